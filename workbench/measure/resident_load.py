"""Open-loop load of thousands of live streams on a resident engine, in one thread and without an object per stream or chunk.

    engine = ResidentEngine(loaded, rows=2000, ladder=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    engine.warm_up()
    record = run_resident(engine, clips, config)        # config.load.streams streams; the same record as `run_paced` makes

A chunk is taken when its last sample was due and its stream's chunk before it is done; a step starts as soon as any chunk is ready and the device is
free. The largest kind of chunk goes first unless another kind has waited `patience_share` of a chunk. While a step runs, blocks of what comes due are
gathered for the next one.

Why no generator can lag here: arrivals are a function of the clock alone. A chunk exists from its due time on, however late the loop looks, and
latency counts from then; how late it looked is reported apart. No chunk may start before it is due, and no block may hold a sample that was
not spoken by then: the first is checked in every run, the second by a test. What a server does beside it (sockets, resampling, text) is not in it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.config import Config
from workbench.errors import ConfigError, LoadNotCarried, RecordError, StepTimeout
from workbench.measure.loadgen import Schedule, build_schedule, run_record
from workbench.measure.resident_plan import NO_WORK, Ints, Lane, LoadPlan, SpokenClips
from workbench.model.speech import Samples
from workbench.results import Record, percentiles_ms
from workbench.runtime.encoding import prompt_index
from workbench.runtime.resident_engine import Flight, ResidentEngine, StepLabels

_LEAD_S = 0.05
_SPIN_S = 0.0005
_REPORT_S = 0.2


@dataclass(frozen=True)
class ResidentOptions:
    """compare_clips: so many clips are recognised alone afterwards and the labels of their utterances compared; patience_share: a kind of chunk
    waits no longer for a larger one than this share of a chunk; most_late_share, drain_timeout_s: as in `PacedOptions`."""

    compare_clips: int = 16
    patience_share: float = 0.125
    most_late_share: float = 1.0
    drain_timeout_s: float = 60.0


def run_resident(
    engine: ResidentEngine,
    clips: Sequence[Samples],
    config: Config,
    progress: Callable[[float], None] = lambda seconds: None,
    options: ResidentOptions | None = None,
) -> Record:
    """Play `config.load` and return the record of latencies, batches and transcripts that differ from the same clip alone.

    Raises ConfigError if the engine has fewer rows than streams, LoadNotCarried if the run was given up, StepTimeout if the backlog does not
    drain within the bound.
    """
    options, streams = options or ResidentOptions(), config.load.streams
    if engine.rows < streams:
        raise ConfigError(
            f"engine rows: got {engine.rows} for load.streams = {streams}; allowed is one row a stream or more"
        )
    geometry, frontend = engine.geometry, engine.frontend
    schedule = build_schedule(config.load, geometry, [clip.size for clip in clips])
    speech = SpokenClips(clips, geometry, frontend.preemphasis, frontend.n_fft)
    run = ResidentRun(engine, schedule, speech, options)
    padded, extra = engine.padded_rows, engine.extra_rounds
    run.play(progress)
    if (run.started_s < schedule.due_s).any():
        raise RecordError("run: a chunk was started before it was due; the clocks differ")
    counters = run.counters(engine.padded_rows - padded, engine.extra_rounds - extra)
    # Arrivals cannot be late (see above): what was sent is what was due.
    record = run_record("paced", config, schedule, (schedule.due_s, run.completed_s), counters)
    record.numbers.update(run.numbers())
    if options.compare_clips:
        record.numbers.update(mismatches(engine, clips, run, options.compare_clips))
    record.notes.extend(
        [
            *engine.loaded.notes,
            "resident engine, its loop and the load in one thread; arrivals follow the clock, so no generator can lag",
            "not in it: receiving audio, resampling, text from labels",
        ]
    )
    return record


class ResidentRun:
    """One playing of a schedule; times are seconds on the schedule's axis. Row n of the engine is stream n."""

    def __init__(
        self, engine: ResidentEngine, schedule: Schedule, speech: SpokenClips, options: ResidentOptions
    ) -> None:
        self.engine, self.schedule, self.options = engine, schedule, options
        self.plan = LoadPlan.of(schedule, speech, engine.geometry)
        self.lanes = [
            Lane(self.plan, speech, number, [engine.staging(kind) for _ in range(2)])
            for number, kind in enumerate(self.plan.kinds)
        ]
        self.completed_s, self.started_s = np.full(len(schedule), np.nan), np.full(len(schedule), np.nan)
        self.seen_s = np.full(len(schedule), np.nan)
        self.steps: list[_Step] = []
        self.results: list[tuple[Ints, StepLabels]] = []
        self._blocked = ~self.plan.first_of_stream
        self._arrived, self._left, self._late = 0, len(schedule), 0
        self._most_late = int(options.most_late_share * len(schedule))
        self._flight: tuple[_Step, Ints, Flight] | None = None
        self._origin_s = self._looked_s = self.longest_look_s = 0.0
        self._prompt = prompt_index(engine.loaded.model, None)

    def play(self, progress: Callable[[float], None] = lambda seconds: None) -> None:
        """Run every chunk of the schedule; returns when the last is done."""
        try:
            self._play(progress)
        finally:
            if self._flight is not None:  # a run that is given up leaves no step under way
                self._land()

    def _play(self, progress: Callable[[float], None]) -> None:
        self._origin_s, reported_s = time.perf_counter() + _LEAD_S, 0.0
        while self._left:
            now = self._now()
            self._arrive(now)
            landed = self._land() if self._flight is not None and self._flight[2].ready() else None
            lane = self._choose(now) if self._flight is None else None
            if lane is not None:
                self._launch(lane)
            if landed is not None:
                self._offer(self._complete(*landed), landed[1])
            if self._flight is not None:
                for waiting in self.lanes:
                    waiting.stage()
            elif lane is None and landed is None:
                self._idle(now)
            if now - reported_s > _REPORT_S:
                reported_s = now
                progress(min(now, self.schedule.seconds))
                self._check(now)

    def _now(self) -> float:
        return time.perf_counter() - self._origin_s

    def _arrive(self, now: float) -> None:
        """Take note of every row that is due by now."""
        due_s = self.schedule.due_s
        self.longest_look_s = max(self.longest_look_s, now - self._looked_s)
        self._looked_s = now
        if self._arrived == due_s.size or due_s[self._arrived] > now:
            return
        start, self._arrived = self._arrived, int(due_s.searchsorted(now, side="right"))
        self.seen_s[start : self._arrived] = now
        self._offer(start + np.flatnonzero(~self._blocked[start : self._arrived]), now)

    def _offer(self, rows: Ints, now: float) -> None:
        """Rows that are due and whose stream is free: to their lanes, or complete at once where there is nothing to compute."""
        while rows.size:
            kinds = self.plan.kind[rows]
            for number, lane in enumerate(self.lanes):
                lane.offer(rows[kinds == number])
            idle = rows[kinds == NO_WORK]
            if not idle.size:
                return
            self.started_s[idle] = now
            rows = self._complete(idle, now)

    def _complete(self, rows: Ints, now: float) -> Ints:
        """Mark rows done; returns the rows that were waiting for them."""
        self.completed_s[rows] = now
        self._left -= rows.size
        self._late += int((now - self.schedule.due_s[rows] > self.schedule.chunk_s).sum())
        following = self.plan.following[rows]
        following = following[following >= 0]
        self._blocked[following] = False
        return following[following < self._arrived]

    def _choose(self, now: float) -> Lane | None:
        """The largest lane, unless the head of another waited beyond the patience: then the one whose head waited longest."""
        ready = [lane for lane in self.lanes if lane.size]
        if len(ready) < 2:
            return ready[0] if ready else None
        oldest = min(ready, key=Lane.head)
        waited_s = now - float(self.schedule.due_s[oldest.head()])
        patience_s = self.options.patience_share * self.schedule.chunk_s
        return oldest if waited_s > patience_s else max(ready, key=lambda lane: lane.size)

    def _launch(self, lane: Lane) -> None:
        rows, blocks = lane.take()
        start_s = self._now()
        prompts = np.full(rows.size, self._prompt)
        flight = self.engine.start(self.schedule.stream[rows], blocks, self.plan.mel_frames[rows], lane.kind, prompts)
        self.started_s[rows] = start_s
        step = _Step(lane.kind, rows.size, start_s, self._now())
        self._flight = (step, rows, flight)

    def _land(self) -> tuple[Ints, float]:
        assert self._flight is not None
        (step, rows, flight), self._flight = self._flight, None
        self.results.append((rows, self.engine.finish(flight)))
        step.done_s = self._now()
        self.steps.append(step)
        return rows, step.done_s

    def _idle(self, now: float) -> None:
        """Nothing to do until the next row is due."""
        if self._arrived == len(self.schedule):
            raise RecordError(f"run: {self._left} chunks wait for chunks that never ran")
        left_s = float(self.schedule.due_s[self._arrived]) - now - _SPIN_S
        if left_s > 0:
            time.sleep(left_s)
        self._looked_s = self._now()

    def _check(self, now: float) -> None:
        schedule, bound_s = self.schedule, self.options.drain_timeout_s
        if self._late > self._most_late:
            raise LoadNotCarried(
                f"load: {self._late} of {len(schedule)} chunks were late by one chunk after {now:.1f} s of "
                f"{schedule.seconds:g} s; allowed are {self._most_late}"
            )
        if now > schedule.seconds + bound_s:
            raise StepTimeout(f"{self._left} chunks had not completed {bound_s} s after the load ended")

    def labels_by_row(self) -> tuple[Ints, NDArray[np.int32]]:
        """(schedule row [N], label [N]) of everything emitted, in the order of rows, those of a row in the order of emission."""
        rows, labels = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for batch, out in self.results:
            rows.append(np.repeat(batch, out.counts))
            labels.append(out.labels[np.arange(out.labels.shape[1]) < out.counts[:, None]])
        found, said = np.concatenate(rows), np.concatenate(labels)
        order = np.argsort(found, kind="stable")
        return found[order], said[order]

    def numbers(self) -> dict[str, Any]:
        """What a run says beside its latencies."""
        steps, schedule = self.steps, self.schedule
        span_s = float(np.nanmax(self.completed_s) - np.nanmin(self.started_s))
        audio_s = sum(u.samples for u in schedule.utterances) / self.engine.geometry.sample_rate_hz
        works = self.plan.kind != NO_WORK
        return {
            "audio_s": audio_s,
            "steps_per_s": len(steps) / span_s,
            "chunks_per_s": int(works.sum()) / span_s,
            "busy_share": sum(step.done_s - step.start_s for step in steps) / span_s,
            "labels_per_audio_s": sum(int(out.counts.sum()) for _, out in self.results) / audio_s,
            **percentiles_ms((self.started_s - schedule.due_s)[works].tolist(), "wait"),
            **percentiles_ms([step.done_s - step.start_s for step in steps], "step"),
            **percentiles_ms([step.begun_s - step.start_s for step in steps], "begin"),
            **percentiles_ms((self.seen_s - schedule.due_s).tolist(), "seen_late", (50, 99)),
            "longest_look_ms": self.longest_look_s * 1e3,
        }

    def counters(self, padded_rows: int, extra_rounds: int) -> dict[str, Any]:
        """Batches under the names that the recogniser's stages use."""
        sizes, items = Counter(step.size for step in self.steps), sum(step.size for step in self.steps)
        kinds = Counter(f"{step.kind[0]} mel frames" for step in self.steps)
        return {
            "stage": "resident",
            "batches": len(self.steps),
            "items": items,
            "batch_sizes": {str(size): sizes[size] for size in sorted(sizes)},
            "batch_size_mean_items": items / max(1, len(self.steps)),
            "batch_size_max_items": max(sizes, default=0),
            "batches_by_kind": dict(kinds),
            "padding_rows": padded_rows,
            "padding_rows_share": padded_rows / max(1, items + padded_rows),
            "extra_rounds": extra_rounds,
            "graphs": self.engine.captured,
            "engine_rows": self.engine.rows,
            "row_bytes": self.engine.encoder.rings.row_bytes,
        }


