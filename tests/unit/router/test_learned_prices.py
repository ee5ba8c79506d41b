"""Learned prices recover: what happened once does not decide for ever."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import pytest

from kvferry.engine.base import EngineDurations, EngineStats, PromptSources
from kvferry.membership.base import MemberId
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Candidate, PlacementRequest, Reason, RequestId
from kvferry.router.placement_policy import Measured, PricedPolicy
from kvferry.router.priced_placement import Decision, Placer
from kvferry.router.prices.rates import CostDefaults
from support.candidates import candidate
from support.virtual_fleet import Fleet

PRIORS = CostDefaults()
PAGE_MS = PRIORS.kv_transfer_page_ms


_numbers = itertools.count()


def a_request(num_tokens: int = 4096) -> PlacementRequest:
    """A prompt that no other one begins like."""
    number = next(_numbers)
    keys = range(number << 20, (number << 20) + num_tokens // 16)
    return PlacementRequest(RequestId(f"r{number}"), keys, num_tokens, 16, 64)


def placed(placer: Placer, request: PlacementRequest, prefill: list[Candidate], decode: list[Candidate]) -> Decision:
    decision = placer.place(request, prefill, decode, 0.0)
    assert decision is not None
    return decision


# --- KV transfer


@pytest.mark.parametrize("num_decode", [1, 2, 8])
def test_one_overload_of_kv_transfers_does_not_end_disaggregation(num_decode: int) -> None:
    """R2: 42 ms a page were learned, and the next 2,000 requests on an idle cluster were aggregated."""
    placer = Placer(ResidencyIndex(), seed=1)
    prefill, decode = [candidate("p0"), candidate("p1")], [candidate(f"d{i}") for i in range(num_decode)]
    assert placed(placer, a_request(), prefill, decode).reason is Reason.DISAGGREGATED
    for worker in decode:
        for _ in range(38):
            placer.observed_kv_transfer(worker.member_id, 256, 256 * 42.0)
    num_disaggregated = 0
    for number in range(1, 400):
        request = a_request()
        decision = placed(placer, request, prefill, decode)
        placer.began(request, decision, 0.0)
        placer.prefilled(request.request_id, 0.0)
        placer.first_token(request.request_id, 0.0)
        if decision.prefill is None:
            placer.observed_prefill(decision.decode, 4096, 4096 * PRIORS.prefill_ms_per_token)
        else:
            placer.observed_kv_transfer(decision.decode, 256, PRIORS.kv_transfer_fixed_ms + 256 * PAGE_MS)
            num_disaggregated += number > 200
        placer.ended(request.request_id, 0.0)
    assert num_disaggregated > 180


def test_transfers_behind_others_do_not_teach_the_time_of_the_queue() -> None:
    fleet = Fleet(num_prefill=4, num_decode=1, seed=3)
    fleet.serve(20, 0.5, [4096])
    for _ in range(200):
        fleet.decode[0].transfer(256, lambda times: None)
    fleet.serve(4, 0.01, [4096])
    fleet.clock.run_out()
    rates = fleet.gateways[0].placer._pricer.decode.rates.of(fleet.decode[0].id)
    assert rates.kv_transfer_page_ms.value == pytest.approx(PAGE_MS, rel=0.5)
    fleet.serve(10, 0.5, [4096])
    assert rates.kv_transfer_page_ms.value == pytest.approx(PAGE_MS, rel=0.2)


def a_policy() -> PricedPolicy:
    """A policy that knows one prefill and one decode worker."""
    policy = PricedPolicy(ResidencyIndex(), seed=1)
    placed(policy.placer, a_request(), [candidate("p")], [candidate("d")])
    return policy


def measured(first_token_ms: float, durations: EngineDurations | None, num_pages: int = 256) -> Measured:
    return Measured(
        first_token_ms=first_token_ms,
        load_ms=0.0,
        computed_tokens=1 if num_pages else 4096,
        transferred_pages=num_pages,
        queue_tokens=0,
        step_ms=None,
        num_streams=1,
        durations=durations,
    )


def learned(policy: PricedPolicy) -> tuple[float, float]:
    """The decode worker's ms a page and ms a token."""
    rates = policy.placer._pricer.decode.rates.of("d")
    return rates.kv_transfer_page_ms.value, rates.prefill_ms_per_token.value


def test_the_engines_time_counts_where_it_is_known() -> None:
    slow_ms = 60_000.0
    policy, wire_ms = a_policy(), PRIORS.kv_transfer_fixed_ms + 256 * 0.2
    for _ in range(30):
        policy.learn(MemberId("d"), measured(slow_ms, EngineDurations(kv_transfer_ms=wire_ms, kv_transfer_share=1.0)))
        policy.learn(MemberId("d"), measured(slow_ms, EngineDurations(prefill_ms=1229.0, prefill_share=0.5), 0))
    page_ms, token_ms = learned(policy)
    assert page_ms == pytest.approx(0.2, rel=0.02)
    assert token_ms == pytest.approx(1224 / 8192, rel=0.02)


