from __future__ import annotations

import pytest

from kvferry.router.rates import CostDefaults, Rate, RatePool

PRIORS = CostDefaults()


def test_a_rate_follows_what_is_observed() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(2.0)
    assert rate.value == pytest.approx(2.0, rel=0.02)


def test_one_outlier_moves_a_rate_little() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(1.0)
    rate.observe(1000.0)
    assert rate.value < 1.5
    rate.observe(0.0001)
    assert rate.value > 0.8


def test_what_is_no_rate_is_refused() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="as a rate"):
            Rate(1.0).observe(value)


def test_an_unobserved_worker_is_taken_to_be_like_the_median() -> None:
    pool = RatePool(PRIORS)
    early = pool.of("early")
    for worker, ms_per_token in (("a", 0.2), ("b", 0.3), ("c", 5.0)):
        for _ in range(30):
            assert pool.of(worker).observed_prefill(PRIORS, 1000, 1000 * ms_per_token + PRIORS.prefill_fixed_ms, 0)
            pool.changed()
    assert pool.of("new").prefill_ms_per_token.value == pytest.approx(0.3, rel=0.1)
    assert early.prefill_ms_per_token.value == pytest.approx(0.3, rel=0.1)
    assert pool.of("new").kv_transfer_page_ms.value == PRIORS.kv_transfer_page_ms
    pool.forget("a")
    assert pool.of("a").prefill_ms_per_token.num_observed == 0


def test_what_was_queued_ahead_counts_as_work_done() -> None:
    pool = RatePool(PRIORS)
    for _ in range(30):
        pool.of("w").observed_prefill(PRIORS, 1000, 4 * 1000 * 0.2 + PRIORS.prefill_fixed_ms, 3000)
    assert pool.of("w").prefill_ms_per_token.value == pytest.approx(0.2, rel=0.02)


def test_observations_that_say_nothing_are_passed_over() -> None:
    rates = RatePool(PRIORS).of("w")
    assert not rates.observed_prefill(PRIORS, 5, 10.0, 0)
    assert not rates.observed_prefill(PRIORS, 1000, 0.0, 0)
    assert not rates.observed_kv_transfer(PRIORS, 0, 10.0)
    assert not rates.observed_step(PRIORS, 10.0, 0)
    assert rates.prefill_ms_per_token.num_observed == 0


def test_ferries_and_steps_are_told_apart_from_their_fixed_part() -> None:
    rates = RatePool(PRIORS).of("w")
    for _ in range(30):
        rates.observed_kv_transfer(PRIORS, 100, PRIORS.handoff_ms + 100 * 0.3)
        rates.observed_step(PRIORS, 2 * (PRIORS.step_ms + 8 * PRIORS.step_ms_per_stream), 8)
    assert rates.kv_transfer_page_ms.value == pytest.approx(0.3, rel=0.02)
    assert rates.step_scale.value == pytest.approx(2.0, rel=0.02)
