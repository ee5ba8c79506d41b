"""When sessions begin in an open loop. Pure: all chance comes from the generator that is handed in.

Gaps between arrivals have mean 1 / rate in every process and are gamma distributed with shape k ("burstiness"): k = 1
is Poisson's process (exponential gaps), k < 1 is burstier, k without bound is a fixed interval. The gaps' coefficient
of variation is 1 / sqrt(k).
"""

from __future__ import annotations

import random
from typing import Literal

Process = Literal["poisson", "gamma", "fixed"]


def times(process: Process, rate_per_s: float, burstiness: float, count: int, rng: random.Random) -> list[float]:
    """`count` ascending times in seconds. `burstiness` is used by gamma only."""
    match process:
        case "poisson":
            return poisson_times(rate_per_s, count, rng)
        case "gamma":
            return gamma_times(rate_per_s, burstiness, count, rng)
        case "fixed":
            return fixed_times(rate_per_s, count)


def poisson_times(rate_per_s: float, count: int, rng: random.Random) -> list[float]:
    """The first arrival is one gap after 0."""
    return _sums([rng.expovariate(rate_per_s) for _ in range(count)])


def gamma_times(rate_per_s: float, burstiness: float, count: int, rng: random.Random) -> list[float]:
    """Gaps with shape `burstiness` and scale 1 / (rate * burstiness)."""
    scale_s = 1 / (rate_per_s * burstiness)
    return _sums([rng.gammavariate(burstiness, scale_s) for _ in range(count)])


def fixed_times(rate_per_s: float, count: int) -> list[float]:
    """0, 1 / rate, 2 / rate, ..."""
    return [index / rate_per_s for index in range(count)]


def _sums(gaps_s: list[float]) -> list[float]:
    at_s = 0.0
    return [at_s := at_s + gap_s for gap_s in gaps_s]
