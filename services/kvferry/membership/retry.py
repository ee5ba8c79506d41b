"""Pauses between attempts to reach the registry."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Doubling, random pauses, so that clients spread over time."""

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, num_failures: int, rng: random.Random) -> float:
        ceiling_s: float = min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 30))
        return ceiling_s * rng.uniform(0.5, 1.0)


DEFAULT_RETRY = RetryPolicy()
