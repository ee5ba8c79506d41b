from __future__ import annotations

import math

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.histogram import HIGHEST_US, Latencies


def of(seconds: list[float]) -> Latencies:
    latencies = Latencies()
    for value in seconds:
        latencies.add_s(value)
    return latencies


def lognormal_s(seed: int, count: int) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).lognormal(-2.0, 1.2, count)]


@pytest.mark.parametrize("count", [1, 2, 10, 999, 20_000])
def test_percentiles_are_those_of_nearest_rank_within_a_thousandth(count: int) -> None:
    seconds = lognormal_s(count, count)
    found = of(seconds).distribution()
    for permille, value in [(500, found.p50), (900, found.p90), (990, found.p99), (999, found.p999)]:
        rank = -(-permille * count // 1000)  # numpy's inverted_cdf, free of its rounding of 99.9 %
        assert value == pytest.approx(sorted(seconds)[rank - 1] * 1e3, rel=1e-3)
    assert found.count == count
    assert found.mean == pytest.approx(np.mean(seconds) * 1e3, rel=1e-12)
    assert found.max == pytest.approx(max(seconds) * 1e3, rel=1e-12)


def test_percentiles_of_many_values_are_also_those_between_ranks() -> None:
    seconds = lognormal_s(7, 50_000)
    latencies = of(seconds)
    for percent in (25, 50, 75, 90, 99):
        assert latencies.percentile_ms(percent) == pytest.approx(np.percentile(seconds, percent) * 1e3, rel=1e-3)


def test_no_percentile_is_above_the_maximum() -> None:
    latencies = of([1.0005])
    assert latencies.percentile_ms(100) <= latencies.max_ms == 1000.5
    assert latencies.steps()[0].max() <= latencies.max_ms


def test_merging_is_as_if_all_had_been_added_to_one() -> None:
    first, second = lognormal_s(1, 500), lognormal_s(2, 800)
    merged = of(first)
    merged.merge(of(second))
    merged.merge(Latencies())
    at_once = of(first + second)
    assert merged.encoded() == at_once.encoded()
    assert merged.distribution().p99 == at_once.distribution().p99
    assert merged.mean_ms == pytest.approx(at_once.mean_ms)
    assert merged.max_ms == at_once.max_ms


def test_decoding_gives_back_the_same_counts() -> None:
    latencies = of(lognormal_s(3, 1000))
    decoded = Latencies.decode(latencies.encoded())
    assert len(decoded) == 1000
    assert decoded.encoded() == latencies.encoded()
    assert decoded.percentiles_ms([50, 99]) == latencies.percentiles_ms([50, 99])
    assert decoded.mean_ms == pytest.approx(latencies.mean_ms, rel=1e-3)
    assert decoded.max_ms == pytest.approx(latencies.max_ms, rel=1e-3)


def test_restoring_a_distribution_keeps_its_mean_and_maximum() -> None:
    distribution = of(lognormal_s(4, 1000)).distribution()
    restored = Latencies.restored(distribution).distribution()
    assert restored.mean == pytest.approx(distribution.mean, rel=1e-12)
    assert restored == type(distribution)(**{**_fields(distribution), "mean": restored.mean})


def _fields(distribution: object) -> dict[str, object]:
    return {name: getattr(distribution, name) for name in distribution.__struct_fields__}  # type: ignore[attr-defined]


def test_other_readers_of_hdr_histograms_can_read_it() -> None:
    histogram = HdrHistogram.decode(of([0.001, 0.002]).encoded())
    assert histogram.get_total_count() == 2
    assert histogram.get_value_at_percentile(100) == 2000


def test_steps_end_at_one() -> None:
    values_ms, shares = of([0.1, 0.1, 0.4]).steps()
    assert values_ms == pytest.approx([100, 400], rel=1e-3)
    assert shares == pytest.approx([2 / 3, 1])


def test_an_empty_one_is_all_zeros() -> None:
    empty = Latencies()
    assert len(empty) == 0
    assert empty.distribution().p99 == empty.distribution().mean == empty.distribution().max == 0
    assert len(Latencies.decode(empty.encoded())) == 0
    assert len(empty.steps()[0]) == 0


def test_a_duration_below_nothing_counts_as_nothing_and_one_beyond_an_hour_as_an_hour() -> None:
    latencies = of([-1e-6, 7200.0])
    assert latencies.percentile_ms(50) <= 0.001
    assert latencies.percentile_ms(100) == pytest.approx(HIGHEST_US / 1e3, rel=1e-3)
    assert latencies.max_ms == 7_200_000


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_a_duration_that_is_no_number_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="a latency of"):
        Latencies().add_s(seconds)


@pytest.mark.parametrize("encoded", ["", "!!!", "HISTFAAAAB", "é", "AAAAAAAAAAAA"])
def test_what_is_no_histogram_is_refused(encoded: str) -> None:
    with pytest.raises(ResultError, match="not a histogram"):
        Latencies.decode(encoded)
