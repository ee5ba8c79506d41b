"""Intervals of means and of shares. All intervals have 95 % confidence, two-sided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev

from kvferry.engine.quality_report import Interval

_CONFIDENCE = 0.95
_NORMAL = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
# Student's t at 97.5 %, by degrees of freedom from 1; beyond the table the expansion below is right to 0.0001.
_STUDENT = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Student's; endless for one value. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    if not all(map(math.isfinite, values)):
        return Interval(math.inf, math.inf, math.inf)
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def interval_of_share(num_hits: int, num_trials: int) -> Interval:
    """Wilson's. Raises ValueError without trials."""
    if num_trials < 1 or not 0 <= num_hits <= num_trials:
        raise ValueError(f"{num_hits} hits of {num_trials} trials")
    share, square = num_hits / num_trials, _NORMAL**2
    middle = (share + square / (2 * num_trials)) / (1 + square / num_trials)
    half = _NORMAL * math.sqrt(share * (1 - share) / num_trials + square / (4 * num_trials**2))
    half /= 1 + square / num_trials
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def _student(degrees: int) -> float:
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    # Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