def mismatches(engine: ResidentEngine, clips: Sequence[Samples], run: ResidentRun, most_clips: int) -> dict[str, int]:
    """Finished utterances of up to `most_clips` clips whose labels differ from those of the clip alone, on the same engine."""
    schedule = run.schedule
    rows, labels = run.labels_by_row()
    spoken = schedule.utterance[rows]
    order = np.argsort(spoken, kind="stable")
    edges = np.searchsorted(spoken[order], np.arange(len(schedule.utterances) + 1))
    labels = labels[order]
    alone: dict[int, NDArray[np.int32]] = {}
    compared = wrong = 0
    for utterance in schedule.utterances:
        if utterance.cut or (utterance.clip not in alone and len(alone) == most_clips):
            continue
        if utterance.clip not in alone:
            alone[utterance.clip] = labels_alone(engine, clips[utterance.clip])
        said = labels[edges[utterance.index] : edges[utterance.index + 1]]
        compared += 1
        wrong += not np.array_equal(said, alone[utterance.clip])
    return {"transcript_mismatches": wrong, "transcripts_compared": compared, "clips_compared": len(alone)}


def labels_alone(engine: ResidentEngine, clip: Samples) -> NDArray[np.int32]:
    """Labels of one recording, a chunk at a time at batch 1 on row 0."""
    geometry = engine.geometry
    speech = SpokenClips([clip], geometry, engine.frontend.preemphasis, engine.frontend.n_fft)
    row, prompt = np.zeros(1, np.int64), np.full(1, prompt_index(engine.loaded.model, None))
    found = [np.zeros(0, np.int32)]
    for chunk in geometry.chunks(clip.size):
        full = geometry.chunk(chunk.index)
        kind = (full.input_mel_frames, full.drop_encoded)
        block = torch.empty(1, engine.block_samples(kind))
        speech.gather(np.full(1, (chunk.start_mel - chunk.history_mel) * geometry.hop_samples), block)
        out = engine.step(row, block.numpy(), np.full(1, chunk.input_mel_frames), kind, prompt)
        found.append(out.labels[0, : out.counts[0]])
    return np.concatenate(found)


@dataclass
class _Step:
    """One step: its kind and size, and the seconds at which it was begun, under way, and done."""

    kind: tuple[int, int]
    size: int
    start_s: float
    begun_s: float
    done_s: float = 0.0
