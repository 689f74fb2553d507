"""State rows: never shared, lowest first, and zeroed in the fewest ranges before a used row's next use."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.batching.slots import SlotAllocator
from workbench.errors import ArenaFull, ConfigError


def used_and_free(rows: int) -> SlotAllocator:
    slots = SlotAllocator(rows)
    for row in [slots.acquire() for _ in range(rows)]:
        slots.release(row)
    return slots


def test_lowest_free_row_and_typed_exhaustion() -> None:
    slots = SlotAllocator(3)
    assert [slots.acquire() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ArenaFull, match="all 3 state rows"):
        slots.acquire()
    slots.release(2)
    slots.release(0)
    assert [slots.acquire(), slots.acquire()] == [0, 2]
    assert slots.snapshot() == {
        "arena_rows": 3,
        "arena_rows_in_use": 3,
        "arena_rows_peak": 3,
        "arena_refusals": 1,
    }


def test_fresh_rows_are_clean_and_used_rows_are_dirty_once() -> None:
    slots = SlotAllocator(2)
    row = slots.acquire()
    assert slots.take_dirty([row]) == []
    slots.release(row)
    assert slots.acquire() == row
    assert slots.take_dirty([row]) == [(0, 1)]
    assert slots.take_dirty([row]) == []


@pytest.mark.parametrize(
    ("batch", "ranges"),
    [
        ([], []),
        ([3], [(3, 4)]),
        ([1, 2, 3, 7], [(1, 4), (7, 8)]),
        ([7, 3, 1, 2], [(1, 4), (7, 8)]),
        ([2, 2, 2], [(2, 3)]),
        ([0, 2, 4], [(0, 1), (2, 3), (4, 5)]),
        (range(8), [(0, 8)]),
    ],
)
def test_ranges(batch: list[int], ranges: list[tuple[int, int]]) -> None:
    slots = used_and_free(8)
    for _ in range(8):
        slots.acquire()
    assert slots.take_dirty(batch) == ranges


def test_a_row_given_back_unused_stays_dirty() -> None:
    slots = used_and_free(1)
    slots.release(slots.acquire())  # its owner left before its first batch
    assert slots.take_dirty([slots.acquire()]) == [(0, 1)]


@pytest.mark.parametrize("row", [-1, 1, 5])
def test_rows_that_are_not_owned(row: int) -> None:
    slots = SlotAllocator(3)
    slots.acquire()
    for misuse in (lambda: slots.release(row), lambda: slots.take_dirty([0, row])):
        with pytest.raises(ValueError, match=f"rows \\[{row}\\] are not owned"):
            misuse()
    slots.release(0)
    with pytest.raises(ValueError, match="not owned"):
        slots.release(0)


def test_an_arena_has_rows() -> None:
    with pytest.raises(ConfigError, match="allowed is 1 or more"):
        SlotAllocator(0)


class Rows(RuleBasedStateMachine):
    """A toy arena holds the last owner's mark in each row; a new owner must find zeros, and nobody else's row may be touched."""

    @initialize(rows=st.integers(1, 9))
    def start(self, rows: int) -> None:
        self.slots = SlotAllocator(rows)
        self.marks = [0] * rows
        self.owned: dict[int, int] = {}
        self.used: set[int] = set()
        self.streams = 0

    @rule()
    def open_stream(self) -> None:
        try:
            row = self.slots.acquire()
        except ArenaFull:
            assert len(self.owned) == len(self.marks)
            return
        assert row not in self.owned and row == min(set(range(len(self.marks))) - set(self.owned))
        self.streams += 1
        self.owned[row] = self.streams
        self.used.discard(row)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def run_batch(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.owned)), min_size=1, unique=True))
        ranges = self.slots.take_dirty(rows)
        zeroed = [row for start, stop in ranges for row in range(start, stop)]
        assert zeroed == sorted(set(zeroed)) and set(zeroed) <= set(rows) - self.used
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges)), "ranges could merge"
        for row in zeroed:
            self.marks[row] = 0
        for row in rows:
            assert self.marks[row] == (self.owned[row] if row in self.used else 0), (
                "a stream saw another stream's state"
            )
            self.marks[row] = self.owned[row]
            self.used.add(row)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def end_stream(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.owned)))
        self.slots.release(row)
        del self.owned[row]

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "slots"):
            assert self.slots.in_use == len(self.owned) <= self.slots.peak_in_use <= len(self.marks)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
