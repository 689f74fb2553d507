"""The general micro-batcher: concurrent work with an equal key leaves together, and nobody waits longer than the set delay.

    batcher: MicroBatcher[str] = MicroBatcher(max_batch_size=4, max_queue_delay_s=0.005, max_queue_depth=64)
    batcher.submit("chunk of stream 1", key=25, now=0.0)
    batcher.next_batch(now=0.001)          # None: alone, and its deadline is 0.005
    batch = batcher.next_batch(now=0.005)  # reason "deadline"
    batcher.finish(batch, now=0.009)

A state machine: `now` is an argument in seconds on any monotonic scale, and there is no thread and no clock. A driver calls `next_batch`
whenever its worker is free and sleeps until `next_deadline` or the next submit. Every key has its own queue, so that complete work
of one key is never held behind the deadline of another. The oldest item of a queue decides for it: by its arrival the deadline and by its
cohort the size worth waiting for. Every operation costs O(1), or O(log keys) amortised.

What makes it fast, by profile: polling compares one cached time; two heaps of plain ints order the heads, and a head that moved on is
dropped when it surfaces or when most are stale; a whole queue leaves as one list; waiting times are sorted into buckets thousands at a time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from workbench.batching.metrics import Reason, StageMetrics
from workbench.config import BatchingConfig
from workbench.errors import ConfigError, QueueFull, StreamClosed

T = TypeVar("T")
_WITHDRAWN = -1


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
    """The receipt of one submitted item; hand it to `cancel` to withdraw the item while it is still queued.

    number: its place in the order of submission over all keys, -1 once it was withdrawn; arrived_at: when, in seconds.
    """

    __slots__ = ("_queue", "_target", "arrived_at", "item", "number")

    def __init__(self, item: T, number: int, arrived_at: float, target: int, queue: _Queue[T]) -> None:
        self.item = item
        self.number = number
        self.arrived_at = arrived_at
        self._target = target
        self._queue = queue


class _Queue(Generic[T]):
    """The tickets of one key, oldest first. `live` are queued, the others withdrawn; the first is live, and `head` and `target` are its."""

    __slots__ = ("cap", "head", "key", "live", "target", "tickets")

    def __init__(self, key: Hashable, cap: int) -> None:
        self.key = key
        self.cap = cap
        self.tickets: deque[Ticket[T]] = deque()
        self.live = 0
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
        self._submitted = 0
        self._left = 0
        self._last_arrival = -math.inf
        # The time from which something may leave: infinite with nothing queued, minus infinite when it may leave now.
        self._due_at = math.inf

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
        return self._submitted - self._left

    def submit(self, item: T, key: Hashable, now: float, cohort: int = 0) -> Ticket[T]:
        """Queue `item` under `key`. `cohort` is how many items of this key are expected together; 0 when that is not known.

        Raises QueueFull when `max_queue_depth` items are queued, and StreamClosed after `close`.
        """
        if self.closed:
            raise StreamClosed(f"{self.metrics.name}: closed; work is accepted only before close")
        number = self._submitted
        if number - self._left >= self.max_queue_depth:
            self.metrics.rejected()
            raise QueueFull(f"{self.metrics.name}: {self.queued} items queued; allowed is {self.max_queue_depth}")
        # Threads read the clock before they take the driver's lock; the queue's order stands, so an earlier reading counts as now.
        if now < self._last_arrival:
            now = self._last_arrival
        self._last_arrival = now
        queue = self._queues.get(key) or self._open(key)
        cap = queue.cap
        ticket = Ticket(item, number, now, cohort if 0 < cohort < cap else cap, queue)
        queue.tickets.append(ticket)
        live = queue.live = queue.live + 1
        self._submitted = number + 1
        if live == 1:
            self._lead(queue)
        elif live == queue.target:
            heapq.heappush(self._complete, queue.head)
            self._due_at = -math.inf
        return ticket

    def next_batch(self, now: float) -> Batch[T] | None:
        """Release the batch whose head is the oldest of all that may leave, or None. Call whenever the worker is free."""
        if now < self._due_at:
            return None
        queue = self._oldest_releasable(now)
        compatible, ready, reason = queue.live, self.queued, self._reason(queue)
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
        if self._due_at == math.inf:
            return None
        return self._due_at if self._due_at > -math.inf else self._oldest().tickets[0].arrived_at

    def finish(self, batch: Batch[T], now: float) -> None:
        """The batch was executed, or failed; call once per released batch."""
        self.in_flight -= len(batch.items)
        self.metrics.finished(now - batch.formed_at)

    def cancel(self, ticket: Ticket[T]) -> bool:
        """Withdraw an item. True if it was still queued; False if it had been released or withdrawn before."""
        queue = ticket._queue
        # A released or withdrawn ticket has a lower number than the head of its queue; a queue that emptied was forgotten.
        number = ticket.number
        if self._queues.get(queue.key) is not queue or number < queue.head:
            return False
        ticket.number = _WITHDRAWN
        queue.live -= 1
        self._left += 1
        self.metrics.cancelled()
        if queue.head == number:
            self._follow(queue)
        if len(queue.tickets) > 2 * queue.live + 16:
            queue.tickets = deque(ticket for ticket in queue.tickets if ticket.number != _WITHDRAWN)
        self._drop_stale()
        self._set_due()
        return True

    def close(self, now: float) -> None:
        """Refuse new work; what is queued leaves at once, oldest head first. `now` is the time of the decision, in seconds."""
        self.closed = True
        self._last_arrival = max(self._last_arrival, now)
        self._set_due()

    def _open(self, key: Hashable) -> _Queue[T]:
        cap = self.cap if self._cap_for is None else max(1, min(self.cap, self._cap_for(key)))
        queue = self._queues[key] = _Queue(key, cap)
        return queue

    def _lead(self, queue: _Queue[T]) -> None:
        """Enter the first ticket of a queue as its head."""
        ticket = queue.tickets[0]
        number = queue.head = ticket.number
        queue.target = ticket._target
        self._heads[number] = queue
        heapq.heappush(self._by_age, number)
        if queue.live >= queue.target:
            heapq.heappush(self._complete, number)
            self._due_at = -math.inf
        else:
            self._due_at = min(self._due_at, self._deadline(ticket))

    def _follow(self, queue: _Queue[T]) -> None:
        """The head of a queue left: the next live ticket leads it, or the key is forgotten."""
        del self._heads[queue.head]
        if not queue.live:
            del self._queues[queue.key]
            queue.tickets.clear()  # withdrawn tickets point back at the queue
        else:
            while queue.tickets[0].number == _WITHDRAWN:
                queue.tickets.popleft()
            self._lead(queue)

    def _drop_stale(self) -> None:
        """Keep the heaps within a fixed multiple of the heads they order."""
        limit = 2 * len(self._heads) + 64
        if len(self._by_age) > limit:
            self._by_age = sorted(self._heads)
        if len(self._complete) > limit:
            self._complete = sorted(number for number, queue in self._heads.items() if queue.live >= queue.target)

    def _deadline(self, head: Ticket[T]) -> float:
        return head.arrived_at + self.max_queue_delay_s if self.max_queue_delay_s else -math.inf

    def _set_due(self) -> None:
        if not self._heads:
            self._due_at = math.inf
        elif self.closed or self._oldest_complete() is not None:
            self._due_at = -math.inf
        else:
            self._due_at = self._deadline(self._oldest().tickets[0])

    def _oldest(self) -> _Queue[T]:
        """The queue with the oldest head; something is queued."""
        by_age, heads = self._by_age, self._heads
        while by_age[0] not in heads:
            heapq.heappop(by_age)
        return heads[by_age[0]]

    def _oldest_complete(self) -> _Queue[T] | None:
        """Of the queues with as many items as their head waits for, the one with the oldest head."""
        complete, heads = self._complete, self._heads
        while complete:
            queue = heads.get(complete[0])
            if queue is not None and queue.live >= queue.target:
                return queue
            heapq.heappop(complete)
        return None

    def _oldest_releasable(self, now: float) -> _Queue[T]:
        """Of the queues that may leave the one with the oldest head; `_due_at` has come, so there is one."""
        oldest = self._oldest()
        if self.closed or now >= self._deadline(oldest.tickets[0]):
            return oldest
        return self._oldest_complete() or oldest

    def _reason(self, queue: _Queue[T]) -> Reason:
        if self.closed:
            return "shutdown"
        if queue.live >= queue.cap:
            return "capacity"
        if queue.live >= queue.target:
            return "cohort"
        return "deadline" if self.max_queue_delay_s else "drain"

    def _take(self, queue: _Queue[T]) -> list[Ticket[T]]:
        """Remove and return the oldest live tickets of a queue, at most its cap."""
        tickets = queue.tickets
        size = min(queue.live, queue.cap)
        if size == len(tickets):
            taken, queue.tickets = list(tickets), deque()
        else:
            taken = []
            while len(taken) < size:
                ticket = tickets.popleft()
                if ticket.number != _WITHDRAWN:
                    taken.append(ticket)
        queue.live -= size
        self._left += size
        self.in_flight += size
        self._follow(queue)
        self._drop_stale()
        self._set_due()
        return taken
