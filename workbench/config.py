"""The configuration: frozen dataclasses with strict YAML in and out. Keys of the batching section are the field names.

    asr:
      model: demo
      att_context_size: [56, 0]
      batching:
        enabled: true
        max_batch_size: 32

    config = load_config("serve.yaml", overrides=["asr.batching.max_queue_delay_us=2000"])
    config.asr.batching.max_batch_size     # 32

Strict means: an unknown key, a wrong type or a value out of range raises `ConfigError` with the dotted path, what was got and what is
allowed (for an unknown key, the nearest known one). pydantic validates; this file only words its findings. Environment
variables are never read and the configuration is never written after loading.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from workbench.errors import ConfigError

_TOGETHER = "keys_together"  # kind of an error about two keys that do not go together
_STRICT = ConfigDict(extra="forbid", validate_default=True)


def _option(default: Any, text: str, **limits: Any) -> Any:
    """A strict field: an int is an int and not a text or a bool."""
    return Field(default=default, description=text, **{"strict": True, **limits})


_Frames = Annotated[int, Field(ge=0, strict=True)]
_Items = Annotated[int, Field(ge=1, le=65536, strict=True)]
Context = Annotated[tuple[_Frames, _Frames], Field(strict=False)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BatchingConfig:
    """`asr.batching`: how the work of concurrent streams is combined. Off by default: a batch costs waiting time."""

    enabled: bool = _option(False, "Combine the work of concurrent callers; off is the lowest single-stream latency.")
    max_batch_size: int = _option(1024, "Most items of one physical batch.", ge=1, le=65536)
    max_queue_delay_us: int = _option(
        5000, "Longest wait of the oldest queued item, in microseconds.", ge=0, le=10_000_000
    )
    max_queue_depth: int = _option(
        2048,
        "Most streams with chunks in the pipeline at once (offline: queued recordings); beyond it QueueFull.",
        ge=1,
        le=1_000_000,
    )
    ingress_cohort_delay_us: int = _option(
        20000, "Alignment window of network streams from the first arrival, in microseconds.", ge=0, le=10_000_000
    )
    state_arena_slots: int = _option(16, "Rows for stream state; the most streams open at once.", ge=1, le=65536)
    offline_bucket_ms: int = _option(
        0, "Offline audio is zero-padded to a multiple of this; 0 is off.", ge=0, le=600_000
    )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class AsrConfig:
    """`asr`: the model and how it is run."""

    model: Annotated[str, StringConstraints(min_length=1)] = _option(
        "demo", "'demo', a named shape with random weights, a .nemo path, or a hub name."
    )
    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = _option(
        "auto", "auto | cpu | cuda | cuda:N; auto takes CUDA where there is a GPU."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Weights, activations and caches."
    )
    att_context_size: Context | None = Field(
        default=None,
        description="[left, right] in encoder frames of 80 ms; none takes the model's own default (the demo model: [56, 0]).",
    )
    channel: int = _option(0, "Channel used of multi-channel audio.", ge=0, le=63)
    max_symbols: int = _option(10, "Most labels the greedy decoder emits per encoder frame.", ge=1, le=1000)
    label_rate_hz: float | None = _option(
        None,
        "Random weights only: labels per second of audio that the decoder is set to emit; none leaves it as drawn.",
        gt=0,
        le=100,
        allow_inf_nan=False,
    )
    cuda_graphs: bool = _option(False, "Replay the steady encoder step as one CUDA graph; no effect without CUDA.")
    encoder: Literal["nemo", "resident", "auto"] = Field(
        default="nemo",
        description="nemo: NeMo's own step; resident: the slot-resident engine, encoder and decoder in one graph (fused pipeline only); auto: "
        "resident on CUDA once its step has equalled NeMo's on this model, else nemo.",
    )
    weights: Literal["native", "int8"] = Field(
        default="native",
        description="native: the encoder's weights in `dtype`; int8: rounded to int8 with a scale per 32, which a lone 80 ms stream on CUDA reads "
        "faster and whose results are no longer the model's own (encoder: resident only).",
    )
    pipeline: Literal["fused", "staged"] = Field(
        default="fused",
        description="fused: one stage per step; staged: front end, encoder, predictor and joint batch apart.",
    )
    batch_buckets: Annotated[tuple[_Items, ...], Field(min_length=1)] | None = Field(
        default=None, description="Batch sizes that the graphed step is padded up to; none takes powers of two."
    )
    batching: BatchingConfig = Field(default_factory=lambda: BatchingConfig())

    @model_validator(mode="after")
    def _int8_only_where_it_is_read(self) -> AsrConfig:
        """`auto` promises NeMo's results and NeMo's step knows no int8."""
        if self.weights != "native" and self.encoder != "resident":
            raise PydanticCustomError(
                _TOGETHER,
                f"asr.weights: got {self.weights} with asr.encoder: {self.encoder}; allowed is native, or int8 with asr.encoder: resident",
            )
        return self


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LoadConfig:
    """`load`: paced traffic; each stream speaks in real time."""

    streams: int = _option(4, "Live streams.", ge=1, le=100_000)
    seconds: float = _option(10.0, "Audio per stream, in seconds.", gt=0, le=86_400, allow_inf_nan=False)
    starts: Literal["staggered", "aligned"] = Field(
        default="staggered", description="Phases spread over one chunk, or all equal."
    )
    seed: int = _option(0, "Seed of the phases and of which clip a stream speaks.", ge=0)
    coordinated: bool = _option(False, "Streams pass the ingress barrier, as those of network clients do.")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """The whole configuration."""

    asr: AsrConfig = Field(default_factory=lambda: AsrConfig())
    load: LoadConfig = Field(default_factory=lambda: LoadConfig())


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """YAML text as plain data. Raises yaml.YAMLError, also for a key that is given twice or values that Python cannot hold."""
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except (ValueError, TypeError, RecursionError) as error:  # the 32nd of a month, brackets thousands deep
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file (or mapping), apply `key=value` overrides with dotted keys, and validate strictly.

    Raises ConfigError for anything that is not exactly an allowed key with an allowed value.
    """
    data = _read_yaml(source) if isinstance(source, str | Path) else _plain(source or {})
    for text in overrides:
        override(data, text)
    config: Config = build(Config, data)
    return config


