"""The micro-batcher against a plain model: any history of submits, polls, cancels, finishes and a close gives the same batches."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.batching.microbatcher import Batch, MicroBatcher, Ticket
from workbench.errors import QueueFull, StreamClosed


@dataclass
class Model:
    """The rules in their plainest form: one list, scanned."""

    cap: int
    delay: float
    closed: bool = False
    queue: list[tuple[int, str, float, int]] = field(default_factory=list)

    def heads(self) -> dict[str, tuple[int, str, float, int]]:
        found: dict[str, tuple[int, str, float, int]] = {}
        for entry in self.queue:
            found.setdefault(entry[1], entry)
        return found

    def count(self, key: str) -> int:
        return sum(entry[1] == key for entry in self.queue)

    def may_leave(self, head: tuple[int, str, float, int], now: float) -> bool:
        _, key, arrived, cohort = head
        target = min(cohort, self.cap) if cohort else self.cap
        return self.closed or self.delay == 0 or self.count(key) >= target or now >= arrived + self.delay

    def release(self, now: float) -> list[int] | None:
        for head in self.heads().values():  # in order of age
            if self.may_leave(head, now):
                taken = [entry for entry in self.queue if entry[1] == head[1]][: self.cap]
                self.queue = [entry for entry in self.queue if entry not in taken]
                return [entry[0] for entry in taken]
        return None


class AgainstModel(RuleBasedStateMachine):
    """Any history of submits, polls, cancels, finishes and a close gives what the model gives."""

    @initialize(cap=st.integers(1, 5), delay=st.sampled_from([0.0, 1.0, 3.0]), depth=st.integers(1, 12))
    def start(self, cap: int, delay: float, depth: int) -> None:
        self.batcher: MicroBatcher[object] = MicroBatcher(
            max_batch_size=cap, max_queue_delay_s=delay, max_queue_depth=depth
        )
        self.model = Model(min(cap, depth), delay)
        self.depth, self.now, self.accepted = depth, 0.0, 0
        self.tickets: list[tuple[int, Ticket[object]]] = []
        self.released: list[int] = []
        self.running: list[Batch[object]] = []
        self.refused = self.cancelled = 0

    @rule(by=st.integers(0, 3))
    def time_passes(self, by: int) -> None:
        self.now += by

    @rule(key=st.sampled_from("abc"), cohort=st.integers(0, 6))
    def submit(self, key: str, cohort: int) -> None:
        item = self.accepted
        try:
            ticket = self.batcher.submit(item, key, self.now, cohort)
        except QueueFull:
            self.refused += 1
            assert len(self.model.queue) == self.depth
        except StreamClosed:
            assert self.model.closed
        else:
            assert len(self.model.queue) < self.depth and not self.model.closed
            self.accepted += 1
            self.tickets.append((item, ticket))
            self.model.queue.append((item, key, self.now, cohort))

    @rule()
    def poll(self) -> None:
        due = self.batcher.next_deadline()
        batch = self.batcher.next_batch(self.now)
        expected = self.model.release(self.now)
        assert (batch and list(batch.items)) == expected
        assert (batch is not None) == (due is not None and due <= self.now)
        if batch is not None:
            assert len(batch.items) <= self.model.cap and min(batch.waited_s) >= 0
            self.released += [int(str(item)) for item in batch.items]
            self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.batcher.finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))), self.now)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item, ticket = data.draw(st.sampled_from(self.tickets))
        queued = [entry for entry in self.model.queue if entry[0] == item]
        assert self.batcher.cancel(ticket) == bool(queued)
        self.model.queue = [entry for entry in self.model.queue if entry[0] != item]
        self.cancelled += len(queued)

    @rule()
    def close(self) -> None:
        self.batcher.close(self.now)
        self.model.closed = True

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "batcher"):
            return
        metrics, batcher = self.batcher.metrics, self.batcher
        assert batcher.queued == len(self.model.queue)
        assert len(set(self.released)) == len(self.released) == metrics.items
        assert self.accepted == metrics.items + metrics.cancelled_items + batcher.queued
        assert metrics.items == sum(size * count for size, count in metrics.batch_sizes.items())
        assert metrics.batches == sum(metrics.reasons.values()) == sum(metrics.batch_sizes.values())
        assert metrics.batches == metrics.finished_batches + len(self.running)
        assert batcher.in_flight == sum(len(batch.items) for batch in self.running)
        assert (metrics.rejected_items, metrics.cancelled_items) == (self.refused, self.cancelled)

    def teardown(self) -> None:
        if not hasattr(self, "batcher"):
            return
        self.close()
        for _ in range(self.batcher.queued):  # each poll releases at least one, so this many empty it
            if self.batcher.queued:
                self.poll()
        assert self.batcher.queued == 0 and self.batcher.next_batch(self.now) is None
        assert len(self.released) + self.cancelled == self.accepted


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
