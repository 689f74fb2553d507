"""What a batching stage did: counts whose sums agree, and distributions of waiting and execution times.

    metrics = StageMetrics("encoder")
    metrics.dispatched("cohort", waited_s=(0.001, 0.0), compatible=2, ready=5)
    metrics.finished(0.0031)
    print(table([metrics]));  metrics.snapshot()["queue_wait_p95_ms"];  prometheus([metrics])

Always: `items` is the sum over `batch_sizes`, and the reasons add up to `batches`. Memory is bounded: durations fall into logarithmic
buckets, whose middle is within 1 % of every value in the bucket (the rule of DDSketch, Masson, Rim and Lee, VLDB 2019: with
g = (1 + a) / (1 - a) and a bucket [b, b g), the point 2 b g / (1 + g) is within a relative error a). Nothing here locks: whoever shares a
stage between threads reads and writes its metrics under that stage's lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np

Reason = Literal["capacity", "cohort", "ready", "deadline", "drain", "shutdown"]
REASONS: tuple[Reason, ...] = get_args(Reason)
QUANTILES = (0.5, 0.95, 0.99)
_ERROR = 0.01
_GROWTH = (1 + _ERROR) / (1 - _ERROR)
_FLOOR_S = 1e-6
_CEILING_S = 1e4
_PER_LOG = 1 / math.log(_GROWTH)
_BUCKETS = int(math.log(_CEILING_S / _FLOOR_S) * _PER_LOG) + 2
_RECENT = 4096


class Durations:
    """Quantiles of many durations in seconds in constant memory: at most 1 % off between 1 µs and 10,000 s; count, sum and ends exact.

    New values wait in a short list and are sorted into the buckets by numpy, a few thousand at a time: that costs a tenth of a logarithm
    and a dict entry per value, and this runs for every item of every stage.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sum_s = 0.0
        self._min_s = math.inf
        self._max_s = 0.0
        self._buckets = np.zeros(_BUCKETS, dtype=np.int64)
        self._recent: list[float] = []

    def add(self, values_s: Sequence[float]) -> None:
        """Record durations of 0 s or more."""
        self._recent.extend(values_s)
        if len(self._recent) >= _RECENT:
            self._fold()

    @property
    def count(self) -> int:
        """How many durations were recorded."""
        return self._count + len(self._recent)

    @property
    def sum_s(self) -> float:
        """Their sum in seconds."""
        return self._sum_s + math.fsum(self._recent)

    def quantile_s(self, share: float) -> float | None:
        """The value in seconds that `share` (0 to 1) of the durations do not exceed (nearest rank); None when there is none."""
        self._fold()
        if not self._count:
            return None
        rank = max(1, math.ceil(share * self._count))
        index = int(np.searchsorted(np.cumsum(self._buckets), rank))
        middle = _FLOOR_S * _GROWTH ** (index - 1) * 2 * _GROWTH / (1 + _GROWTH) if index else 0.0
        return min(max(middle, self._min_s), self._max_s)

    def numbers_ms(self, prefix: str) -> dict[str, float | None]:
        """`{prefix}_p50_ms`, `_p95_ms`, `_p99_ms`, `_max_ms`; None where nothing was recorded."""
        found = {f"{prefix}_p{share * 100:g}_ms": self.quantile_s(share) for share in QUANTILES}
        found[f"{prefix}_max_ms"] = self._max_s if self._count else None
        return {name: None if value is None else value * 1e3 for name, value in found.items()}

    def _fold(self) -> None:
        if not self._recent:
            return
        values = np.asarray(self._recent)
        self._recent = []
        self._count += values.size
        self._sum_s += float(values.sum())
        self._min_s = min(self._min_s, float(values.min()))
        self._max_s = max(self._max_s, float(values.max()))
        # Bucket 0 holds everything below the floor; values above the ceiling share the last bucket.
        steps = np.log(np.clip(values, _FLOOR_S, _CEILING_S) / _FLOOR_S) * _PER_LOG
        indices = np.where(values < _FLOOR_S, 0, steps.astype(np.int64) + 1)
        self._buckets += np.bincount(indices, minlength=_BUCKETS)


class StageMetrics:
    """Counters and distributions of one stage. `name` labels it in tables and exports."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.batches = 0
        self.items = 0
        self.batch_sizes: dict[int, int] = {}
        self.reasons: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.finished_batches = 0
        self.rejected_items = 0
        self.cancelled_items = 0
        self.padding_rows = 0
        self.padding_samples = 0
        self.compatible_items = 0
        self.ready_items = 0
        self.queue_wait = Durations()
        self.execution = Durations()

    def dispatched(self, reason: Reason, waited_s: Sequence[float], compatible: int, ready: int) -> None:
        """A batch left: one wait in seconds per item, the items of its key and all items that were queued at that moment."""
        size = len(waited_s)
        self.batches += 1
        self.items += size
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + 1
        self.reasons[reason] += 1
        self.compatible_items += compatible
        self.ready_items += ready
        self.queue_wait.add(waited_s)

    def finished(self, seconds: float) -> None:
        """A batch was executed, or failed, after `seconds`."""
        self.finished_batches += 1
        self.execution.add((max(0.0, seconds),))

    def rejected(self) -> None:
        """An item was refused because the queue was full."""
        self.rejected_items += 1

    def cancelled(self) -> None:
        """A queued item was withdrawn by its owner."""
        self.cancelled_items += 1

    def padded(self, rows: int = 0, samples: int = 0) -> None:
        """A batch ran with `rows` unused rows, or audio was extended by `samples` zeros, to reach a fixed size."""
        self.padding_rows += rows
        self.padding_samples += samples

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain data for JSON; units are in the names, sizes are text keys in ascending order."""
        batches = max(1, self.batches)
        return {
            "stage": self.name,
            "batches": self.batches,
            "items": self.items,
            "batch_sizes": {str(size): self.batch_sizes[size] for size in sorted(self.batch_sizes)},
            "batch_size_mean_items": self.items / batches,
            "batch_size_max_items": max(self.batch_sizes, default=0),
            "reasons": {reason: count for reason, count in self.reasons.items() if count},
            "finished_batches": self.finished_batches,
            "rejected_items": self.rejected_items,
            "cancelled_items": self.cancelled_items,
            "padding_rows": self.padding_rows,
            "padding_rows_share": self.padding_rows / max(1, self.items + self.padding_rows),
            "padding_samples": self.padding_samples,
            "compatible_mean_items": self.compatible_items / batches,
            "ready_mean_items": self.ready_items / batches,
            **self.queue_wait.numbers_ms("queue_wait"),
            **self.execution.numbers_ms("execution"),
        }


