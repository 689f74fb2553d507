"""Rows of a state arena: who owns which, and which must be zeroed before their next use.

    slots = SlotAllocator(rows=16)
    row = slots.acquire()            # the lowest free row; ArenaFull when every row is owned
    slots.take_dirty([row])          # ranges to zero before this batch runs, here []
    slots.release(row)               # the next owner finds the row in take_dirty

The allocator never touches a device: the arena zeroes the ranges that it is given. Zeroing is put off to the first batch that uses a row,
where the rows of many streams fall into few contiguous ranges, instead of being paid when a stream ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from workbench.errors import ArenaFull, ConfigError


class SlotAllocator:
    """`rows` rows, each owned by at most one stream. Fresh rows are clean: an arena is allocated zeroed."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise ConfigError(f"rows: got {rows}; allowed is 1 or more")
        self.rows = rows
        self.peak_in_use = 0
        self.refused = 0
        self._free = list(range(rows))
        self._owned: set[int] = set()
        self._dirty: set[int] = set()

    @property
    def in_use(self) -> int:
        """Rows that are owned now."""
        return len(self._owned)

    def acquire(self) -> int:
        """Own the lowest free row. Raises ArenaFull when there is none."""
        if not self._free:
            self.refused += 1
            raise ArenaFull(
                f"all {self.rows} state rows are taken (asr.batching.state_arena_slots); finish or cancel a stream first"
            )
        row = heapq.heappop(self._free)
        self._owned.add(row)
        self.peak_in_use = max(self.peak_in_use, len(self._owned))
        return row

    def release(self, row: int) -> None:
        """Give a row back; it is dirty until its next owner zeroes it. Raises ValueError for a row that is not owned."""
        self._check([row])
        self._owned.remove(row)
        self._dirty.add(row)
        heapq.heappush(self._free, row)

    def take_dirty(self, rows: Iterable[int]) -> list[tuple[int, int]]:
        """The fewest ranges [start, stop) that cover exactly the dirty ones of these owned rows; they count as clean from here on.

        Raises ValueError for a row that is not owned.
        """
        wanted = set(rows)
        self._check(wanted)
        dirty = sorted(wanted & self._dirty)
        self._dirty.difference_update(dirty)
        ranges: list[tuple[int, int]] = []
        for row in dirty:
            if ranges and ranges[-1][1] == row:
                ranges[-1] = (ranges[-1][0], row + 1)
            else:
                ranges.append((row, row + 1))
        return ranges

    def snapshot(self) -> dict[str, int]:
        """Use of the arena as plain data: rows, rows in use, the most that ever were, and refusals."""
        return {
            "arena_rows": self.rows,
            "arena_rows_in_use": self.in_use,
            "arena_rows_peak": self.peak_in_use,
            "arena_refusals": self.refused,
        }

    def _check(self, rows: Iterable[int]) -> None:
        strangers = sorted(set(rows) - self._owned)
        if strangers:
            raise ValueError(f"rows {strangers} are not owned; owned are {self.in_use} of {self.rows} rows")
