"""How a chunk gets from a stream to its result: in place, or through the batching of the fused or the staged pipeline.

    pipeline = FusedPipeline(stage, batching, cap, offline, slots=3)
    pipeline.enter()                      # QueueFull is raised here; what is in is not refused until it leaves
    task = Task(item, on_done=stream_callback)
    pipeline.submit(task, cohort=0)       # StreamClosed is raised here; on_done(task) is called exactly once otherwise
    pipeline.cancel(task)                 # True: it was withdrawn and on_done will not be called
    pipeline.leave()                      # the stream has no further chunk that is ready

Fused: one micro-batcher over whole steps. Staged: a micro-batcher for the front end and one for the encoder, then decoder waves. Work that
was together in one stage is announced to the next as a cohort, so the queue delay is paid once per step and not once per stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch

from workbench.batching.decoder_waves import DecoderWaves
from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import Batch, MicroBatcher, Ticket
from workbench.batching.places import Places
from workbench.config import BatchingConfig
from workbench.errors import StreamClosed
from workbench.runtime.encoding import StepItem, StepResult
from workbench.runtime.ingress import IngressGate
from workbench.runtime.offline_batches import OfflineBatches
from workbench.runtime.resident_stage import ResidentStage
from workbench.runtime.staged import RowWalk, StagedStage
from workbench.runtime.stages import FusedStage
from workbench.runtime.workers import EXECUTION_SLOTS, Lane, Wake, Workers

Outcomes = Sequence[Any] | BaseException


class Task:
    """One item on its way. When `on_done` is called, `result` or `error` is set, and `cohort` says how many streams of the same batch
    will probably submit their next chunk, of the same kind, right now."""

    __slots__ = (
        "batcher",
        "cancelled",
        "cohort",
        "error",
        "flying",
        "item",
        "mel",
        "on_done",
        "result",
        "row_walk",
        "ticket",
    )

    def __init__(self, item: StepItem, on_done: Callable[[Task], None]) -> None:
        self.item, self.on_done = item, on_done
        self.result: StepResult | None = None
        self.error: BaseException | None = None
        self.cohort = 0
        self.cancelled = False
        self.flying = False
        self.batcher: MicroBatcher[Task] | None = None
        self.ticket: Ticket[Task] | None = None
        self.mel: tuple[torch.Tensor, int] | None = None
        self.row_walk: RowWalk | None = None

    def wake(self) -> None:
        """Tell the owner."""
        self.on_done(self)

    def off_queue(self) -> None:
        """It is in no queue any more. A ticket and its task refer to each other: left so, every chunk's audio would wait for the cycle collector."""
        self.batcher = self.ticket = None


class Pipeline(Protocol):
    """What a recogniser needs of a batched pipeline."""

    workers: Workers
    ingress: IngressGate

    @property
    def main_metrics(self) -> StageMetrics: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def submit(self, task: Task, cohort: int = 0) -> None: ...

    def cancel(self, task: Task) -> bool: ...

    def stages(self) -> list[StageMetrics]: ...


class FusedPipeline:
    """One lane: whole steps."""

    def __init__(
        self,
        stage: FusedStage | ResidentStage,
        batching: BatchingConfig,
        cap: int,
        offline: OfflineBatches,
        slots: int,
    ) -> None:
        self._stage = stage
        self._batcher: MicroBatcher[Task] = MicroBatcher.from_config(batching, cap, StageMetrics("step"))
        self._places = Places(batching.max_queue_depth, self._batcher.metrics)
        self.ingress = IngressGate(batching)
        lane = Lane("step", OpenBatcher(self._batcher), self._run, self._settle)
        self.workers = Workers([self.ingress.lane, offline.lane, lane], slots)
        self.ingress.attach(self.workers)
        offline.attach(self.workers)

    @property
    def main_metrics(self) -> StageMetrics:
        """Metrics of the step."""
        return self._batcher.metrics

    def enter(self) -> None:
        """A stream brings its first ready chunk. Raises QueueFull at once."""
        with self.workers.changed:
            self._places.take()

    def leave(self) -> None:
        """A stream that entered has nothing more to run."""
        with self.workers.changed:
            self._places.give_back()

    def submit(self, task: Task, cohort: int = 0) -> None:
        """Queue a chunk of a stream that entered. Raises StreamClosed at once."""
        with self.workers.changed:
            _queue(self._batcher, task, task.item.key, self.workers.now(), cohort)
            self.workers.poke()

    def cancel(self, task: Task) -> bool:
        """Withdraw a chunk that is still queued."""
        with self.workers.changed:
            return _withdraw(task)

    def stages(self) -> list[StageMetrics]:
        """Metrics per stage; read them under `workers.changed`."""
        return [*self.ingress.stages(), self._batcher.metrics]

    def _run(self, batch: Batch[Task]) -> Sequence[StepResult]:
        padded_before = self._stage.encoder.padded_rows
        results = self._stage.run([task.item for task in batch.items])
        self._batcher.metrics.padded(rows=self._stage.encoder.padded_rows - padded_before)
        return results

    def _settle(self, batch: Batch[Task], outcomes: Outcomes, now: float) -> tuple[list[Wake], list[Wake]]:
        for position, task in enumerate(batch.items):
            if isinstance(outcomes, BaseException):
                task.error = outcomes
            else:
                task.result = outcomes[position]
        return _wakes(batch.items)


