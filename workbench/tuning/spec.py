"""What a study is: one YAML file in `studies/<name>/`, read strictly.

    name: demo
    base: {asr: {batching: {enabled: true, state_arena_slots: 64}}, load: {streams: 32, seconds: 30}}
    space:
      asr.batching.max_batch_size: {int: [1, 1024], log: true}
    objectives: [{number: latency_p95_ms}]
    constraints: [{number: late_share, at_most: 0.001}]
    budget: {trials: 50, repeats: 1, seed: 0}
    costs: [../h200/costs_56_0.json]                     # relative to the YAML; without it they are measured on this machine
    compare: {document_example: {asr: {batching: {max_batch_size: 32}}}}      # laid over the default and measured by the same rule

    spec = load_study("studies/demo")
    config = spec.configure(Config())        # the default configuration of the study: `base` laid over the user's own

Objectives and constraints name entries of a record's `numbers`, so anything measured can be optimised or limited. A study that searches
`load.streams` must maximise `streams` under a limit; its default and its `compare` are then judged by the most streams that they carry.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass

from workbench.config import Config, build, override, parse_yaml, replace, to_dict
from workbench.errors import ConfigError, StudyError
from workbench.tuning.space import Space

STUDY_FILE = "study.yaml"
STREAMS = "load.streams"
SLOTS = "asr.batching.state_arena_slots"
# What a study that varies its own load must make large: a lighter load would win anything else.
_LOAD_NUMBERS = {STREAMS: "streams", "load.seconds": "load_s"}
_STRICT = ConfigDict(extra="forbid", validate_default=True)
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
_Number = Annotated[str, StringConstraints(min_length=1)]
_Limit = Annotated[float | None, Field(allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Objective:
    """A number to make small or large."""

    number: _Number
    direction: Literal["minimise", "maximise"] = "minimise"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Constraint:
    """A limit that a usable configuration keeps: exactly one of the two."""

    number: _Number
    at_most: _Limit = None
    at_least: _Limit = None

    @property
    def limit(self) -> float:
        """The limit itself."""
        return self.at_most if self.at_most is not None else float(self.at_least or 0.0)

    def excess(self, value: float) -> float:
        """How far a value is beyond the limit; zero or less keeps it (Optuna's convention)."""
        return value - self.limit if self.at_most is not None else self.limit - value

    def describe(self) -> str:
        """The limit as a person writes it."""
        return f"{self.number} {'<=' if self.at_most is not None else '>='} {self.limit:g}"


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Budget:
    """trials: how many, duplicates included; repeats: runs per trial, each with its own traffic; seed: of the sampler.

    finalists: with 2 or more repeats, so many of the best trials, and the default, are run again on traffic that no trial saw, and
    the best there is the best: the winner of many noisy trials owes part of its lead to luck.
    """

    trials: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 40
    repeats: Annotated[int, Field(ge=1, le=100, strict=True)] = 1
    finalists: Annotated[int, Field(ge=1, le=100, strict=True)] = 5
    seed: Annotated[int, Field(ge=0, strict=True)] = 0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OfflineWork:
    """Whole recordings instead of live streams. lengths: the distributions of their durations, each recognised once per run with
    `recordings` of them; concurrency: how many are in the works at once."""

    lengths: list[Literal["shipped", "long_tailed"]] = Field(
        default_factory=lambda: ["shipped", "long_tailed"], min_length=1
    )
    recordings: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 256
    concurrency: Annotated[int, Field(ge=1, le=1024, strict=True)] = 64


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class StudySpec:
    """One study. storage: any SQLAlchemy URL that Optuna takes; none keeps a SQLite file beside the results. compare: named configurations,
    each laid over the default one, that are measured like it."""

    name: _Name
    title: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Any] = Field(default_factory=dict)
    objectives: list[Objective] = Field(default_factory=lambda: [Objective(number="latency_p95_ms")], min_length=1)
    constraints: list[Constraint] = Field(default_factory=list)
    budget: Budget = Field(default_factory=Budget)
    storage: str | None = None
    costs: list[str] = Field(default_factory=list)
    compare: dict[_Name, dict[str, Any]] = Field(default_factory=dict)
    offline: OfflineWork | None = None

    @property
    def finds_capacity(self) -> bool:
        """Whether configurations are judged by the most streams that they carry within the limits."""
        return STREAMS in self.space and self.objectives[0].number == _LOAD_NUMBERS[STREAMS]

    def configure(self, base: Config) -> Config:
        """The study's default configuration. Raises ConfigError for a bad `base:`, or a default outside the space."""
        config = with_rows(build(Config, _laid_over(to_dict(base), self.base), root="base"))
        Space.parse(self.space).default(config)
        return config

    def at(self, default_config: Config, point: Mapping[str, Any]) -> Config:
        """The configuration of a point of the space."""
        return with_rows(replace(default_config, **point))

    def compared(self, default_config: Config) -> dict[str, Config]:
        """The configurations of `compare`. Raises ConfigError for a key or value that is not allowed."""
        below = to_dict(default_config)
        return {
            name: with_rows(build(Config, _laid_over(below, above), root=f"compare.{name}"))
            for name, above in self.compare.items()
        }

    def overridden(self, overrides: Iterable[str]) -> StudySpec:
        """The study with `dotted.key=value` laid over its `base:`: the command line has the last word."""
        base = copy.deepcopy(self.base)
        for text in overrides:
            override(base, text)
        return dataclasses.replace(self, base=base)


