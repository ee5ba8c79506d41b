"""Shares and waits of simulated clusters in virtual time; `make bench-fair-queue` runs longer ones."""

from __future__ import annotations

import pytest

from bench import fair_queue
from bench.fair_decode import decode

SEED = 1


@pytest.mark.parametrize(("num_workers", "num_gateways"), [(2, 1), (2, 2), (2, 4), (8, 4)])
def test_shares_are_4_to_1_with_premium_on_one_gateway(num_workers: int, num_gateways: int) -> None:
    figures = fair_queue.skewed_shares(num_workers, num_gateways, SEED, duration_s=30.0)
    assert figures["share"] == pytest.approx(0.8, rel=0.01)
    assert figures["lowest_10s"] >= 0.8 * 0.95
    assert figures["highest_10s"] <= 0.8 * 1.05


def test_first_come_first_served_does_not_keep_shares() -> None:
    assert fair_queue.skewed_shares(2, 2, SEED, duration_s=30.0, fair=False)["share"] < 0.5


def test_an_under_share_tenant_waits_as_long_as_alone_with_short_steps() -> None:
    ratios = fair_queue.under_share_ratios(SEED, 512, 60.0)
    del ratios["p99_alone_at_share_ms"]
    assert max(ratios.values()) <= 1.2


def test_1000_small_tenants_beside_a_whale() -> None:
    calm_ms = fair_queue.small_tenants(SEED, has_whale=False, duration_s=40.0)
    assert fair_queue.small_tenants(SEED, has_whale=True, duration_s=40.0) <= 3 * calm_ms


def test_a_changed_weight_holds_within_ten_seconds() -> None:
    figures = fair_queue.changed_weights(SEED)
    assert figures["before"] == pytest.approx(0.8, rel=0.05)
    assert figures["first_10s"] == pytest.approx(0.2, abs=0.02)
    assert figures["next_10s"] == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("num_workers", [2, 4, 16])
def test_debts_repair_shares_of_tenants_on_different_workers(num_workers: int) -> None:
    best = 1 / num_workers
    assert fair_queue.disjoint_workers(SEED, num_workers, has_debts=False) < 0.85 * best
    assert fair_queue.disjoint_workers(SEED, num_workers, has_debts=True) > 0.95 * best


@pytest.mark.parametrize("num_workers", [2, 8, 16, 32])
def test_debts_of_chance_stay_in_the_dead_band(num_workers: int) -> None:
    figures = fair_queue.dead_band(SEED, num_workers, duration_s=30.0)
    assert figures["corrected_slices"] == 0
    assert figures["largest_debt_of_band"] < 0.9


@pytest.mark.parametrize("num_gateways", [1, 4])
def test_refused_clients_come_back_one_after_another(num_gateways: int) -> None:
    figures = fair_queue.refusals(SEED, num_gateways)
    assert figures["of_limit"] == pytest.approx(1.0, rel=0.025)
    assert figures["most_in_10s"] <= 1.05
    assert figures["refusals_per_answer"] < 2


def test_slots_follow_shares_and_reserve_and_preemption_let_a_tenant_in() -> None:
    busy = decode(noise_tokens=3000, num_light=200, num_reserved=0, preempts=False, duration_s=100.0)
    assert busy.share == pytest.approx(0.8, rel=0.05)
    plain, both = (
        decode(noise_tokens=3000, num_light=None, num_reserved=num_reserved, preempts=preempts)
        for num_reserved, preempts in ((0, False), (4, True))
    )
    assert plain.p99_ms > 5000
    assert both.p99_ms < 100
    assert 0 < both.num_preempted < 300