class StagedPipeline:
    """Three lanes: front end, encoder, decoder operations."""

    def __init__(
        self, stage: StagedStage, batching: BatchingConfig, cap: int, offline: OfflineBatches, slots: int
    ) -> None:
        self._stage = stage
        self._frontend: MicroBatcher[Task] = MicroBatcher.from_config(batching, cap, StageMetrics("frontend"))
        self._places = Places(batching.max_queue_depth, self._frontend.metrics)
        self._encoder: MicroBatcher[Task] = MicroBatcher.from_config(batching, cap, StageMetrics("encoder"))
        self._waves: DecoderWaves[Task] = DecoderWaves(batching, cap)
        self._decoder = _WaveMachine(self._waves)
        self.ingress = IngressGate(batching)
        lanes = [
            self.ingress.lane,
            offline.lane,
            Lane("frontend", OpenBatcher(self._frontend), self._run_frontend, self._settle_frontend),
            Lane("encoder", OpenBatcher(self._encoder), self._run_encoder, self._settle_encoder),
            Lane("decoder", self._decoder, self._run_decoder, self._settle_decoder, limit=EXECUTION_SLOTS),
        ]
        self.workers = Workers(lanes, slots)
        self.ingress.attach(self.workers)
        offline.attach(self.workers)

    @property
    def main_metrics(self) -> StageMetrics:
        """Metrics of the encoder, the stage that every chunk passes once and that costs most."""
        return self._encoder.metrics

    def enter(self) -> None:
        """A stream brings its first ready chunk. Raises QueueFull at once."""
        with self.workers.changed:
            self._places.take()

    def leave(self) -> None:
        """A stream that entered has nothing more to run."""
        with self.workers.changed:
            self._places.give_back()

    def submit(self, task: Task, cohort: int = 0) -> None:
        """Queue a chunk of a stream that entered. Raises StreamClosed at once; no later stage refuses it."""
        with self.workers.changed:
            _queue(self._frontend, task, task.item.block.size, self.workers.now(), cohort)
            self.workers.poke()

    def cancel(self, task: Task) -> bool:
        """Withdraw a chunk that no batch in execution holds."""
        with self.workers.changed:
            withdrawn = _withdraw(task)
            if task.row_walk is not None and not task.flying:
                self._waves.leave(task)
                withdrawn = True
            task.cancelled = not withdrawn
            return withdrawn

    def stages(self) -> list[StageMetrics]:
        """Metrics per stage; read them under `workers.changed`."""
        return [*self.ingress.stages(), self._frontend.metrics, self._encoder.metrics, *self._waves.metrics.values()]

    def _run_frontend(self, batch: Batch[Task]) -> Sequence[tuple[torch.Tensor, int]]:
        with self._stage.device_lock, torch.inference_mode():
            mel_BFT = self._stage.mel([task.item for task in batch.items])
        return [(mel_BFT, position) for position in range(len(batch.items))]

    def _settle_frontend(self, batch: Batch[Task], outcomes: Outcomes, now: float) -> tuple[list[Wake], list[Wake]]:
        going, ended = _sort(batch.items, outcomes)
        together = Counter(task.item.key for task, _ in going)
        for task, mel in going:
            task.mel = mel
            _queue(self._encoder, task, task.item.key, now, together[task.item.key])
        return self._leave(ended)

    def _run_encoder(self, batch: Batch[Task]) -> Sequence[RowWalk]:
        items = [task.item for task in batch.items]
        padded_before = self._stage.encoder.padded_rows
        with self._stage.device_lock, torch.inference_mode():
            walks = self._stage.encode(items, _gathered([task.mel for task in batch.items if task.mel is not None]))
        self._encoder.metrics.padded(rows=self._stage.encoder.padded_rows - padded_before)
        return walks

    def _settle_encoder(self, batch: Batch[Task], outcomes: Outcomes, now: float) -> tuple[list[Wake], list[Wake]]:
        going, ended = _sort(batch.items, outcomes)
        walking = []
        for task, row_walk in going:
            task.mel, task.row_walk = None, row_walk
            (ended if row_walk.walk.finished else walking).append(task)
        for task in walking:
            self._waves.enter(task, now, cohort=len(walking))
        self._decoder.admit(now)
        return self._leave(ended)

    def _run_decoder(self, batch: Batch[Task]) -> Sequence[None]:
        walks = [task.row_walk for task in batch.items if task.row_walk is not None]
        with self._stage.device_lock, torch.inference_mode():
            self._stage.decode((batch.key[0], batch.key[1]), walks)  # type: ignore[index]
        return [None] * len(walks)

    def _settle_decoder(self, batch: Batch[Task], outcomes: Outcomes, now: float) -> tuple[list[Wake], list[Wake]]:
        for task in batch.items:
            task.flying = False
        going, ended = _sort(batch.items, outcomes)
        for task, _ in going:
            key = _op_key(task)
            if key is None:
                ended.append(task)
            else:
                self._waves.enqueue(task, task, key, now)
        for task in ended:
            self._waves.leave(task)
        return self._leave(ended)

    def _leave(self, ended: Sequence[Task]) -> tuple[list[Wake], list[Wake]]:
        for task in ended:
            if task.error is None and task.row_walk is not None:
                task.result = task.row_walk.result
        return _wakes(ended)