def test_without_the_engines_time_the_gateways_own_counts() -> None:
    policy = a_policy()
    for durations in (None, EngineDurations(queue_ms=3.0)):
        for _ in range(30):
            policy.learn(MemberId("d"), measured(PRIORS.kv_transfer_fixed_ms + 256 * 0.2, durations))
            policy.learn(MemberId("d"), measured(PRIORS.prefill_fixed_ms + 4096 * 0.3, durations, 0))
    assert learned(policy) == pytest.approx((0.2, 0.3), rel=0.02)


def test_an_unknown_share_of_a_known_time_teaches_nothing() -> None:
    policy = a_policy()
    policy.learn(MemberId("d"), measured(9e9, EngineDurations(kv_transfer_ms=9e9, prefill_ms=9e9)))
    policy.learn(MemberId("d"), measured(9e9, EngineDurations(kv_transfer_ms=9e9, prefill_ms=9e9), 0))
    assert learned(policy) == (PAGE_MS, PRIORS.prefill_ms_per_token)


def test_pages_on_their_way_to_a_worker_are_transferred_before_a_new_ones() -> None:
    placer = Placer(ResidencyIndex(), seed=1)

    def place(request: PlacementRequest) -> Decision:
        decision = placer.place(request, [candidate("p0")], [candidate("d0")], 0.0, may_be_aggregated=False)
        assert decision is not None
        return decision

    first = a_request()
    decision = place(first)
    alone_ms = PRIORS.kv_transfer_fixed_ms + 256 * PAGE_MS
    placer.began(first, decision, 0.0)
    assert place(a_request()).price.kv_transfer_ms == pytest.approx(alone_ms)
    placer.prefilled(first.request_id, 0.0)
    assert place(a_request()).price.kv_transfer_ms == pytest.approx(alone_ms + 256 * PAGE_MS)
    placer.first_token(first.request_id, 0.0)
    assert place(a_request()).price.kv_transfer_ms == pytest.approx(alone_ms)
    placer.check()


# --- Other gateways' prompts


def test_other_gateways_prompts_count_by_their_tokens() -> None:
    """R4: a prompt of 128 tokens went behind four of 120,000 instead of seven of 100."""
    long = candidate("long", EngineStats(num_running=1, num_waiting=3, queued_prompt_tokens=480_000))
    short = candidate("short", EngineStats(num_running=1, num_waiting=6, queued_prompt_tokens=700))
    decode = [candidate("d0", EngineStats(queued_prompt_tokens=480_000))]
    for seed in range(20):
        placer = Placer(ResidencyIndex(), seed=seed)
        request = a_request(128)
        decision = placer.place(request, [long, short], decode, 0.0, may_be_aggregated=False)
        assert decision is not None
        assert decision.prefill == "short"
        assert decision.price.queue_ms == pytest.approx(700 * PRIORS.prefill_ms_per_token)
        # A decode worker that computes for other gateways is no way around.
        assert placed(placer, request, [long, short], decode).prefill == "short"


def test_own_prompts_are_not_counted_again_as_other_gateways() -> None:
    placer = Placer(ResidencyIndex(), dataclasses.replace(PRIORS, interference_weight=100.0), seed=1)
    decode, now_s = [candidate("d0")], 1.0

    def queue_ms(stats: EngineStats, reported_s: float, at_s: float) -> float:
        decision = placer.place(a_request(4096), [candidate("p0", stats, reported_s)], decode, at_s)
        assert decision is not None
        assert decision.prefill == "p0"
        return decision.price.queue_ms

    ours = a_request(4096)
    decision = placer.place(ours, [candidate("p0")], decode, now_s)
    assert decision is not None
    placer.began(ours, decision, now_s)
    head_ms = PRIORS.prefill_fixed_ms + 4096 * PRIORS.prefill_ms_per_token
    stats = EngineStats(num_running=2, queued_prompt_tokens=4096 + 1000)
    assert queue_ms(stats, 1.0, 1.0) == pytest.approx(head_ms + 1000 * PRIORS.prefill_ms_per_token)
    placer.prefilled(ours.request_id, 1.4)
    # The report is from before the end.
    for reported_s in (1.39, 1.41, 1.54):
        assert queue_ms(stats, reported_s, 1.55) == pytest.approx(1000 * PRIORS.prefill_ms_per_token)
    stats = EngineStats(num_running=1, queued_prompt_tokens=1000)
    assert queue_ms(stats, 1.56, 1.56) == pytest.approx(1000 * PRIORS.prefill_ms_per_token)


