"""Decoder scheduling with a hand-moved clock: admission, and the four dispatch rules in order."""

from __future__ import annotations

import pytest

from workbench.batching.decoder_waves import MOST_OVERTAKES, DecoderWaves
from workbench.config import BatchingConfig
from workbench.errors import QueueFull, StreamClosed

DELAY_S = 0.005


def make(cap: int = 4, delay_us: int = 5000, depth: int = 64) -> DecoderWaves[object]:
    return DecoderWaves(BatchingConfig(max_batch_size=cap, max_queue_delay_us=delay_us, max_queue_depth=depth))


def running(steps: int, cap: int = 4) -> DecoderWaves[object]:
    """A scheduler with admitted steps 0, 1, …"""
    waves = make(cap)
    for step in range(steps):
        waves.enter(step, 0.0, cohort=1)
    assert waves.admit(0.0) == tuple(range(steps))
    return waves


# Admission: entries as (time, cohort), the time of the look, and which are admitted by then.
ADMISSIONS = {
    "alone until the deadline": ([(0, 0)], 0.0049, []),
    "alone at the deadline": ([(0, 0)], 0.005, [0]),
    "one shared deadline": ([(0, 0), (0.004, 0)], 0.005, [0, 1]),
    "cohort complete": ([(0, 2), (0.001, 2)], 0.001, [0, 1]),
    "cohort incomplete": ([(0, 3), (0.001, 3)], 0.001, []),
    "a later cohort lowers the target": ([(0, 3), (0.001, 2)], 0.001, [0, 1]),
    "a later cohort does not raise it": ([(0, 2), (0.001, 3)], 0.001, [0, 1]),
    "an unknown cohort does not raise it": ([(0, 2), (0.001, 0)], 0.001, [0, 1]),
    "cohort of one passes the barrier alone": ([(0, 0), (0.001, 1)], 0.001, [1]),
    "a full wave": ([(0, 0)] * 4, 0.0, [0, 1, 2, 3]),
    "a cohort above the cap": ([(0, 9)] * 4, 0.0, [0, 1, 2, 3]),
    "the next wave has its own deadline": ([(0, 0), (0.006, 0)], 0.007, [0]),
}


@pytest.mark.parametrize("case", ADMISSIONS)
def test_admission(case: str) -> None:
    entries, look_at, admitted = ADMISSIONS[case]
    waves = make()
    for step, (when, cohort) in enumerate(entries):
        waves.enter(step, when, cohort)
    assert list(waves.admit(look_at)) == admitted
    assert waves.admit(look_at) == () and waves.admitted == len(admitted)
    assert waves.waiting == len(entries) - len(admitted)


@pytest.mark.parametrize("options", [{"delay_us": 0}, {"cap": 1}])
def test_no_barrier_without_a_delay_or_without_batches(options: dict[str, int]) -> None:
    waves = make(**options)
    waves.enter("a", 0.0)
    assert waves.admit(0.0) == ("a",)


J2, J3, P0, P1 = ("joint", 2, False), ("joint", 3, False), ("predictor", 0), ("predictor", 1)
# Dispatch: admitted steps, queued (key, time) in order by steps 0, 1, …, poll time, what leaves. The cap is 4.
DISPATCHES = {
    "some decoders are elsewhere": (3, [(J2, 0), (J2, 0)], 0.001, None),
    "1 capacity before everybody is ready": (9, [(P0, 0)] + [(J2, 0)] * 4, 0.001, (J2, 4, "capacity")),
    "1 of two full groups the older head": (9, [(P0, 0)] * 4 + [(J2, 0)] * 4, 0.001, (P0, 4, "capacity")),
    "1 the older head though the other group is larger": (
        12,
        [(P0, 0)] * 4 + [(J2, 0)] * 6,
        0.001,
        (P0, 4, "capacity"),
    ),
    "1 capacity before an overdue head": (9, [(P0, 0)] + [(J2, 1)] * 4, 1.0, (J2, 4, "capacity")),
    "2 everybody ready: the largest group": (4, [(P0, 0)] + [(J2, 0)] * 3, 0.001, (J2, 3, "ready")),
    "2 ties to the older head": (4, [(P0, 0), (J2, 0), (J2, 0), (P0, 0)], 0.001, (P0, 2, "ready")),
    "2 everybody ready before an overdue head": (4, [(P0, 0)] + [(J2, 0)] * 3, 1.0, (J2, 3, "ready")),
    "2 banks and frames never mix": (4, [(P0, 0), (P1, 0), (J2, 0), (J3, 0)], 0.001, (P0, 1, "ready")),
    "2 a lone decoder never waits": (1, [(J2, 0)], 0.0, (J2, 1, "ready")),
    "4 the oldest group at its deadline": (9, [(P0, 0)] + [(J2, 0.001)] * 3, 0.005, (P0, 1, "deadline")),
    "4 not before": (9, [(P0, 0)] + [(J2, 0.001)] * 3, 0.0049, None),
}


