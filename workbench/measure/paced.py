"""A real paced run: live streams speak in real time into a recogniser, and latency is counted from when each chunk was due.

    clips = [read_audio(item) for item in items]
    record = run_paced(recognizer, clips, LoadConfig(streams=8, seconds=20))
    record.numbers["latency_p95_ms"], record.numbers["late_share"]

Open loop: the generator follows the schedule whether or not the recogniser keeps up, so backlog shows as latency. Completion times are
taken where a batch ends, in the worker's thread. A run whose generator itself lagged is refused (see `loadgen.summarise`). A run that fails
leaves no stream behind, so that the recogniser can be used for the next one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from workbench.clock import MonotonicClock
from workbench.config import Config, LoadConfig
from workbench.errors import ArenaFull, ConfigError, LoadNotCarried, QueueFull, RecordError, StepTimeout
from workbench.measure.lag import LagWatch
from workbench.measure.loadgen import Schedule, build_schedule, check_generator, lateness_bound_s, run_record
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Event, Recognizer, Stream

_LEAD_S = 0.1
_SWITCH_S = 0.0005
_QUIET_S = 10.0


@dataclass(frozen=True)
class PacedOptions:
    """compare: recognise every clip alone afterwards and count transcripts that differ; most_late_share: give the run up once more of
    its chunks than this share were late by a chunk (1: never); stop_lagging: give the run up once its generator is certain to have been too
    late for it to count; drain_timeout_s: bound on the backlog after the load's end."""

    compare: bool = True
    most_late_share: float = 1.0
    stop_lagging: bool = False
    drain_timeout_s: float = 60.0


def run_paced(
    recognizer: Recognizer,
    clips: Sequence[Samples],
    load: LoadConfig,
    progress: Callable[[float], None] = lambda seconds: None,
    options: PacedOptions | None = None,
) -> Record:
    """Play `load` against `recognizer` and return the record of latencies, batches and, if wanted, transcripts that differ from a lone run.

    `push_p50_ms` is what handing over a chunk takes its caller, `push_cpu_us` (a mean) how long its thread computes for it. Raises ConfigError if the
    arena has fewer rows than streams, LoadNotCarried if chunks were refused or the run was given up, GeneratorLagged if the generator was late, StepTimeout if the backlog does not drain within the bound.
    """
    options = options or PacedOptions()
    if recognizer.arena.rows < load.streams:
        raise ConfigError(
            f"asr.batching.state_arena_slots: {recognizer.arena.rows} rows for load.streams = {load.streams} live streams; allowed is at "
            "least as many"
        )
    schedule = build_schedule(load, recognizer.loaded.geometry, [clip.size for clip in clips])
    run = _Run(recognizer, schedule, clips, options, load.coordinated)
    with _prompt_threads():
        try:
            run.play(progress)
            run.drain()
        finally:
            run.abandon()
    config = Config(asr=recognizer.config.asr, load=load)
    times_s = (run.sent_s, run.completed_s)
    record = run_record(
        "paced", config, schedule, times_s, {**recognizer.metrics.snapshot(), **recognizer.arena.snapshot()}
    )
    record.numbers["push_p50_ms"] = 1e3 * float(np.median(run.taken_s - run.sent_s))
    record.numbers["push_cpu_us"] = run.push_cpu_us
    if options.compare:
        record.numbers.update(transcript_mismatches=run.mismatches(), transcripts_compared=run.compared)
    record.notes.extend(recognizer.loaded.notes)
    return record


