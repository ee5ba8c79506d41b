from __future__ import annotations

import statistics

import numpy as np
import pytest

from kvferry_loadtest.intervals import estimate, ratio, student_t


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.7062047), (2, 4.30265273), (4, 2.77644511), (9, 2.26215716), (30, 2.04227246), (1000, 1.96233910)],
)
def test_students_t_is_that_of_the_tables(freedom: float, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=1e-8)


def test_freedom_need_not_be_whole() -> None:
    assert student_t(2) > student_t(2.5) > student_t(3)
    with pytest.raises(ValueError, match=r"0\.5 degrees"):
        student_t(0.5)


def test_a_mean_has_an_interval_from_two_repeats_on() -> None:
    assert estimate([]) is None
    single = estimate([3.0])
    assert single is not None
    assert (single.mean, single.half_width, single.n) == (3.0, None, 1)
    three = estimate([9.0, 10.0, 11.0])
    assert three is not None
    assert three.half_width == pytest.approx(4.30265273 * statistics.stdev([9, 10, 11]) / 3**0.5)


def test_a_ratio_of_single_repeats_has_no_interval() -> None:
    found = ratio([2.0], [1.0, 1.1])
    assert found is not None
    assert found.value == pytest.approx(2 / 1.05)
    assert found.low is found.high is found.significant is None


def test_a_ratio_to_nothing_has_no_value_but_a_verdict() -> None:
    assert ratio([], [1.0]) is None
    some_failed = ratio([50.0, 52.0], [0.0, 0.0])
    assert some_failed is not None
    assert (some_failed.value, some_failed.low, some_failed.significant) == (None, None, True)
    none_failed = ratio([0.0, 0.0], [0.0, 0.0])
    assert none_failed is not None
    assert none_failed.significant is False


def test_repeats_without_any_spread_differ_when_they_are_not_equal() -> None:
    found = ratio([2.0, 2.0], [1.0, 1.0])
    assert found is not None
    assert (found.low, found.high, found.significant) == (2.0, 2.0, True)
    same = ratio([1.0, 1.0], [1.0, 1.0])
    assert same is not None
    assert same.significant is False


def test_wild_repeats_say_nothing_and_have_no_bounds() -> None:
    found = ratio([1e-6, 1e6], [1e-9, 1e9])
    assert found is not None
    assert (found.low, found.high, found.significant) == (None, None, False)


def test_the_interval_leaves_out_one_just_when_the_difference_is_significant() -> None:
    random = np.random.default_rng(6)
    verdicts = set()
    for _ in range(60):
        found = ratio(list(random.normal(104, 4, 3)), list(random.normal(100, 2, 4)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.significant is not (found.low <= 1 <= found.high)
        verdicts.add(found.significant)
    assert verdicts == {True, False}


def test_the_interval_of_a_ratio_covers_the_true_one_as_often_as_it_claims() -> None:
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(200):
        values = [float(value) for value in random.normal(130, 8, 5)]
        base = [float(value) for value in random.normal(100, 4, 4)]
        found = ratio(values, base)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.3 <= found.high
    assert 0.92 <= covered / 200 <= 0.98
