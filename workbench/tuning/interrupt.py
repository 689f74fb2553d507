"""Ctrl-C that lands only where nothing is left behind.

    with Interrupts() as interrupts:
        ...                              # a Ctrl-C here is kept
        with interrupts.welcome():       # and raised here, or as it comes inside
            evaluate(config)

Why: Optuna starts a heartbeat thread around every trial. A KeyboardInterrupt between that start and the body of its `with` leaves the thread
running, it is no daemon, and the process then never ends. So the signal is held back except while a trial is measured.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Holds SIGINT back outside `welcome`. Does nothing in other threads than the main one, where Python delivers no signals."""

    def __init__(self) -> None:
        self._welcome = False
        self._came = False
        self._before: Any = None

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was kept, if there is one."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    @contextmanager
    def welcome(self) -> Iterator[None]:
        """While inside, a Ctrl-C raises at once; one that was kept is raised on entry."""
        self._welcome = True
        try:
            self.check()
            yield
        finally:
            self._welcome = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if kind is None:
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._welcome:
            raise KeyboardInterrupt
        self._came = True
