"""Hard limits of a tenant: which one refuses, and when a refused request may come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.limits import (
    BURST_S,
    MAX_LIMIT,
    MAX_RETRY_AFTER_S,
    LimitName,
    Limits,
    Refusal,
    TenantLimits,
    shown,
)


@pytest.mark.parametrize("name", list(LimitName))
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e13])
def test_a_limit_is_a_positive_number(name: LimitName, value: float) -> None:
    with pytest.raises(ValueError, match=name.value):
        Limits(**{name.value: value}).check()


@pytest.mark.parametrize("value", [0.5, MAX_LIMIT])
def test_a_limit_may_be_a_part_of_one_and_very_large(value: float) -> None:
    Limits(requests_per_minute=value, tokens_per_minute=value).check()


def test_a_limit_is_shown_to_people() -> None:
    assert [shown(limit) for limit in (None, 0.5, 1e12)] == ["none", "0.5", "1e+12"]


def promised(limits: TenantLimits, num_refusals: int, now_s: float) -> list[int]:
    """Return when each of so many refused requests of one token may come back."""
    refusals = [limits.admit(1, 1, now_s) for _ in range(num_refusals)]
    return [refusal.retry_after_s for refusal in refusals if refusal is not None]


def test_without_limits_all_is_admitted() -> None:
    limits = TenantLimits(Limits(), 0.0)
    assert all(limits.admit(512, 1_000_000, 0.0) is None for _ in range(1000))


def test_requests_pass_at_their_rate_after_a_burst() -> None:
    limits = TenantLimits(Limits(requests_per_minute=60), 0.0)
    admitted = [limits.admit(1, 10, step / 10) is None for step in range(1200)]
    assert admitted[:10] == [True] * 10
    assert sum(admitted) == int(BURST_S) + 119


def test_answers_delay_what_comes_after_them() -> None:
    limits = TenantLimits(Limits(tokens_per_minute=600), 0.0)
    assert limits.admit(1, 90, 0.0) is None
    limits.used(0, 100, 0.0)
    assert limits.admit(1, 1, 0.0) == Refusal(LimitName.TOKENS, 600, 10)
    assert limits.admit(1, 1, 9.1) is None


def test_a_prompt_larger_than_the_burst_passes_and_is_paid_for() -> None:
    limits = TenantLimits(Limits(tokens_per_minute=60), 0.0)
    assert limits.admit(1, 1000, 0.0) is None
    assert limits.admit(1, 1, 900.0) == Refusal(LimitName.TOKENS, 60, MAX_RETRY_AFTER_S)
    assert limits.admit(1, 1, 992.0) is None


def test_choices_in_flight_anywhere_count() -> None:
    limits = TenantLimits(Limits(max_choices=4), 0.0)
    assert limits.admit(2, 1, 0.0) is None
    limits.num_choices_elsewhere = 2
    assert limits.admit(1, 1, 0.0) == Refusal(LimitName.CHOICES, 4, 1)
    limits.end(2)
    assert limits.admit(2, 1, 0.0) is None
    limits.num_choices_elsewhere = 0
    assert limits.admit(3, 1, 0.0) == Refusal(LimitName.CHOICES, 4, 1)


def test_choices_in_flight_add_up() -> None:
    limits = TenantLimits(Limits(max_choices=4), 0.0)
    assert limits.admit(4, 1, 0.0) is None
    limits.end(4)
    assert [limits.admit(2, 1, 0.0) for _ in range(3)] == [None, None, Refusal(LimitName.CHOICES, 4, 1)]


def test_the_limit_that_opens_last_refuses() -> None:
    limits = TenantLimits(Limits(requests_per_minute=6, tokens_per_minute=600), 0.0)
    assert limits.admit(1, 101, 0.0) is None
    assert limits.admit(1, 1, 0.0) == Refusal(LimitName.REQUESTS, 6, 10)
    limits.used(0, 200, 0.0)
    assert limits.admit(1, 1, 0.0) == Refusal(LimitName.TOKENS, 600, 21)


def test_a_request_that_was_admitted_and_did_not_begin_is_taken_back() -> None:
    limits = TenantLimits(Limits(requests_per_minute=60, tokens_per_minute=600), 0.0)
    for _ in range(3):
        assert limits.admit(10, 100, 5.0) is None
        assert limits.admit(1, 1, 5.0) is not None
        limits.take_back(10, 100, 5.0)
    limits.take_back(100, 1000, 5.0)
    assert limits.admit(10, 100, 5.0) is None
    assert limits.admit(1, 1, 5.0) is not None, "no more is given back than a bucket holds"


def test_requests_of_other_gateways_count() -> None:
    limits = TenantLimits(Limits(requests_per_minute=60), 0.0)
    limits.used(12, 0, 0.0)
    assert limits.admit(1, 1, 0.0) == Refusal(LimitName.REQUESTS, 60, 3)
    assert limits.admit(1, 1, 3.0) is None


def test_times_are_promised_one_after_another_and_not_for_ever() -> None:
    limits = TenantLimits(Limits(requests_per_minute=60), 0.0)
    for _ in range(10):
        limits.admit(1, 1, 0.0)
    promised = [limits.admit(1, 1, 0.0) for _ in range(200)]
    assert [refusal.retry_after_s for refusal in promised if refusal is not None][:4] == [1, 2, 3, 4]
    assert max(refusal.retry_after_s for refusal in promised if refusal is not None) == MAX_RETRY_AFTER_S


def test_times_are_promised_at_the_rate_of_the_limit() -> None:
    limits = TenantLimits(Limits(requests_per_minute=30), 0.0)
    for _ in range(5):
        assert limits.admit(1, 1, 100.0) is None
    assert promised(limits, 4, 100.0) == [2, 4, 6, 8]


def test_the_promises_of_other_gateways_are_reckoned_with() -> None:
    """They promise the same room: one that admitted half of the requests of late promises half of it."""
    limits = TenantLimits(Limits(tokens_per_minute=60), 0.0)
    for _ in range(5):
        assert limits.admit(1, 0, 0.0) is None
    limits.used(2, 5, 0.0)
    limits.used(3, 5, 0.0)
    assert promised(limits, 4, 0.0) == [1, 3, 5, 7]


@pytest.mark.parametrize(("num_others", "promises"), [(10, [1, 12, 23]), (1000, [1, 17, 33])])
def test_a_gateway_that_admitted_nothing_takes_itself_for_one_of_at_most_sixteen(
    num_others: int, promises: list[int]
) -> None:
    limits = TenantLimits(Limits(tokens_per_minute=60), 0.0)
    limits.used(num_others, 10, 0.0)
    assert promised(limits, 3, 0.0) == promises


def test_requests_that_are_taken_back_are_none_of_this_gateways() -> None:
    limits = TenantLimits(Limits(tokens_per_minute=60), 0.0)
    assert limits.admit(2, 0, 0.0) is None
    limits.take_back(2, 0, 0.0)
    limits.take_back(9, 0, 0.0)
    assert limits.admit(1, 0, 0.0) is None
    limits.used(9, 10, 0.0)
    assert promised(limits, 3, 0.0) == [1, 11, 21]


@pytest.mark.parametrize(("num_others", "last"), [(56, 48), (57, 46)])
def test_older_requests_count_half_once_there_are_more_than_256(num_others: int, last: int) -> None:
    limits = TenantLimits(Limits(tokens_per_minute=60), 0.0)
    assert limits.admit(200, 0, 0.0) is None
    limits.used(num_others, 0, 0.0)
    assert limits.admit(100, 0, 0.0) is None
    limits.used(0, 10, 0.0)
    # 56 of others beside 300 of this gateway, or 57 / 2 beside 200 / 2 + 100.
    assert promised(limits, 40, 0.0)[-1] == last


def test_what_a_bucket_holds_changes_with_its_limit() -> None:
    limits = TenantLimits(Limits(requests_per_minute=60), 0.0)
    assert limits.admit(4, 1, 0.0) is None
    limits.set(Limits(requests_per_minute=120), 0.0)
    assert [limits.admit(1, 1, 0.0) is None for _ in range(13)] == [True] * 12 + [False]
    assert [limits.admit(1, 1, 1.0) is None for _ in range(3)] == [True, True, False]
    limits.set(Limits(), 1.0)
    assert [limits.admit(1, 1, 1.0) for _ in range(50)] == [None] * 50


def test_a_changed_limit_counts_at_once() -> None:
    limits = TenantLimits(Limits(requests_per_minute=6), 0.0)
    assert limits.admit(1, 1, 0.0) is None
    assert limits.admit(1, 1, 0.0) is not None
    limits.set(Limits(requests_per_minute=600), 0.0)
    assert limits.admit(1, 1, 0.2) is None
    limits.set(Limits(), 0.2)
    assert limits.admit(512, 1, 0.2) is None


@given(
    per_minute=st.floats(1, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 512), st.integers(1, 100_000)), max_size=200),
)
def test_no_more_passes_than_the_rate_a_burst_and_one_request(
    per_minute: float, steps: list[tuple[float, int, int]]
) -> None:
    limits = TenantLimits(Limits(tokens_per_minute=per_minute), 0.0)
    now_s, admitted, largest = 0.0, 0, 0
    for pause_s, num_choices, num_tokens in steps:
        now_s += pause_s
        if limits.admit(num_choices, num_tokens, now_s) is None:
            admitted += num_tokens
            largest = max(largest, num_tokens)
        assert admitted <= per_minute / 60 * (now_s + BURST_S) + largest + 1 + 1e-6 * admitted
