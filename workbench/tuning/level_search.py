"""The most streams that one configuration carries, by one real run at a time: down to a level that is kept, or up from it, then between the two.

    search = LevelSearch(256)
    search.ran("lagged", share=0.7)     # the run at search.level, 256 streams; the next is at 0.7 of them
    search.ran("kept")                  # that one, at 179
    search.carried, search.ceiling, search.level     # 179, 256 and, of the next run, 214: their geometric mean

A level is carried if all its runs kept every limit; where one that was kept breaks a limit when it runs again, the highest below it that was kept
counts. A run in which the load generator lagged, or that the device refused for want of memory, bounds the search as one that broke a limit does,
but takes nothing from a level that was kept. Pure: no clock, no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["kept", "broke", "lagged", "refused"]

# The search ends where the ceiling is no more than this many times what is carried; where no ceiling is known it goes up by STEP_UP.
RESOLUTION, STEP_UP = 1.1, 1.5
# Runs of a single stream that were not kept, after which there is no level left.
_TRIES_AT_ONE = 2


def carried_level(runs: Iterable[tuple[int, bool]]) -> int:
    """Of levels and whether a run there kept every limit, the highest level that was kept, below any that was not; 0 if there is none."""
    found = list(runs)
    broken = min((level for level, kept in found if not kept), default=math.inf)
    return max((level for level, kept in found if kept and level < broken), default=0)


@dataclass
class LevelSearch:
    """level: of the next run; most: of any; runs: every level that ran, and what the run was."""

    level: int
    most: int = 100_000
    runs: list[tuple[int, Verdict]] = field(default_factory=list)

    def ran(self, verdict: Verdict, share: float = 1.0) -> None:
        """Tell what the run at `level` was. share: of its streams, what to go on with while no level is carried; one less at least."""
        self.runs.append((self.level, verdict))
        carried, ceiling = self.carried, self.ceiling
        if not carried:
            self.level = max(1, min(int(self.level * share), self.level - 1))
        elif self.closed:
            self.level = carried
        elif ceiling is None:
            self.level = min(self.most, max(carried + 1, round(carried * STEP_UP)))
        else:
            self.level = min(ceiling - 1, max(carried + 1, round(math.sqrt(carried * ceiling))))

    @property
    def carried(self) -> int:
        """The level that is carried, as far as is known; 0 if there is none."""
        return carried_level((level, verdict == "kept") for level, verdict in self.runs if verdict in ("kept", "broke"))

    @property
    def ceiling(self) -> int | None:
        """The lowest level above it that was not kept, whatever the reason."""
        carried = self.carried
        return min((level for level, verdict in self.runs if verdict != "kept" and level > carried), default=None)

    @property
    def held(self) -> int | None:
        """The ceiling where it is the load generator's: the configuration itself may carry more."""
        ceiling = self.ceiling
        return ceiling if {verdict for level, verdict in self.runs if level == ceiling} == {"lagged"} else None

    @property
    def closed(self) -> bool:
        """Whether a further level would tell nothing more."""
        carried, ceiling = self.carried, self.ceiling
        if not carried:
            return sum(level == 1 and verdict != "kept" for level, verdict in self.runs) >= _TRIES_AT_ONE
        return carried >= self.most if ceiling is None else ceiling <= max(carried + 1, carried * RESOLUTION)
