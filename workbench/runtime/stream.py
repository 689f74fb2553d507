"""One live utterance: audio in, events out, from a thread or from asyncio.

    with recognizer.stream() as stream:
        stream.push(piece)
        for event in stream.step(): ...
        final = stream.finish()[-1]

    events = await stream.astep();  events = await stream.afinish()

`push` only stores audio. `step` runs every chunk that is complete and returns their events; `submit` starts the same without waiting. A
stream has at most one chunk in the works, since the next needs its state. A stream is for one caller at a time; different streams may be
driven from any threads and event loops at once. With batching off `step` runs in the caller's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy.typing as npt

from workbench.clock import MonotonicClock
from workbench.errors import AudioError, QueueFull, StepTimeout, StreamClosed
from workbench.model.speech import Samples, as_speech
from workbench.runtime.encoding import StepItem, StepKey, StepResult, step_item, step_key
from workbench.runtime.frontend import AudioBuffer
from workbench.runtime.pipelines import Pipeline, Task
from workbench.runtime.text import GrowingText

if TYPE_CHECKING:
    from workbench.geometry import Chunk
    from workbench.runtime.recognizer import Recognizer

# Enough for whole recordings at once; live callers are better off with a second or two.
MOST_WAITING_S = 3600.0


@dataclass(frozen=True)
class Event:
    """What one chunk, or the end, gave.

    kind: `partial` after a chunk, `final` once at the end; text: everything so far; labels: ids new in this event; chunk: its index (the
    number of chunks for `final`); audio_s: seconds of audio received when it was made; completed_s: monotonic time of completion.
    """

    kind: Literal["partial", "final"]
    text: str
    labels: tuple[int, ...]
    chunk: int
    audio_s: float
    completed_s: float


@dataclass(frozen=True)
class StreamOptions:
    """on_event: called for every event in the thread that completed it, so it must not wait for a step; prompt: language index; bias: [V] on the device, or None;
    coordinated: whether chunks wait at the ingress barrier for their companions; most_waiting_s: seconds of audio that may wait."""

    on_event: Callable[[Event], None] | None = None
    prompt: int = 0
    bias: Any = None
    coordinated: bool = False
    most_waiting_s: float = MOST_WAITING_S


class Stream:
    """One live utterance. Not for two callers at once."""

    def __init__(self, recognizer: Recognizer, row: int, options: StreamOptions) -> None:
        self.row, self._recognizer, self._options = row, recognizer, options
        self._geometry, stage = recognizer.loaded.geometry, recognizer.stage
        self._buffer = AudioBuffer(self._geometry, stage.frontend.preemphasis, stage.frontend.n_fft)
        self._growing = GrowingText(recognizer.detokenizer)
        self._labels: list[int] = []
        self._frames: list[int] = []
        self._clock = MonotonicClock()
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        self._events: list[Event] = []
        self._in_flight: Task | None = None
        self._at_barrier = self._has_place = False
        self._batched = recognizer.pipeline is not None
        self._coordinated = options.coordinated and self._batched
        self._error: BaseException | None = None
        # As text: a kept exception keeps the frames that it passed, and with them whole batches of audio.
        self._refused: str | None = None
        self._released = False
        self._chunks = 0

    @property
    def text(self) -> str:
        """Everything recognised so far."""
        return self._growing.text

    @property
    def labels(self) -> tuple[int, ...]:
        """All label ids so far."""
        return tuple(self._labels)

    @property
    def frames(self) -> tuple[int, ...]:
        """For each label the encoder frame at which it was emitted."""
        return tuple(self._frames)

    @property
    def error(self) -> BaseException | None:
        """What broke the stream, or None."""
        return self._error

    @property
    def done(self) -> bool:
        """Whether the stream was finished or cancelled, or failed."""
        return self._released

    def push(self, samples: npt.ArrayLike, rate_hz: int | None = None) -> None:
        """Append audio: one channel [samples], float in [-1, 1] or signed integers, at the model's rate.

        Raises AudioError for a wrong shape, rate or scale or non-finite samples, StreamClosed after the end, QueueFull where a chunk is ready
        and more than `most_waiting_s` seconds of audio would wait: step, or push it again later.
        """
        with self._changed:
            self._require_open()
            data = self._checked(samples, rate_hz)
            waiting_s = (self._buffer.waiting_samples + data.size) / self._geometry.sample_rate_hz
            if waiting_s > self._options.most_waiting_s and self._buffer.next_chunk() is not None:
                raise QueueFull(
                    f"stream: {waiting_s:.2f} s of audio would wait; allowed is {self._options.most_waiting_s:g} s; step first"
                )
            self._buffer.push(data)

    def submit(self) -> None:
        """Start every chunk that is ready, without waiting. Raises what an earlier chunk raised, and QueueFull (try again later)."""
        with self._changed:
            self._require_open()
            self._advance(from_caller=True)

    def step(self, timeout_s: float = 60.0) -> list[Event]:
        """Run every complete chunk and return the new events (none if no chunk was complete). Raises StepTimeout at the bound."""
        self.submit()
        self._wait(timeout_s)
        return self._take_events()

    def finish(self, timeout_s: float = 60.0) -> list[Event]:
        """End the audio, run what is left, give the row back and return the new events; the last one is `final`.

        Finishing a finished stream returns nothing.
        """
        self.end()
        self._wait(timeout_s)
        return self._take_events()

    async def astep(self, timeout_s: float = 60.0) -> list[Event]:
        """`step` for an event loop: the loop is never blocked, not even with batching off."""
        if self._recognizer.pipeline is None:
            return await asyncio.to_thread(self.step, timeout_s)
        self.submit()
        await self._await(timeout_s)
        return self._take_events()

    async def afinish(self, timeout_s: float = 60.0) -> list[Event]:
        """`finish` for an event loop."""
        if self._recognizer.pipeline is None:
            return await asyncio.to_thread(self.finish, timeout_s)
        self.end()
        await self._await(timeout_s)
        return self._take_events()

    def end(self) -> None:
        """Start finishing without waiting: the rest runs, then the final event is made and the row is given back.

        After QueueFull the stream still holds its audio: call it, or `finish`, again.
        """
        with self._changed:
            if self._buffer.ended and self._released and self._error is None:
                return
            self._require_open(ended_allowed=True)
            self._buffer.end()
            self._leave_barrier()
            self._advance(from_caller=True)

    def cancel(self) -> None:
        """Drop the stream: queued work is withdrawn, the row is given back. Safe at any time and twice."""
        with self._changed:
            task, pipeline = self._in_flight, self._recognizer.pipeline
            self._leave_barrier()
            if task is not None and (pipeline is None or not pipeline.cancel(task)):
                # The batch in execution still writes the row; it goes back when the batch ends.
                self._error = self._error or StreamClosed("the stream was cancelled")
            else:
                self._in_flight = None
                self._release()
            self._notify()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _checked(self, samples: npt.ArrayLike, rate_hz: int | None) -> Samples:
        import numpy as np

        data, rate = np.asarray(samples), self._geometry.sample_rate_hz
        if data.size == 0 and data.ndim == 1:
            return np.zeros(0, np.float32)
        if rate_hz is not None and rate_hz != rate:
            raise AudioError(
                "stream", f"got audio at {rate_hz} Hz; this model takes {rate} Hz (resample the whole recording first)"
            )
        return as_speech(data, rate, rate)

    def _require_open(self, ended_allowed: bool = False) -> None:
        if self._error is not None:
            raise self._error
        if self._released or (self._buffer.ended and not ended_allowed):
            raise StreamClosed("the stream has ended")

    def _advance(self, cohort: int = 0, from_caller: bool = False) -> None:
        """Start the next ready chunk, or make the final event and give back what is not needed. Holds the stream's lock.

        cohort: streams that submit a chunk of the same kind together with this one, 0 where that is not known.
        """
        while self._in_flight is None and not self._released and not self._at_barrier:
            chunk = self._buffer.next_chunk()
            if chunk is None:
                self._leave_pipeline()
                if self._buffer.ended:
                    self._emit("final", ())
                    self._release()
                return
            if self._recognizer.pipeline is None:
                self._run_here(self._item(chunk))
                continue
            together = self._pass_barrier(chunk) if from_caller else cohort
            if together is None:
                return
            # A live speaker who stops leaves a chunk or two and awaits the result: that is worth more than company.
            is_end = self._buffer.ended and self._buffer.next_chunk(ahead=2) is None
            self._submit(self._recognizer.pipeline, chunk, together or int(is_end))

    def _submit(self, pipeline: Pipeline, chunk: Chunk, cohort: int) -> None:
        if not self._has_place:
            pipeline.enter()  # QueueFull leaves the audio in the buffer: submit again later
            self._has_place, self._refused = True, None
        self._in_flight = task = Task(self._item(chunk), self._on_done)
        try:
            pipeline.submit(task, cohort)
        except BaseException:
            self._in_flight = None
            raise
        self._buffer.consume(chunk)

    def _item(self, chunk: Chunk) -> StepItem:
        following = self._buffer.next_chunk(ahead=1)
        return step_item(
            self._geometry,
            self.row,
            chunk,
            self._buffer.peek(chunk),
            extend=self._batched,
            prompt=self._options.prompt,
            bias=self._options.bias,
            next_key=None if following is None else self._key(following),
        )

    def _key(self, chunk: Chunk) -> StepKey:
        return step_key(self._geometry, chunk, self._options.bias is not None, extend=self._batched)

    def _pass_barrier(self, chunk: Chunk) -> int | None:
        """How many streams go on together with this chunk (0: that is not known); None: it waits for its ingress wave."""
        pipeline = self._recognizer.pipeline
        if not self._coordinated or self._buffer.ended or pipeline is None:
            return 0
        size = pipeline.ingress.arrive(self, self._launch, self._key(chunk), self._geometry.chunk_s)
        self._at_barrier = size is None
        return size

    def _leave_pipeline(self) -> None:
        if self._has_place and self._recognizer.pipeline is not None:
            self._recognizer.pipeline.leave()
            self._has_place = False

    def _leave_barrier(self) -> None:
        pipeline = self._recognizer.pipeline
        if self._coordinated and pipeline is not None:
            pipeline.ingress.unregister(self)
            self._coordinated = self._at_barrier = False

    def _launch(self, cohort: int) -> None:
        """The wave closed (worker thread)."""
        with self._changed:
            if self._at_barrier:
                self._at_barrier = False
                self._go_on(cohort)
            self._notify()

    def _on_done(self, task: Task) -> None:
        """The batch with this stream's chunk ended (worker thread)."""
        with self._changed:
            self._in_flight = None
            if self._error is not None or task.error is not None or task.result is None:
                self._fail(self._error or task.error or StreamClosed("the stream was cancelled"))
            else:
                self._go_on(task.cohort, task.result)
            self._notify()

    def _go_on(self, cohort: int, result: StepResult | None = None) -> None:
        """Take a result and start the next chunk (worker thread). Raises nothing: a slot that died would leave every other stream waiting."""
        try:
            if result is not None:
                self._complete(result)
            self._advance(cohort)
        except QueueFull as full:  # at the end of its ingress wave; the caller learns of it and may submit again
            self._refused = str(full)
        except BaseException as error:  # also the SystemExit of a caller's on_event
            self._fail(error)

    def _run_here(self, item: StepItem) -> None:
        self._buffer.consume(item.chunk)
        try:
            result = self._recognizer.run_alone(item)
        except BaseException as error:
            self._fail(error)
            raise
        self._complete(result)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._release()

    def _complete(self, result: StepResult) -> None:
        self._labels += result.labels
        self._frames += result.frames
        self._growing.add(result.labels)
        self._chunks += 1
        self._emit("partial", result.labels)

    def _emit(self, kind: Literal["partial", "final"], labels: tuple[int, ...]) -> None:
        audio_s = self._buffer.received_samples / self._geometry.sample_rate_hz
        chunk = self._chunks - (kind == "partial")
        event = Event(kind, self._growing.text, labels, chunk, audio_s, self._clock.now())
        self._events.append(event)
        if self._options.on_event is not None:
            try:
                self._options.on_event(event)
            except (
                Exception
            ) as error:  # the caller's own function failed: its stream ends with that error, nobody else's does
                self._fail(error)

    @property
    def _busy(self) -> bool:
        return self._in_flight is not None or self._at_barrier

    def _notify(self) -> None:
        self._changed.notify_all()
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def _wait(self, timeout_s: float) -> None:
        deadline, pipeline = self._clock.now() + timeout_s, self._recognizer.pipeline
        with self._changed:
            if self._busy and pipeline is not None and pipeline.workers.runs_here():
                raise RuntimeError(
                    "step or finish was called in on_event, which runs where the work it waits for would; submit or end there"
                )
            while self._busy:
                left_s = deadline - self._clock.now()
                if left_s <= 0:
                    raise StepTimeout(f"a step did not complete within {timeout_s} s")
                self._changed.wait(min(left_s, 1.0))
            self._raise_failures()

    async def _await(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = self._clock.now() + timeout_s
        while True:
            with self._changed:
                if not self._busy:
                    self._raise_failures()
                    return
                woken = asyncio.Event()
                self._wakers.append(_waker(loop, woken))
            try:
                await asyncio.wait_for(woken.wait(), max(0.0, deadline - self._clock.now()))
            except asyncio.TimeoutError:
                raise StepTimeout(f"a step did not complete within {timeout_s} s") from None

    def _raise_failures(self) -> None:
        if self._error is not None:
            raise self._error
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise QueueFull(refused)

    def _take_events(self) -> list[Event]:
        with self._changed:
            events, self._events = self._events, []
        return events

    def _release(self) -> None:
        if not self._released:
            self._leave_barrier()
            self._leave_pipeline()
            self._released = True
            self._buffer.forget()
            self._recognizer.release(self)


def _waker(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> Callable[[], None]:
    """Set an event of a loop from any thread; a loop that was closed meanwhile has nobody to wake."""

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # it can close between a question and the call
            loop.call_soon_threadsafe(woken.set)

    return wake
