"""The clock as a value: two functions that a runtime owns and that tests and the digital twin replace.

Pure code takes the time as an argument; only a runtime loop and the load generator hold a `Clock`. Seconds are floats on a
monotonic scale with an arbitrary origin, never wall-clock time.

    clock = ManualClock()
    clock.sleep_until(1.5)      # returns at once; clock.now() == 1.5
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...

    def sleep_until(self, when_s: float) -> None:
        """Return once `now() >= when_s`."""
        ...


class MonotonicClock:
    """Real time by `time.perf_counter`."""

    def now(self) -> float:
        """Return the current time in seconds."""
        return time.perf_counter()

    def sleep_until(self, when_s: float) -> None:
        """Sleep until `when_s`; returns at once when that has passed."""
        while (left_s := when_s - time.perf_counter()) > 0:
            time.sleep(left_s)


class ManualClock:
    """A clock that moves only when told to; `sleep_until` jumps forward and never back."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the current virtual time in seconds."""
        return self._now_s

    def sleep_until(self, when_s: float) -> None:
        """Move to `when_s` unless that lies in the past."""
        self._now_s = max(self._now_s, when_s)
