"""The circuit breaker and the write budget of a volume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_keeper.volumes.breaker import Breaker, BreakerState, WriteBudget


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker(3, 5.0)
    assert not breaker.failed(0)
    assert not breaker.failed(0)
    breaker.succeeded()
    assert not breaker.failed(1)
    assert not breaker.failed(1)
    assert breaker.failed(1)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.failed(1), "those that were under way say nothing new"
    assert breaker.num_trips == 1


def test_one_trial_decides() -> None:
    breaker = Breaker(3, 5.0)
    assert breaker.trip(10)
    assert not breaker.is_retry_due(14.9)
    assert breaker.is_retry_due(15)
    breaker.begin_trial()
    assert not breaker.is_retry_due(15)
    assert not breaker.is_closed
    assert not breaker.failed(16), "it was not closed"
    assert breaker.state is BreakerState.OPEN
    assert not breaker.is_retry_due(20.9)
    assert breaker.is_retry_due(21)
    breaker.begin_trial()
    assert breaker.succeeded()
    assert breaker.is_closed
    assert breaker.num_trips == 1


def test_an_old_success_does_not_close_it() -> None:
    breaker = Breaker(1, 5.0)
    assert breaker.failed(0)
    assert not breaker.succeeded()
    assert breaker.state is BreakerState.OPEN


def test_no_budget_is_no_limit() -> None:
    budget = WriteBudget(None, 0)
    budget.spend(1 << 60)
    assert budget.allows(0)


def test_an_idle_day_saves_up_an_hour() -> None:
    budget = WriteBudget(24_000, 0)
    assert budget.allows(10 * WriteBudget.DAY_S)
    budget.spend(1000)
    assert not budget.allows(10 * WriteBudget.DAY_S)
    assert budget.allows(10 * WriteBudget.DAY_S + 4)


def test_what_was_not_written_is_given_back() -> None:
    budget = WriteBudget(24_000, 0)
    budget.spend(5000)
    assert not budget.allows(0)
    budget.refund(5000)
    assert budget.allows(0)
    # And does not vanish for being more than the bucket holds: it came from there.
    budget.spend(1000)
    assert not budget.allows(0)


@pytest.mark.parametrize("bytes_per_day", [1_000_000, 86_400_000])
@given(steps=st.lists(st.tuples(st.floats(0, 5000), st.integers(1, 100_000)), max_size=200))
def test_no_more_than_its_share(bytes_per_day: int, steps: list[tuple[float, int]]) -> None:
    budget, now_s, written, largest = WriteBudget(bytes_per_day, 0), 0.0, 0, 0
    for wait_s, num_bytes in steps:
        now_s += wait_s
        if budget.allows(now_s):
            budget.spend(num_bytes)
            written += num_bytes
            largest = max(largest, num_bytes)
        assert written <= bytes_per_day * (now_s + 3600) / 86_400 + largest + 1
