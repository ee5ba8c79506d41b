from __future__ import annotations

import pytest

from kvferry.router.prices.rates import (
    CostDefaults,
    Rate,
    RatePool,
    faded,
    kv_transfer_rate,
    prefill_rate,
    step_scale,
)

PRIORS = CostDefaults()
PREFILL = "prefill_ms_per_token"


def test_a_rate_follows_what_is_observed() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(2.0)
    assert rate.value == pytest.approx(2.0, rel=0.02)


def test_one_outlier_moves_a_rate_little_and_two_in_a_row_do_too() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(1.0)
    rate.observe(1000.0)
    assert rate.value < 1.5
    rate.observe(0.0001)
    assert rate.value > 0.8
    rate.observe(1000.0)
    rate.observe(1000.0)
    assert rate.value < 2.5


def test_three_observations_far_off_on_the_same_side_are_believed() -> None:
    rate = Rate(1.0)
    for value in (1.0, 1.0, 90.0, 100.0, 110.0):
        rate.observe(value)
    assert rate.value == 100.0
    for value in (1.0, 0.9, 1.1):
        rate.observe(value)
    assert rate.value == 1.0


def test_small_observations_are_neither_believed_nor_counted_much() -> None:
    rate = Rate(1.0)
    for _ in range(20):
        rate.observe(1.0, size=1000)
    for _ in range(5):
        rate.observe(50.0, size=100)
    assert rate.value < 1.5


def test_the_mean_is_all_time_over_all_tokens() -> None:
    rate = Rate(1.0)
    for _ in range(100):
        rate.observe(2.0, size=512)
        rate.observe(0.8, size=4096)
    assert rate.value == pytest.approx((2.0 * 512 + 0.8 * 4096) / (512 + 4096), rel=0.1)


def test_what_is_no_rate_is_refused() -> None:
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="as a rate"):
            Rate(1.0).observe(value)


def test_a_value_fades_into_the_typical_one() -> None:
    assert [faded(0.1, 1.0, age) for age in (0.0, 1.0)] == [0.1, 0.1]
    values = [faded(0.1, 1.0, 1 + age / 8) for age in range(8)]
    assert values == sorted(values)
    assert faded(0.1, 1.0, 3.0) == pytest.approx(1.0, rel=0.02)
    # A worker that was slow counts as a bit faster than the others in the end, so that it is tried.
    assert 0.2 < faded(300.0, 1.0, 9.0) < 0.3
    assert 0.8 < faded(2.0, 1.0, 9.0) < 0.9


def pool_of(*ms_per_token: float) -> RatePool:
    pool = RatePool(PRIORS)
    for i, value in enumerate(ms_per_token):
        for _ in range(30):
            pool.observe(f"w{i}", PREFILL, value)
    pool.refresh()
    return pool


def current(pool: RatePool, worker: str, *, is_tried: bool = False) -> float:
    return pool.prefill_ms_per_token(pool.of(worker), is_tried=is_tried)


def place(pool: RatePool, num_placements: int, now_s: float = 0.0) -> None:
    for _ in range(num_placements):
        if pool.advance(now_s):
            pool.refresh()


def test_an_unobserved_worker_is_taken_to_be_like_the_median() -> None:
    pool = pool_of(0.2, 0.3, 5.0)
    assert current(pool, "new") == pytest.approx(0.3, rel=0.1)
    assert pool.kv_transfer_page_ms(pool.of("new"), is_tried=False) == PRIORS.kv_transfer_page_ms
    pool.forget("w0")
    pool.refresh()
    assert pool.of("w0").prefill_ms_per_token.num_observed == 0
    assert current(pool, "new") == pytest.approx((0.3 + 5.0) / 2, rel=0.1)


def test_a_rate_that_is_observed_does_not_fade() -> None:
    pool = pool_of(0.2, 0.2, 0.8)
    for i in range(300):
        place(pool, 1, now_s=i)
        pool.observe(f"w{i % 3}", PREFILL, 0.8 if i % 3 == 2 else 0.2)
    assert current(pool, "w2") == pytest.approx(0.8, rel=0.01)


@pytest.mark.parametrize("seconds", [0.0, 1.0], ids=["by placements", "by time"])
def test_a_rate_that_is_not_observed_fades_to_the_others(seconds: float) -> None:
    pool = pool_of(0.2, 0.2, 60.0)
    for i in range(200):
        place(pool, 1, now_s=i * seconds)
        pool.observe(f"w{i % 2}", PREFILL, 0.2)
    assert current(pool, "w2") < 0.2
    # One request at a time tries it, and what it finds counts.
    assert current(pool, "w2", is_tried=True) == pytest.approx(60.0)
    pool.observe("w2", PREFILL, 0.2)
    assert current(pool, "w2") == pytest.approx(0.2, rel=0.2)


def test_one_observation_confirms_what_was_known_of_a_slow_worker() -> None:
    pool = pool_of(0.2, 0.2, 2.0)
    for i in range(200):
        place(pool, 1)
        pool.observe(f"w{i % 2}", PREFILL, 0.2)
    assert current(pool, "w2") < 0.2
    pool.observe("w2", PREFILL, 2.1)
    assert current(pool, "w2") == pytest.approx(2.1, rel=0.1)


def test_a_fleet_that_is_measured_no_more_fades_into_the_defaults_by_placements_only() -> None:
    pool = pool_of(40.0, 40.0)
    place(pool, 1, now_s=10_000.0)
    assert current(pool, "w0") == pytest.approx(40.0)
    assert current(pool, "new") == pytest.approx(40.0)
    place(pool, 150, now_s=10_000.0)
    assert current(pool, "w0") <= PRIORS.prefill_ms_per_token
    assert current(pool, "new") <= PRIORS.prefill_ms_per_token


def test_workers_of_the_other_kind_are_typical_where_there_is_no_other_measure() -> None:
    other = pool_of(0.5)
    pool = RatePool(PRIORS, other.fresh)
    pool.refresh()
    assert current(pool, "new") == pytest.approx(0.5, rel=0.01)
    pool.observe("w", PREFILL, 0.4)
    pool.refresh()
    assert current(pool, "new") == pool.of("w").prefill_ms_per_token.value


def test_what_was_computed_beside_counts_as_work_done() -> None:
    elapsed_ms = 4 * 1000 * 0.2 + PRIORS.prefill_fixed_ms
    assert prefill_rate(PRIORS, 1000, elapsed_ms, 3000) == pytest.approx(0.2)
    assert kv_transfer_rate(PRIORS, 100, PRIORS.kv_transfer_fixed_ms + 400 * 0.3, 300) == pytest.approx(0.3)


def test_measurements_that_say_nothing_are_passed_over() -> None:
    assert prefill_rate(PRIORS, 5, 10.0, 0) is None
    assert prefill_rate(PRIORS, 1000, 0.0, 0) is None
    assert kv_transfer_rate(PRIORS, 0, 10.0, 0) is None
    assert step_scale(PRIORS, 10.0, 0) is None


def test_ferries_and_steps_are_told_apart_from_their_fixed_part() -> None:
    assert kv_transfer_rate(PRIORS, 100, PRIORS.kv_transfer_fixed_ms + 100 * 0.3, 0) == pytest.approx(0.3)
    assert step_scale(PRIORS, 2 * (PRIORS.step_ms + 8 * PRIORS.step_ms_per_stream), 8) == pytest.approx(2.0)
