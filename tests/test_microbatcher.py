"""The micro-batcher: every release rule by a table, and bounds on waiting and memory."""

from __future__ import annotations

import ast
import weakref
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench.batching
from workbench.batching.microbatcher import Batch, MicroBatcher
from workbench.config import BatchingConfig
from workbench.errors import ConfigError, QueueFull, StreamClosed


def make(cap: int = 4, delay_s: float = 5.0, depth: int = 64) -> MicroBatcher[object]:
    return MicroBatcher(max_batch_size=cap, max_queue_delay_s=delay_s, max_queue_depth=depth)


# Each case: submits as (time, key, cohort), the time of the poll, and what leaves as (items, reason); None for nothing.
RELEASES = {
    "nothing queued": ([], 9.0, None),
    "alone before its deadline": ([(0, "a", 0)], 4.999, None),
    "alone at its deadline": ([(0, "a", 0)], 5.0, ([0], "deadline")),
    "two at the first one's deadline": ([(0, "a", 0), (4, "a", 0)], 5.0, ([0, 1], "deadline")),
    "full": ([(0, "a", 0)] * 4, 0.0, ([0, 1, 2, 3], "capacity")),
    "more than full": ([(0, "a", 0)] * 6, 0.0, ([0, 1, 2, 3], "capacity")),
    "cohort incomplete": ([(0, "a", 3)] * 2, 1.0, None),
    "cohort complete": ([(0, "a", 3)] * 3, 1.0, ([0, 1, 2], "cohort")),
    "cohort of one never waits": ([(0, "a", 1)], 0.0, ([0], "cohort")),
    "extra compatible items ride along": ([(0, "a", 2)] * 3, 0.0, ([0, 1, 2], "cohort")),
    "extra items only up to the cap": ([(0, "a", 2)] * 5, 0.0, ([0, 1, 2, 3], "capacity")),
    "cohort above the cap waits for the cap": ([(0, "a", 9)] * 4, 0.0, ([0, 1, 2, 3], "capacity")),
    "the oldest item's cohort decides": ([(0, "a", 3), (0, "a", 1)], 0.0, None),
    "cohorts of other keys do not count": ([(0, "a", 2), (0, "b", 2)], 0.0, None),
    "another key is not held behind the head": ([(0, "a", 0), (1, "b", 2), (1, "b", 2)], 1.0, ([1, 2], "cohort")),
    "a full key passes a younger cohort": ([(0, "a", 0)] * 4 + [(1, "b", 1)], 1.0, ([0, 1, 2, 3], "capacity")),
    "of two complete keys the older head": ([(0, "b", 1), (0, "a", 1)], 0.0, ([0], "cohort")),
    "an overdue head goes before a full key": ([(0, "a", 0)] + [(1, "b", 0)] * 4, 5.0, ([0], "deadline")),
    "an item of its own key completes an old cohort": (
        [(0, "a", 2), (1, "b", 0), (2, "a", 0)],
        2.0,
        ([0, 2], "cohort"),
    ),
}


@pytest.mark.parametrize("case", RELEASES)
def test_release_rules(case: str) -> None:
    submits, poll_at, expected = RELEASES[case]
    batcher = make()
    for number, (when, key, cohort) in enumerate(submits):
        batcher.submit(number, key, when, cohort)
    batch = batcher.next_batch(poll_at)
    assert (batch and (list(batch.items), batch.reason)) == expected


def test_delay_zero_takes_whatever_is_queued() -> None:
    batcher = make(delay_s=0.0)
    assert batcher.next_batch(0.0) is None
    for number in range(3):
        batcher.submit(number, "a", 1.0)
    batch = batcher.next_batch(1.0)
    assert batch is not None and batch.items == (0, 1, 2) and batch.reason == "drain"


def test_a_busy_worker_finds_everything_that_gathered() -> None:
    batcher = make(cap=8)
    for number in range(5):
        batcher.submit(number, "a", float(number))
    batch = batcher.next_batch(30.0)
    assert batch is not None and batch.waited_s == (30.0, 29.0, 28.0, 27.0, 26.0) and batch.formed_at == 30.0


def test_batch_counts_what_was_queued() -> None:
    batcher = make(cap=2)
    for key in "aaabb":
        batcher.submit(key, key, 0.0)
    batch = batcher.next_batch(0.0)
    assert batch == Batch(("a", "a"), "a", "capacity", 0.0, (0.0, 0.0), compatible=3, ready=5)


