"""The wait of a new prompt in a worker's fair queue."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

#     finish = own backlog + this prompt's ms, divided by the weight
#     wait   = own backlog + sum over other tenants of min(backlog, weight x finish)
#
# The other tenants are served meanwhile as long as they have work, each at its weight; the queue's length says little.

# Backlogs divided by weights, in ms: below and above these powers of two all are counted together.
_MIN_EXPONENT = -4
_MAX_EXPONENT = 32


def fair_wait_ms(own_ms: float, prompt_ms: float, weight: float, others: Iterable[tuple[float, float]]) -> float:
    """`others` has (backlog in ms, weight) of the other tenants."""
    finish = (own_ms + prompt_ms) / weight
    return own_ms + sum(min(backlog_ms, other_weight * finish) for backlog_ms, other_weight in others)


class BacklogCurve:
    """Sums of backlogs and weights by powers of two of backlog / weight."""

    __slots__ = ("_buckets",)

    def __init__(self, buckets: Mapping[int, tuple[float, float]] | None = None) -> None:
        self._buckets = dict(buckets or {})  # exponent -> (ms, weight)

    @classmethod
    def of(cls, backlogs: Iterable[tuple[float, float]]) -> BacklogCurve:
        curve = cls()
        for backlog_ms, weight in backlogs:
            curve.add(backlog_ms, weight)
        return curve

    @property
    def buckets(self) -> Mapping[int, tuple[float, float]]:
        return self._buckets

    def add(self, backlog_ms: float, weight: float) -> None:
        if backlog_ms <= 0:
            return
        exponent = _exponent(backlog_ms / weight)
        ms, weights = self._buckets.get(exponent, (0.0, 0.0))
        self._buckets[exponent] = (ms + backlog_ms, weights + weight)

    def wait_ms(self, own_ms: float, prompt_ms: float, weight: float) -> float:
        """Return the wait or up to 21 % more; `own_ms` are in the curve."""
        finish = (own_ms + prompt_ms) / weight
        own_exponent = _exponent(own_ms / weight) if own_ms > 0 else None
        wait_ms = own_ms
        for exponent, (ms, weights) in self._buckets.items():
            if exponent == own_exponent:
                ms, weights = max(0.0, ms - own_ms), max(0.0, weights - weight)
            # A minimum of sums is at least the sum of minima. Both differ in the bucket of `finish` alone, by a factor
            # of at most (1 + sqrt 2) / 2: backlog / weight differs by at most 2 within a bucket.
            wait_ms += min(ms, weights * finish)
        return wait_ms


def _exponent(ratio: float) -> int:
    return min(max(math.frexp(ratio)[1], _MIN_EXPONENT), _MAX_EXPONENT)
