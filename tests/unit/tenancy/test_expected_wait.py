from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.shares.expected_wait import BacklogCurve, fair_wait_ms

WEIGHTS = st.floats(0.05, 50)
BACKLOGS = st.floats(0.5, 1e6)
OTHERS = st.lists(st.tuples(BACKLOGS, WEIGHTS), max_size=20)
LARGEST_ERROR = (1 + math.sqrt(2)) / 2


def fluid_finish_ms(own_ms: float, weight: float, others: list[tuple[float, float]]) -> float:
    """Serve all at their weights until the first tenant has nothing left."""
    backlogs = [[own_ms, weight], *([ms, other] for ms, other in others)]
    now_ms = 0.0
    while backlogs[0][0] > 1e-9:
        active = [entry for entry in backlogs if entry[0] > 1e-9]
        all_weights = sum(entry[1] for entry in active)
        step_ms = min(entry[0] * all_weights / entry[1] for entry in active)
        for entry in active:
            entry[0] -= step_ms * entry[1] / all_weights
        now_ms += step_ms
    return now_ms


@given(st.floats(0, 1e5), st.floats(1, 1e4), WEIGHTS, OTHERS)
def test_the_wait_is_that_of_a_fluid_fair_queue(
    own_ms: float, prompt_ms: float, weight: float, others: list[tuple[float, float]]
) -> None:
    finish_ms = fluid_finish_ms(own_ms + prompt_ms, weight, others)
    assert fair_wait_ms(own_ms, prompt_ms, weight, others) + prompt_ms == pytest.approx(finish_ms, rel=1e-6, abs=1e-3)


@given(st.floats(0.5, 1e5), st.floats(1, 1e4), WEIGHTS, OTHERS)
def test_the_curve_is_exact_or_up_to_21_percent_above(
    own_ms: float, prompt_ms: float, weight: float, others: list[tuple[float, float]]
) -> None:
    exact_ms = fair_wait_ms(own_ms, prompt_ms, weight, others)
    curve = BacklogCurve.of([(own_ms, weight), *others])
    wait_ms = curve.wait_ms(own_ms, prompt_ms, weight)
    assert exact_ms * (1 - 1e-9) - 1e-6 <= wait_ms <= exact_ms * LARGEST_ERROR * (1 + 1e-9) + 1e-6


def test_the_largest_error_is_reached() -> None:
    # In one bucket: backlog / weight of 512 and of nearly 1024, weights so that the sums meet where one finishes.
    below = 2 - math.sqrt(2)
    others = [(512 * below, below), (1023.99 * (1 - below), 1 - below)]
    finish = sum(ms for ms, _ in others)
    curve = BacklogCurve.of(others)
    error = curve.wait_ms(0.0, finish, 1.0) / fair_wait_ms(0.0, finish, 1.0, others)
    assert error == pytest.approx(LARGEST_ERROR, rel=1e-4)


@given(st.floats(0, 1e5), WEIGHTS, OTHERS, st.floats(1, 1e4), st.floats(0, 1e4))
def test_a_longer_prompt_waits_longer_and_never_behind_more_than_there_is(
    own_ms: float, weight: float, others: list[tuple[float, float]], prompt_ms: float, more_ms: float
) -> None:
    wait_ms = fair_wait_ms(own_ms, prompt_ms, weight, others)
    assert wait_ms <= fair_wait_ms(own_ms, prompt_ms + more_ms, weight, others)
    assert own_ms <= wait_ms <= own_ms + sum(ms for ms, _ in others) + 1e-6


def test_a_flood_counts_only_up_to_its_share() -> None:
    assert fair_wait_ms(0.0, 100.0, 4.0, [(1e6, 1.0)]) == 25.0
    assert fair_wait_ms(0.0, 100.0, 1.0, [(1e6, 4.0)]) == 400.0
    assert fair_wait_ms(50.0, 100.0, 1.0, [(30.0, 4.0)]) == 80.0


def test_a_curve_travels_as_its_buckets() -> None:
    curve = BacklogCurve.of([(ms, 1.0 + ms % 3) for ms in range(1, 1000)])
    assert len(curve.buckets) <= 12
    again = BacklogCurve(curve.buckets)
    again.add(0.0, 1.0)
    assert again.wait_ms(0.0, 100.0, 1.0) == curve.wait_ms(0.0, 100.0, 1.0)
