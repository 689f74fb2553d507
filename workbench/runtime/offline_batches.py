"""Whole recordings recognised in batches of equal length, with optional bucketing of the lengths.

    for row in recognizer.transcribe(items): print(row.path, row.duration_s, row.text, row.words[:1])

`offline_bucket_ms` extends recordings with zeros at the end to the next multiple, so that recordings of nearly the same length share a batch.
The true length goes along, and the model masks what lies behind it: text, duration and times are those of the recording itself. Padding
is counted. A recording is not extended past the model's position limit, and one that is itself beyond it is streamed instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workbench.batching.buckets import MOST_BATCH_S, bucketed_samples
from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.config import BatchingConfig
from workbench.errors import AudioError, QueueFull, StepTimeout
from workbench.model.speech import AudioItem, Samples, read_audio
from workbench.runtime.encoding import StepResult
from workbench.runtime.offline import offline_batch
from workbench.runtime.workers import Lane, Wake, Workers

if TYPE_CHECKING:
    from workbench.model.load import LoadedModel
    from workbench.runtime.recognizer import Recognizer
    from workbench.runtime.transcribe import Transcript

# Recordings decoded ahead of the results, whatever the batch cap: they wait in host memory.
MOST_READ_AHEAD = 64
_PIECE_S = 30.0
_TIMEOUT_S = 600.0


@dataclass(eq=False)
class OfflineTask:
    """One recording in the works: its samples [S] and the length that it is extended to."""

    samples: Samples = field(repr=False)
    padded_samples: int
    done: threading.Event = field(default_factory=threading.Event, repr=False)
    result: StepResult | None = None
    error: BaseException | None = None


class OfflineBatches:
    """The offline stage with its own queue, as a lane of the recogniser's workers; without workers it runs in the caller's thread."""

    def __init__(self, loaded: LoadedModel, device_lock: threading.Lock, batching: BatchingConfig, cap: int) -> None:
        self.loaded, self._device_lock, self._bucket_ms = loaded, device_lock, batching.offline_bucket_ms
        self.most_frames = int(getattr(loaded.model.encoder, "pos_emb_max_len", 5000))
        self.metrics = StageMetrics("offline")
        self._workers: Workers | None = None
        most_samples = int(MOST_BATCH_S * loaded.geometry.sample_rate_hz)
        self._batcher: MicroBatcher[OfflineTask] = MicroBatcher(
            max_batch_size=cap,
            max_queue_delay_s=batching.max_queue_delay_us * 1e-6,
            max_queue_depth=batching.max_queue_depth,
            metrics=self.metrics,
            cap_for=lambda key: max(1, most_samples // max(1, int(str(key)))),
        )
        self.lane = Lane("offline", self, self._run, self._settle)
        self.next_batch, self.next_deadline = self._batcher.next_batch, self._batcher.next_deadline
        self.finish, self.close = self._batcher.finish, self._batcher.close

    def attach(self, workers: Workers) -> None:
        """The workers that run its batches."""
        self._workers = workers

    @property
    def open(self) -> int:
        """Recordings queued or in execution."""
        return self._batcher.queued + self._batcher.in_flight

    def stages(self) -> list[StageMetrics]:
        """Its metrics, once it was used."""
        return [self.metrics] if self.metrics.batches else []

    def too_long(self, samples: int) -> bool:
        """Whether a recording passes the model's position limit."""
        geometry = self.loaded.geometry
        return geometry.encoded_frames(geometry.mel_frames(samples)) > self.most_frames

    def submit(self, samples: Samples) -> OfflineTask:
        """Start one recording [S]. Raises QueueFull and StreamClosed."""
        task = OfflineTask(
            samples, bucketed_samples(samples.size, self._bucket_ms, self.loaded.geometry, self.most_frames)
        )
        if self._workers is None:
            self._run_here(task)
        else:
            with self._workers.changed:
                self._batcher.submit(task, task.padded_samples, self._workers.now())
                self._workers.poke()
        return task

    def _run_here(self, task: OfflineTask) -> None:
        task.result = self._recognise([task])[0]
        self.metrics.dispatched("capacity", (0.0,), 1, 1)
        self.metrics.padded(samples=task.padded_samples - task.samples.size)
        task.done.set()

    def _run(self, batch: Batch[OfflineTask]) -> Sequence[StepResult]:
        return self._recognise(batch.items)

    def _settle(self, batch: Batch[OfflineTask], outcomes: Any, now: float) -> tuple[list[Wake], list[Wake]]:
        self.metrics.padded(samples=sum(task.padded_samples - task.samples.size for task in batch.items))
        for position, task in enumerate(batch.items):
            if isinstance(outcomes, BaseException):
                task.error = outcomes
            else:
                task.result = outcomes[position]
        return [], [task.done.set for task in batch.items]

    def _recognise(self, tasks: Sequence[OfflineTask]) -> list[StepResult]:
        blocks = np.zeros((len(tasks), tasks[0].padded_samples), np.float32)
        for row, task in zip(blocks, tasks, strict=True):
            row[: task.samples.size] = task.samples
        with self._device_lock:
            found = offline_batch(self.loaded, torch.from_numpy(blocks), [task.samples.size for task in tasks])
        return [StepResult(labels, frames) for labels, frames in found]


