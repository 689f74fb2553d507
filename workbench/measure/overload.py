"""Overload on purpose: callers arrive several times faster than they can be served, for a while; then it must be as if nothing had been.

    record = overload_configured(config, None, seconds=30.0, factor=4.0)
    record.numbers["refused_queue_full"], record.numbers["mismatches"], record.numbers["recovery_s"]

First every shape of step runs once and a closed loop measures how many recordings a second the recogniser sustains. Then callers come at
`factor` times that rate. One who meets QueueFull or ArenaFull with the first piece goes away. The others speak as fast as they are let: `push`
holds them to `most_waiting_s` ahead of the recogniser. When the load ends all of them stop, and what was accepted of their recordings must
complete, with the labels that the same audio has without the crush.

Recovery: `recovery_s` is from the end of the load until everything accepted was done; `new_stream_recovery_s` until a new short stream was served
within twice the time that it takes on the idle recogniser (`idle_stream_ms`, a median). A refusal counts as not recovered.
Memory: what is resident (Linux), sampled every half second and kept in `rows`. Flat is a fact when the second half of the load does not
grow: `memory_growth_mib` is the mean of the last quarter less that of the second, the slopes are least-squares lines over each half.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from workbench.batching.buckets import default_ladder
from workbench.config import Config, replace, to_dict
from workbench.errors import ArenaFull, QueueFull, StepTimeout
from workbench.measure.steps import Kind, PreparedSteps, speech_clips
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer, Stream
from workbench.runtime.transcribe import StreamWindow

MOST_WAITING_S = 1.0
_PIECE_S = 0.25
_SAMPLE_S = 0.5
_POLL_S = 0.002
_DRAIN_S = 120.0
_PROBES = 20
_NORMAL = 2.0
_EVERY_SIZE_TO = 32
_KINDS: tuple[Kind, ...] = ("first", "second", "steady")


def overload_configured(
    config: Config,
    audio: Sequence[str] | None,
    seconds: float = 30.0,
    factor: float = 4.0,
    progress: Callable[[float], None] = lambda seconds: None,
) -> Record:
    """Overload a fresh recogniser with batching on. Raises StepTimeout if what was accepted does not complete."""
    with Recognizer.open(replace(config, **{"asr.batching.enabled": True})) as recognizer:
        clips = speech_clips(recognizer.loaded.geometry.sample_rate_hz, audio)
        recognizer.warm_up()
        _run_every_shape(recognizer, clips)
        rate_hz = _sustained_hz(recognizer, clips)
        prober = _Prober(recognizer, clips[0])
        idle_s = statistics.median(prober.served_s() for _ in range(_PROBES))
        load_average = _load_average()
        run = _Overload(recognizer, clips)
        run.offer(rate_hz * factor, seconds, progress)
        recovery_s, new_stream_s = run.drain(prober, _NORMAL * idle_s)
        counters = {stage.name: stage.snapshot() for stage in recognizer.stage_metrics()}
        mismatches = run.mismatches()
        return Record(
            kind="overload",
            config=to_dict(recognizer.config),
            numbers={
                "seconds": seconds,
                "factor": factor,
                "sustained_utterances_per_s": rate_hz,
                "offered": run.offered,
                "accepted": run.accepted,
                "completed": len(run.completed),
                "most_waiting_s": MOST_WAITING_S,
                "cut_short": run.cut_short,
                "refused_queue_full": run.refused[QueueFull],
                "refused_arena_full": run.refused[ArenaFull],
                "mismatches": mismatches,
                "recovery_s": recovery_s,
                "idle_stream_ms": idle_s * 1e3,
                "new_stream_recovery_s": new_stream_s,
                **memory_numbers(run.memory),
                "load_average": load_average,
            },
            rows=[{"at_s": at_s, "resident_mib": mib} for at_s, mib in run.memory],
            counters=counters,
            notes=list(recognizer.loaded.notes),
        )


def memory_numbers(samples: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    """Growth in MiB and slopes in MiB per minute of (seconds, MiB) samples; None with fewer than eight."""
    names = ("memory_growth_mib", "memory_slope_first_half_mib_per_min", "memory_slope_second_half_mib_per_min")
    if len(samples) < 8:
        return dict.fromkeys(names)
    at_s, mib = np.asarray(samples, dtype=float).T
    quarter, half = len(mib) // 4, len(mib) // 2
    growth = mib[-quarter:].mean() - mib[quarter:half].mean()
    slopes = [np.polyfit(at_s[part] / 60, mib[part], 1)[0] for part in (slice(half), slice(half, None))]
    return dict(zip(names, map(float, (growth, *slopes)), strict=True))


def _run_every_shape(recognizer: Recognizer, clips: Sequence[Samples]) -> None:
    """Each batch size up to what the pipeline can hold, first to steady chunk: what a shape allocates once is not growth."""
    most = min(recognizer.batch_cap, recognizer.arena.rows)
    for batch in sorted({*range(1, min(most, _EVERY_SIZE_TO) + 1), *default_ladder(most)}):
        with PreparedSteps(recognizer, clips, batch) as steps:
            for kind in _KINDS:
                steps.run(kind)


def _sustained_hz(recognizer: Recognizer, clips: Sequence[Samples]) -> float:
    """Recordings per second of a closed loop."""
    window = StreamWindow(recognizer, recognizer.arena.rows)
    start_s = time.perf_counter()
    streams = [window.start(clip) for clip in clips]
    for stream in streams:
        window.finish(stream)
    return len(clips) / (time.perf_counter() - start_s)


class _Prober:
    """A new stream of one chunk of speech, again and again."""

    def __init__(self, recognizer: Recognizer, clip: Samples) -> None:
        self._recognizer = recognizer
        self._speech = clip[: recognizer.loaded.geometry.chunk_ready_samples(0)]
        self._stream: Stream | None = None
        self._start_s = 0.0

    def served_s(self) -> float:
        """Seconds from opening to the final event of one stream. Raises QueueFull and ArenaFull."""
        start_s = time.perf_counter()
        _started(self._recognizer, self._speech).finish()
        return time.perf_counter() - start_s

    def poll(self) -> float | None:
        """Begin a stream if none is on its way; the seconds that it took once it is done, None before."""
        if self._stream is None:
            self._start_s = time.perf_counter()
            self._stream = _started(self._recognizer, self._speech)
        if not self._stream.done:
            return None
        self._stream = None
        return time.perf_counter() - self._start_s


class _Caller:
    """One who speaks a recording into a stream, as far ahead as `push` allows. Raises QueueFull and ArenaFull when not let in."""

    def __init__(self, recognizer: Recognizer, clip: int, speech: Samples) -> None:
        self.clip, self._speech, self.accepted_samples = clip, speech, 0
        self._piece = int(_PIECE_S * recognizer.loaded.geometry.sample_rate_hz)
        self.stream = recognizer.stream(most_waiting_s=MOST_WAITING_S)
        self._push()
        try:
            self._submit()
        except QueueFull:
            self.stream.cancel()
            raise

    @property
    def heard_out(self) -> bool:
        """Whether the whole recording was accepted."""
        return self.accepted_samples == self._speech.size

    def go_on(self) -> None:
        """Push what is allowed; what waits without a place in the pipeline asks for one again."""
        self._push()
        with contextlib.suppress(QueueFull):
            self._submit()

    def hang_up(self) -> None:
        """Say no more; what was accepted is still to be recognised."""
        self._speech = self._speech[: self.accepted_samples]

    def _push(self) -> None:
        with contextlib.suppress(QueueFull):  # as far ahead as allowed
            while not self.heard_out:
                piece = self._speech[self.accepted_samples : self.accepted_samples + self._piece]
                self.stream.push(piece)
                self.accepted_samples += piece.size

    def _submit(self) -> None:
        if self.heard_out:
            self.stream.end()
        else:
            self.stream.submit()


class _Overload:
    """Callers who come at a fixed rate whatever happens to them."""

    def __init__(self, recognizer: Recognizer, clips: Sequence[Samples]) -> None:
        self._recognizer, self._clips = recognizer, clips
        self._live: list[_Caller] = []
        self.offered = self.accepted = self.cut_short = 0
        self.completed: list[tuple[int, int, tuple[int, ...]]] = []  # clip, samples accepted of it, labels
        self.refused: dict[type[RuntimeError], int] = {QueueFull: 0, ArenaFull: 0}
        self.memory: list[tuple[float, float]] = []

    def offer(self, rate_hz: float, seconds: float, progress: Callable[[float], None]) -> None:
        """`rate_hz` callers a second; at the end all hang up."""
        start_s = time.perf_counter()
        while (now_s := time.perf_counter() - start_s) < seconds:
            while self.offered < now_s * rate_hz:
                self._offer_one()
            self._go_on()
            if now_s > _SAMPLE_S * len(self.memory):
                self.memory.append((now_s, _resident_mib()))
                progress(now_s)
            time.sleep(_POLL_S)
        self.cut_short = sum(not caller.heard_out for caller in self._live)
        for caller in self._live:
            caller.hang_up()

    def drain(self, prober: _Prober, normal_s: float) -> tuple[float, float]:
        """Seconds until everything accepted is done, and until a new stream was served within `normal_s`."""
        start_s = time.perf_counter()
        done_s: float | None = None
        served_s: float | None = None
        while done_s is None or served_s is None:
            self._go_on()
            now_s = time.perf_counter() - start_s
            if done_s is None and not self._live:
                done_s = now_s
            if served_s is None and _within(prober, normal_s):
                served_s = now_s
            if now_s > _DRAIN_S:
                raise StepTimeout(
                    f"{_DRAIN_S:.0f} s after the load {len(self._live)} accepted recordings had not completed, or new streams "
                    f"were not served within {normal_s:.3f} s"
                )
            time.sleep(_POLL_S)
        return done_s, served_s

    def mismatches(self) -> int:
        """Accepted recordings whose labels are not those of the same audio recognised alone."""
        alone: dict[tuple[int, int], tuple[int, ...]] = {}
        for clip, samples, _ in self.completed:
            if (clip, samples) not in alone:
                stream = _started(self._recognizer, self._clips[clip][:samples])
                stream.finish()
                alone[clip, samples] = stream.labels
        return sum(labels != alone[clip, samples] for clip, samples, labels in self.completed)

    def _offer_one(self) -> None:
        clip = self.offered % len(self._clips)
        self.offered += 1
        try:
            caller = _Caller(self._recognizer, clip, self._clips[clip])
        except (QueueFull, ArenaFull) as full:
            self.refused[type(full)] += 1
        else:
            self.accepted += 1
            self._live.append(caller)

    def _go_on(self) -> None:
        """Note what has completed and let go of it, everybody else goes on; a failure is raised."""
        live, self._live = self._live, []
        for caller in live:
            if caller.stream.error is not None:
                raise caller.stream.error
            if caller.stream.done:
                self.completed.append((caller.clip, caller.accepted_samples, caller.stream.labels))
            else:
                caller.go_on()
                self._live.append(caller)


def _started(recognizer: Recognizer, speech: Samples) -> Stream:
    """A stream with a whole recording, on its way to its end. Raises QueueFull and ArenaFull; nothing is left then."""
    stream = recognizer.stream()
    try:
        stream.push(speech)
        stream.end()
    except QueueFull:
        stream.cancel()
        raise
    return stream


def _within(prober: _Prober, normal_s: float) -> bool:
    try:
        served_s = prober.poll()
    except (QueueFull, ArenaFull):
        return False
    return served_s is not None and served_s <= normal_s


def _resident_mib() -> float:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if pages.exists() else 0.0


def _load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
