"""Digital twin: the recogniser's own scheduler on a virtual clock, with step costs that were measured.

Why: a tuning study needs hundreds of runs, and minutes of live traffic take minutes. Here only the device is replaced, by a
table of measured milliseconds per batch size; the queues, their rules and the load are the very code that runs live.

    costs = CostTable.from_record(Record.load("runs/costs.json"))
    schedule = build_schedule(config.load, geometry, clip_samples)
    simulate(config, costs, schedule).numbers["latency_p95_ms"]

One worker takes one batch at a time and is busy for its cost. The next chunk of an utterance is submitted when the one before it is
finished, as a live stream does, because a step needs the state that the step before it left. A full queue ends the run with an
error, as it does live.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.config import Config, effective_batch_cap
from workbench.errors import ConfigError, QueueFull, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.loadgen import Schedule, build_schedule, run_record
from workbench.results import Record, environment

STAGE = "step"
# (mel frames fed, outputs dropped, cut by the end): what the recogniser's own steps must share to run as one batch.
StepKey = tuple[int, int, bool]
_GRID = np.linspace(0.0, 1.0, 257)
_DRAWS = 4096

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of one step: per shape the measured batch sizes (ascending) and, for each, a row of quantiles on an even grid.

    Shapes are the kinds of step `first`, `second`, `steady` and `cut`; mel_frames: what each was fed, where the record says so.
    """

    curves: dict[str, tuple[tuple[int, ...], Floats]]
    mel_frames: dict[str, int]

    @classmethod
    def from_record(cls, record: Record, stage: str = STAGE) -> CostTable:
        """Read rows {stage, batch, shape, mel_frames, ms_p50, ms_p95, samples_ms}; mel_frames and samples_ms (a list) may be absent.

        Without samples the lower half of the spread is the median and the upper half runs through the 95th percentile.
        Raises RecordError for another kind of record, no rows of the stage, or costs that are not positive numbers.
        """
        if record.kind != "costs":
            raise RecordError(f"got a record of kind {record.kind!r}; a cost table is one of kind 'costs'")
        found: dict[str, dict[int, Floats]] = {}
        mel_frames: dict[str, int] = {}
        for row in record.rows:
            if row.get("stage") == stage:
                shape = str(row["shape"])
                found.setdefault(shape, {})[int(row["batch"])] = _quantiles(row)
                if "mel_frames" in row:
                    mel_frames[shape] = int(row["mel_frames"])
        if not found:
            stages = sorted({str(row.get("stage")) for row in record.rows})
            raise RecordError(f"costs: no rows of stage {stage!r}; the record has {', '.join(stages) or 'no rows'}")
        curves = {s: (tuple(sorted(b)), np.stack([b[size] for size in sorted(b)])) for s, b in found.items()}
        return cls(curves, mel_frames)

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
            if self.quantiles_ms(shape, batch)[_GRID.size // 2] <= busy_share * chunk_s * 1e3
        ]
        return max(fits, default=1)

    def digest(self) -> str:
        """A short fingerprint: results that rest on different measurements must not be pooled."""
        plain = {shape: [batches, grid.tolist()] for shape, (batches, grid) in sorted(self.curves.items())}
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:12]


