"""Bounds on a mean of few runs: a limit is kept only if the upper bound keeps it, so that luck with one run is not taken for safety.

    upper_bound([98.0, 101.0, 99.5])      # 101.9: the mean of many such runs lies below it with 95 % confidence

One-sided, from Student's distribution; runs must be independent, which is why every repeat has its own traffic. One run has no bound: its
value is taken as it is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
# One-sided 95 % quantiles of Student's distribution for 1, 2, … degrees of freedom (Student, Biometrika 1908; any table of it).
_STUDENT_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
_NORMAL_95 = 1.645


def student_95(degrees: int) -> float:
    """The one-sided 95 % quantile for `degrees` >= 1; beyond the table by Fisher's expansion, within 0.1 %."""
    if degrees <= len(_STUDENT_95):
        return _STUDENT_95[degrees - 1]
    return _NORMAL_95 + (_NORMAL_95**3 + _NORMAL_95) / (4 * degrees)


def margin(values: Sequence[float]) -> float:
    """How far the bound lies from the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return student_95(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


def upper_bound(values: Sequence[float]) -> float:
    """The mean of many such runs lies below this with 95 % confidence."""
    return statistics.fmean(values) + margin(values)


def lower_bound(values: Sequence[float]) -> float:
    """The mean of many such runs lies above this with 95 % confidence."""
    return statistics.fmean(values) - margin(values)
