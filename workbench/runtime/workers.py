"""The thread around a `MicroBatcher`: waits for releases, runs batches, wakes the callers.

    worker = BatchWorker(MicroBatcher.from_config(config), run=stage.run, name="step")
    future = worker.submit(item, key)
    future.result(timeout=30)
    worker.close()

Rules live in the pure batcher; here are only a lock, a condition and a clock. A batch counts as finished in the batcher before its callers
are woken, so that whatever a caller submits next can join the next batch. A failing or short result reaches every member of that batch
and nobody else, and the worker goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.clock import MonotonicClock

T = TypeVar("T")

# Bound of one idle wait: a lost wake-up would cost this and not a hang.
_IDLE_WAIT_S = 0.5


class BatchWorker(Generic[T]):
    """One thread that executes the batches of one batcher."""

    def __init__(
        self, batcher: MicroBatcher[tuple[T, Future[Any]]], run: Callable[[Sequence[T]], Sequence[Any]], name: str
    ) -> None:
        self.batcher, self._run, self._clock = batcher, run, MonotonicClock()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=f"workbench-{name}", daemon=True)
        self._thread.start()

    def submit(self, item: T, key: Hashable, cohort: int = 0) -> Future[Any]:
        """Queue one item; the future gets its result. Raises QueueFull or StreamClosed at once."""
        future: Future[Any] = Future()
        with self._changed:
            ticket = self.batcher.submit((item, future), key, self._clock.now(), cohort)
            self._changed.notify()
        future.workbench_ticket = ticket  # type: ignore[attr-defined]
        return future

    def cancel(self, future: Future[Any]) -> bool:
        """Withdraw a queued item; True if it had not left the queue. Its future is cancelled."""
        with self._changed:
            withdrawn = self.batcher.cancel(future.workbench_ticket)  # type: ignore[attr-defined]
        if withdrawn:
            future.cancel()
        return withdrawn

    def close(self, timeout_s: float = 30.0) -> None:
        """Reject new work, run what is queued at once, and wait for the thread. Safe to call twice."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self.batcher.close(self._clock.now())
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _loop(self) -> None:
        while (batch := self._next()) is not None:
            self._execute(batch)

    def _next(self) -> Batch[tuple[T, Future[Any]]] | None:
        with self._changed:
            while True:
                now = self._clock.now()
                batch = self.batcher.next_batch(now)
                if batch is not None:
                    return batch
                if self._closed and self.batcher.queued == 0:
                    return None
                deadline = self.batcher.next_deadline()
                self._changed.wait(_IDLE_WAIT_S if deadline is None else min(max(deadline - now, 0.0), _IDLE_WAIT_S))

    def _execute(self, batch: Batch[tuple[T, Future[Any]]]) -> None:
        error: BaseException | None = None
        results: Sequence[Any] = ()
        try:
            results = self._run([item for item, _ in batch.items])
            if len(results) != len(batch.items):
                error = RuntimeError(f"a batch of {len(batch.items)} items gave {len(results)} results")
        except BaseException as caught:  # every member must learn of it, whatever it was; nothing is swallowed
            error = caught
        with self._changed:
            self.batcher.finish(batch, self._clock.now())
        for position, (_, future) in enumerate(batch.items):
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(results[position])
