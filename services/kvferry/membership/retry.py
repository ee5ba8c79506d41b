"""Pauses between attempts to reach the registry."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses between attempts: doubling, and random, so that not everyone meets a returning etcd at once."""

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, num_failures: int, rng: random.Random) -> float:
        """The pause after this many failures in a row, at least 1."""
        ceiling_s: float = min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 30))
        return ceiling_s * rng.uniform(0.5, 1.0)


DEFAULT_RETRY = RetryPolicy()
