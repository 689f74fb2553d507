"""Measured costs as a table that a simulation can ask: milliseconds of a step by kind and batch size, with their spread.

    table = CostTable.from_record(Record.load("runs/costs.json"))
    table.quantiles_ms("steady", 8)      # 257 quantiles of a step of 8 streams
    table.captures.numbers((1, 4, 16))   # milliseconds and memory of the CUDA graphs of three batch sizes, if measured

Between measured batch sizes costs are interpolated; beyond them they are continued in a straight line, which the twin counts and says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.errors import InputError, RecordError
from workbench.results import Record

STAGE = "step"
CAPTURE = "capture"
MOST_BATCH = 65_536
# Numbers of a record that was measured in traffic.
TRAFFIC = ("wake_us_per_item", "arrival_delay_us", "after_idle_us", "dispatch_us", "turnaround_us", "handover_us")
# A worker that had nothing to do for this long begins its next step with cold caches and a sleeping thread.
IDLE_S = 1e-3
# (mel frames fed, outputs dropped, cut by the end): what the recogniser's own steps must share to run as one batch.
StepKey = tuple[int, int, bool]
GRID = np.linspace(0.0, 1.0, 257)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Captures:
    """What CUDA graphs take: per batch size milliseconds and bytes, and the bytes of the pool that those of all sizes share."""

    by_batch: dict[int, tuple[float, float]]
    pool_bytes: float

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Captures | None:
        """Read rows {stage: capture, batch, capture_ms, bytes, pool_bytes}; None if there are none."""
        graphs = [row for row in rows if row.get("stage") == CAPTURE]
        by_batch = {int(row["batch"]): (float(row["capture_ms"]), float(row["bytes"])) for row in graphs}
        return cls(by_batch, max(float(row.get("pool_bytes", 0)) for row in graphs)) if graphs else None

    def numbers(self, ladder: Sequence[int]) -> dict[str, float]:
        """`graph_capture_ms` and `graph_memory_mib` of a ladder: linear between measured sizes, beyond the largest in proportion to the batch.
        The pool is as large as the largest size needs."""
        sizes = sorted(self.by_batch)
        beyond = [max(1.0, size / sizes[-1]) for size in ladder]
        ms, held = (
            float(np.dot(np.interp(ladder, sizes, [self.by_batch[size][part] for size in sizes]), beyond))
            for part in (0, 1)
        )
        pool = self.pool_bytes * max(ladder) / sizes[-1]
        return {"graph_capture_ms": ms, "graph_memory_mib": (held + pool) / 2**20}


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of one step: per shape the measured batch sizes (ascending) and, for each, a row of quantiles on an even grid.

    Shapes are the kinds of step `first`, `second`, `steady` and `cut`; mel_frames: what each was fed, where the record says so;
    captures: what its CUDA graphs take, where that was measured. Seconds, where a record measured in traffic says so: wake_s to tell one caller of a
    batch of its result; arrival_s from when a chunk is due until it is queued; after_idle_s that a step takes longer on a worker that was idle;
    dispatch_s and turnaround_s from when a batch may leave until a worker begins with it, one that was idle and one that was busy until then;
    handover_s that the interpreter is busy with handing over one chunk.
    """

    curves: dict[str, tuple[tuple[int, ...], Floats]]
    mel_frames: dict[str, int]
    captures: Captures | None = None
    wake_s: float = 0.0
    arrival_s: float = 0.0
    after_idle_s: float = 0.0
    dispatch_s: float = 0.0
    turnaround_s: float = 0.0
    handover_s: float = 0.0

    @classmethod
    def from_record(cls, record: Record, stage: str = STAGE) -> CostTable:
        """Read rows {stage, batch, shape, mel_frames, ms_p50, ms_p95, samples_ms}; mel_frames and samples_ms (a list) may be absent.

        Without samples the lower half of the spread is the median and the upper half runs through the 95th percentile.
        Raises RecordError for another kind of record, no rows of the stage, or costs that are not positive numbers.
        """
        if record.kind != "costs":
            raise RecordError(f"got a record of kind {record.kind!r}; a cost table is one of kind 'costs'")
        with sound_costs():
            return cls._read(record, stage)

    @classmethod
    def _read(cls, record: Record, stage: str) -> CostTable:
        found: dict[str, dict[int, Floats]] = {}
        mel_frames: dict[str, int] = {}
        for row in record.rows:
            if row.get("stage") == stage:
                shape = str(row["shape"])
                found.setdefault(shape, {})[int(row["batch"])] = row_quantiles(row)
                if "mel_frames" in row:
                    mel_frames[shape] = int(row["mel_frames"])
        if not found:
            stages = sorted({str(row.get("stage")) for row in record.rows})
            raise RecordError(f"costs: no rows of stage {stage!r}; the record has {', '.join(stages) or 'no rows'}")
        curves = {s: (tuple(sorted(b)), np.stack([b[size] for size in sorted(b)])) for s, b in found.items()}
        seconds = [1e-6 * float(record.numbers.get(name, 0.0)) for name in TRAFFIC]
        if not all(0 <= value < math.inf for value in seconds):
            got = {name: record.numbers.get(name) for name in TRAFFIC}
            raise RecordError(f"costs: got {got}; allowed are microseconds from 0")
        return cls(curves, mel_frames, Captures.from_rows(record.rows), *seconds)

    def shape_for(self, key: StepKey) -> str:
        """The measured shape that stands for a key: its kind of step, else `steady`, else whatever was measured."""
        mel_frames, drop_encoded, cut = key
        kinds = ["cut"] if cut else [kind for kind in ("steady", "second") if self.mel_frames.get(kind) == mel_frames]
        kinds += ["steady" if drop_encoded else "first", "steady", *self.curves]
        return next(kind for kind in kinds if kind in self.curves)

    def covers(self, shape: str, batch: int) -> bool:
        """Whether a batch size lies between measured ones."""
        batches = self.curves[shape][0]
        return batches[0] <= batch <= batches[-1]

    def quantiles_ms(self, shape: str, batch: int) -> Floats:
        """Quantiles of the cost at a batch size: linear between the measured sizes, and on along the last two beyond them.

        A larger batch is never taken to cost less than the largest measured one, a smaller one never less than its share.
        """
        batches, grid = self.curves[shape]
        if len(batches) == 1:
            return np.asarray(grid[0] * max(1.0, batch / batches[0]))
        high = min(max(int(np.searchsorted(batches, batch)), 1), len(batches) - 1)
        weight = (batch - batches[high - 1]) / (batches[high] - batches[high - 1])
        line = (1 - weight) * grid[high - 1] + weight * grid[high]
        if weight > 1:
            line = np.maximum(line, grid[high])
        if weight < 0:
            line = np.maximum(line, grid[0] * batch / batches[0])
        return np.asarray(line)

    def busy_streams(self, chunk_s: float, busy_share: float = 0.6) -> int:
        """The most streams whose steady steps, all in one batch, keep the worker busy for `busy_share` of a chunk; at least 1.

        Never more than the largest measured batch: a load to tune on, where neither one-by-one nor waiting for all is best.
        """
        shape = self.shape_for((self.mel_frames.get("steady", 0), 2, False))
        fits = [
            batch
            for batch in range(1, self.curves[shape][0][-1] + 1)
            if self.quantiles_ms(shape, batch)[GRID.size // 2] <= busy_share * chunk_s * 1e3
        ]
        return max(fits, default=1)

    def digest(self) -> str:
        """A short fingerprint: results that rest on different measurements must not be pooled."""
        plain: dict[str, Any] = {shape: [b, grid.tolist()] for shape, (b, grid) in sorted(self.curves.items())}
        if any(traffic := [self.wake_s, self.arrival_s, self.after_idle_s, self.dispatch_s, self.turnaround_s]):
            plain["traffic"] = traffic
        if self.handover_s:  # younger than the studies of records without it
            plain["handover"] = self.handover_s
        if self.captures is not None:
            plain[CAPTURE] = [sorted(self.captures.by_batch.items()), self.captures.pool_bytes]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


@contextmanager
def sound_costs() -> Iterator[None]:
    """Turns what a damaged record makes Python raise, a text or a list for a number or a missing key, into a RecordError."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise RecordError(f"costs: the record is damaged ({type(error).__name__}: {error})") from None


def row_quantiles(row: dict[str, Any]) -> Floats:
    """Quantiles in milliseconds on the grid, of a row's samples or else of its p50 and p95. Raises RecordError if one is not positive."""
    samples = row.get("samples_ms")
    if samples:
        values = np.quantile(np.asarray(samples, dtype=np.float64), GRID)
    else:
        p50, p95 = float(row["ms_p50"]), float(row["ms_p95"])
        values = p50 + np.maximum(GRID - 0.5, 0.0) * (p95 - p50) / 0.45
    if not np.isfinite(values).all() or values[0] <= 0 or not 1 <= int(row["batch"]) <= MOST_BATCH:
        raise RecordError(
            f"costs: row with batch {row['batch']}, shape {row['shape']!r} has costs that are not positive, or no batch of 1 to {MOST_BATCH}"
        )
    return np.asarray(values)
