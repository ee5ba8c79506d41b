"""Latencies as HDR histograms (http://hdrhistogram.org): of bounded size whatever the count, and mergeable.

Averages of percentiles are no percentiles. Repeats of a run are therefore merged count by count, and only then asked.
"""

from __future__ import annotations

import binascii
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from hdrh.codec import HdrCookieException, HdrHistogramSettingsException, HdrLengthException
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.result import Distribution

HIGHEST_US = 3_600_000_000  # an hour; longer ones count as that long everywhere but in `mean` and `max`
SIGNIFICANT_DIGITS = 3

# Whatever HdrHistogram.decode meets in a string that is none.
_DECODING_ERRORS = (
    binascii.Error,
    HdrCookieException,
    HdrHistogramSettingsException,
    HdrLengthException,
    IndexError,
    MemoryError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


class Latencies:
    """Durations between 0 and an hour, counted at a resolution of 1 µs below 2 ms and of 0.1 % above.

    `mean` and `max` are exact as long as no histogram was decoded: the encoding keeps neither. `restored` adds both.
    """

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, HIGHEST_US, SIGNIFICANT_DIGITS)
        self._count = 0
        self._sum_s = 0.0
        self._max_s = 0.0

    def __repr__(self) -> str:
        return f"<Latencies count={self._count} sum={self._sum_s:.6f} s max={self._max_s:.6f} s>"

    def __len__(self) -> int:
        return self._count

    def add_s(self, seconds: float) -> None:
        """Clocks may disagree by a hair: a negative duration counts as none. Raises ValueError for nan and infinity."""
        if not math.isfinite(seconds):
            raise ValueError(f"a latency of {seconds} s")
        seconds = max(seconds, 0.0)
        self._histogram.record_value(min(round(seconds * 1e6), HIGHEST_US))
        self._count += 1
        self._sum_s += seconds
        self._max_s = max(self._max_s, seconds)

    def merge(self, other: Latencies) -> None:
        """Adds everything in `other`, which stays as it is."""
        if len(other) == 0:
            return
        self._histogram.add(other._histogram)
        self._count += other._count
        self._sum_s += other._sum_s
        self._max_s = max(self._max_s, other._max_s)

    @property
    def mean_ms(self) -> float:
        """0 when empty."""
        return self._sum_s / self._count * 1e3 if self._count else 0.0

    @property
    def max_ms(self) -> float:
        """0 when empty."""
        return self._max_s * 1e3

    def percentile_ms(self, percent: float) -> float:
        """The value of nearest rank, ceil(percent / 100 * count), within 0.05 % or 0.5 µs. 0 when empty."""
        return self.percentiles_ms([percent])[0]

    def percentiles_ms(self, percents: Sequence[float]) -> list[float]:
        """As `percentile_ms`, in one pass."""
        if not self._count:
            return [0.0] * len(percents)
        values_ms, cumulated = self._steps()
        ranks = [max(1, math.ceil(percent / 100 * self._count - 1e-9)) for percent in percents]
        places = np.minimum(np.searchsorted(cumulated, ranks), len(values_ms) - 1)
        return [min(float(values_ms[place]), self.max_ms) for place in places]

    def steps(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The cumulative distribution: values in ms, ascending, and the share (0..1] of all that is not above each."""
        values_ms, cumulated = self._steps()
        return np.minimum(values_ms, self.max_ms), cumulated / max(self._count, 1)

    def _steps(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        counts = np.frombuffer(self._histogram.counts, dtype=np.uint64).astype(np.int64)
        filled = np.flatnonzero(counts)
        lowest_us = np.array([self._histogram.get_value_from_index(int(index)) for index in filled], dtype=np.float64)
        highest_us = np.array(
            [self._histogram.get_highest_equivalent_value(int(value)) for value in lowest_us], dtype=np.float64
        )
        return (lowest_us + highest_us) / 2 / 1e3, np.cumsum(counts[filled])

    def distribution(self) -> Distribution:
        """In ms. An empty one is all zeros: whoever has measured nothing leaves it out instead."""
        p50, p90, p99, p999 = self.percentiles_ms([50, 90, 99, 99.9])
        return Distribution(
            count=self._count,
            mean=self.mean_ms,
            p50=p50,
            p90=p90,
            p99=p99,
            p999=p999,
            max=self.max_ms,
            histogram=self.encoded(),
        )

    def encoded(self) -> str:
        """HdrHistogram's V2 encoding, compressed, in base64; values are microseconds."""
        return bytes(self._histogram.encode()).decode("ascii")

    @classmethod
    def decode(cls, encoded: str) -> Latencies:
        """`mean` and `max` are then as exact as the histogram is. Raises ResultError when it is none of ours."""
        latencies = cls()
        try:
            histogram = HdrHistogram.decode(encoded.encode("ascii"))
            latencies._histogram.add(histogram)
        except _DECODING_ERRORS as error:
            raise ResultError(f"not a histogram: {type(error).__name__}") from None
        latencies._count = int(histogram.get_total_count())
        if latencies._count:
            values_ms, cumulated = latencies._steps()
            latencies._sum_s = float(values_ms @ np.diff(cumulated, prepend=0)) / 1e3
            latencies._max_s = float(values_ms[-1]) / 1e3
        return latencies

    @classmethod
    def restored(cls, distribution: Distribution) -> Latencies:
        """From what `distribution` returned, exact mean and maximum included. Raises ResultError as `decode` does."""
        latencies = cls.decode(distribution.histogram)
        latencies._sum_s = distribution.mean * latencies._count / 1e3
        latencies._max_s = distribution.max / 1e3
        return latencies