def test_close_releases_at_once_and_refuses_new_work() -> None:
    batcher = make()
    for number, key in enumerate("aba"):
        batcher.submit(number, key, 0.0)
    batcher.close(1.0)
    with pytest.raises(StreamClosed):
        batcher.submit(9, "a", 1.0)
    batches = [batcher.next_batch(1.0) for _ in range(3)]
    assert [(b.items, b.reason) for b in batches if b] == [((0, 2), "shutdown"), ((1,), "shutdown")]
    assert batcher.queued == 0 and batcher.next_deadline() is None


def test_queue_full_exactly_at_the_depth_and_not_after_a_release() -> None:
    batcher = make(cap=2, depth=3)
    for number in range(3):
        batcher.submit(number, number, 0.0)
    with pytest.raises(QueueFull, match="3 items queued; allowed is 3"):
        batcher.submit(3, 0, 0.0)
    assert batcher.metrics.rejected_items == 1
    assert batcher.next_batch(5.0) is not None
    batcher.submit(4, 0, 5.0)
    assert batcher.queued == 3


def test_items_in_execution_are_not_queued() -> None:
    batcher = make(cap=2, depth=2)
    for number in range(2):
        batcher.submit(number, "a", 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None and (batcher.queued, batcher.in_flight) == (0, 2)
    batcher.submit(2, "a", 0.0)
    batcher.finish(batch, 0.25)
    assert batcher.in_flight == 0
    assert batcher.metrics.snapshot()["execution_max_ms"] == 250.0


def test_depth_below_the_batch_size_limits_the_batch() -> None:
    # Otherwise a full queue would wait for items that it cannot accept.
    batcher = make(cap=8, depth=3)
    for number in range(3):
        batcher.submit(number, "a", 0.0)
    batch = batcher.next_batch(0.0)
    assert batch is not None and batch.reason == "capacity"


def test_a_key_may_have_a_lower_cap() -> None:
    batcher: MicroBatcher[int] = MicroBatcher(
        max_batch_size=8, max_queue_delay_s=5.0, max_queue_depth=64, cap_for=lambda frames: 400 // int(str(frames))
    )
    for number in range(6):
        batcher.submit(number, 100, 0.0)
        batcher.submit(number, 1000, 0.0)
    sizes = []
    while batch := batcher.next_batch(9.0):
        sizes.append((batch.key, len(batch.items)))
    assert sorted(sizes) == [(100, 2), (100, 4), *[(1000, 1)] * 6]  # 400 frames a batch, and never less than one item


def test_cancel_only_while_queued() -> None:
    batcher = make()
    first, second = batcher.submit(0, "a", 0.0), batcher.submit(1, "a", 1.0)
    assert batcher.cancel(first) and not batcher.cancel(first)
    assert batcher.next_deadline() == 6.0
    batch = batcher.next_batch(6.0)
    assert batch is not None and batch.items == (1,)
    assert not batcher.cancel(second)
    batcher.submit(2, "a", 7.0)
    assert not batcher.cancel(second) and not batcher.cancel(first) and batcher.queued == 1
    assert not make().cancel(second)
    assert batcher.metrics.cancelled_items == 1


def test_cancelling_below_the_target_takes_the_release_back() -> None:
    batcher = make()
    batcher.submit(0, "a", 0.0, cohort=2)
    late = batcher.submit(1, "a", 0.0, cohort=2)
    batcher.cancel(late)
    assert batcher.next_batch(0.0) is None and batcher.next_deadline() == 5.0


def test_readings_of_the_clock_out_of_order() -> None:
    # Two threads read the clock, then take the lock in the other order: the queue's order stands and no wait is negative.
    batcher = make(cap=2)
    batcher.submit("second reading", "a", 1.001)
    batcher.submit("first reading", "a", 1.0)
    batch = batcher.next_batch(1.0005)
    assert batch is not None and batch.items == ("second reading", "first reading") and min(batch.waited_s) >= 0


@pytest.mark.parametrize(
    "wrong", [{"cap": 0}, {"depth": 0}, {"delay_s": -1.0}, {"delay_s": float("nan")}, {"delay_s": float("inf")}]
)
def test_options_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        make(**wrong)  # type: ignore[arg-type]


def test_from_config_takes_the_lower_cap() -> None:
    config = BatchingConfig(max_batch_size=32, max_queue_delay_us=2500, max_queue_depth=100)
    batcher = MicroBatcher[int].from_config(config)
    assert (batcher.cap, batcher.max_queue_delay_s, batcher.max_queue_depth) == (32, 0.0025, 100)
    assert MicroBatcher[int].from_config(config, cap=8).cap == 8


ARRIVALS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(0, 4)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(ARRIVALS, st.integers(1, 5), st.integers(0, 6), st.integers(0, 7))
def test_nobody_waits_past_its_deadline_while_the_worker_is_free(
    arrivals: list[tuple[int, str, int]], cap: int, delay: int, run_s: int
) -> None:
    """One worker that takes `run_s` per batch: a batch leaves at its head's deadline, or when the worker came free after that."""
    batcher = make(cap, float(delay), 1000)
    now, pending = 0.0, []
    for gap, key, cohort in arrivals:
        now += gap
        pending.append((now, key, cohort))
    free_at, seen = 0.0, []
    while pending or batcher.queued:
        deadline = batcher.next_deadline()
        wake = max(free_at, deadline) if deadline is not None else float("inf")
        if pending and pending[0][0] <= wake:
            when, key, cohort = pending.pop(0)
            batcher.submit((when, key), key, when, cohort)
            continue
        batch = batcher.next_batch(wake)
        assert batch is not None, "the announced deadline released nothing"
        assert wake <= max(free_at, batch.items[0][0] + delay)  # type: ignore[index]
        free_at = wake + run_s
        seen += list(batch.items)
        assert {key for _, key in batch.items} == {batch.key}  # type: ignore[misc]
    for key in "abc":
        times = [when for when, k in seen if k == key]  # type: ignore[misc]
        assert times == sorted(times), "order kept per key"
    assert len(seen) == len(arrivals)


def test_a_steady_stream_of_full_batches_does_not_starve_a_lone_key() -> None:
    batcher = make(cap=2, depth=1000)
    batcher.submit("lone", "rare", 0.0)
    for tick in range(1000):
        now = tick * 0.01
        for _ in range(4):  # twice what the worker takes
            if batcher.queued < 900:
                batcher.submit("busy", "common", now)
        batch = batcher.next_batch(now)
        if batch is not None and batch.key == "rare":
            assert now == pytest.approx(5.0)
            return
    raise AssertionError("the lone key never left")


class Key:
    """A hashable key that can be weakly referenced."""


def test_idle_keys_are_forgotten() -> None:
    batcher = make()
    released, cancelled = Key(), Key()
    watched = [weakref.ref(released), weakref.ref(cancelled)]
    batcher.submit("x", released, 0.0, cohort=1)
    batcher.cancel(batcher.submit("x", cancelled, 0.0))
    assert batcher.next_batch(0.0) is not None
    del released, cancelled
    assert [ref() for ref in watched] == [None, None]


def test_memory_is_bounded_while_an_old_head_waits() -> None:
    batcher = make(cap=8, delay_s=1e6)
    batcher.submit("old", "rare", 0.0)
    for number in range(3000):
        batcher.cancel(batcher.submit("withdrawn", "rare", 0.0))
        batcher.submit("passing by", number, 0.0, cohort=1)
        assert batcher.next_batch(0.0) is not None
    assert max(len(batcher._by_age), len(batcher._complete), len(batcher._queues["rare"].tickets)) < 200
    assert len(batcher._queues) == 1


def test_memory_is_bounded_while_a_cohort_comes_and_goes() -> None:
    batcher = make(cap=8, delay_s=1e6)
    batcher.submit("complete, and the worker is busy", "first", 0.0, cohort=1)
    batcher.submit("head", "pair", 0.0, cohort=2)
    for _ in range(3000):
        batcher.cancel(batcher.submit("second", "pair", 0.0))
    assert max(len(batcher._by_age), len(batcher._complete), len(batcher._queues["pair"].tickets)) < 200


def test_the_core_has_no_clock_no_threads_and_no_torch() -> None:
    for path in Path(workbench.batching.__file__).parent.glob("*.py"):
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        }
        assert not imported & {"time", "datetime", "threading", "asyncio", "torch", "nemo", "random"}, path.name
