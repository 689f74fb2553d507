"""The search space of a study: dotted configuration keys, each with a range or a list of choices, checked before anything runs.

    space:
      asr.batching.max_batch_size: {int: [1, 1024], log: true}
      asr.batching.max_queue_delay_us: {int: [0, 50000], step: 500}
      asr.att_context_size: {choices: [[56, 0], [56, 3]]}
      asr.batch_buckets: {subset: [1, 2, 4, 8, 16, 24, 32], always: [64]}      # each is in or out

    space = Space.parse(mapping)
    space.default(base)          # the point of the base configuration; it must lie in the space, since it is always a trial
    space.suggest(trial)         # {"asr.batching.max_batch_size": 17, ...}

Every end and choice is validated as that key's value, so a study cannot begin that would fail half-way. Pure: `trial` is anything
with Optuna's three `suggest_*` methods.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from workbench.config import Config, field_path_type, number_in, replace, to_dict
from workbench.errors import ConfigError

Kind = Literal["int", "float", "choices", "subset"]


class Suggests(Protocol):
    """The part of an Optuna trial that a space uses."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...
    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


@dataclass(frozen=True)
class Parameter:
    """One key. Ranges have low <= high, both included; `step` 0 means any value (float) or every integer (int).

    A subset is a rising list of some of `choices` and all of `always`: to the sampler, one yes or no per choice.
    """

    path: str
    kind: Kind
    low: float = 0
    high: float = 0
    step: float = 0
    log: bool = False
    choices: tuple[Any, ...] = ()
    always: tuple[Any, ...] = ()

    @property
    def points(self) -> int | None:
        """How many values there are; None for a continuous range."""
        if self.kind == "choices":
            return len(self.choices)
        if self.kind == "subset":
            return int(2 ** len(self.choices))
        if self.low == self.high:
            return 1
        step = self.step or (1 if self.kind == "int" else 0)
        return round((self.high - self.low) / step) + 1 if step else None

    def contains(self, value: Any) -> bool:
        """Whether a value of the key is a point of the range."""
        if self.kind == "choices":
            return value in self.choices
        if self.kind == "subset":
            return isinstance(value, list) and value == self._rising(value) and set(self.always) <= set(value)
        step = self.step or (1 if self.kind == "int" else 0)
        if not self.low <= value <= self.high:
            return False
        return not step or math.isclose((value - self.low) / step, round((value - self.low) / step), abs_tol=1e-9)

    def describe(self) -> str:
        """The range as a person writes it."""
        if self.kind == "choices":
            return f"one of {list(self.choices)}"
        if self.kind == "subset":
            return f"{list(self.always)} and any of {list(self.choices)}, rising"
        return f"[{self.low}, {self.high}]" + (f" in steps of {self.step}" if self.step else "")

    def labels(self, value: Any) -> dict[str, Any]:
        """The value as the sampler and the database hold it: lists become text, a subset one truth value per choice."""
        if self.kind == "subset":
            return {self._member(choice): choice in value for choice in self.choices}
        return {self.path: self._label(value)}

    def read(self, params: Mapping[str, Any]) -> Any:
        """The value from what the sampler holds; None where it holds nothing of this key."""
        if self.kind == "subset":
            chosen = [choice for choice in self.choices if params.get(self._member(choice))]
            return self._rising([*chosen, *self.always]) if self._member(self.choices[0]) in params else None
        if self.path not in params:
            return None
        value = params[self.path]
        return json.loads(value) if self.kind == "choices" and value not in self.choices else value

    def suggest(self, trial: Suggests) -> Any:
        """The trial's value of this key."""
        if self.kind == "choices":
            labels = [self._label(choice) for choice in self.choices]
            return self.choices[labels.index(trial.suggest_categorical(self.path, labels))]
        if self.kind == "subset":
            return self.read({n: trial.suggest_categorical(n, [False, True]) for n in map(self._member, self.choices)})
        if self.kind == "int":
            step = int(self.step) or 1
            return trial.suggest_int(self.path, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.path, self.low, self.high, step=self.step or None, log=self.log)

    def _label(self, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, list) else value

    def _member(self, choice: Any) -> str:
        return f"{self.path}[{choice}]"

    def _rising(self, values: Sequence[Any]) -> list[Any]:
        return sorted({*values} & {*self.choices, *self.always})


