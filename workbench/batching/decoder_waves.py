"""Scheduling of decoder operations: one admission per step, then dispatch of whatever the admitted decoders have ready.

    waves: DecoderWaves[str] = DecoderWaves(BatchingConfig(max_batch_size=8))
    waves.enter("stream 1", now=0.0, cohort=2);  waves.enter("stream 2", now=0.001, cohort=2)
    waves.admit(now=0.001)                                   # ("stream 1", "stream 2"): the wave is complete
    waves.enqueue("stream 1", "op", key=("joint", 2, False), now=0.002)
    waves.next_batch(now=0.002)                              # None: the other admitted decoder is not queued yet

Greedy transducer decoding is conditional: some decoders need the predictor while others need the joint, so a batch of all of them may never
come. Therefore a step waits once, at its start, in a wave with one shared deadline; after that the next group leaves as soon as every
admitted decoder is queued or in flight, and no later round of the same step waits for a timer. Each admitted step has at most one
operation queued. The number of open steps is bounded by `max_queue_depth`, so an accepted step can always queue its operations.
A key is a tuple whose first element names the stage, for its metrics: ("predictor", bank), ("joint", remaining frames, has bias).
Time is an argument in seconds; there is no thread and no clock. Groups are few, so they are scanned.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from workbench.batching.metrics import Reason, StageMetrics
from workbench.batching.microbatcher import Batch
from workbench.config import BatchingConfig
from workbench.errors import QueueFull, StreamClosed

T = TypeVar("T")
OpKey = tuple[Hashable, ...]

# Rules 1 and 2 may pass over an overdue head of a smaller group; after this many batches in a row its group leaves first.
MOST_OVERTAKES = 8


@dataclass(frozen=True)
class _Op(Generic[T]):
    item: T
    number: int
    arrived_at: float


class DecoderWaves(Generic[T]):
    """Admission of decoder steps and release of their operations. `cap` lowers `max_batch_size` for fewer rows than that."""

    def __init__(self, batching: BatchingConfig, cap: int | None = None) -> None:
        self.cap = batching.max_batch_size if cap is None else min(cap, batching.max_batch_size)
        self.delay_s = batching.max_queue_delay_us * 1e-6
        self.max_queue_depth = batching.max_queue_depth
        self.metrics: dict[str, StageMetrics] = {"admission": StageMetrics("admission")}
        self.closed = False
        self.in_flight = 0
        self._wave: dict[Hashable, float] = {}
        self._wave_deadline = math.inf
        self._wave_target = 0
        self._admitted: dict[Hashable, OpKey | None] = {}
        self._news: list[Hashable] = []
        self._groups: dict[OpKey, dict[Hashable, _Op[T]]] = {}
        self._queued = 0
        self._enqueued = 0
        self._overtakes = 0

    @property
    def queued(self) -> int:
        """Operations that wait for dispatch."""
        return self._queued

    @property
    def admitted(self) -> int:
        """Steps past the barrier that have not left, over all waves."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """Steps at the barrier."""
        return len(self._wave)

    def enter(self, step: Hashable, now: float, cohort: int = 0) -> None:
        """A decoder begins a step and waits at the barrier until `admit` names it.

        cohort: steps expected together; 1 passes at once, 0 is unknown. The first step of a wave sets its deadline, `now` + delay; a later
        cohort can only lower the wave's target. Raises StreamClosed after `close`, QueueFull when `max_queue_depth` steps are open,
        ValueError for a step that is already open.
        """
        if self.closed:
            raise StreamClosed("decoder: closed; steps are accepted only before close")
        if step in self._admitted or step in self._wave:
            raise ValueError(f"step {step!r} is already open; it must leave first")
        if self.admitted + self.waiting >= self.max_queue_depth:
            self.metrics["admission"].rejected()
            raise QueueFull(
                f"decoder: {self.admitted + self.waiting} steps are open; allowed is {self.max_queue_depth}"
            )
        if cohort == 1 or self.cap == 1 or not self.delay_s:
            self._admit({step: now}, now, "cohort" if cohort == 1 else "drain")
            return
        self._close_due_wave(now)
        target = min(cohort, self.cap) if cohort > 1 else self.cap
        if not self._wave:
            self._wave_deadline, self._wave_target = now + self.delay_s, target
        else:
            self._wave_target = min(self._wave_target, target)
        self._wave[step] = now
        if len(self._wave) >= self._wave_target:
            self._close_wave(now, "capacity" if len(self._wave) >= self.cap else "cohort")

    def admit(self, now: float) -> tuple[Hashable, ...]:
        """Close the wave if its deadline has come, and return every step admitted since the last call, in order of arrival."""
        self._close_due_wave(now)
        news = tuple(self._news)
        self._news.clear()
        return news

    def leave(self, step: Hashable) -> T | None:
        """A step ended, or its stream was cancelled: it is forgotten, and its operation, if one was still queued, is returned.

        The last step to leave the barrier takes its wave along. Unknown steps are ignored, so that clean-up may run twice.
        """
        if step in self._wave:
            del self._wave[step]
            return None
        key = self._admitted.pop(step, None)
        if step in self._news:
            self._news.remove(step)
        if key is None:
            return None
        op = self._groups[key].pop(step)
        self._queued -= 1
        self._stage(key).cancelled()
        if not self._groups[key]:
            del self._groups[key]
        return op.item

    def enqueue(self, step: Hashable, op: T, key: OpKey, now: float) -> None:
        """Queue the next operation of an admitted step.

        Raises StreamClosed for a step that is not admitted, and ValueError for one that has an operation queued. After `close` admitted
        steps may go on: what was accepted completes.
        """
        if step not in self._admitted:
            raise StreamClosed(f"step {step!r} is not admitted: it left, or never passed the barrier")
        if self._admitted[step] is not None:
            raise ValueError(f"step {step!r} already has an operation queued; allowed is one")
        self._groups.setdefault(key, {})[step] = _Op(op, self._enqueued, now)
        self._admitted[step] = key
        self._enqueued += 1
        self._queued += 1

    def next_batch(self, now: float) -> Batch[T] | None:
        """Release the group that the rules choose, or None. Call whenever an execution slot is free."""
        if not self._groups:
            return None
        oldest = min(self._groups, key=self._age)
        overdue = now >= self._deadline(oldest)
        choice = self._choose(oldest, overdue)
        if choice is None:
            return None
        key, reason = choice
        self._overtakes = self._overtakes + 1 if overdue and key != oldest else 0
        return self._take(key, reason, now)

    def next_deadline(self) -> float | None:
        """The earliest time in seconds at which `admit` or `next_batch` yields something with no further call; None with nothing waiting.

        A time that is not in the future means at once.
        """
        times = [self._wave_deadline] if self._wave else []
        if self._groups:
            oldest = min(self._groups, key=self._age)
            at_once = self._choose(oldest, overdue=False) is not None
            times.append(self._head(oldest).arrived_at if at_once else self._deadline(oldest))
        return min(times, default=None)

    def finish(self, batch: Batch[T], now: float) -> None:
        """A batch was executed, or failed; call once, before its callers are woken."""
        self.in_flight -= len(batch.items)
        self._stage(batch.key).finished(now - batch.formed_at)

    def close(self, now: float) -> None:
        """Refuse new steps, admit those at the barrier, and from now on release queued operations at once."""
        self.closed = True
        self._close_wave(now, "shutdown")

    def _choose(self, oldest: OpKey, overdue: bool) -> tuple[OpKey, Reason] | None:
        groups = self._groups
        if overdue and self._overtakes >= MOST_OVERTAKES:
            return oldest, "deadline"
        full = [key for key in groups if len(groups[key]) >= self.cap]
        if full:
            return min(full, key=self._age), "capacity"
        largest = max(groups, key=lambda key: (len(groups[key]), -self._age(key)))
        if self._queued + self.in_flight >= len(self._admitted):
            return largest, "ready"
        if self.closed:
            return largest, "shutdown"
        if overdue:
            return oldest, "deadline" if self.delay_s else "drain"
        return None

    def _take(self, key: OpKey, reason: Reason, now: float) -> Batch[T]:
        group, ready = self._groups.pop(key), self._queued
        taken = dict(islice(group.items(), self.cap))
        if len(taken) < len(group):
            self._groups[key] = {step: op for step, op in group.items() if step not in taken}
        for step in taken:
            self._admitted[step] = None
        self._queued -= len(taken)
        self.in_flight += len(taken)
        waited_s = tuple(max(0.0, now - op.arrived_at) for op in taken.values())
        self._stage(key).dispatched(reason, waited_s, len(group), ready)
        return Batch(tuple(op.item for op in taken.values()), key, reason, now, waited_s, len(group), ready)

    def _close_due_wave(self, now: float) -> None:
        if self._wave and now >= self._wave_deadline:
            self._close_wave(now, "deadline")

    def _close_wave(self, now: float, reason: Reason) -> None:
        if self._wave:
            wave, self._wave = self._wave, {}
            self._admit(wave, now, reason)

    def _admit(self, wave: dict[Hashable, float], now: float, reason: Reason) -> None:
        self._admitted.update(dict.fromkeys(wave))
        self._news.extend(wave)
        waited_s = tuple(max(0.0, now - arrived_at) for arrived_at in wave.values())
        self.metrics["admission"].dispatched(reason, waited_s, len(wave), len(wave))

    def _head(self, key: OpKey) -> _Op[T]:
        return next(iter(self._groups[key].values()))

    def _age(self, key: OpKey) -> int:
        return self._head(key).number

    def _deadline(self, key: OpKey) -> float:
        return self._head(key).arrived_at + self.delay_s

    def _stage(self, key: Hashable) -> StageMetrics:
        name = str(key[0]) if isinstance(key, tuple) else str(key)
        return self.metrics.setdefault(name, StageMetrics(name))