def simulate(config: Config, costs: CostTable, schedule: Schedule, cohort: int = 0) -> Record:
    """Run the schedule through the micro-batcher of `asr.batching` on a virtual clock. Same inputs, same record.

    cohort: what the runtime passes to `submit`, the items expected together; 0 where it does not know. Besides the names of every
    run, `numbers` has busy_share (of the worker, until the last completion) and extrapolated_share (of batches, beyond the
    measured sizes). Raises ConfigError if the streams do not fit `state_arena_slots`, RecordError if the queue overflows.
    """
    batching = config.asr.batching
    if batching.enabled and schedule.streams > batching.state_arena_slots:
        raise ConfigError(
            f"asr.batching.state_arena_slots: got {batching.state_arena_slots} for {schedule.streams} live streams; "
            "allowed is at least one row per stream"
        )
    if not batching.enabled:  # the scalar path: callers take turns, one stream at a time, without a timer
        batching = dataclasses.replace(batching, max_queue_delay_us=0)
    batcher: MicroBatcher[int] = MicroBatcher.from_config(
        batching, cap=effective_batch_cap(batching)[0], metrics=StageMetrics(STAGE)
    )
    worker = _Worker(costs, config.load.seed)
    run = _Run(schedule, batcher, worker, cohort if batching.enabled else None)
    run.play()
    record = run_record(
        "twin", config, schedule, (schedule.due_s, run.completed_s), batcher.metrics.snapshot(), _environment()
    )
    batches = max(1, batcher.metrics.batches)
    record.numbers.update(
        busy_share=worker.busy_s / max(run.now, worker.busy_s, 1e-9),
        extrapolated_share=worker.extrapolated / batches,
    )
    if worker.extrapolated:
        record.notes.append(
            f"{worker.extrapolated} of {batches} batches lay beyond the measured batch sizes: linear guess"
        )
    return record


def twin_runner(
    costs: CostTable, geometry: StreamGeometry, clip_samples: Sequence[int], cohort: int = 0
) -> Callable[[Config], Record]:
    """`config -> Record` for a tuning study: the twin on one model's costs, with each load's schedule built once."""
    schedule = functools.lru_cache(maxsize=16)(lambda load: build_schedule(load, geometry, clip_samples))
    return lambda config: simulate(config, costs, schedule(config.load), cohort)


class _Worker:
    """The device: draws the cost of a batch from the measured spread. One seeded generator makes runs repeatable."""

    def __init__(self, costs: CostTable, seed: int) -> None:
        self.busy_s = 0.0
        self.extrapolated = 0
        self._costs = costs
        self._rng = np.random.default_rng((seed, 1))
        self._draws: list[float] = []
        self._known: dict[tuple[Any, int], tuple[list[float], bool]] = {}

    def cost_s(self, key: Any, batch: int) -> float:
        """Seconds of one batch."""
        found = self._known.get((key, batch))
        if found is None:
            shape = self._costs.shape_for(key)
            spread_s = (self._costs.quantiles_ms(shape, batch) * 1e-3).tolist()
            found = self._known[key, batch] = (spread_s, not self._costs.covers(shape, batch))
        if not self._draws:
            self._draws = self._rng.random(_DRAWS).tolist()
        spread, beyond = found
        at = self._draws.pop() * (len(spread) - 1)
        low = int(at)
        cost = spread[low] + (spread[low + 1] - spread[low]) * (at - low)
        self.busy_s += cost
        self.extrapolated += beyond
        return cost


