"""Digital twin: the recogniser's own scheduler on a virtual clock, with step costs that were measured.

Why: a tuning study needs hundreds of runs, and minutes of live traffic take minutes. Here only the device is replaced, by a
table of measured milliseconds per batch size; the queues, their rules and the load are the very code that runs live.

    costs = CostTable.from_record(Record.load("runs/costs.json"))
    schedule = build_schedule(config.load, geometry, clip_samples)
    simulate(config, costs, schedule).numbers["latency_p95_ms"]

One worker takes one batch at a time and is busy for its cost; it begins a little after the batch may leave, if the record says so. The next chunk of an utterance is submitted when the one before it is
finished, as a live stream does, because a step needs the state that the step before it left. Where the step is graphed, a batch is
padded up the ladder and costs what the padded one costs. A full queue ends the run with an error, as it does live.

Callers hand over their chunks and are told of results one after the other, since one interpreter does both: that bounds the chunks a second of one
process, whatever its device could do. What a step itself takes of the interpreter is in its measured cost.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.batching.buckets import bucket_for, checked_ladder, default_ladder
from workbench.batching.ingress import IngressCohorts, Wave
from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.config import BatchingConfig, Config, check_rows, effective_batch_cap
from workbench.errors import ConfigError, LoadNotCarried, QueueFull
from workbench.geometry import StreamGeometry
from workbench.measure.cost_table import IDLE_S, STAGE, CostTable, StepKey
from workbench.measure.loadgen import Schedule, build_schedule, run_record
from workbench.results import Record, environment

__all__ = ["STAGE", "CostTable", "simulate", "twin_runner"]

_DRAWS = 4096
# More chunks than this in one simulated run would take minutes and gigabytes.
MOST_CHUNKS = 20_000_000


def simulate(config: Config, costs: CostTable, schedule: Schedule, cohort: int = 0) -> Record:
    """Run the schedule through the micro-batcher of `asr.batching` on a virtual clock. Same inputs, same record.

    cohort: what the runtime passes to `submit`, the items expected together; 0 where it does not know. Besides the names of every
    run, `numbers` has busy_share (of the worker, until the last completion), extrapolated_share (of batches, beyond the
    measured sizes), padding_rows_share and, where the step is graphed, graphs, graph_capture_ms and graph_memory_mib (if measured).
    Raises ConfigError if the streams do not fit `state_arena_slots`, LoadNotCarried if the queue overflows.
    """
    check_rows(config)
    batching = config.asr.batching
    if not batching.enabled:  # the scalar path: callers take turns, one stream at a time, without a timer
        batching = dataclasses.replace(batching, max_queue_delay_us=0)
        costs = dataclasses.replace(costs, dispatch_s=0.0, turnaround_s=0.0, handover_s=0.0)  # the caller is the worker
    cap = effective_batch_cap(batching)[0]
    batcher: MicroBatcher[int] = MicroBatcher.from_config(batching, cap=cap, metrics=StageMetrics(STAGE))
    ladder = graphed_ladder(config, cap)
    worker = _Worker(costs, config.load.seed, ladder)
    barrier = _Barrier(batching, schedule.chunk_s) if config.load.coordinated and batching.enabled else None
    run = _Run(schedule, batcher, worker, cohort if batching.enabled else None, barrier)
    run.play()
    batcher.metrics.padded(rows=worker.padded_rows)
    counters = batcher.metrics.snapshot()
    record = run_record("twin", config, schedule, (schedule.due_s, run.completed_s), counters, _environment())
    batches = max(1, batcher.metrics.batches)
    record.numbers.update(
        busy_share=worker.busy_s / max(run.now, worker.busy_s, 1e-9),
        extrapolated_share=worker.extrapolated / batches,
        padding_rows_share=counters["padding_rows_share"],
        **_graph_numbers(costs, ladder),
    )
    if barrier is not None:
        waves = barrier.cohorts.metrics.snapshot()
        record.counters.update(ingress_reasons=waves["reasons"], ingress_wait_p95_ms=waves["queue_wait_p95_ms"])
    if worker.extrapolated:
        record.notes.append(
            f"{worker.extrapolated} of {batches} batches lay beyond the measured batch sizes: linear guess"
        )
    return record


def graphed_ladder(config: Config, cap: int) -> tuple[int, ...] | None:
    """The batch sizes that steady steps are padded up to; None where the step is not graphed. Raises ConfigError as the recogniser does."""
    sizes = config.asr.batch_buckets
    ladder = checked_ladder(sizes, cap) if sizes else default_ladder(cap)
    return ladder if config.asr.cuda_graphs else None


def _graph_numbers(costs: CostTable, ladder: tuple[int, ...] | None) -> dict[str, float]:
    if ladder is None:
        return {}
    return {"graphs": len(ladder), **(costs.captures.numbers(ladder) if costs.captures else {})}


def twin_runner(
    costs: CostTable, geometry: StreamGeometry, clip_samples: Sequence[int], cohort: int = 0
) -> Callable[[Config], Record]:
    """`config -> Record` for a tuning study: the twin on one model's costs, with each load's schedule built once."""
    schedule = functools.lru_cache(maxsize=16)(lambda load: build_schedule(load, geometry, clip_samples))

    def run(config: Config) -> Record:
        check_rows(config)  # before a schedule is built that could be large
        load = config.load
        if load.streams * load.seconds / geometry.chunk_s > MOST_CHUNKS:
            raise ConfigError(
                f"load: {load.streams} streams of {load.seconds:g} s are {load.streams * load.seconds / geometry.chunk_s:.0f} chunks; the "
                f"twin simulates at most {MOST_CHUNKS}"
            )
        return simulate(config, costs, schedule(load), cohort)

    return run


class _Worker:
    """The device: draws the cost of a batch from the measured spread. One seeded generator makes runs repeatable."""

    def __init__(self, costs: CostTable, seed: int, ladder: tuple[int, ...] | None) -> None:
        self.busy_s = 0.0
        self.extrapolated = 0
        self.padded_rows = 0
        self.costs, self._ladder = costs, ladder
        self._rng = np.random.default_rng((seed, 1))
        self._draws: list[float] = []
        self._known: dict[tuple[Any, int], tuple[list[float], bool, int]] = {}

    def cost_s(self, key: Any, batch: int, idle_s: float = 0.0) -> float:
        """Seconds of one batch on a worker that was idle for `idle_s` before."""
        found = self._known.get((key, batch))
        if found is None:
            shape, size = self.costs.shape_for(key), self._padded_size(key, batch)
            spread_s = (self.costs.quantiles_ms(shape, size) * 1e-3).tolist()
            found = self._known[key, batch] = (spread_s, not self.costs.covers(shape, size), size - batch)
        if not self._draws:
            self._draws = self._rng.random(_DRAWS).tolist()
        spread, beyond, padding = found
        at = self._draws.pop() * (len(spread) - 1)
        low = int(at)
        cost = spread[low] + (spread[low + 1] - spread[low]) * (at - low)
        if idle_s > IDLE_S:
            cost += self.costs.after_idle_s
        self.busy_s += cost
        self.extrapolated += beyond
        self.padded_rows += padding
        return cost

    def _padded_size(self, key: StepKey, batch: int) -> int:
        """As the runtime: cut chunks never run as graphs."""
        return batch if self._ladder is None or key[2] else bucket_for(batch, self._ladder)


class _Barrier:
    """The ingress barrier of coordinated streams, as the runtime's `IngressGate`, on the virtual clock. Streams are utterances."""

    def __init__(self, batching: BatchingConfig, chunk_s: float) -> None:
        self.cohorts = IngressCohorts(batching)
        self._chunk_s = chunk_s
        self.deadline = math.inf  # when the open wave closes at the latest; infinite with none
        self._wave: Wave | None = None
        self._held: dict[int, int] = {}
        self._seen: set[int] = set()

    @property
    def closed(self) -> bool:
        """Whether a wave has closed whose chunks were not yet taken."""
        return self._wave is not None and self._wave.closed

    def arrive(self, utterance: int, row: int, now: float) -> bool:
        """A chunk comes to the barrier; True if it goes on at once, alone."""
        if utterance not in self._seen:
            self._seen.add(utterance)
            self.cohorts.register(utterance, now)
        wave = self.cohorts.arrive(utterance, now, self._chunk_s)
        if wave.closed and wave.size == 1:
            return True
        self._wave, self._held[utterance] = wave, row
        self.deadline = now if wave.closed else wave.deadline
        return False

    def leave(self, utterance: int, now: float) -> int | None:
        """The utterance ends: nobody waits for it; the row that it held at the barrier, if any."""
        self.cohorts.unregister(utterance, now)
        held = self._held.pop(utterance, None)
        if not self._held:
            self._wave, self.deadline = None, math.inf
        elif self.closed:
            self.deadline = now
        return held

    def released(self, now: float) -> list[tuple[int, int]]:
        """(utterance, row) of the wave that has closed by now."""
        self.cohorts.poll(now)
        if not self.closed:
            return []
        released, self._held, self._wave, self.deadline = list(self._held.items()), {}, None, math.inf
        return released