def test_of_other_gateways_prompts_the_part_that_is_mostly_computed_counts() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    queue_ms: list[float] = []
    for number in range(1, 6):
        sources = PromptSources(local_compute=20_000 * number, local_cache_hit=80_000 * number)
        stats = EngineStats(num_running=1, queued_prompt_tokens=1000, prompt_tokens=sources)
        queue_ms.append(placed(placer, a_request(), [candidate("p0", stats)], [candidate("d0")]).price.queue_ms)
    assert queue_ms[-1] == pytest.approx(1000 * 0.2 * PRIORS.prefill_ms_per_token)


@pytest.mark.parametrize("num_gateways", [4, 16])
def test_other_gateways_queues_do_not_inflate_what_is_learned(num_gateways: int) -> None:
    """R4: 2 to 4 times with 4 to 16 gateways."""
    fleet = Fleet(num_prefill=2, num_decode=4, num_gateways=num_gateways, seed=1)
    fleet.serve(60 * num_gateways, 0.13, [2048])
    for gateway in fleet.gateways:
        for worker in fleet.prefill:
            rate = gateway.placer._pricer.prefill.rates.of(worker.id).prefill_ms_per_token
            assert rate.num_observed > 5
            assert rate.value == pytest.approx(PRIORS.prefill_ms_per_token, rel=0.1)


# --- Prefill workers


def shares_of(placer: Placer, prefill: list[Candidate], num_requests: int) -> collections.Counter[str | None]:
    """Place requests one after the other on prefill workers that take what they should."""
    shares: collections.Counter[str | None] = collections.Counter()
    for _ in range(num_requests):
        request = a_request(2048)
        decision = placed(placer, request, prefill, [candidate(f"d{i}") for i in range(4)])
        placer.began(request, decision, 0.0)
        placer.prefilled(request.request_id, 0.0)
        placer.ended(request.request_id, 0.0)
        if decision.prefill is not None:
            placer.observed_prefill(decision.prefill, 2048, 5.0 + 2048 * PRIORS.prefill_ms_per_token)
        shares[decision.prefill] += 1
    return shares


def test_a_prefill_worker_without_memory_is_left_alone() -> None:
    """R7: one with all pages in use got 473 of 1,000."""
    free = candidate("free", EngineStats(num_pages=10_000, num_pages_used=100))
    full = candidate("full", EngineStats(num_pages=10_000, num_pages_used=10_000))
    shares = shares_of(Placer(ResidencyIndex(), seed=1), [free, full], 1000)
    assert shares["full"] == 0
    assert shares["free"] > 900


def test_prompts_that_wait_on_a_prefill_worker_need_its_memory_too() -> None:
    placer = Placer(ResidencyIndex(), dataclasses.replace(PRIORS, interference_weight=100.0), seed=1)
    prefill = [candidate("p0", EngineStats(num_pages=1000, num_pages_used=0))]
    queue_ms: list[float] = []
    for _ in range(5):
        request = a_request(4096)
        decision = placed(placer, request, prefill, [candidate("d0")])
        assert decision.prefill == "p0"
        placer.began(request, decision, 0.0)
        queue_ms.append(decision.price.queue_ms)
    each_ms = PRIORS.prefill_fixed_ms + 4096 * PRIORS.prefill_ms_per_token
    assert queue_ms[:3] == pytest.approx([0, each_ms, 2 * each_ms])
    # 900 pages may be used, and the fourth prompt makes 1,024.
    page_ms = PRIORS.pages_full_ms / 100
    assert queue_ms[3:] == pytest.approx([3 * each_ms + 124 * page_ms, 4 * each_ms + 380 * page_ms])


def test_a_worker_that_was_slow_thrice_gets_work_again() -> None:
    """R10: after three prefills of 30 s none of the next 5,000 requests."""
    placer = Placer(ResidencyIndex(), seed=1)
    prefill = [candidate(f"p{i}") for i in range(4)]
    shares_of(placer, prefill, 40)
    for _ in range(3):
        placer.observed_prefill(MemberId("p0"), 2048, 30_000.0)
    assert shares_of(placer, prefill, 20)["p0"] == 0
    shares_of(placer, prefill, 180)
    assert shares_of(placer, prefill, 400)["p0"] > 60


def test_a_new_worker_does_not_inherit_what_the_others_learned_in_an_overload() -> None:
    """All are measured as they are again, and none was ever observed beside the new one."""
    placer = Placer(ResidencyIndex(), seed=1)
    old = [candidate("p0"), candidate("p1")]
    placed(placer, a_request(), old, [candidate("d0")])
    for worker in old:
        for _ in range(5):
            placer.observed_prefill(worker.member_id, 2048, 30_000.0)
    for _ in range(1, 100):
        placed(placer, a_request(), [*old, candidate("new")], [candidate("d0")])
    price = placed(placer, a_request(), [candidate("new")], [candidate("d0")]).price
    fastest_ms = PRIORS.prefill_fixed_ms + 4096 * PRIORS.prefill_ms_per_token
    assert price.compute_ms <= fastest_ms * 1.05