@dataclass(frozen=True)
class Space:
    """The keys that a study varies."""

    parameters: tuple[Parameter, ...]

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> Space:
        """Read the `space:` section. Raises ConfigError naming the key, what was got and what is allowed."""
        if not mapping:
            raise ConfigError("space: got no key; allowed is at least one dotted key of the configuration")
        return cls(tuple(_parameter(path, options) for path, options in mapping.items()))

    @property
    def points(self) -> int | None:
        """How many different configurations there are; None if one range is continuous."""
        counts = [parameter.points for parameter in self.parameters]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def suggest(self, trial: Suggests) -> dict[str, Any]:
        """One point as {dotted key: value}, ready for `config.replace`."""
        return {parameter.path: parameter.suggest(trial) for parameter in self.parameters}

    def default(self, base: Config) -> dict[str, Any]:
        """The point of the base configuration. Raises ConfigError if it lies outside the space."""
        point = {parameter.path: value_at(base, parameter.path) for parameter in self.parameters}
        for parameter in self.parameters:
            if not parameter.contains(point[parameter.path]):
                raise ConfigError(
                    f"space.{parameter.path}: the default {point[parameter.path]!r} is not in {parameter.describe()}; it is always a trial, "
                    "so that a gain has something to be stated against: widen the range, or set the key under base:"
                )
        return point

    def labels(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """A point as the sampler holds it."""
        return {name: value for p in self.parameters for name, value in p.labels(point[p.path]).items()}

    def point(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The point of what the sampler holds; keys that a trial did not reach are left out."""
        found = {parameter.path: parameter.read(params) for parameter in self.parameters}
        return {p.path: found[p.path] for p in self.parameters if found[p.path] is not None or p.path in params}

    def holds(self, config: Config) -> bool:
        """Whether the point of a configuration lies in the space."""
        return all(parameter.contains(value_at(config, parameter.path)) for parameter in self.parameters)


def value_at(config: Config, path: str) -> Any:
    """The value of a dotted key."""
    value: Any = to_dict(config)
    for part in path.split("."):
        value = value[part]
    return value


def _parameter(path: str, options: Any) -> Parameter:
    field_path_type(path)
    kinds = ("int", "float", "choices", "subset")
    given = [kind for kind in kinds if isinstance(options, Mapping) and kind in options]
    if len(given) != 1:
        raise _refuse(
            path,
            options,
            "{int: [low, high]}, {float: [low, high]}, {choices: [...]} or {subset: [...], always: [...]}",
        )
    kind: Any = given[0]
    allowed = {"choices": {"choices"}, "subset": {"subset", "always"}}.get(kind, {kind, "log", "step"})
    if unknown := sorted(set(options) - allowed):
        raise _refuse(path, ", ".join(map(str, unknown)), f"the options {', '.join(sorted(allowed))}")
    if kind == "choices":
        return _choices(path, options["choices"])
    if kind == "subset":
        return _subset(path, options["subset"], options.get("always"))
    return _range(path, kind, options)


def _choices(path: str, choices: Any) -> Parameter:
    if not isinstance(choices, list) or not choices or any(choices.count(choice) > 1 for choice in choices):
        raise _refuse(path, choices, "a list of different values")
    for choice in choices:
        _check(path, choice)
    return Parameter(path, "choices", choices=tuple(choices))


def _subset(path: str, choices: Any, always: Any) -> Parameter:
    both = [*choices, *always] if isinstance(choices, list) and isinstance(always, list) else []
    if not choices or not always or not all(_is(value, (int,)) for value in both) or len({*both}) < len(both):
        raise _refuse(
            path, {"subset": choices, "always": always}, "two lists of whole numbers, all different, neither empty"
        )
    _check(path, sorted(both))
    return Parameter(path, "subset", choices=tuple(sorted(choices)), always=tuple(sorted(always)))


def _range(path: str, kind: Kind, options: Mapping[str, Any]) -> Parameter:
    ends, step, log = options[kind], options.get("step", 0), options.get("log", False)
    numbers = (int,) if kind == "int" else (int, float)
    if kind == "float" and field_path_type(path)[1]["annotation"] is int:
        raise _refuse(path, {"float": ends}, "int: [low, high], since this key takes whole numbers")
    if not (
        isinstance(ends, list) and len(ends) == 2 and all(_is(end, numbers) for end in ends) and ends[0] <= ends[1]
    ):
        wanted = f"two {'whole numbers' if kind == 'int' else 'numbers'} [low, high], low first"
        raise _refuse(path, ends, wanted + _spelled(ends))
    if not isinstance(log, bool):
        raise _refuse(f"{path}.log", log, "true or false")
    if not _is(step, numbers) or step < 0 or (log and step):
        raise _refuse(f"{path}.step", step, "a positive number, and none beside log" + _spelled([step]))
    if log and ends[0] <= 0:
        raise _refuse(path, ends, "a low end above 0 with log")
    for end in ends:
        _check(path, end)
    parameter = Parameter(path, kind, ends[0], ends[1], step, log)
    if step and not parameter.contains(ends[1]):
        raise _refuse(path, ends, f"a high end that is the low end plus a multiple of the step {step}")
    return parameter


def _spelled(values: Any) -> str:
    """A hint for numbers that YAML takes for text."""
    found = {value: number for value in values if (number := number_in(value))} if isinstance(values, list) else {}
    return "".join(f"; YAML reads {text} as text, write {number:g}" for text, number in found.items())


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(float(value))  # type: ignore[arg-type]


def _check(path: str, value: Any) -> None:
    try:
        replace(Config(), **{path: value})
    except ConfigError as error:
        raise ConfigError(f"space.{error}") from None


def _refuse(path: str, got: Any, allowed: str) -> ConfigError:
    return ConfigError(f"space.{path}: got {got!r}; allowed is {allowed}")