class _Run:
    """One pass over a schedule. The next event is the end of the batch in execution; while idle, a chunk falling due or a deadline."""

    def __init__(
        self,
        schedule: Schedule,
        batcher: MicroBatcher[int],
        worker: _Worker,
        cohort: int | None,
        barrier: _Barrier | None,
    ) -> None:
        """cohort: of every submission; None where batching is off. barrier: of coordinated streams; None where they are not."""
        self.now = 0.0
        self.completed_s: list[float] = [math.nan] * len(schedule)
        self._batcher, self._worker, self._barrier = batcher, worker, barrier
        self._arrival_s, self._wake_s = worker.costs.arrival_s, worker.costs.wake_s
        self._handover_s = worker.costs.handover_s
        self._free_at = -math.inf  # until when the interpreter was busy with callers
        # Batched, the end of an utterance leaves without waiting for company, as it does live.
        self._cohort = np.where(schedule.final & (cohort is not None), 1, cohort or 0).tolist()
        self._due_s: list[float] = schedule.due_s.tolist()
        self._streams = schedule.streams
        self._utterance: list[int] = schedule.utterance.tolist()
        self._final: list[bool] = schedule.final.tolist()
        self._keys = _step_keys(schedule, extend=cohort is not None)
        self._busy = [False] * len(schedule.utterances)
        self._told_s = [0.0] * len(schedule.utterances)  # when the last result of each was told
        self._backlog: dict[int, deque[int]] = {}
        self._running: Batch[int] | None = None
        self._done_at, self._idle_since = math.inf, -math.inf
        self._dispatch_s, self._turnaround_s = worker.costs.dispatch_s, worker.costs.turnaround_s
        self._takes_at: float | None = None  # when the worker begins with what may leave; None while nothing may

    def play(self) -> None:
        """Process events until every row has completed."""
        due_s, batcher, arrive, handover_s = self._due_s, self._batcher, self._arrive, self._handover_s
        rows, row = len(due_s), 0
        while True:
            if self._running is None:
                deadline = batcher.next_deadline() if self._takes_at is None else self._takes_at
                at = max(due_s[row], self._free_at + handover_s) if row < rows else math.inf
                event = min(at, math.inf if deadline is None else deadline)
                if self._barrier is not None:
                    event = min(event, self._barrier.deadline)
                if event == math.inf:
                    return
                now = self.now = max(self.now, event)
            else:
                now = self.now = self._done_at
            while row < rows and (at := max(due_s[row], self._free_at + handover_s)) <= now:
                if handover_s:
                    self._free_at = at
                arrive(row, at)
                row += 1
            if self._barrier is not None and self._barrier.deadline <= now:
                self._let_in(self._barrier)
            if self._running is not None:
                self._finish(now)
            if not self._takes(now):
                continue
            batch = batcher.next_batch(now)
            if batch is not None:
                self._running, self._takes_at = batch, None
                self._done_at = now + self._worker.cost_s(batch.key, len(batch.items), now - self._idle_since)

    def _takes(self, now: float) -> bool:
        """Whether the worker, which is free, looks for a batch now: a turnaround after its last one, else a dispatch after a batch may leave."""
        if not self._dispatch_s and not self._turnaround_s:
            return True
        if self._takes_at is None:
            deadline, back_at = self._batcher.next_deadline(), self._idle_since + self._turnaround_s
            if deadline is None or deadline > now:
                return False
            self._takes_at = back_at if now <= back_at else now + self._dispatch_s
        return now >= self._takes_at

    def _arrive(self, row: int, now: float) -> None:
        utterance, barrier = self._utterance[row], self._barrier
        if barrier is not None:
            if barrier.deadline <= now:
                self._let_in(barrier)
            held = barrier.leave(utterance, now) if self._final[row] else None
            if held is not None:
                self._start(held, utterance, now)
        if self._busy[utterance]:
            self._backlog.setdefault(utterance, deque()).append(row)
        elif barrier is None or self._final[row]:
            self._start(row, utterance, now)
        elif barrier.arrive(utterance, row, now):
            self._start(row, utterance, now, 1)
        else:
            self._busy[utterance] = True
        if barrier is not None and barrier.closed:
            self._let_in(barrier)

    def _let_in(self, barrier: _Barrier) -> None:
        """Start the chunks of the wave that has closed, each with the number of its companions of the same kind."""
        now = barrier.deadline
        released = barrier.released(now)
        together = Counter(self._keys[row] for _, row in released)
        for utterance, row in released:
            self._start(row, utterance, now, together[self._keys[row]])

    def _start(self, row: int, utterance: int, now: float, cohort: int | None = None) -> None:
        key = self._keys[row]
        if key is None:  # the end of an utterance whose chunks are all done; told after the last of them
            self.completed_s[row] = max(now, self._told_s[utterance])
            return
        self._busy[utterance] = True
        try:
            self._batcher.submit(row, key, now, self._cohort[row] if cohort is None else cohort)
        except QueueFull as full:
            raise LoadNotCarried(
                f"load: QueueFull at {now:.2f} s ({full}); this configuration does not carry {self._streams} streams"
            ) from full

    def _finish(self, now: float) -> None:
        assert self._running is not None
        batch, self._running, self._idle_since = self._running, None, now
        self._batcher.finish(batch, now)
        completed, told_s, busy, backlogs = self.completed_s, self._told_s, self._busy, self._backlog
        told_from = max(now, self._free_at)
        if self._handover_s:
            self._free_at = told_from + len(batch.items) * self._wake_s
        for position, row in enumerate(batch.items, 1):
            # Everything runs `arrival_s` behind the load; callers learn of the results one after the other.
            utterance = self._utterance[row]
            at = told_from + self._arrival_s + position * self._wake_s
            completed[row] = told_s[utterance] = max(at, told_s[utterance])
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


@functools.cache
def _environment() -> dict[str, Any]:
    """Found once per process: a study simulates hundreds of times on one host."""
    return environment()
