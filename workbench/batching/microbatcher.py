"""The general micro-batcher: concurrent work with an equal key leaves together, and nobody waits longer than the set delay.

    batcher: MicroBatcher[str] = MicroBatcher(max_batch_size=4, max_queue_delay_s=0.005, max_queue_depth=64)
    batcher.submit("chunk of stream 1", key=25, now=0.0)
    batcher.next_batch(now=0.001)          # None: alone, and its deadline is 0.005
    batch = batcher.next_batch(now=0.005)  # reason "deadline"
    batcher.finish(batch, now=0.009)

A state machine: `now` is an argument in seconds on any monotonic scale, and there is no thread and no clock. A driver calls `next_batch`
whenever its worker is free and sleeps until `next_deadline` or the next submit. Every key has its own queue, so that complete work
of one key is never held behind the deadline of another. The oldest item of a queue decides for it: by its arrival the deadline and by its
cohort the size worth waiting for. Every operation costs O(1), or O(log keys) on two heaps of plain ints: the heads by age, and the
heads whose queue is large enough. A head that moved on leaves a stale number behind, dropped when it surfaces or when more than
half are stale; that, ordered dicts for withdrawal in O(1), and taking a whole queue at once are what make it fast.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from workbench.batching.metrics import Reason, StageMetrics
from workbench.config import BatchingConfig
from workbench.errors import ConfigError, QueueFull, StreamClosed

T = TypeVar("T")


@dataclass(frozen=True)
class Batch(Generic[T]):
    """Work that runs together: `items` share `key` and keep their order of submission.

    reason: the rule that released it; formed_at: when, in seconds; waited_s: per item; compatible: items queued with this key at dispatch,
    before the cap; ready: all items queued at dispatch.
    """

    items: tuple[T, ...]
    key: Hashable
    reason: Reason
    formed_at: float
    waited_s: tuple[float, ...]
    compatible: int
    ready: int


class Ticket(Generic[T]):
    """The receipt of one submitted item; hand it to `cancel` to withdraw the item while it is still queued."""

    __slots__ = ("_queue", "arrived_at", "item", "number", "target")

    def __init__(self, item: T, number: int, arrived_at: float, target: int, queue: _Queue[T]) -> None:
        self.item = item
        self.number = number
        self.arrived_at = arrived_at
        self.target = target
        self._queue = queue


class _Queue(Generic[T]):
    """The queued tickets of one key by number; `head` and `target` are those of the oldest ticket."""

    __slots__ = ("cap", "head", "key", "target", "tickets")

    def __init__(self, key: Hashable, cap: int) -> None:
        self.key = key
        self.cap = cap
        self.tickets: OrderedDict[int, Ticket[T]] = OrderedDict()
        self.head = -1
        self.target = cap


class MicroBatcher(Generic[T]):
    """Combine submitted items into batches of one key.

    max_batch_size: most items of a batch; max_queue_delay_s: longest wait of the oldest item for company, 0 for "whatever is queued when the
    worker is free"; max_queue_depth: most queued items over all keys, those in execution not counted. cap_for: an own limit for a key,
    at most max_batch_size, for stages whose items differ in length (frames per batch instead of items per batch).
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_queue_delay_s: float,
        max_queue_depth: int,
        metrics: StageMetrics | None = None,
        cap_for: Callable[[Hashable], int] | None = None,
    ) -> None:
        if max_batch_size < 1 or max_queue_depth < 1:
            raise ConfigError(
                f"got max_batch_size={max_batch_size}, max_queue_depth={max_queue_depth}; allowed is 1 or more"
            )
        if not 0 <= max_queue_delay_s < math.inf:
            raise ConfigError(
                f"got max_queue_delay_s={max_queue_delay_s}; allowed is a finite number of seconds, 0 or more"
            )
        # A queue that holds fewer items than a batch would wait for a batch that cannot come.
        self.cap = min(max_batch_size, max_queue_depth)
        self.max_queue_delay_s = max_queue_delay_s
        self.max_queue_depth = max_queue_depth
        self.metrics = metrics if metrics is not None else StageMetrics("microbatcher")
        self.in_flight = 0
        self.closed = False
        self._cap_for = cap_for
        self._queues: dict[Hashable, _Queue[T]] = {}
        self._heads: dict[int, _Queue[T]] = {}
        self._by_age: list[int] = []
        self._complete: list[int] = []
        self._queued = 0
        self._submitted = 0
        self._last_arrival = -math.inf

    @classmethod
    def from_config(
        cls, batching: BatchingConfig, cap: int | None = None, metrics: StageMetrics | None = None
    ) -> MicroBatcher[T]:
        """Build from `asr.batching`; `cap` lowers `max_batch_size` for a stage that can hold fewer items."""
        size = batching.max_batch_size if cap is None else min(cap, batching.max_batch_size)
        return cls(
            max_batch_size=size,
            max_queue_delay_s=batching.max_queue_delay_us * 1e-6,
            max_queue_depth=batching.max_queue_depth,
            metrics=metrics,
        )

    @property
    def queued(self) -> int:
        """Items that were accepted and are neither released nor withdrawn."""
        return self._queued

    def submit(self, item: T, key: Hashable, now: float, cohort: int = 0) -> Ticket[T]:
        """Queue `item` under `key`. `cohort` is how many items of this key are expected together; 0 when that is not known.

        Raises QueueFull when `max_queue_depth` items are queued, and StreamClosed after `close`.
        """
        if self.closed:
            raise StreamClosed(f"{self.metrics.name}: closed; work is accepted only before close")
        if self._queued >= self.max_queue_depth:
            self.metrics.rejected()
            raise QueueFull(f"{self.metrics.name}: {self._queued} items queued; allowed is {self.max_queue_depth}")
        # Threads read the clock before they take the driver's lock; the queue's order stands, so an earlier reading counts as now.
        if now < self._last_arrival:
            now = self._last_arrival
        queue = self._queues.get(key) or self._open(key)
        cap = queue.cap
        number = self._submitted
        ticket = Ticket(item, number, now, cohort if 0 < cohort < cap else cap, queue)
        tickets = queue.tickets
        tickets[number] = ticket
        self._last_arrival = now
        self._submitted = number + 1
        self._queued += 1
        if len(tickets) == 1:
            self._lead(queue)
        elif len(tickets) == queue.target:
            heapq.heappush(self._complete, queue.head)
        return ticket

    def next_batch(self, now: float) -> Batch[T] | None:
        """Release the batch whose head is the oldest of all that may leave, or None. Call whenever the worker is free."""
        queue = self._releasable(now)
        if queue is None:
            return None
        compatible, ready = len(queue.tickets), self._queued
        reason = self._reason(queue)
        tickets = self._take(queue)
        formed_at = now if now > self._last_arrival else self._last_arrival
        waited_s = tuple([formed_at - ticket.arrived_at for ticket in tickets])
        self.metrics.dispatched(reason, waited_s, compatible, ready)
        items = tuple([ticket.item for ticket in tickets])
        return Batch(items, queue.key, reason, formed_at, waited_s, compatible, ready)

    def next_deadline(self) -> float | None:
        """The earliest time in seconds at which `next_batch` releases something if nothing more is submitted; None with nothing queued.

        A time that is not in the future means at once.
        """
        head = self._oldest()
        if head is None:
            return None
        arrived_at = head.tickets[head.head].arrived_at
        if self.closed or self._first_complete() is not None:
            return arrived_at
        return arrived_at + self.max_queue_delay_s

    def finish(self, batch: Batch[T], now: float) -> None:
        """The batch was executed, or failed; call once per released batch."""
        self.in_flight -= len(batch.items)
        self.metrics.finished(now - batch.formed_at)

    def cancel(self, ticket: Ticket[T]) -> bool:
        """Withdraw an item. True if it was still queued; False if it had been released or withdrawn before."""
        queue, number = ticket._queue, ticket.number
        if self._queues.get(queue.key) is not queue or queue.tickets.pop(number, None) is None:
            return False
        self._queued -= 1
        self.metrics.cancelled()
        if queue.head == number:
            self._follow(queue)
        return True

    def close(self, now: float) -> None:
        """Refuse new work; what is queued leaves at once, oldest head first. `now` is the time of the decision, in seconds."""
        self.closed = True
        self._last_arrival = max(self._last_arrival, now)

    def _open(self, key: Hashable) -> _Queue[T]:
        cap = self.cap if self._cap_for is None else max(1, min(self.cap, self._cap_for(key)))
        queue = self._queues[key] = _Queue(key, cap)
        return queue

    def _lead(self, queue: _Queue[T]) -> None:
        """Enter the first ticket of a queue as its head."""
        number, ticket = next(iter(queue.tickets.items()))
        queue.head, queue.target = number, ticket.target
        self._heads[number] = queue
        heapq.heappush(self._by_age, number)
        if len(queue.tickets) >= ticket.target:
            heapq.heappush(self._complete, number)

    def _follow(self, queue: _Queue[T]) -> None:
        """The head of a queue left: the next ticket leads it, or the key is forgotten."""
        del self._heads[queue.head]
        if queue.tickets:
            self._lead(queue)
        else:
            del self._queues[queue.key]
        limit = 2 * len(self._heads) + 64
        if len(self._by_age) > limit:
            self._by_age = sorted(self._heads)
        if len(self._complete) > limit:
            self._complete = sorted(n for n, q in self._heads.items() if len(q.tickets) >= q.target)

    def _oldest(self) -> _Queue[T] | None:
        by_age, heads = self._by_age, self._heads
        while by_age and by_age[0] not in heads:
            heapq.heappop(by_age)
        return heads[by_age[0]] if by_age else None

    def _first_complete(self) -> _Queue[T] | None:
        complete, heads = self._complete, self._heads
        while complete:
            queue = heads.get(complete[0])
            if queue is not None and len(queue.tickets) >= queue.target:
                return queue
            heapq.heappop(complete)
        return None

    def _releasable(self, now: float) -> _Queue[T] | None:
        oldest = self._oldest()
        if oldest is None:
            return None
        # With no delay the worker being free is the whole rule; no comparison of times is needed.
        if self.closed or not self.max_queue_delay_s:
            return oldest
        if now >= oldest.tickets[oldest.head].arrived_at + self.max_queue_delay_s:
            return oldest
        return self._first_complete()

    def _reason(self, queue: _Queue[T]) -> Reason:
        size = len(queue.tickets)
        if self.closed:
            return "shutdown"
        if size >= queue.cap:
            return "capacity"
        if size >= queue.target:
            return "cohort"
        return "deadline" if self.max_queue_delay_s else "drain"

    def _take(self, queue: _Queue[T]) -> list[Ticket[T]]:
        """Remove and return the oldest tickets of a queue, at most its cap."""
        tickets = queue.tickets
        if len(tickets) <= queue.cap:
            taken = list(tickets.values())
            tickets.clear()
        else:
            taken = [tickets.popitem(last=False)[1] for _ in range(queue.cap)]
        self._queued -= len(taken)
        self.in_flight += len(taken)
        self._follow(queue)
        return taken
