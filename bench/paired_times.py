"""Whether requests that should take as long as others do: pairs of times, and Wilcoxon's signed-rank test of them."""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

_SWEPT_BYTES = 64 << 20  # more than a processor's caches have
_NUM_OF_OTHERS = 50  # contents; so few that they leave room in the libraries' caches

# Builds the request of a tenant with content of a number, always the same one, and returns what sends it.
Ask = Callable[[str, int], Coroutine[Any, Any, None]]


@dataclass
class Pairs:
    """Times in seconds, by pair: of content that was sent before, and of new content of the same shape."""

    sent: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    @property
    def p(self) -> float:
        return signed_rank_p([sent - new for sent, new in zip(self.sent, self.new, strict=True)])

    def figures(self) -> dict[str, float]:
        """Return medians in microseconds, and p."""
        gaps = [new - sent for sent, new in zip(self.sent, self.new, strict=True)]
        return {
            "sent_us": round(1e6 * median(self.sent), 1),
            "new_us": round(1e6 * median(self.new), 1),
            "gap_us": round(1e6 * median(gaps), 2),
            "p": float(f"{self.p:.2g}"),
        }


def signed_rank_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test: whether differences lie around zero.

    By the normal approximation, with corrections for ties and continuity (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 3.1). Zeros are left out. Raises ValueError for less than 20 other differences,
    for which the approximation is poor.
    """
    others = sorted((each for each in differences if each), key=abs)
    if len(others) < 20:
        raise ValueError(f"{len(others)} differences other than zero are too few")
    count, rank, positive, ties = len(others), 0, 0.0, 0.0
    for _, group in itertools.groupby(others, key=abs):
        equal = list(group)
        # All of them have the mean of their ranks.
        positive += (rank + (len(equal) + 1) / 2) * sum(each > 0 for each in equal)
        ties += len(equal) ** 3 - len(equal)
        rank += len(equal)
    mean = count * (count + 1) / 4
    deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 24 - ties / 48)
    distance = max(0.0, abs(positive - mean) - 0.5)
    return math.erfc(distance / deviation / math.sqrt(2))


class PairedTimes:
    """Measures pairs of requests. Contents are used for one pair."""

    def __init__(self, seed: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._random = random.Random(seed)
        self._clock_ns = clock_ns
        self._numbers = itertools.count(self._random.getrandbits(48) << 16)
        self._of_others = list(itertools.islice(self._numbers, _NUM_OF_OTHERS))
        self._swept = np.zeros(_SWEPT_BYTES, np.uint8)

    async def measure(self, ask: Ask, num_pairs: int, *, first: str, second: str, num_between: int) -> Pairs:
        """Let `first` send contents, and `second` both those and new ones, in random order. May be the same tenant.

        Before each of these, memory is written and `num_between` requests of a third one are sent: else the processor's
        own caches and branch predictors know the content of the last few requests.
        """
        pairs = Pairs()
        for _ in range(num_pairs):
            sent, new = next(self._numbers), next(self._numbers)
            await ask(first, sent)
            probes = [(pairs.sent, sent), (pairs.new, new)]
            self._random.shuffle(probes)
            for times, number in probes:
                self._swept += 1
                for number_of_others in self._random.choices(self._of_others, k=num_between):
                    await ask("others", number_of_others)
                times.append(await self._timed(ask(second, number)))
        return pairs

    async def _timed(self, request: Coroutine[Any, Any, None]) -> float:
        gc.disable()
        try:
            begun_ns = self._clock_ns()
            await request
            return (self._clock_ns() - begun_ns) / 1e9
        finally:
            gc.enable()
