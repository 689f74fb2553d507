"""Options and counters of the graphed encoder step, and why a step ran eagerly.

    GraphOptions(max_graphs=8, when_full="refuse")
    step.report()["eager"]        # {"first_chunk": 1, "warmup": 1}

A step that does not run as a graph is never silent: it is counted under one of the reasons below. "Outside the steady state" are the
steps that no graph is meant to cover; in forced mode they still run eagerly while every other reason raises `GraphError`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from workbench.errors import ConfigError

WhenFull = Literal["evict", "refuse"]
Mode = Literal["auto", "forced", "off"]

OUTSIDE_STEADY_STATE = frozenset({"first_chunk", "keep_all_outputs", "bypass_pre_encode", "no_caches", "no_lengths"})
REASONS = OUTSIDE_STEADY_STATE | {
    *("off", "disabled", "not_cuda", "training", "autocast", "grad", "capturing"),
    *("warmup", "max_graphs", "capture_failed"),
}


class GraphError(RuntimeError):
    """Forced mode: a steady step could not run as a graph. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        super().__init__(f"the encoder step cannot run as a CUDA graph: {reason}{f' ({detail})' if detail else ''}")


@dataclass(frozen=True)
class GraphOptions:
    """max_graphs: graphs kept at once; warmup_steps: eager steps of a shape before it is captured; when_full: what the next shape
    meets (`evict` drops the least recently used graph, `refuse` runs it eagerly); mode: `auto`, `forced` or `off`; first_chunk: graph the
    first chunk of an utterance as well, which has a shape of its own."""

    max_graphs: int = 8
    warmup_steps: int = 1
    when_full: WhenFull = "evict"
    mode: Mode = "auto"
    first_chunk: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.max_graphs, int) or self.max_graphs < 1:
            raise ConfigError(f"max_graphs: got {self.max_graphs!r}; allowed are whole numbers from 1")
        if not isinstance(self.warmup_steps, int) or self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: got {self.warmup_steps!r}; allowed are whole numbers from 0")
        if not isinstance(self.first_chunk, bool):
            raise ConfigError(f"first_chunk: got {self.first_chunk!r}; allowed are true and false")
        for name, value, allowed in (
            ("when_full", self.when_full, get_args(WhenFull)),
            ("mode", self.mode, get_args(Mode)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}: got {value!r}; allowed are {', '.join(allowed)}")


@dataclass
class GraphCounters:
    """What happened since the step was attached. `failures` maps a shape, as text, to the error of its capture."""

    captured: int = 0
    replayed: int = 0
    evicted: int = 0
    invalidated: int = 0
    capture_ms: float = 0.0
    last_capture_ms: float = 0.0
    eager: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a record."""
        return {
            "captured": self.captured,
            "replayed": self.replayed,
            "evicted": self.evicted,
            "invalidated": self.invalidated,
            "capture_ms": round(self.capture_ms, 3),
            "last_capture_ms": round(self.last_capture_ms, 3),
            "eager": dict(self.eager),
            "failures": dict(self.failures),
        }
