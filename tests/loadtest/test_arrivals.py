"""Arrival processes: the statistics that they promise."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_loadtest.arrivals import Process, fixed_times, gamma_times, poisson_times, times

NUM = 20_000


def gaps(at_s: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *at_s])]


def variation(values: list[float]) -> float:
    return pstdev(values) / fmean(values)


def test_poisson_gaps_have_the_rate_and_the_spread_of_an_exponential() -> None:
    found = gaps(poisson_times(4.0, NUM, random.Random(1)))
    assert fmean(found) == pytest.approx(0.25, rel=0.03)
    assert variation(found) == pytest.approx(1.0, rel=0.03)


def test_poisson_counts_vary_as_much_as_their_mean() -> None:
    at_s = poisson_times(5.0, NUM, random.Random(2))
    counts = [0] * int(at_s[-1])
    for moment_s in at_s:
        if moment_s < len(counts):
            counts[int(moment_s)] += 1
    assert pstdev(counts) ** 2 / fmean(counts) == pytest.approx(1.0, rel=0.08)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_keep_the_rate_and_vary_by_burstiness(burstiness: float) -> None:
    found = gaps(gamma_times(2.0, burstiness, NUM, random.Random(3)))
    assert fmean(found) == pytest.approx(0.5, rel=0.05)
    assert variation(found) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_fixed_times_are_a_ruler_from_zero() -> None:
    assert fixed_times(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("process", "alone"),
    [
        ("poisson", lambda: poisson_times(3.0, 7, random.Random(5))),
        ("gamma", lambda: gamma_times(3.0, 0.5, 7, random.Random(5))),
        ("fixed", lambda: fixed_times(3.0, 7)),
    ],
)
def test_a_process_is_chosen_by_its_name(process: Process, alone: Callable[[], list[float]]) -> None:
    assert times(process, 3.0, 0.5, 7, random.Random(5)) == alone()


@settings(max_examples=30)
@given(
    process=st.sampled_from(["poisson", "gamma", "fixed"]),
    rate_per_s=st.floats(0.01, 1000),
    burstiness=st.floats(0.05, 20),
    count=st.integers(0, 50),
    seed=st.integers(0, 9),
)
def test_times_ascend_and_only_the_generator_makes_them_differ(
    process: Process, rate_per_s: float, burstiness: float, count: int, seed: int
) -> None:
    at_s = times(process, rate_per_s, burstiness, count, random.Random(seed))
    assert len(at_s) == count
    assert at_s == sorted(at_s)
    assert all(moment_s >= 0 for moment_s in at_s)
    assert at_s == times(process, rate_per_s, burstiness, count, random.Random(seed))
