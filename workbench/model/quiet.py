"""Silence for NeMo: its import, its constructors and its restores log dozens of lines that bury the user's output.

    with quiet_nemo():
        import nemo.collections.asr

Levels are raised to errors only and restored where they were; warnings of the dependencies are hidden for the duration.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LOUD = (
    "nemo_logger",
    "lhotse",
    "nv_one_logger",
    "pytorch_lightning",
    "lightning",
    "numba",
    "matplotlib",
    "torch.distributed",
)


@contextmanager
def quiet_nemo() -> Iterator[None]:
    """Hide everything below errors while NeMo is imported, constructed or restored."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            for name in _LOUD:
                logging.getLogger(name).setLevel(logging.ERROR)
            _nemo_level()
            yield
        finally:
            _nemo_level()
            logging.disable(before)


def _nemo_level() -> None:
    nemo_logging = sys.modules.get("nemo.utils")
    if nemo_logging is not None and hasattr(nemo_logging, "logging"):
        nemo_logging.logging.setLevel(logging.ERROR)