def build(cls: type, data: Mapping[str, Any], root: str = "") -> Any:
    """Validate `data` into the dataclass `cls`; `root` prefixes the dotted paths in errors."""
    try:
        return TypeAdapter(cls).validate_python(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(cls, finding, root) for finding in error.errors())) from None


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dict of any configuration dataclass, with lists for tuples, as YAML and JSON store it."""
    return {key: _listed(value) for key, value in dataclasses.asdict(config).items()}


def to_yaml(config: Any) -> str:
    """YAML text that `load_config` reads back to an equal configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def replace(config: Config, **values: Any) -> Config:
    """A copy with dotted keys replaced, validated: `replace(c, **{"asr.batching.max_batch_size": 8})`."""
    data = to_dict(config)
    for key, value in values.items():
        _set(data, key, value)
    changed: Config = build(Config, data)
    return changed


def effective_batch_cap(batching: BatchingConfig) -> tuple[int, str]:
    """The batch size that can really be reached and the key that limits it: another key may sit below `max_batch_size`."""
    limits = {
        "asr.batching.max_batch_size": batching.max_batch_size,
        "asr.batching.state_arena_slots": batching.state_arena_slots,
        "asr.batching.max_queue_depth": batching.max_queue_depth,
    }
    if not batching.enabled:
        return 1, "asr.batching.enabled"
    key = min(limits, key=lambda name: limits[name])
    return limits[key], key


def check_rows(config: Config) -> None:
    """Raises ConfigError where `load.streams` do not fit the arena: a stream that ends one utterance and begins the next holds two rows for a
    moment, so it needs two."""
    streams, rows = config.load.streams, config.asr.batching.state_arena_slots
    if rows < 2 * streams:
        raise ConfigError(
            f"asr.batching.state_arena_slots: got {rows} for load.streams = {streams}; allowed is at least {2 * streams}, two rows a stream: "
            "one that ends an utterance and begins the next holds both for a moment"
        )


def field_path_type(path: str) -> tuple[Any, dict[str, Any]]:
    """Default and constraints (`ge`, `le`, …, `description`) of a dotted key; ConfigError if it does not exist."""
    cls: Any = Config
    parts = path.split(".")
    for depth, part in enumerate(parts):
        fields = cls.__pydantic_fields__
        if part not in fields:
            raise ConfigError(_unknown(".".join(parts[: depth + 1]), part, list(fields)))
        info = fields[part]
        cls = info.annotation
    limits = {name: getattr(m, name) for m in info.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    return info.get_default(call_default_factory=True), {
        **limits,
        "annotation": info.annotation,
        "description": info.description,
    }


def _read_yaml(path: str | Path) -> dict[str, Any]:
    try:
        data = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: got a {type(data).__name__} at the top level; allowed is a mapping with asr: and load:"
        )
    return data


def override(data: dict[str, Any], text: str) -> None:
    """Set `dotted.key=value` in nested plain data; the value is YAML. Raises ConfigError for a text of another form."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override: got {text!r}; allowed is dotted.key=value")
    try:
        _set(data, key.strip(), parse_yaml(value))
    except yaml.YAMLError:
        raise ConfigError(f"{key}: got {value!r}, which is not a YAML value") from None


def _set(data: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for part in parents:
        child = data.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{dotted}: {part} is not a section")
        data = child
    data[last] = value


def _explain(cls: type, finding: Any, root: str) -> str:
    path = ".".join([root, *map(str, finding["loc"])] if root else map(str, finding["loc"]))
    kind, got = finding["type"], finding["input"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return _unknown(path, str(finding["loc"][-1]), _known(cls, finding["loc"][:-1]))
    if kind in ("dataclass_type", "dict_type"):
        return f"{path or 'configuration'}: got {got!r}; allowed is a section with the keys {', '.join(_known(cls, finding['loc']))}"
    if kind == _TOGETHER:
        return str(finding["msg"])
    if kind == "missing":
        return f"{path}: missing; it has no default"
    message = finding["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    if kind == "too_short":
        message = "at least one value"
    if kind.startswith(("int", "float")) and (number := number_in(got)) is not None:
        message += f"; YAML reads {got} as text, write {number:g}"
    if kind == "string_pattern_mismatch":
        message = f"text matching {finding['ctx']['pattern']}"
    return f"{path}: got {got!r} ({type(got).__name__}); allowed is {message}"


def number_in(value: Any) -> float | None:
    """The number that a text spells where YAML does not see one: `1e1` has neither point nor sign, so YAML 1.1 takes it for text."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _known(cls: Any, location: Iterable[Any]) -> list[str]:
    for part in location:
        info = cls.__pydantic_fields__.get(part) if hasattr(cls, "__pydantic_fields__") else None
        if info is None:
            break
        cls = info.annotation
    return list(getattr(cls, "__pydantic_fields__", {}))


def _unknown(path: str, key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{path}: unknown key; {hint}known keys here are {', '.join(known)}"


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(item) if isinstance(item, Mapping) else item for key, item in value.items()}


def _listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
