"""The threads around the pure schedulers: a bounded number of execution slots run whatever the lanes release and wake the callers.

    lane = Lane("step", batcher, run=run_batch, settle=settle_batch)
    workers = Workers([lane], slots=3)
    with workers.changed:
        batcher.submit(task, key, workers.now())
        workers.poke()
    workers.close()

Rules live in the pure machines; here are only one lock, the threads and the clock. A lane is one machine with the function that executes its
batches; lanes stand in the order in which work passes through them. A batch counts as finished in its machine before anybody is woken. What
a finished batch moves on to the next lane is moved under the same lock, so no work is ever between two lanes. Streams that go on at
once with their next chunk are woken before the lane takes its next batch, so that they can join it; all others while it already runs.
A failing or short batch reaches exactly its members. A thread that nothing wakes looks again after half a second.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.batching.microbatcher import Batch
from workbench.clock import MonotonicClock

# Tasks in execution at once: one on the device while others are packed before it or woken after it.
EXECUTION_SLOTS = 3
_IDLE_WAIT_S = 0.5
_NOW = -math.inf

Wake = Callable[[], None]


class Machine(Protocol):
    """What a lane needs of a pure scheduler."""

    @property
    def open(self) -> int:
        """Work that was accepted and has not left the machine."""
        ...

    def next_batch(self, now: float) -> Batch[Any] | None: ...

    def next_deadline(self) -> float | None: ...

    def finish(self, batch: Batch[Any], now: float) -> None: ...

    def close(self, now: float) -> None: ...


@dataclass
class Lane:
    """One machine and what to do with its batches.

    run: executes a batch outside the lock, one outcome per item; settle: called under the lock with the outcomes or the error, returns the
    wake-ups of streams that go on at once and of all others; limit: batches in execution at once.
    """

    name: str
    machine: Machine
    run: Callable[[Batch[Any]], Sequence[Any]]
    settle: Callable[[Batch[Any], Sequence[Any] | BaseException, float], tuple[list[Wake], list[Wake]]]
    limit: int = 1
    executing: int = 0
    closed: bool = False


class Workers:
    """`slots` threads over lanes in the order of the work's path."""

    def __init__(self, lanes: Sequence[Lane], slots: int = EXECUTION_SLOTS) -> None:
        self.lanes = list(lanes)
        self.changed = threading.Condition()
        self._clock = MonotonicClock()
        self._closing = False
        self._looks_again_at = _NOW
        # For measurements: called after each batch with lane, batch and the times (begun, executed, lane free, thread free).
        self.watch: Callable[[str, Batch[Any], tuple[float, float, float, float]], None] | None = None
        self._threads = [
            threading.Thread(target=self._loop, name=f"workbench-slot-{slot}", daemon=True) for slot in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    def now(self) -> float:
        """Time of the clock that the machines run on, in seconds."""
        return self._clock.now()

    def poke(self) -> None:
        """After a submit, under the lock: wake a thread if something may leave earlier than any of them would look."""
        deadline = self._deadline()
        if (deadline is not None and deadline < self._looks_again_at) or self._looks_again_at == _NOW:
            self.changed.notify()

    def close(self, timeout_s: float = 30.0) -> None:
        """Refuse new work, run what was accepted at once, and wait for the threads. Safe to call twice and from a slot."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    @property
    def slots(self) -> int:
        """Threads that execute batches."""
        return len(self._threads)

    def runs_here(self) -> bool:
        """Whether the caller is one of the slots."""
        return threading.current_thread() in self._threads

    @property
    def alive(self) -> bool:
        """Whether any thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    def _loop(self) -> None:
        while (taken := self._next()) is not None:
            self._execute(*taken)
            del taken  # an idle thread must not keep the audio and the callers of its last batch

    def _next(self) -> tuple[Lane, Batch[Any]] | None:
        with self.changed:
            while True:
                now = self._clock.now()
                if self._closing and self._close_in_order(now):
                    self.changed.notify_all()
                    return None
                taken = self._take(now)
                if taken is not None:
                    # Nobody is known to look at the right time any more; whoever wakes next sees to it.
                    self._looks_again_at = _NOW
                    self.changed.notify()
                    return taken
                deadline = self._deadline()
                wait_s = _IDLE_WAIT_S if deadline is None else min(max(deadline - now, 0.0), _IDLE_WAIT_S)
                self._looks_again_at = now + wait_s
                self.changed.wait(wait_s)

    def _take(self, now: float) -> tuple[Lane, Batch[Any]] | None:
        """The next batch; lanes nearest to the end come first, so that begun work completes before more is begun."""
        for lane in reversed(self.lanes):
            if lane.executing < lane.limit:
                batch = lane.machine.next_batch(now)
                if batch is not None:
                    lane.executing += 1
                    return lane, batch
        return None

    def _deadline(self) -> float | None:
        times = [lane.machine.next_deadline() for lane in self.lanes if lane.executing < lane.limit]
        return min((time for time in times if time is not None), default=None)

    def _close_in_order(self, now: float) -> bool:
        """Close each machine once nothing can come into it any more; True when all work is done."""
        for lane in self.lanes:
            if not lane.closed:
                lane.closed = True
                lane.machine.close(now)
            if lane.machine.open or lane.executing:
                return False
        return True

    def _execute(self, lane: Lane, batch: Batch[Any]) -> None:
        outcomes: Sequence[Any] | BaseException
        begun = self._clock.now()
        try:
            outcomes = lane.run(batch)
            if len(outcomes) != len(batch.items):
                outcomes = RuntimeError(f"a batch of {len(batch.items)} items gave {len(outcomes)} results")
        except BaseException as error:  # every member must learn of it, whatever it was; nothing is swallowed
            outcomes = error
        with self.changed:
            now = self._clock.now()
            lane.machine.finish(batch, now)
            first, rest = lane.settle(batch, outcomes, now)
            if not first:
                lane.executing -= 1
            self.changed.notify()
        if first:
            for wake in first:
                wake()
            with self.changed:
                lane.executing -= 1
                self.changed.notify()
        free = self._clock.now()
        for wake in rest:
            wake()
        watch = self.watch  # whoever watches may stop meanwhile
        if watch is not None:
            watch(lane.name, batch, (begun, now, free, self._clock.now()))