class _Run:
    """One playing of a schedule; times are seconds on the schedule's axis."""

    def __init__(
        self,
        recognizer: Recognizer,
        schedule: Schedule,
        clips: Sequence[Samples],
        options: PacedOptions,
        coordinated: bool,
    ) -> None:
        self._recognizer, self._schedule, self._clips, self._options = recognizer, schedule, clips, options
        self._coordinated = coordinated
        self._clock = MonotonicClock()
        self._origin_s = 0.0
        self.sent_s, self.taken_s = np.full(len(schedule), np.nan), np.full(len(schedule), np.nan)
        self.completed_s = np.full(len(schedule), np.nan)
        self._streams: dict[int, Stream] = {}
        self._opened: list[Stream] = []
        self._pushed: dict[int, int] = {}
        self._final_text: dict[int, str] = {}
        # As lists: reading single elements of arrays would cost the generator as much as a lock.
        self._plan = list(
            zip(schedule.utterance.tolist(), schedule.stop_samples.tolist(), schedule.final.tolist(), strict=True)
        )
        self._left = len(schedule)
        self._late, self._most_late = 0, int(options.most_late_share * len(schedule))
        self._lag = LagWatch(len(schedule), lateness_bound_s(schedule.chunk_s))
        self._changed = threading.Condition()
        self._row_of = {
            (u, -1 if final else c): row
            for row, ((u, _, final), c) in enumerate(zip(self._plan, schedule.chunk_index.tolist(), strict=True))
        }
        self.compared = 0
        self.push_cpu_us = 0.0

    def play(self, progress: Callable[[float], None]) -> None:
        """Send every row when it is due."""
        self._origin_s = self._clock.now() + _LEAD_S
        reported_s, cpu_s = 0.0, time.thread_time()
        for row, due_s in enumerate(self._schedule.due_s.tolist()):
            self._clock.sleep_until(self._origin_s + due_s)
            self.sent_s[row] = self._clock.now() - self._origin_s
            self._lag.sent(self.sent_s[row] - due_s)
            if self._options.stop_lagging and self._lag.lost:
                raise self._lag.refusal(due_s, self._schedule.seconds)
            self._send(row)
            self.taken_s[row] = self._clock.now() - self._origin_s
            if self._late > self._most_late:
                self._give_up(row, due_s)
            if due_s - reported_s > 0.2:
                reported_s = due_s
                progress(due_s)
        self.push_cpu_us = 1e6 * (time.thread_time() - cpu_s) / max(1, len(self._schedule))

    def _give_up(self, row: int, due_s: float) -> None:
        schedule = self._schedule
        check_generator(self.sent_s[: row + 1] - schedule.due_s[: row + 1], lateness_bound_s(schedule.chunk_s))
        raise LoadNotCarried(
            f"load: {self._late} of {len(schedule)} chunks were late by one chunk after {due_s:.1f} s of "
            f"{schedule.seconds:g} s; allowed are {self._most_late}"
        )

    def drain(self) -> None:
        """Wait until every row completed."""
        timeout_s = self._options.drain_timeout_s
        deadline_s = self._clock.now() + timeout_s
        with self._changed:
            while self._left > 0:
                failed = next((stream for stream in self._opened if stream.error is not None), None)
                if failed is not None and failed.error is not None:
                    raise RecordError(f"run: a stream failed ({failed.error})") from failed.error
                if self._clock.now() > deadline_s:
                    raise StepTimeout(f"{self._left} chunks had not completed {timeout_s} s after the load ended")
                self._changed.wait(0.2)

    def abandon(self) -> None:
        """Cancel what is still open and wait for the batch in execution; nothing to do after a run that drained."""
        for stream in self._opened:
            if not stream.done:
                stream.cancel()
        deadline_s = self._clock.now() + _QUIET_S
        while any(not stream.done for stream in self._opened) and self._clock.now() < deadline_s:
            self._clock.sleep_until(self._clock.now() + 0.01)

    def mismatches(self) -> int:
        """Finished utterances whose text differs from the same clip recognised alone."""
        alone: dict[int, str] = {}
        wrong = 0
        for utterance in self._schedule.utterances:
            if utterance.cut or utterance.index not in self._final_text:
                continue
            if utterance.clip not in alone:
                with self._recognizer.stream() as stream:
                    stream.push(self._clips[utterance.clip])
                    stream.step()
                    alone[utterance.clip] = stream.finish()[-1].text
            self.compared += 1
            wrong += self._final_text[utterance.index] != alone[utterance.clip]
        return wrong

    def _send(self, row: int) -> None:
        schedule = self._schedule
        utterance, stop, final = self._plan[row]
        clip = self._clips[schedule.utterances[utterance].clip]
        try:
            stream = self._streams.get(utterance)
            if stream is None:
                stream = self._recognizer.stream(
                    lambda event: self._note(utterance, event), coordinated=self._coordinated
                )
                self._streams[utterance] = stream
                self._opened.append(stream)
            stream.push(clip[self._pushed.get(utterance, 0) : stop])
            self._pushed[utterance] = stop
            if final:
                del self._streams[utterance]
                stream.end()
            else:
                stream.submit()
        except (QueueFull, ArenaFull) as refused:
            raise LoadNotCarried(
                f"load: {type(refused).__name__} at {schedule.due_s[row]:.2f} s ({refused}); this configuration does not carry "
                f"{schedule.streams} streams"
            ) from refused

    def _note(self, utterance: int, event: Event) -> None:
        row = self._row_of.get((utterance, -1 if event.kind == "final" else event.chunk))
        if event.kind == "final":
            self._final_text[utterance] = event.text
        if row is None:  # the chunk cut by the end: its row is the final one
            return
        with self._changed:
            self.completed_s[row] = event.completed_s - self._origin_s
            self._late += bool(self.completed_s[row] - self._schedule.due_s[row] > self._schedule.chunk_s)
            self._left -= 1
            self._changed.notify()


@contextmanager
def _prompt_threads() -> Iterator[None]:
    """A short interpreter switch interval: the generator must get its turn while a worker runs Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