@pytest.mark.parametrize("case", DISPATCHES)
def test_dispatch(case: str) -> None:
    admitted, ops, poll_at, expected = DISPATCHES[case]
    waves = running(admitted)
    for step, (key, when) in enumerate(ops):
        waves.enqueue(step, f"op {step}", key, when)
    batch = waves.next_batch(poll_at)
    assert (batch and (batch.key, len(batch.items), batch.reason)) == expected
    if batch is not None:
        assert batch.items == tuple(f"op {step}" for step, (key, _) in enumerate(ops) if key == batch.key)[:4]
        assert (batch.compatible, batch.ready) == (sum(key == batch.key for key, _ in ops), len(ops))


def test_the_deadline_announces_what_comes_first() -> None:
    waves = running(2)
    assert waves.next_deadline() is None
    waves.enqueue(0, "x", J2, 1.0)
    assert waves.next_deadline() == 1.0 + DELAY_S
    waves.enter("later", 0.5)
    assert waves.next_deadline() == 0.5 + DELAY_S, "the barrier's deadline is earlier"
    waves.enqueue(1, "y", P0, 1.001)
    waves.leave("later")
    assert waves.next_deadline() == 1.0, "everybody is ready: at once"


def test_rule_3_shutdown_releases_the_largest_group() -> None:
    waves = running(9)
    for step, key in enumerate([P0, J2, J2]):
        waves.enqueue(step, step, key, 0.0)
    assert waves.next_batch(0.0) is None
    waves.close(0.0)
    batches = [waves.next_batch(0.0), waves.next_batch(0.0)]
    assert [(b.items, b.reason) for b in batches if b] == [((1, 2), "shutdown"), ((0,), "shutdown")]


def test_delay_zero_takes_the_oldest_group() -> None:
    waves = make(delay_us=0)
    for step in range(4):
        waves.enter(step, 0.0)
    for step, key in enumerate([P0, J2, J2]):
        waves.enqueue(step, step, key, 0.0)
    batch = waves.next_batch(0.0)
    assert batch is not None and (batch.key, batch.reason) == (P0, "drain")


def test_operations_in_flight_count_as_ready() -> None:
    waves = running(4)
    for step in range(3):
        waves.enqueue(step, step, J2, 0.0)
    waves.enqueue(3, 3, P0, 0.0)
    first, second = waves.next_batch(0.0), waves.next_batch(0.0)
    assert first is not None and second is not None
    assert (first.key, second.key, second.reason, waves.in_flight) == (J2, P0, "ready", 4)
    waves.finish(first, 0.002)
    assert waves.in_flight == 1 and waves.metrics["joint"].snapshot()["execution_max_ms"] == 2.0
    waves.enqueue(0, 0, P0, 0.002)
    assert waves.next_batch(0.002) is None, "steps 1 and 2 are awake and have not queued yet"
    waves.leave(1)
    waves.enqueue(2, 2, J2, 0.003)
    batch = waves.next_batch(0.003)
    assert batch is not None and (batch.items, batch.reason) == ((0,), "ready")


def test_later_rounds_of_a_step_never_wait() -> None:
    waves = make()
    for step in range(2):
        waves.enter(step, 0.0, cohort=2)
    assert waves.admit(0.0) == (0, 1)
    for round_ in range(20):
        for step in range(2):
            waves.enqueue(step, step, P0 if round_ % 2 else J2, 0.0)
        batch = waves.next_batch(0.0)
        assert batch is not None and len(batch.items) == 2 and batch.waited_s == (0.0, 0.0)
        waves.finish(batch, 0.0)