_COLUMNS = (
    ("stage", "stage"),
    ("batches", "batches"),
    ("items", "items"),
    ("mean", "batch_size_mean_items"),
    ("max", "batch_size_max_items"),
    ("padding rows", "padding_rows"),
    ("rejected", "rejected_items"),
    ("cancelled", "cancelled_items"),
    ("wait p50 ms", "queue_wait_p50_ms"),
    ("wait p95 ms", "queue_wait_p95_ms"),
    ("wait p99 ms", "queue_wait_p99_ms"),
    ("run p50 ms", "execution_p50_ms"),
    ("run p95 ms", "execution_p95_ms"),
    ("run p99 ms", "execution_p99_ms"),
    ("reasons", "reasons"),
)


def table(stages: Iterable[StageMetrics]) -> str:
    """An aligned text table, one line per stage."""
    rows = [[title for title, _ in _COLUMNS]]
    rows += [[_cell(snapshot[key]) for _, key in _COLUMNS] for snapshot in (stage.snapshot() for stage in stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return " ".join(f"{name}={count}" for name, count in value.items()) or "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


_COUNTERS = (
    ("batches", "batches", "Batches released."),
    ("items", "items", "Items released in batches."),
    ("rejected_items", "rejected_items", "Items refused because the queue was full."),
    ("cancelled_items", "cancelled_items", "Queued items withdrawn by their owner."),
    ("padding_rows", "padding_rows", "Unused rows run to reach a fixed batch size."),
    ("padding_samples", "padding_samples", "Zero samples appended to reach a bucket."),
    ("compatible_items", "compatible_items", "Items of the released key queued at dispatch, summed over batches."),
    ("ready_items", "ready_items", "All items queued at dispatch, summed over batches."),
)
_LADDER = tuple(2**power for power in range(17))


def prometheus(stages: Iterable[StageMetrics], prefix: str = "workbench") -> str:
    """Prometheus text format: counters, batch sizes as a histogram, times in seconds as summaries."""
    found = list(stages)
    lines: list[str] = []
    for name, attribute, text in _COUNTERS:
        lines += [f"# HELP {prefix}_{name}_total {text}", f"# TYPE {prefix}_{name}_total counter"]
        lines += [f"{prefix}_{name}_total{{{_stage(stage)}}} {getattr(stage, attribute)}" for stage in found]
    lines += [f"# HELP {prefix}_releases_total Batches by the rule that released them."]
    lines += [f"# TYPE {prefix}_releases_total counter"]
    for stage in found:
        lines += [f'{prefix}_releases_total{{{_stage(stage)},reason="{r}"}} {n}' for r, n in stage.reasons.items()]
    lines += [f"# HELP {prefix}_batch_size_items Items per batch.", f"# TYPE {prefix}_batch_size_items histogram"]
    for stage in found:
        lines += _size_lines(stage, f"{prefix}_batch_size_items")
    for name, text in (("queue_wait", "Time an item was queued."), ("execution", "Time a batch took to run.")):
        lines += [f"# HELP {prefix}_{name}_seconds {text}", f"# TYPE {prefix}_{name}_seconds summary"]
        for stage in found:
            lines += _summary_lines(stage, getattr(stage, name), f"{prefix}_{name}_seconds")
    return "\n".join(lines) + "\n"


def _stage(stage: StageMetrics) -> str:
    name = stage.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'stage="{name}"'


def _size_lines(stage: StageMetrics, name: str) -> list[str]:
    label = _stage(stage)
    below = [(edge, sum(n for size, n in stage.batch_sizes.items() if size <= edge)) for edge in _LADDER]
    lines = [f'{name}_bucket{{{label},le="{edge}"}} {count}' for edge, count in below]
    lines += [f'{name}_bucket{{{label},le="+Inf"}} {stage.batches}']
    return [*lines, f"{name}_sum{{{label}}} {stage.items}", f"{name}_count{{{label}}} {stage.batches}"]


def _summary_lines(stage: StageMetrics, durations: Durations, name: str) -> list[str]:
    label = _stage(stage)
    values = [(share, durations.quantile_s(share)) for share in QUANTILES]
    lines = [f'{name}{{{label},quantile="{share:g}"}} {value:.9g}' for share, value in values if value is not None]
    return [*lines, f"{name}_sum{{{label}}} {durations.sum_s:.9g}", f"{name}_count{{{label}}} {durations.count}"]
