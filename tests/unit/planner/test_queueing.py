"""Waiting times against known values and a simulated queue."""

from __future__ import annotations

import heapq
import math
from random import Random

import pytest

from kvferry_plan.planner.queueing import erlang_c, wait_quantile_s


def test_known_values_of_erlangs_c() -> None:
    # Tables of the Erlang C formula: 2 servers at 1 Erlang wait with probability 1/3, one server at use 0.8 with 0.8.
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.8) == pytest.approx(0.8)
    assert erlang_c(10, 8.0) == pytest.approx(0.409, abs=5e-4)
    assert erlang_c(4, 4.0) == 1.0


def test_no_wait_below_the_quantile_and_no_end_over_capacity() -> None:
    assert wait_quantile_s(100, 1.0, 1.0, 0.0, 0.99) == 0.0
    assert wait_quantile_s(1, 1.0, 1.0, 0.0, 0.99) == math.inf


@pytest.mark.parametrize("num_servers", [1, 4])
def test_a_simulated_queue_waits_as_long(num_servers: int) -> None:
    """Exponential service at use 0.7, for which the formula is exact: the 99th percentile within 5 %."""
    rng, rate, service_s = Random(7), 0.7 * num_servers, 1.0
    free = [0.0] * num_servers
    now, waits = 0.0, []
    for _ in range(200_000):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        waits.append(start - now)
        heapq.heappush(free, start + rng.expovariate(1 / service_s))
    waits.sort()
    assert wait_quantile_s(num_servers, rate, service_s, 1.0, 0.99) == pytest.approx(
        waits[int(0.99 * len(waits))], rel=0.05
    )
