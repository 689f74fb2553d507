"""Progress on standard error: a bar in a terminal, nothing in a pipe.

with seconds_bar("paced", 20.0) as progress: run_paced(..., progress=progress)
with count_bar("costs") as progress: measure_costs(..., progress=progress)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def seconds_bar(title: str, seconds: float) -> Iterator[Callable[[float], None]]:
    """A bar over seconds of load; call it with the seconds reached."""
    with _bar(title, round(seconds, 1), "s") as bar:
        yield lambda reached: _to(bar, min(round(reached, 1), round(seconds, 1)))
        _to(bar, bar.total)


@contextmanager
def count_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar over counted work; call it with (done, total)."""
    with _bar(title, 0, "it") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            _to(bar, done)

        yield show


def _to(bar: tqdm, value: float) -> None:
    bar.update(value - bar.n)


def _bar(title: str, total: float, unit: str) -> tqdm:
    return tqdm(
        total=total,
        desc=title,
        unit=unit,
        file=sys.stderr,
        dynamic_ncols=True,
        disable=not sys.stderr.isatty(),
        leave=False,
    )