def test_leaving_releases_the_others() -> None:
    waves = running(3)
    waves.enqueue(0, "x", J2, 0.0)
    waves.enqueue(1, "y", J2, 0.0)
    assert waves.next_batch(0.0) is None
    assert waves.leave(2) is None
    assert waves.leave(1) == "y", "a cancelled stream takes its queued operation along"
    batch = waves.next_batch(0.0)
    assert batch is not None and batch.items == ("x",)
    assert waves.metrics["joint"].cancelled_items == 1


def test_leaving_with_an_operation_in_flight() -> None:
    waves = running(2)
    waves.enqueue(0, "cancelled in flight", J2, 0.0)
    waves.enqueue(1, "x", P0, 0.0)
    batch = waves.next_batch(0.0)
    assert batch is not None and batch.items == ("cancelled in flight",)
    assert waves.leave(0) is None and (waves.admitted, waves.in_flight) == (1, 1)
    waves.enter(0, 0.0, cohort=1)
    waves.finish(batch, 0.001)
    assert waves.in_flight == 0 and waves.admitted == 2
    assert waves.next_batch(0.001) is None, "the step that came back is not queued yet"


def test_leaving_the_barrier() -> None:
    waves = make()
    waves.enter("a", 0.0, cohort=2)
    waves.leave("a")
    assert waves.next_deadline() is None and waves.admit(1.0) == ()
    waves.enter("b", 1.0)
    waves.leave("never entered")
    assert waves.next_deadline() == 1.0 + DELAY_S
    waves.enter("c", 1.0, cohort=1)
    waves.leave("c")
    assert waves.admit(1.0) == (), "who left is not announced"


def test_the_depth_bounds_open_steps_so_accepted_ones_can_always_queue() -> None:
    waves = make(depth=3)
    for step in range(3):
        waves.enter(step, 0.0, cohort=1 if step == 1 else 0)
    assert (waves.waiting, waves.admitted) == (2, 1)
    with pytest.raises(QueueFull, match="3 steps are open; allowed is 3"):
        waves.enter(3, 0.0)
    assert waves.metrics["admission"].rejected_items == 1
    waves.leave(0)
    waves.enter(3, 0.0)


def test_after_close_accepted_steps_complete_and_new_ones_are_refused() -> None:
    waves = make()
    waves.enter("at the barrier", 0.0)
    waves.close(0.001)
    assert waves.admit(0.001) == ("at the barrier",)
    with pytest.raises(StreamClosed):
        waves.enter("new", 0.002)
    for _ in range(3):
        waves.enqueue("at the barrier", "op", J2, 0.002)
        batch = waves.next_batch(0.002)
        assert batch is not None
        waves.finish(batch, 0.002)


def test_misuse_is_an_error() -> None:
    waves = running(1)
    waves.enter("waiting", 0.0)
    with pytest.raises(ValueError, match="already open"):
        waves.enter(0, 0.0)
    with pytest.raises(StreamClosed, match="not admitted"):
        waves.enqueue("waiting", "op", J2, 0.0)
    waves.enqueue(0, "op", J2, 0.0)
    with pytest.raises(ValueError, match="already has an operation"):
        waves.enqueue(0, "op", J2, 0.0)
    waves.leave(0)
    with pytest.raises(StreamClosed):
        waves.enqueue(0, "op", J2, 0.0)


def test_a_small_group_is_passed_over_a_bounded_number_of_times() -> None:
    """Two decoders that always find each other would starve a third on rule 2 for ever."""
    waves = running(3)
    waves.enqueue(2, "small", P0, 0.0)
    for round_ in range(100):
        now = 1.0 + round_
        for step in range(2):
            waves.enqueue(step, "large", J2, now)
        batch = waves.next_batch(now)
        assert batch is not None
        waves.finish(batch, now)
        if batch.items == ("small",):
            assert (round_, batch.reason) == (MOST_OVERTAKES, "deadline")
            break
    else:
        raise AssertionError("the small group never left")
    batch = waves.next_batch(now)
    assert batch is None or batch.key == J2
