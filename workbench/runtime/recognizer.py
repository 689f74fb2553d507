"""`Recognizer` and `Stream`: many live streams on one model, batched or not, with the same results.

    with Recognizer.open(config) as recognizer, recognizer.stream() as stream:
        for piece in pieces:
            stream.push(piece)
            for event in stream.step():
                print(event.text)
        print(stream.finish()[-1].text)

`push` only stores audio. `step` runs every chunk that is complete and returns their events; `submit` starts the same without waiting. A
stream has at most one chunk in the works, since the next needs its state; with batching on, chunks of different streams meet in one
`MicroBatcher`. A stream is for one caller at a time; different streams may be driven from any threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy.typing as npt

from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import MicroBatcher
from workbench.clock import MonotonicClock
from workbench.config import Config, effective_batch_cap
from workbench.errors import AudioError, QueueFull, StepTimeout, StreamClosed
from workbench.model.load import LoadedModel, load_configured
from workbench.model.speech import Samples, as_speech
from workbench.runtime.arena import StateArena
from workbench.runtime.frontend import AudioBuffer
from workbench.runtime.stages import FusedStage, StepItem, StepResult
from workbench.runtime.text import Detokenizer, GrowingText
from workbench.runtime.workers import BatchWorker


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


class Recognizer:
    """One model, one arena and, with batching on, one worker."""

    def __init__(self, loaded: LoadedModel, config: Config) -> None:
        import torch

        self.loaded, self.config = loaded, config
        if config.asr.cuda_graphs and loaded.device != "cpu":
            from workbench.encoder.graphed import set_streaming_cuda_graphs

            set_streaming_cuda_graphs(loaded.model, True)
        self.arena = StateArena(
            loaded.model, config.asr.batching.state_arena_slots, loaded.device, getattr(torch, loaded.dtype)
        )
        self.stage = FusedStage(loaded, self.arena)
        self.detokenizer = Detokenizer(loaded.model)
        self.metrics = StageMetrics("step")
        self.closed = False
        self._open_streams: set[Stream] = set()
        self._lock = threading.Lock()
        self.worker: BatchWorker[StepItem] | None = None
        batching = config.asr.batching
        if batching.enabled:
            batcher: MicroBatcher[tuple[StepItem, Future[Any]]] = MicroBatcher(
                max_batch_size=effective_batch_cap(batching)[0],
                max_queue_delay_s=batching.max_queue_delay_us / 1e6,
                max_queue_depth=batching.max_queue_depth,
                metrics=self.metrics,
            )
            self.worker = BatchWorker(batcher, self.stage.run, "step")

    @classmethod
    def open(cls, config: Config) -> Recognizer:
        """Load the configured model and make it ready. Raises ModelError or ConfigError."""
        return cls(load_configured(config.asr), config)

    def stream(self, on_event: Callable[[Event], None] | None = None) -> Stream:
        """Open a stream; `on_event` is called for every event in the thread that completed it. Raises ArenaFull, StreamClosed."""
        with self._lock:
            if self.closed:
                raise StreamClosed("the recogniser is closed")
            stream = Stream(self, self.arena.acquire(), on_event)
            self._open_streams.add(stream)
        return stream

    def release(self, stream: Stream) -> None:
        """Give a stream's row back; called by the stream once."""
        with self._lock:
            self._open_streams.discard(stream)
            self.arena.release(stream.row)

    def graph_counters(self) -> dict[str, Any]:
        """Captured, replayed and eager steps of the graphed encoder; empty where it is off."""
        from workbench.encoder.graphed import attached_step

        step = attached_step(self.loaded.model.encoder)
        return {} if step is None else step.counters.as_dict()

    @property
    def open_streams(self) -> int:
        """Streams that hold a row."""
        return len(self._open_streams)

    def warm_up(self, steps: int = 3) -> None:
        """Run a few steps of silence of every kind, past the queue, so that first-call costs are paid before traffic."""
        import numpy as np

        geometry, row = self.loaded.geometry, self.arena.acquire()
        buffer = AudioBuffer(geometry, self.stage.frontend.preemphasis, self.stage.frontend.n_fft)
        buffer.push(np.zeros(geometry.chunk_ready_samples(steps + 1) + geometry.hop_samples, np.float32))
        buffer.end()
        try:
            while (chunk := buffer.next_chunk()) is not None:
                self.stage.run([self.stage.item(row, chunk, buffer.peek(chunk))])
                buffer.consume(chunk)
        finally:
            self.arena.release(row)

    def close(self, timeout_s: float = 30.0) -> None:
        """Reject new work, complete what is queued, cancel what is open. Safe to call twice."""
        with self._lock:
            self.closed = True
            left = list(self._open_streams)
        if self.worker is not None:
            self.worker.close(timeout_s)
        for stream in left:
            stream.cancel()

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """One live utterance. Not for two callers at once."""

    def __init__(self, recognizer: Recognizer, row: int, on_event: Callable[[Event], None] | None) -> None:
        self.row, self._recognizer, self._on_event = row, recognizer, on_event
        stage = recognizer.stage
        self._buffer = AudioBuffer(recognizer.loaded.geometry, stage.frontend.preemphasis, stage.frontend.n_fft)
        self._growing = GrowingText(recognizer.detokenizer)
        self._labels: list[int] = []
        self._clock = MonotonicClock()
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._in_flight: Future[Any] | None = None
        self._error: BaseException | None = None
        self._refused: QueueFull | None = None
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

    def push(self, samples: npt.ArrayLike, rate_hz: int | None = None) -> None:
        """Append audio: one channel [samples], float in [-1, 1] or signed integers, at the model's rate.

        Raises AudioError for a wrong shape, rate or non-finite samples, StreamClosed after the end.
        """
        with self._changed:
            self._require_open()
            self._buffer.push(self._checked(samples, rate_hz))

    def submit(self) -> None:
        """Start every chunk that is ready, without waiting. Raises what an earlier chunk raised, and QueueFull (try again later)."""
        with self._changed:
            self._require_open()
            self._advance()

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

    def end(self) -> None:
        """Start finishing without waiting: the rest runs, then the final event is made and the row is given back.

        After QueueFull the stream still holds its audio: call it, or `finish`, again.
        """
        with self._changed:
            if self._buffer.ended and self._released and self._error is None:
                return
            self._require_open(ended_allowed=True)
            self._buffer.end()
            self._advance()

    def cancel(self) -> None:
        """Drop the stream: queued work is withdrawn, the row is given back. Safe at any time and twice."""
        with self._changed:
            flying, worker = self._in_flight, self._recognizer.worker
            if flying is not None and (worker is None or not worker.cancel(flying)):
                self._error = self._error or StreamClosed(
                    "the stream was cancelled"
                )  # the row goes back when the batch ends
            else:
                self._in_flight = None
                self._release()
            self._changed.notify_all()

    @property
    def error(self) -> BaseException | None:
        """What broke the stream, or None."""
        return self._error

    @property
    def done(self) -> bool:
        """Whether the stream was finished or cancelled, or failed."""
        return self._released

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _checked(self, samples: npt.ArrayLike, rate_hz: int | None) -> Samples:
        import numpy as np

        data, rate = np.asarray(samples), self._recognizer.loaded.geometry.sample_rate_hz
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

    def _advance(self) -> None:
        """Start the next ready chunk, or make the final event. Holds the stream's lock."""
        while self._in_flight is None and not self._released:
            chunk = self._buffer.next_chunk()
            if chunk is None:
                if self._buffer.ended:
                    self._emit("final", ())
                    self._release()
                return
            worker = self._recognizer.worker
            item = self._recognizer.stage.item(self.row, chunk, self._buffer.peek(chunk))
            if worker is None:
                self._buffer.consume(chunk)
                self._complete(self._run_here(item))
            else:
                future = worker.submit(item, item.key)  # QueueFull leaves the audio in the buffer: submit again later
                self._buffer.consume(chunk)
                self._in_flight = future
                future.add_done_callback(self._on_done)

    def _on_done(self, future: Future[Any]) -> None:
        """A batch with this stream's chunk ended (worker thread)."""
        if future.cancelled():
            return
        with self._changed:
            self._in_flight = None
            failure = future.exception()
            if failure is not None or self._error is not None:
                self._fail(self._error or failure or StreamClosed("the stream was cancelled"))
            else:
                self._complete(future.result())
                try:
                    self._advance()
                except QueueFull as full:  # the audio waits in the buffer; the caller learns of it and may submit again
                    self._refused = full
                except StreamClosed as closed:
                    self._fail(closed)
            self._changed.notify_all()

    def _run_here(self, item: StepItem) -> StepResult:
        try:
            return self._recognizer.stage.run([item])[0]
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._release()

    def _complete(self, result: StepResult) -> None:
        self._labels += result.labels
        self._growing.add(result.labels)
        self._chunks += 1
        self._emit("partial", result.labels)

    def _emit(self, kind: Literal["partial", "final"], labels: tuple[int, ...]) -> None:
        audio_s = self._buffer.received_samples / self._recognizer.loaded.geometry.sample_rate_hz
        chunk = self._chunks - (kind == "partial")
        event = Event(kind, self._growing.text, labels, chunk, audio_s, self._clock.now())
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def _wait(self, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        with self._changed:
            while self._in_flight is not None:
                if not self._changed.wait(min(deadline - self._clock.now(), 1.0)) and self._clock.now() >= deadline:
                    raise StepTimeout(f"a step did not complete within {timeout_s} s")
            if self._error is not None:
                raise self._error
            if self._refused is not None:
                refused, self._refused = self._refused, None
                raise refused

    def _take_events(self) -> list[Event]:
        with self._changed:
            events, self._events = self._events, []
        return events

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._recognizer.release(self)
