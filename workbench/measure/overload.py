"""Overload on purpose: callers arrive several times faster than they can be served, for a while; then it must be as if nothing had been.

    record = overload_configured(config, None, seconds=30.0, factor=4.0)
    record.numbers["refused_queue_full"], record.numbers["mismatches"], record.numbers["recovery_s"]

First a closed loop measures how many recordings a second the recogniser sustains. Then recordings are offered at `factor` times that rate,
whole and at once, by callers that go away when they are refused. What was accepted must complete with the labels that it has without the crush.
`recovery_s` is how long after the last offer everything accepted was done; memory is sampled every half second.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.config import Config, replace, to_dict
from workbench.errors import ArenaFull, QueueFull, StepTimeout
from workbench.measure.steps import speech_clips
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer, Stream
from workbench.runtime.transcribe import StreamWindow

_SAMPLE_S = 0.5
_DRAIN_S = 120.0


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
        rate_hz, expected = _sustained(recognizer, clips)
        run = _Overload(recognizer, clips)
        run.offer(rate_hz * factor, seconds, progress)
        recovery_s = run.drain()
        wrong = sum(labels != expected[clip] for labels, clip in run.completed)
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
                "refused_queue_full": run.refused[QueueFull],
                "refused_arena_full": run.refused[ArenaFull],
                "mismatches": wrong,
                "recovery_s": recovery_s,
                "memory_growth_mib": (run.memory_bytes[-1] - run.memory_bytes[len(run.memory_bytes) // 4]) / 2**20,
            },
            counters={stage.name: stage.snapshot() for stage in recognizer.stage_metrics()},
            notes=list(recognizer.loaded.notes),
        )


def _sustained(recognizer: Recognizer, clips: Sequence[Samples]) -> tuple[float, list[tuple[int, ...]]]:
    """Recordings per second of a closed loop, and the labels of each recording."""
    window = StreamWindow(recognizer, recognizer.arena.rows)
    start_s = time.perf_counter()
    streams = [window.start(clip) for clip in clips]
    for stream in streams:
        window.finish(stream)
    return len(clips) / (time.perf_counter() - start_s), [stream.labels for stream in streams]


class _Overload:
    """Open-loop callers."""

    def __init__(self, recognizer: Recognizer, clips: Sequence[Samples]) -> None:
        self._recognizer, self._clips = recognizer, clips
        self._live: list[tuple[Stream, int]] = []
        self.accepted = 0
        self.completed: list[tuple[tuple[int, ...], int]] = []
        self.refused: dict[type[RuntimeError], int] = {QueueFull: 0, ArenaFull: 0}
        self.memory_bytes = [_resident_bytes()]
        self.offered = 0

    def offer(self, rate_hz: float, seconds: float, progress: Callable[[float], None]) -> None:
        """Offer recordings at a fixed rate whatever happens to them."""
        start_s = time.perf_counter()
        while (now_s := time.perf_counter() - start_s) < seconds:
            while self.offered < now_s * rate_hz:
                self._offer_one()
            self._go_on()
            if now_s > _SAMPLE_S * len(self.memory_bytes):
                self.memory_bytes.append(_resident_bytes())
                progress(now_s)
            time.sleep(0.002)

    def drain(self) -> float:
        """Seconds until everything accepted is done."""
        start_s = time.perf_counter()
        while self._live:
            self._go_on()
            if time.perf_counter() - start_s > _DRAIN_S:
                raise StepTimeout(
                    f"{len(self._live)} accepted recordings had not completed {_DRAIN_S:.0f} s after the last offer"
                )
            time.sleep(0.002)
        self.memory_bytes.append(_resident_bytes())
        return time.perf_counter() - start_s

    def _offer_one(self) -> None:
        clip = self.offered % len(self._clips)
        self.offered += 1
        try:
            stream = self._recognizer.stream()
            try:
                stream.push(self._clips[clip])
                stream.end()
            except QueueFull:
                stream.cancel()
                raise
        except (QueueFull, ArenaFull) as full:
            self.refused[type(full)] += 1
        else:
            self.accepted += 1
            self._live.append((stream, clip))

    def _go_on(self) -> None:
        """A recording in the middle whose next chunk met a full queue asks again; a failure is raised."""
        self.completed += [(stream.labels, clip) for stream, clip in self._live if stream.done]
        self._live = [(stream, clip) for stream, clip in self._live if not stream.done]
        for stream, _ in self._live:
            with contextlib.suppress(QueueFull):
                stream.end()


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
