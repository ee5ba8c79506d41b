"""Prices of pools: those of one are learned from its own workers."""

from __future__ import annotations

import itertools

import pytest

from kvferry.membership.base import MemberId, MemberKind
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Candidate, PlacementRequest, RequestId
from kvferry.router.placement_policy import Measured, PricedPolicy
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import NO_VOLUMES
from support.candidates import candidate

_numbers = itertools.count()


def worker(name: str, pool: str) -> Candidate:
    return candidate(name, kind=MemberKind.DECODE, pool=pool)


def place(policy: PricedPolicy, *decode: Candidate) -> tuple[PlacementRequest, Decision]:
    number = next(_numbers)
    keys = range(number << 20, (number << 20) + 256)
    request = PlacementRequest(RequestId(f"r{number}"), keys, 4096, 16, 64)
    decision = policy.place(request, [], decode, 0.0, volumes=NO_VOLUMES, may_be_aggregated=True)
    assert isinstance(decision, Decision)
    return request, decision


def computed(ms: float) -> Measured:
    return Measured(
        first_token_ms=ms,
        load_ms=0.0,
        computed_tokens=4096,
        transferred_pages=0,
        queue_tokens=0,
        step_ms=ms / 100,
        num_streams=1,
    )


@pytest.mark.parametrize("slow", ["", "large@1"])
def test_a_new_worker_is_priced_by_its_own_pools_rates(slow: str) -> None:
    policy = PricedPolicy(ResidencyIndex(), seed=1)
    old, new = worker("small-0", "small@1"), worker("small-1", "small@1")
    before = place(policy, old, new)[1].expected_ttft_ms
    large = [worker(f"large-{i}", slow) for i in range(5)]
    for _, each in itertools.product(range(30), large):
        place(policy, each)
        policy.learn(each.member_id, computed(100_000.0))
    assert place(policy, *large)[1].expected_ttft_ms > 20 * before
    assert place(policy, new)[1].expected_ttft_ms == before, "100 s are nothing that this model's workers know of"


def test_requests_are_counted_in_their_own_pool_and_pools_without_workers_are_forgotten() -> None:
    policy = PricedPolicy(ResidencyIndex(), seed=1)
    for generation in range(20):
        candidate = worker(f"w{generation}", f"m@{generation}")
        request, decision = place(policy, candidate)
        policy.began(request, decision, 0.0)
        placer = policy._by_pool[f"m@{generation}"]
        assert (placer.num_in_flight, policy.placer.num_in_flight) == (1, 0)
        policy.forget(candidate.member_id)
        policy.first_token(request.request_id, 0.1)
        policy.ended(request.request_id, 0.2, 64)
        placer.check()
        assert placer.num_in_flight == 0
    policy.forget(MemberId("any"))
    assert not policy._by_pool
    assert not policy._by_worker
    assert not policy._by_request