def with_rows(config: Config) -> Config:
    """The configuration with an arena for its load: a study sizes it, two rows a stream, so that every point carries its streams."""
    return replace(config, **{SLOTS: max(config.asr.batching.state_arena_slots, 2 * config.load.streams)})


def at_streams(config: Config, streams: int) -> Config:
    """A configuration of `with_rows` with another number of streams; an arena that was sized for the load follows it down as well."""
    sized = config.asr.batching.state_arena_slots == 2 * config.load.streams
    return with_rows(replace(config, **{"load.streams": streams, **({SLOTS: 1} if sized else {})}))


def load_study(source: str | Path) -> StudySpec:
    """Read a study folder or its YAML file. Raises StudyError if there is none, ConfigError for what is wrong in it."""
    path = Path(source)
    path = path / STUDY_FILE if path.is_dir() else path
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StudyError(
            f"{path}: no study there ({error.strerror}); a study is a folder with a {STUDY_FILE}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    try:
        spec = parse_study(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return dataclasses.replace(spec, costs=[str(path.parent / costs) for costs in spec.costs])


def parse_study(data: Any) -> StudySpec:
    """Validate the mapping of a study. Raises ConfigError naming the key."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"got a {type(data).__name__}; allowed is a mapping with name:, space:, objectives:")
    spec: StudySpec = build(StudySpec, data)
    Space.parse(spec.space)
    for number, constraint in enumerate(spec.constraints):
        if (constraint.at_most is None) == (constraint.at_least is None):
            raise ConfigError(f"constraints.{number}: {constraint.number} needs exactly one of at_most and at_least")
    objectives = [objective.number for objective in spec.objectives]
    limits = [(constraint.number, constraint.at_most is None) for constraint in spec.constraints]
    if len(set(objectives)) < len(objectives) or len(set(limits)) < len(limits):
        raise ConfigError("objectives, constraints: a number is named twice; allowed is once")
    _check_load(spec)
    for name, above in spec.compare.items():
        build(Config, above, root=f"compare.{name}")
    return spec


def _check_load(spec: StudySpec) -> None:
    """A study that varies its load must want more of it, within limits."""
    for key in spec.space:
        if not key.startswith("load."):
            continue
        number = _LOAD_NUMBERS.get(key)
        if number is None or not any(o.number == number and o.direction == "maximise" for o in spec.objectives):
            allowed = (
                "no value, since it changes what is measured"
                if number is None
                else f"it beside the objective {{number: {number}, direction: maximise}}: with any other, the lightest load would win"
            )
            raise ConfigError(f"space.{key}: got a key of the load; allowed is {allowed}")
        if spec.offline is not None:
            raise ConfigError(f"space.{key}: got a key of live streams; an offline study has none")
        if not spec.constraints and len(spec.objectives) == 1:
            raise ConfigError(f"constraints: got none; a study that maximises {number} needs a limit to keep")


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A deep merge: sections are merged, values of `above` win."""
    out = dict(below)
    for key, value in above.items():
        under = out.get(key)
        out[key] = _laid_over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return out
