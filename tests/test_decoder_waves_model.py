"""Decoder scheduling against the rules word for word, and a virtual runtime in which every step completes."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.batching.decoder_waves import MOST_OVERTAKES, DecoderWaves, OpKey
from workbench.batching.microbatcher import Batch
from workbench.config import BatchingConfig
from workbench.errors import QueueFull, StreamClosed

J2, J3, P0, P1 = ("joint", 2, False), ("joint", 3, False), ("predictor", 0), ("predictor", 1)


def make(cap: int, delay_us: int, depth: int) -> DecoderWaves[object]:
    return DecoderWaves(BatchingConfig(max_batch_size=cap, max_queue_delay_us=delay_us, max_queue_depth=depth))


def choose_plainly(
    waves: DecoderWaves[object], ops: list[tuple[Hashable, float]], now: float
) -> tuple[Hashable, str] | None:
    """Rules 1 to 4 word for word over a list of (key, arrival), without the bound on overtaking."""
    keys = list(dict.fromkeys(key for key, _ in ops))  # by age of the head
    size = {key: sum(k == key for k, _ in ops) for key in keys}
    if not ops:
        return None
    for key in keys:
        if size[key] >= waves.cap:
            return key, "capacity"
    largest = max(keys, key=lambda key: size[key])  # the first of equals, so the older head
    if len(ops) + waves.in_flight >= waves.admitted:
        return largest, "ready"
    if waves.closed:
        return largest, "shutdown"
    if now >= ops[0][1] + waves.delay_s:
        return keys[0], "deadline" if waves.delay_s else "drain"
    return None


class Decoders(RuleBasedStateMachine):
    """Random decoders against the plain rules; every operation comes back once, to its own step."""

    @initialize(cap=st.integers(1, 4), delay_s=st.sampled_from([0, 1, 2]), depth=st.integers(1, 8))
    def start(self, cap: int, delay_s: int, depth: int) -> None:
        self.waves = make(cap, delay_s * 1_000_000, depth)
        self.depth, self.now, self.opened, self.overtaken = depth, 0.0, 0, 0
        self.barrier: dict[int, float] = {}
        self.awake: set[int] = set()
        self.queue: dict[int, tuple[Hashable, float]] = {}
        self.running: list[Batch[object]] = []
        self.accepted = self.dispatched = self.cancelled = 0

    def see_admissions(self) -> None:
        for step in self.waves.admit(self.now):
            assert isinstance(step, int)
            self.barrier.pop(step)
            self.awake.add(step)
        assert all(self.now < entered + self.waves.delay_s for entered in self.barrier.values()), (
            "the barrier outlasted its deadline"
        )

    @rule(by=st.integers(0, 2))
    def time_passes(self, by: int) -> None:
        self.now += by
        self.see_admissions()

    @rule(cohort=st.integers(0, 5))
    def enter(self, cohort: int) -> None:
        step, self.opened = self.opened, self.opened + 1
        is_open = len(self.barrier) + self.waves.admitted
        try:
            self.waves.enter(step, self.now, cohort)
        except QueueFull:
            assert is_open == self.depth
        except StreamClosed:
            assert self.waves.closed
        else:
            assert is_open < self.depth and not self.waves.closed
            self.barrier[step] = self.now
        self.see_admissions()
        assert len(self.barrier) < self.waves.cap or not self.barrier

    @precondition(lambda self: self.awake)
    @rule(data=st.data(), key=st.sampled_from([J2, J3, P0]))
    def enqueue(self, data: st.DataObject, key: OpKey) -> None:
        step = data.draw(st.sampled_from(sorted(self.awake)))
        self.waves.enqueue(step, step, key, self.now)
        self.awake.remove(step)
        self.queue[step] = (key, self.now)
        self.accepted += 1

    @rule()
    def poll(self) -> None:
        ops = list(self.queue.values())
        expected = choose_plainly(self.waves, ops, self.now)
        due = self.waves.next_deadline()
        overdue = bool(ops) and self.now >= ops[0][1] + self.waves.delay_s
        batch = self.waves.next_batch(self.now)
        if overdue and self.overtaken == MOST_OVERTAKES:
            expected = ops[0][0], "deadline"
        assert (batch and (batch.key, batch.reason)) == expected
        if batch is None:
            return
        assert due is not None and due <= self.now
        self.overtaken = self.overtaken + 1 if overdue and batch.key != ops[0][0] else 0
        members = [step for step, (key, _) in self.queue.items() if key == batch.key][: self.waves.cap]
        assert list(batch.items) == members
        for step in members:
            del self.queue[step]
        self.dispatched += len(members)
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.waves.finish(batch, self.now)
        self.awake.update(int(str(step)) for step in batch.items)

    @precondition(lambda self: self.awake or self.queue or self.barrier)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted({*self.awake, *self.queue, *self.barrier})))
        op = self.waves.leave(step)
        assert op == (step if step in self.queue else None)
        self.cancelled += step in self.queue
        self.awake.discard(step)
        self.queue.pop(step, None)
        self.barrier.pop(step, None)

    @rule()
    def close(self) -> None:
        self.waves.close(self.now)
        self.see_admissions()
        assert not self.barrier

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "waves"):
            return
        waves = self.waves
        stages = [metrics for name, metrics in waves.metrics.items() if name != "admission"]
        assert waves.queued == len(self.queue) and waves.waiting == len(self.barrier)
        assert waves.in_flight == sum(len(batch.items) for batch in self.running)
        assert sum(metrics.items for metrics in stages) == self.dispatched
        assert sum(metrics.cancelled_items for metrics in stages) == self.cancelled
        assert self.accepted == self.dispatched + self.cancelled + len(self.queue)
        for metrics in waves.metrics.values():
            assert metrics.batches == sum(metrics.reasons.values())
            assert metrics.items == sum(size * count for size, count in metrics.batch_sizes.items())
            assert max(metrics.batch_sizes, default=0) <= waves.cap


TestDecoders = Decoders.TestCase
TestDecoders.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.sampled_from([J2, J3, P0, P1]), max_size=5)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_every_step_completes_and_no_op_waits_for_a_timer_that_nobody_set(
    decoders: list[tuple[int, list[OpKey]]], cap: int, executors: int
) -> None:
    """A virtual runtime: steps enter at their times, run their rounds one after another on a few executors, and leave."""
    waves = make(cap, 2_000_000, 64)
    arrivals = sorted((float(at), step) for step, (at, _) in enumerate(decoders))
    rounds = {step: list(keys) for step, (_, keys) in enumerate(decoders)}
    flying: list[tuple[float, Batch[object]]] = []
    now, done = 0.0, []

    def go_on(step: int) -> None:
        if rounds[step]:
            waves.enqueue(step, step, rounds[step].pop(0), now)
        else:
            waves.leave(step)
            done.append(step)

    while len(done) < len(decoders):
        while arrivals and arrivals[0][0] <= now:
            waves.enter(arrivals.pop(0)[1], now)
        for step in waves.admit(now):
            go_on(int(str(step)))
        for finished in [batch for ends, batch in flying if ends <= now]:
            flying = [(ends, batch) for ends, batch in flying if batch is not finished]
            waves.finish(finished, now)
            for step in finished.items:
                go_on(int(str(step)))
        while len(flying) < executors and (batch := waves.next_batch(now)):
            flying.append((now + 1.0, batch))
        if len(done) == len(decoders):
            break
        times = [at for at, _ in arrivals[:1]] + [ends for ends, _ in flying]
        deadline = waves.next_deadline()
        if deadline is not None and (len(flying) < executors or waves.waiting):
            times.append(deadline)
        later = [at for at in times if at > now]
        assert later, "nothing will ever happen again"
        now = min(later)
    assert sorted(done) == list(range(len(decoders)))
    assert waves.admitted == waves.queued == waves.in_flight == waves.waiting == 0