class _Run:
    """One pass over a schedule. The next event is the end of the batch in execution; while idle, a chunk falling due or a deadline."""

    def __init__(self, schedule: Schedule, batcher: MicroBatcher[int], worker: _Worker, cohort: int | None) -> None:
        """cohort: of every submission; None where batching is off."""
        self.now = 0.0
        self.completed_s: list[float] = [math.nan] * len(schedule)
        self._batcher, self._worker = batcher, worker
        # Batched, the end of an utterance leaves without waiting for company, as it does live.
        self._cohort = np.where(schedule.final & (cohort is not None), 1, cohort or 0).tolist()
        self._due_s: list[float] = schedule.due_s.tolist()
        self._streams = schedule.streams
        self._utterance: list[int] = schedule.utterance.tolist()
        self._keys = _step_keys(schedule, extend=cohort is not None)
        self._busy = [False] * len(schedule.utterances)
        self._backlog: dict[int, deque[int]] = {}
        self._running: Batch[int] | None = None
        self._done_at = math.inf

    def play(self) -> None:
        """Process events until every row has completed."""
        due_s, batcher, arrive = self._due_s, self._batcher, self._arrive
        rows, row = len(due_s), 0
        while True:
            if self._running is None:
                deadline = batcher.next_deadline()
                event = min(due_s[row] if row < rows else math.inf, math.inf if deadline is None else deadline)
                if event == math.inf:
                    return
                now = self.now = max(self.now, event)
            else:
                now = self.now = self._done_at
            while row < rows and due_s[row] <= now:
                arrive(row, due_s[row])
                row += 1
            if self._running is not None:
                self._finish(now)
            batch = batcher.next_batch(now)
            if batch is not None:
                self._running = batch
                self._done_at = now + self._worker.cost_s(batch.key, len(batch.items))

    def _arrive(self, row: int, now: float) -> None:
        utterance = self._utterance[row]
        if self._busy[utterance]:
            self._backlog.setdefault(utterance, deque()).append(row)
        else:
            self._start(row, utterance, now)

    def _start(self, row: int, utterance: int, now: float) -> None:
        key = self._keys[row]
        if key is None:  # the end of an utterance whose chunks are all done
            self.completed_s[row] = now
            return
        self._busy[utterance] = True
        try:
            self._batcher.submit(row, key, now, self._cohort[row])
        except QueueFull as full:
            raise RecordError(
                f"load: QueueFull at {now:.2f} s ({full}); this configuration does not carry {self._streams} streams"
            ) from full

    def _finish(self, now: float) -> None:
        assert self._running is not None
        batch, self._running = self._running, None
        self._batcher.finish(batch, now)
        completed, busy, backlogs = self.completed_s, self._busy, self._backlog
        for row in batch.items:
            completed[row] = now
            utterance = self._utterance[row]
            busy[utterance] = False
            if utterance in backlogs:
                backlog = backlogs[utterance]
                while backlog and not busy[utterance]:
                    self._start(backlog.popleft(), utterance, now)
                if not backlog:
                    del backlogs[utterance]


def _step_keys(schedule: Schedule, extend: bool) -> list[StepKey | None]:
    """The compatibility key of every row; None where nothing is left to compute.

    extend: as the runtime does when it batches, a chunk that the end cut short is filled up to its full length and shares a key with
    full ones. What is full for the first, the second and any later chunk is read off the rows that are not cut.
    """
    mel_frames, cut = schedule.mel_frames.copy(), schedule.cut.copy()
    place = np.minimum(schedule.chunk_index, 2)
    for number in range(3) if extend else ():
        full = mel_frames[(place == number) & ~cut & (mel_frames > 0)]
        filled = (place == number) & cut
        if full.size and filled.any():
            mel_frames[filled], cut[filled] = full[0], False
    # One integer per key: numpy finds the distinct ones of a column twenty times faster than those of rows.
    codes = (mel_frames << 32) + (schedule.drop_encoded << 1) + cut
    unique, inverse = np.unique(codes, return_inverse=True)
    keys = [(code >> 32, (code & 0xFFFFFFFF) >> 1, bool(code & 1)) for code in unique.tolist()]
    return [keys[index] if keys[index][0] else None for index in inverse.tolist()]


def _quantiles(row: dict[str, Any]) -> Floats:
    samples = row.get("samples_ms")
    if samples:
        values = np.quantile(np.asarray(samples, dtype=np.float64), _GRID)
    else:
        p50, p95 = float(row["ms_p50"]), float(row["ms_p95"])
        values = p50 + np.maximum(_GRID - 0.5, 0.0) * (p95 - p50) / 0.45
    if not np.isfinite(values).all() or values[0] <= 0 or int(row["batch"]) < 1:
        raise RecordError(
            f"costs: row with batch {row['batch']}, shape {row['shape']!r} has costs that are not positive"
        )
    return np.asarray(values)


@functools.cache
def _environment() -> dict[str, Any]:
    """Found once per process: a study simulates hundreds of times on one host."""
    return environment()