class OpenBatcher:
    """A micro-batcher as the machine of a lane."""

    def __init__(self, batcher: MicroBatcher[Task]) -> None:
        self._batcher = batcher
        self.next_batch, self.next_deadline = batcher.next_batch, batcher.next_deadline
        self.finish, self.close = batcher.finish, batcher.close

    @property
    def open(self) -> int:
        """Queued items and items in execution."""
        return self._batcher.queued + self._batcher.in_flight


class _WaveMachine:
    """Decoder waves as the machine of a lane: an admitted step queues its first operation at once."""

    def __init__(self, waves: DecoderWaves[Task]) -> None:
        self._waves = waves
        self.next_deadline, self.finish = waves.next_deadline, waves.finish

    @property
    def open(self) -> int:
        """Steps at the barrier and steps admitted."""
        return self._waves.waiting + self._waves.admitted

    def admit(self, now: float) -> None:
        """Queue the first operation of every step that passed the barrier."""
        for step in self._waves.admit(now):
            if isinstance(step, Task) and (key := _op_key(step)) is not None:
                self._waves.enqueue(step, step, key, now)

    def next_batch(self, now: float) -> Batch[Task] | None:
        self.admit(now)
        batch = self._waves.next_batch(now)
        for task in batch.items if batch is not None else ():
            task.flying = True
        return batch

    def close(self, now: float) -> None:
        self._waves.close(now)


def _op_key(task: Task) -> tuple[Hashable, ...] | None:
    """("predictor", bank) or ("joint", remaining frames, has bias); None when the walk is finished."""
    if task.row_walk is None or (op := task.row_walk.walk.op()) is None:
        return None
    return op if op[0] == "predictor" else (*op, task.item.key.has_bias)


def _queue(batcher: MicroBatcher[Task], task: Task, key: Hashable, now: float, cohort: int) -> None:
    task.ticket = batcher.submit(task, key, now, cohort)
    task.batcher = batcher


def _withdraw(task: Task) -> bool:
    withdrawn = task.batcher is not None and task.ticket is not None and task.batcher.cancel(task.ticket)
    if withdrawn:
        task.off_queue()
    return withdrawn


def _sort(tasks: Sequence[Task], outcomes: Outcomes) -> tuple[list[tuple[Task, Any]], list[Task]]:
    """Tasks that go on, with their outcomes, and tasks that end here by an error or a cancellation."""
    going, ended = [], []
    for position, task in enumerate(tasks):
        if isinstance(outcomes, BaseException):
            task.error = outcomes
            ended.append(task)
        elif task.cancelled:
            task.error = StreamClosed("the stream was cancelled")
            ended.append(task)
        else:
            going.append((task, outcomes[position]))
    return going, ended


def _wakes(tasks: Sequence[Task]) -> tuple[list[Wake], list[Wake]]:
    """Streams whose next chunk is there come first, and are told how many of them go on with the same kind of chunk."""
    together = Counter(task.item.next_key for task in tasks)
    first, rest = [], []
    for task in tasks:
        task.off_queue()
        goes_on = task.item.next_key is not None and task.error is None
        task.cohort = together[task.item.next_key] if goes_on else 0
        (first if goes_on else rest).append(task.wake)
    return first, rest


def _gathered(mels: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Mel rows of one shape as one batch; a whole front-end batch in its own order is passed on as it is."""
    source = mels[0][0]
    if source.size(0) == len(mels) and all(mel is source and at == i for i, (mel, at) in enumerate(mels)):
        return source
    return torch.stack([mel[at] for mel, at in mels])
