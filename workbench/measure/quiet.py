"""How busy the rest of the machine is: a measurement beside other programs says more about them.

    meter = OtherLoad();  ...;  meter.cores()        # cores that other programs used meanwhile, None where the system does not tell
    wait_until_quiet(most_cores=0.2, timeout_s=120)

Processor time of the whole machine (/proc/stat) less that of this process and its finished children, over the time on the clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LOOK_S = 2.0


class OtherLoad:
    """A meter that starts when it is made."""

    def __init__(self) -> None:
        self._start_s, self._machine_s, self._own_s = time.perf_counter(), _machine_s(), _own_s()

    def cores(self) -> float | None:
        """Cores used by other programs since the start."""
        now_s = _machine_s()
        if now_s is None or self._machine_s is None:
            return None
        used_s = (now_s - self._machine_s) - (_own_s() - self._own_s)
        return max(0.0, used_s / (time.perf_counter() - self._start_s))


def wait_until_quiet(most_cores: float, timeout_s: float) -> bool:
    """Wait until other programs use at most `most_cores` for two seconds; False if that did not happen in time."""
    stop_s = time.perf_counter() + timeout_s
    while True:
        meter = OtherLoad()
        time.sleep(_LOOK_S)
        cores = meter.cores()
        if cores is None or cores <= most_cores:
            return True
        if time.perf_counter() > stop_s:
            return False


def _machine_s() -> float | None:
    """Busy seconds of all cores since boot: all columns but idle and waiting for disks."""
    if not _STAT.exists():
        return None
    columns = [int(text) for text in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(columns) - columns[3] - columns[4]) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])