def transcribe_offline(
    recognizer: Recognizer, items: Iterable[AudioItem], concurrency: int | None = None
) -> Iterator[Transcript]:
    """Yield a `Transcript` per item in order; see `Recognizer.transcribe`."""
    window = max(1, min(concurrency or recognizer.batch_cap, MOST_READ_AHEAD))
    pending: deque[tuple[AudioItem, Samples, OfflineTask | None, AudioError | None]] = deque()
    rate_hz, offline = recognizer.loaded.geometry.sample_rate_hz, recognizer.offline
    for item in items:
        while len(pending) >= window:
            yield _collected(recognizer, *pending.popleft())
        try:
            samples = read_audio(item, rate_hz, recognizer.config.asr.channel)
        except AudioError as error:
            pending.append((item, np.zeros(0, np.float32), None, error))
            continue
        task = None
        while task is None and not offline.too_long(samples.size):
            try:
                task = offline.submit(samples)
            except QueueFull:  # others fill the queue: what this call has in it must complete first
                if not pending:
                    raise
                yield _collected(recognizer, *pending.popleft())
        pending.append((item, samples, task, None))
    while pending:
        yield _collected(recognizer, *pending.popleft())


def _collected(
    recognizer: Recognizer, item: AudioItem, samples: Samples, task: OfflineTask | None, error: AudioError | None
) -> Transcript:
    from workbench.runtime.transcribe import Transcript

    if error is not None:
        return Transcript(str(item.path), 0.0, None, item.text, str(error))
    if task is None:
        labels, frames = _streamed(recognizer, samples)
    else:
        if not task.done.wait(_TIMEOUT_S):
            raise StepTimeout(f"{item.path}: not recognised within {_TIMEOUT_S:.0f} s")
        if task.error is not None:
            raise task.error
        labels, frames = (task.result.labels, task.result.frames) if task.result is not None else ((), ())
    duration_s = samples.size / recognizer.loaded.geometry.sample_rate_hz
    words = recognizer.detokenizer.words(labels, frames, recognizer.loaded.geometry.frame_ms / 1000, duration_s)
    text = recognizer.detokenizer.text(labels)
    return Transcript(str(item.path), round(duration_s, 3), text, item.text, words=words)


def _streamed(recognizer: Recognizer, samples: Samples) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A recording beyond the position limit, as a stream in pieces: memory and step time do not grow with its length."""
    piece = int(_PIECE_S * recognizer.loaded.geometry.sample_rate_hz)
    with recognizer.stream() as stream:
        for start in range(0, samples.size, piece):
            stream.push(samples[start : start + piece])
            stream.step(_TIMEOUT_S)
        stream.finish(_TIMEOUT_S)
        return stream.labels, stream.frames
