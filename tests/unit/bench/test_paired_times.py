from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from bench.paired_times import PairedTimes, Pairs, signed_rank_p


def test_p_is_that_of_the_normal_approximation() -> None:
    # 20 differences of one sign: no rank is negative, the mean is 105 and the deviation 26.79, so z is 104.5 / 26.79.
    assert signed_rank_p([float(each) for each in range(1, 21)]) == pytest.approx(9.57e-5, rel=0.01)
    # All of them tie, so that each has the rank 10.5: the variance is 717.5 - 7980 / 48 = 551.25, and z 104.5 / 23.48.
    assert signed_rank_p([1.0] * 20) == pytest.approx(8.55e-6, rel=0.01)


def test_p_is_two_sided_and_depends_on_order_and_scale_of_nothing() -> None:
    seeded = random.Random(3)
    differences = [seeded.gauss(0.4, 1.0) for _ in range(200)]
    p = signed_rank_p(differences)
    assert 0.0 < p < 0.01
    assert signed_rank_p([-each for each in differences]) == pytest.approx(p)
    assert signed_rank_p([1e-6 * each for each in reversed(differences)]) == pytest.approx(p)


def test_differences_that_cancel_have_a_p_of_1() -> None:
    assert signed_rank_p([sign * each for each in range(1, 31) for sign in (1.0, -1.0)]) == 1.0


def test_zeros_are_left_out() -> None:
    differences = [float(each) for each in range(1, 31)]
    assert signed_rank_p([*differences, *[0.0] * 100]) == signed_rank_p(differences)
    with pytest.raises(ValueError, match="19 differences"):
        signed_rank_p([*differences[:19], *[0.0] * 100])


def test_one_in_a_hundred_of_true_hypotheses_is_rejected() -> None:
    seeded = random.Random(5)
    rejected = sum(signed_rank_p([seeded.gauss(0.0, 1.0) for _ in range(50)]) <= 0.01 for _ in range(2000))
    assert 8 <= rejected <= 34  # 20, and three deviations


def test_a_few_late_requests_hide_no_difference() -> None:
    seeded = random.Random(7)
    differences = [seeded.gauss(1.0, 1.0) for _ in range(100)]
    differences[::20] = [-1e6] * 5
    assert signed_rank_p(differences) < 0.001


def test_figures_are_medians_in_microseconds() -> None:
    pairs = Pairs([1e-6 * each for each in range(21)], [1e-6 * (each + 2) for each in range(21)])
    figures = pairs.figures()
    assert (figures["sent_us"], figures["new_us"], figures["gap_us"]) == (10.0, 12.0, 2.0)
    assert figures["p"] < 0.001


def measured(*, is_shared: bool) -> tuple[Pairs, Pairs, list[tuple[str, int]]]:
    """Return another tenant's times and the own ones, with a cache that is shared or by tenant; and all requests."""
    asked: list[tuple[str, int]] = []
    kept: set[tuple[str, int]] = set()
    noise = random.Random(3)
    now_ns = 0

    async def ask(tenant: str, number: int) -> None:
        nonlocal now_ns
        asked.append((tenant, number))
        key = ("" if is_shared else tenant, number)
        now_ns += noise.randrange(1000) + (0 if key in kept else 500)
        kept.add(key)

    async def both() -> tuple[Pairs, Pairs]:
        times = PairedTimes(7, lambda: now_ns)
        other = await times.measure(ask, 80, first="one", second="other", num_between=2)
        return other, await times.measure(ask, 80, first="one", second="one", num_between=2)

    other, own = asyncio.run(both())
    return other, own, asked


def test_a_shared_cache_is_seen_and_one_by_tenant_is_not() -> None:
    shared, own, _ = measured(is_shared=True)
    assert shared.p < 0.001
    assert own.p < 0.001
    by_tenant, own, _ = measured(is_shared=False)
    assert by_tenant.p > 0.1
    assert own.p < 0.001
    assert 0 < own.figures()["gap_us"] < 1.0


def test_contents_are_new_for_each_pair_and_probes_come_in_random_order() -> None:
    _, _, asked = measured(is_shared=False)
    by_other = [number for tenant, number in asked if tenant == "other"]
    by_one = {number for tenant, number in asked[: len(asked) // 2] if tenant == "one"}
    assert len(by_other) == len(set(by_other)) == 160
    assert len(set(by_other) & by_one) == 80
    order = Counter(number in by_one for number in by_other[::2])
    assert min(order[True], order[False]) > 20
    between = [number for tenant, number in asked if tenant == "others"]
    assert len(between) == 2 * 2 * 160
    assert 20 < len(set(between)) <= 50
    assert not set(between) & {number for tenant, number in asked if tenant != "others"}
