from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from msgspec import structs

from kvferry.engine.base import Backlogs, EngineStats, RequestId, Turn
from kvferry.membership.base import MemberId
from kvferry.pages.keys import route_keys, seed_of
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry.router.placement import Candidate, PlacementRequest, Reason
from kvferry.router.priced_placement import Decision, Placer
from kvferry.router.prices.pricing import NO_VOLUMES, VolumeCosts
from kvferry.router.prices.rates import CostDefaults
from support.candidates import candidate

BLOCK_SIZE = 16
PRIORS = CostDefaults()

_fresh = itertools.count()


def candidates(kind: str, num: int, load: EngineStats | None = None) -> list[Candidate]:
    return [candidate(f"{kind}{i}", load) for i in range(num)]


def tokens(num_tokens: int, seed: int) -> list[int]:
    seeded = random.Random(seed)
    return [seeded.randrange(50_000) for _ in range(num_tokens)]


def request_of(token_ids: Sequence[int], max_tokens: int = 64) -> PlacementRequest:
    keys = route_keys(token_ids, BLOCK_SIZE, seed_of(""))
    return PlacementRequest(RequestId(f"r{next(_fresh)}"), keys, len(token_ids), BLOCK_SIZE, max_tokens)


def fresh_request(num_tokens: int = 4096, max_tokens: int = 64) -> PlacementRequest:
    return request_of(tokens(num_tokens, next(_fresh)), max_tokens)


def gpu(name: str) -> Holder:
    return Holder(name, Tier.GPU)


def volume(*nodes: str, page_ms: float = PRIORS.volume_page_ms, queue_ms: float = 0.0) -> VolumeCosts:
    return VolumeCosts(frozenset(nodes), page_ms, queue_ms)


def placed(
    placer: Placer,
    request: PlacementRequest,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    volumes: Mapping[str, VolumeCosts] = NO_VOLUMES,
) -> Decision:
    decision = placer.place(request, prefill, decode, 0.0, volumes=volumes)
    assert decision is not None
    return decision


# --- the choice between the two ways


def test_without_a_decode_worker_there_is_no_decision() -> None:
    assert Placer(ResidencyIndex()).place(fresh_request(), candidates("p", 1), [], 0.0) is None


def test_a_long_uncached_prompt_is_disaggregated() -> None:
    decision = placed(Placer(ResidencyIndex(), seed=1), fresh_request(10_240), candidates("p", 1), candidates("d", 1))
    assert (decision.prefill, decision.decode, decision.reason) == ("p0", "d0", Reason.DISAGGREGATED)
    assert decision.missing_tokens == 10_240
    assert decision.lacking_pages == 640


def test_a_short_uncached_tail_is_computed_where_it_is_decoded() -> None:
    index = ResidencyIndex()
    request = fresh_request(10_240)
    index.store(gpu("d0"), request.keys[:-4])
    index.store(gpu("p0"), request.keys[:-4])
    decision = placed(Placer(index, seed=1), request, candidates("p", 1), candidates("d", 2))
    assert (decision.prefill, decision.decode, decision.reason) == (None, "d0", Reason.PREFIX_ON_DECODE)
    assert decision.missing_tokens == 64
    short = placed(Placer(index, seed=1), fresh_request(40), candidates("p", 1), candidates("d", 1))
    assert (short.prefill, short.reason) == (None, Reason.SHORT_TAIL)


def test_busy_prefill_workers_leave_prompts_to_decode_workers() -> None:
    busy = candidates("p", 2, EngineStats(num_running=1, num_waiting=20))
    decision = placed(Placer(ResidencyIndex(), seed=1), fresh_request(), busy, candidates("d", 1))
    assert (decision.prefill, decision.reason) == (None, Reason.PREFILL_BUSY)


def test_without_prefill_workers_decode_workers_compute() -> None:
    decision = placed(Placer(ResidencyIndex(), seed=1), fresh_request(), [], candidates("d", 1))
    assert (decision.prefill, decision.reason) == (None, Reason.NO_PREFILL_WORKER)
    assert decision.lacking_pages == 0


@pytest.mark.parametrize(
    "facts", [{"model": "another"}, {"block_size": 32}, {"kv_cache_dtype": "fp8"}], ids=lambda facts: next(iter(facts))
)
def test_workers_that_cannot_exchange_pages_are_not_paired(facts: dict[str, object]) -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    alien = candidate("alien", **facts)
    decision = placed(placer, fresh_request(), [alien], candidates("d", 1))
    assert (decision.prefill, decision.reason) == (None, Reason.UNEQUAL_PAGES)
    for _ in range(20):
        assert placed(placer, fresh_request(), [alien, *candidates("p", 1)], candidates("d", 1)).prefill == "p0"


# --- where to


def test_the_worker_that_holds_the_prefix_computes_the_rest() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    index.store(gpu("p2"), request.keys[:256])
    decision = placed(Placer(index, seed=1), request, candidates("p", 4), candidates("d", 4))
    assert decision.prefill == "p2"
    assert decision.missing_tokens == 4096
    assert decision.matched.gpu == 4096


def test_the_decode_worker_that_lacks_fewer_pages_is_cheaper() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    for name in ("p0", "d1"):
        index.store(gpu(name), request.keys[:256])
    decision = placed(Placer(index, seed=1), request, candidates("p", 1), candidates("d", 4))
    assert (decision.prefill, decision.decode, decision.lacking_pages) == ("p0", "d1", 256)


def test_slower_tiers_count_for_what_loading_costs() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    index.store(gpu("p0"), request.keys[:128])
    index.store(Holder("p0", Tier.CPU), request.keys[128:256])
    index.store(Holder("v", Tier.VOLUME), request.keys[:384])
    volumes = {"v": volume("")}
    price = placed(Placer(index, seed=1), request, candidates("p", 2), candidates("d", 1), volumes).price
    assert price.prefill == "p0"
    assert (price.matched.gpu, price.matched.cpu, price.matched.volume) == (2048, 2048, 2048)
    assert price.load_ms == pytest.approx(128 * PRIORS.cpu_page_ms + 128 * PRIORS.volume_page_ms)
    assert price.compute_ms == pytest.approx(PRIORS.prefill_fixed_ms + 2048 * PRIORS.prefill_ms_per_token)
    assert price.volume == "v"


def on_volumes(request: PlacementRequest, **depths: int) -> ResidencyIndex:
    index = ResidencyIndex()
    for volume_id, depth in depths.items():
        index.store(Holder(volume_id, Tier.VOLUME), request.keys[:depth])
    return index


def test_a_worker_near_the_pages_is_preferred() -> None:
    request = fresh_request(8192)
    prefill = [candidate(f"p{i}", node=f"n{i}") for i in range(4)]
    decision = placed(
        Placer(on_volumes(request, v=512), seed=1), request, prefill, candidates("d", 1), {"v": volume("n2")}
    )
    assert (decision.prefill, decision.load.volume, decision.load.num_pages) == ("p2", "v", 512)
    far = placed(
        Placer(on_volumes(request, v=512), seed=1), request, prefill[:1], candidates("d", 1), {"v": volume("n2")}
    )
    assert far.price.load_ms == pytest.approx(512 * (PRIORS.volume_page_ms + PRIORS.remote_page_ms))


def test_pages_that_cost_less_to_compute_than_to_load_are_left_where_they_are() -> None:
    request = fresh_request(8192)
    slow = volume("", page_ms=100 * BLOCK_SIZE * PRIORS.prefill_ms_per_token)
    for prefill in (candidates("p", 2), []):
        decision = placed(Placer(on_volumes(request, v=384), seed=1), request, prefill, candidates("d", 1), {"v": slow})
        assert decision.load == ("", 0, 384)
        assert decision.missing_tokens == 8192
        assert decision.matched.volume == 0


def test_of_two_volumes_the_one_that_saves_most_is_read() -> None:
    request = fresh_request(8192)
    index = on_volumes(request, deep=500, idle=400)
    busy, idle = volume("", queue_ms=10_000.0), volume("")
    decision = placed(
        Placer(index, seed=1), request, candidates("p", 1), candidates("d", 1), {"deep": busy, "idle": idle}
    )
    assert (decision.load.volume, decision.load.num_pages) == ("idle", 400)
    decision = placed(
        Placer(index, seed=1), request, candidates("p", 1), candidates("d", 1), {"deep": idle, "idle": idle}
    )
    assert (decision.load.volume, decision.load.num_pages) == ("deep", 500)


def test_a_volume_that_nobody_can_read_does_not_count() -> None:
    request = fresh_request(8192)
    decision = placed(Placer(on_volumes(request, v=500), seed=1), request, candidates("p", 1), candidates("d", 1))
    assert (decision.load.volume, decision.load.skipped_pages, decision.missing_tokens) == ("", 0, 8192)


def test_what_a_worker_holds_itself_is_not_loaded() -> None:
    request = fresh_request(8192)
    index = on_volumes(request, v=300)
    index.store(gpu("p0"), request.keys[:400])
    decision = placed(Placer(index, seed=1), request, candidates("p", 1), candidates("d", 1), {"v": volume("")})
    assert (decision.load.volume, decision.load.skipped_pages, decision.price.load_ms) == ("", 0, 0.0)
    assert decision.missing_tokens == 8192 - 400 * BLOCK_SIZE


def test_a_decode_worker_with_more_streams_costs_more_and_one_without_memory_most() -> None:
    loads = [EngineStats(num_running=n, num_pages=10_000, num_pages_used=n) for n in (0, 40)]
    full = EngineStats(num_running=1, num_pages=10_000, num_pages_used=9_990)
    decode = [candidate("idle", loads[0]), candidate("busy", loads[1]), candidate("full", full)]
    decision = placed(Placer(ResidencyIndex(), seed=1), fresh_request(), candidates("p", 1), decode)
    cost = {price.decode: price.streams_ms for price in (decision.price, *decision.runners_up()) if price.prefill}
    assert decision.decode == "idle"
    assert cost["idle"] < cost["busy"] < cost["full"]


def test_waiting_requests_make_a_decode_worker_dear() -> None:
    decode = [candidate("d0", EngineStats(num_running=8, num_waiting=4)), candidate("d1", EngineStats(num_running=12))]
    for _ in range(10):
        assert placed(Placer(ResidencyIndex(), seed=1), fresh_request(), candidates("p", 1), decode).decode == "d1"


def test_workers_that_have_loaded_the_adapter_are_cheaper_until_they_are_busy() -> None:
    having, other = EngineStats(loaded_adapters=frozenset({"sql@00"})), EngineStats()
    prefill = [candidate("p0", other), candidate("p1", having)]
    decode = [candidate("d0", other), candidate("d1", having)]
    plain = fresh_request(4096)
    request = structs.replace(plain, adapter="sql@00")
    chosen = [placed(Placer(ResidencyIndex(), seed=seed), request, prefill, decode) for seed in range(20)]
    assert {(decision.prefill, decision.decode) for decision in chosen} == {("p1", "d1")}
    chosen = [placed(Placer(ResidencyIndex(), seed=seed), plain, prefill, decode) for seed in range(20)]
    assert {decision.decode for decision in chosen} == {"d0", "d1"}, "the model itself is loaded everywhere"
    # Waiting behind other prompts costs more than loading.
    busy = dataclasses.replace(having, num_running=1, queued_prompt_tokens=100_000)
    decision = placed(Placer(ResidencyIndex(), seed=1), request, [prefill[0], candidate("p1", busy)], decode)
    assert (decision.prefill, decision.decode) == (None, "d1")


def test_prompts_that_wait_for_their_turns_keep_no_stream_waiting() -> None:
    """Forty of a flood made every decode worker too dear for a tenant whose turn comes at once."""
    prompts = EngineStats(num_running=1, num_waiting=40, num_prompts=40)
    streams = EngineStats(num_running=1, num_waiting=40)

    def streams_ms(stats: EngineStats) -> float:
        decision = placed(Placer(ResidencyIndex(), seed=1), fresh_request(), [], [candidate("d0", stats)])
        return decision.price.streams_ms

    assert streams_ms(prompts) == streams_ms(EngineStats(num_running=1))
    assert streams_ms(streams) > 10 * streams_ms(prompts)


def test_the_wait_is_that_of_the_fair_queue_and_of_what_the_report_does_not_know() -> None:
    """A tenant waits for a part of a flood's forty prompts, by its share, and for all of its own."""
    request = with_turn(fresh_request(1000), "gold", 4.0)
    (decode,) = candidates("d", 1)
    placer = Placer(ResidencyIndex(), dataclasses.replace(PRIORS, interference_weight=100.0), seed=1)
    prompt_ms = PRIORS.prefill_fixed_ms + 1000 * PRIORS.prefill_ms_per_token
    noise = Backlogs({"noise": (40 * prompt_ms, 1.0)})

    def queue_ms(backlogs: Backlogs) -> float:
        stats = EngineStats(num_running=1, num_waiting=39, queued_prompt_tokens=40_000, backlogs=backlogs)
        return placed(placer, request, [candidate("p0", stats, reported_s=0.0)], [decode]).price.queue_ms

    alone = queue_ms(noise)
    assert alone == pytest.approx(prompt_ms / 4, rel=0.25)
    own = queue_ms(Backlogs({**noise.by_tenant, "gold": (prompt_ms, 4.0)}))
    assert own == pytest.approx(prompt_ms + 2 * prompt_ms / 4, rel=0.25)
    sent = with_turn(fresh_request(1000), "gold", 4.0)
    placer.began(sent, placed(placer, sent, [candidate("p0", reported_s=0.0)], [decode]), 1.0)
    assert queue_ms(noise) == pytest.approx(alone + prompt_ms, rel=0.05)


def with_turn(request: PlacementRequest, tenant: str, share: float) -> PlacementRequest:
    return structs.replace(request, turn=Turn(tenant, share))


# --- prices


def test_prices_grow_with_missing_tokens_and_with_the_queue() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    totals = []
    for held in (500, 400, 200, 100, 1):
        index.clear(gpu("p0"))
        index.store(gpu("p0"), request.keys[:held])
        totals.append(placed(Placer(index, seed=1), request, candidates("p", 1), candidates("d", 1)).price.total_ms)
    assert totals == sorted(totals)
    assert len(set(totals)) == len(totals)
    # Decode workers that must not compute, so that the queue of the one prefill worker can grow.
    placer = Placer(ResidencyIndex(), dataclasses.replace(PRIORS, interference_weight=100.0), seed=1)
    queues = []
    for _ in range(4):
        another = fresh_request(8192)
        decision = placed(placer, another, candidates("p", 1), candidates("d", 8))
        assert decision.prefill == "p0"
        queues.append(decision.price.queue_ms)
        placer.began(another, decision, 0.0)
    each_ms = PRIORS.prefill_fixed_ms + 8192 * PRIORS.prefill_ms_per_token
    assert queues == pytest.approx([0, each_ms, 2 * each_ms, 3 * each_ms])


def test_the_breakdown_adds_up_and_the_chosen_is_the_cheapest_but_for_chance() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    for i in range(8):
        index.store(gpu(f"p{i}"), request.keys[: 40 * i])
        index.store(gpu(f"d{i}"), request.keys[: 20 * i])
    decision = placed(Placer(index, seed=1), request, candidates("p", 8), candidates("d", 8))
    runners_up = decision.runners_up()
    assert 1 <= len(runners_up) <= 5
    assert runners_up[-1].prefill is None
    with_prefill = [price for price in runners_up if price.prefill is not None]
    assert [price.total_ms for price in with_prefill] == sorted(price.total_ms for price in with_prefill)
    for price in (decision.price, *runners_up):
        assert min(price.queue_ms, price.load_ms, price.compute_ms, price.others_ms, price.kv_transfer_ms) >= 0
        assert price.total_ms <= decision.price.total_ms * 2 or price.prefill is None
    assert (decision.price.prefill, decision.price.decode) == (decision.prefill, decision.decode)
    # Whoever chose a neighbour by chance chose one that is near.
    assert decision.price.total_ms <= min(price.total_ms for price in runners_up) * 1.06 + 2
    ttft = decision.price.queue_ms + decision.price.load_ms + decision.price.compute_ms + decision.price.kv_transfer_ms
    assert decision.expected_ttft_ms == pytest.approx(ttft + PRIORS.step_ms + PRIORS.step_ms_per_stream)


def test_a_prefill_that_hangs_makes_its_worker_dear() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    request = fresh_request(1024)
    placer.began(request, placed(placer, request, candidates("p", 1), candidates("d", 1)), 0.0)
    decision = placer.place(fresh_request(1024), candidates("p", 2), candidates("d", 1), 30.0)
    assert decision is not None
    assert decision.prefill == "p1"


# --- requests in flight


def test_a_burst_of_siblings_costs_one_prefill() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    shared = tokens(10_240, 1)
    workers: collections.Counter[MemberId | None] = collections.Counter()
    computed = 0
    reasons = set()
    for i in range(32):
        request = request_of(shared + tokens(20, 100 + i))
        decision = placer.place(request, candidates("p", 8), candidates("d", 8), i * 0.0001)
        assert decision is not None
        placer.began(request, decision, i * 0.0001)
        placer.check()
        workers[decision.prefill] += 1
        computed += decision.missing_tokens
        reasons.add(decision.reason)
    assert len(workers) == 1
    # The prompt once, and for each its own tail, with what the stride of in-flight pages leaves over.
    assert computed < 1.5 * 10_240
    assert reasons == {Reason.DISAGGREGATED, Reason.SIBLING}


def test_a_hot_prefix_spreads_when_its_holder_has_a_queue() -> None:
    index = ResidencyIndex()
    shared = tokens(2048, 1)
    index.store(gpu("p0"), route_keys(shared, BLOCK_SIZE, seed_of("")))
    placer = Placer(index, seed=1)
    chosen: collections.Counter[MemberId | None] = collections.Counter()
    for i in range(40):
        request = request_of(shared + tokens(2048, 100 + i))
        decision = placed(placer, request, candidates("p", 4), candidates("d", 64))
        placer.began(request, decision, 0.0)
        chosen[decision.prefill] += 1
    assert chosen[MemberId("p0")] > 0
    assert len([worker for worker in chosen if worker is not None]) == 4


def test_decode_workers_fill_up_evenly_before_they_report() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    chosen: collections.Counter[MemberId] = collections.Counter()
    for _ in range(160):
        request = fresh_request(512)
        decision = placed(placer, request, [], candidates("d", 8))
        placer.began(request, decision, 0.0)
        placer.first_token(request.request_id, 0.0)
        chosen[decision.decode] += 1
    assert len(chosen) == 8
    assert max(chosen.values()) - min(chosen.values()) <= 8


def test_reported_streams_are_not_counted_twice() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    unreported = [candidate("d0", EngineStats(), 0.0)]
    for _ in range(4):
        request = fresh_request(512)
        decision = placer.place(request, [], unreported, 1.0)
        assert decision is not None
        placer.began(request, decision, 1.0)
        placer.first_token(request.request_id, 1.0)
    before = placer.place(fresh_request(512), [], unreported, 2.0)
    after = placer.place(fresh_request(512), [], [candidate("d0", EngineStats(num_running=4), 2.0)], 2.0)
    assert before is not None
    assert after is not None
    assert before.price.streams_ms == pytest.approx(after.price.streams_ms)


def test_pages_of_a_finished_prefill_are_believed_in_until_the_index_knows() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    first, second = request_of(tokens(8192, 5)), request_of(tokens(8192, 5))
    decision = placed(placer, first, candidates("p", 8), candidates("d", 8))
    placer.began(first, decision, 0.0)
    placer.prefilled(first.request_id, 1.0)
    soon = placer.place(second, candidates("p", 8), candidates("d", 8), 1.1)
    assert soon is not None
    assert soon.matched.expected == 8192
    placer.first_token(first.request_id, 1.2)
    placer.ended(first.request_id, 1.3)
    late = placer.place(second, candidates("p", 8), candidates("d", 8), 1.3 + PRIORS.expected_grace_s)
    assert late is not None
    assert late.matched.total == 0
    assert placer.is_idle


def test_pages_of_a_failed_prefill_are_expected_no_more() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    first, second = request_of(tokens(8192, 5)), request_of(tokens(8192, 5))
    placer.began(first, placed(placer, first, candidates("p", 8), candidates("d", 8)), 0.0)
    placer.ended(first.request_id, 0.1)
    decision = placer.place(second, candidates("p", 8), candidates("d", 8), 0.1)
    assert decision is not None
    assert decision.matched.total == 0
    assert placer.is_idle


def test_accounts_come_back_to_zero_whatever_happens() -> None:
    seeded = random.Random(7)
    index = ResidencyIndex()
    placer = Placer(index, seed=2)
    shared = [tokens(320, i) for i in range(3)]
    live: list[PlacementRequest] = []
    now_s = 0.0
    for _ in range(600):
        now_s += seeded.random() * 0.1
        action = seeded.randrange(6)
        if action <= 1 or not live:
            request = request_of(seeded.choice(shared) + tokens(seeded.randrange(200), next(_fresh)))
            prefill = candidates("p", seeded.randrange(4))
            decision = placer.place(request, prefill, candidates("d", 3), now_s)
            assert decision is not None
            placer.began(request, decision, now_s)
            live.append(request)
        elif action == 2:
            placer.prefilled(seeded.choice(live).request_id, now_s)
        elif action == 3:
            placer.first_token(seeded.choice(live).request_id, now_s)
        elif action == 4:
            placer.ended(live.pop(seeded.randrange(len(live))).request_id, now_s, seeded.choice([None, 3, 4000]))
        elif seeded.random() < 0.1:
            placer.forget(MemberId(f"d{seeded.randrange(3)}"))
        assert placer.num_in_flight == len(live)
        placer.check()
    for request in live:
        placer.ended(request.request_id, now_s)
        placer.ended(request.request_id, now_s)
        placer.check()
    placer.place(fresh_request(), [], candidates("d", 3), now_s + PRIORS.expected_grace_s)
    placer.check()
    assert placer.is_idle


def test_a_request_cannot_begin_twice_and_unknown_ones_are_ignored() -> None:
    placer = Placer(ResidencyIndex(), seed=1)
    request = fresh_request()
    decision = placed(placer, request, candidates("p", 1), candidates("d", 1))
    placer.began(request, decision, 0.0)
    with pytest.raises(ValueError, match="in flight already"):
        placer.began(request, decision, 0.0)
    placer.ended(request.request_id, 0.0)
    placer.began(request, decision, 0.0)
    for forget in (placer.prefilled, placer.first_token, placer.ended):
        forget(RequestId("unknown"), 0.0)
    placer.check()
    assert placer.num_in_flight == 1


# --- many gateways, many workers


def test_gateways_that_see_the_same_prices_do_not_herd() -> None:
    index = ResidencyIndex()
    chosen: collections.Counter[MemberId | None] = collections.Counter()
    for seed in range(64):
        chosen[placed(Placer(index, seed=seed), fresh_request(), candidates("p", 8), candidates("d", 8)).prefill] += 1
    assert set(chosen) == {f"p{i}" for i in range(8)}
    assert max(chosen.values()) <= 20


def test_chance_never_takes_what_is_clearly_dearer() -> None:
    index = ResidencyIndex()
    request = fresh_request(8192)
    index.store(gpu("p3"), request.keys[:256])
    for seed in range(50):
        assert placed(Placer(index, seed=seed), request, candidates("p", 8), candidates("d", 8)).prefill == "p3"


def test_the_same_seed_decides_the_same() -> None:
    def run() -> list[tuple[MemberId | None, MemberId]]:
        placer, made = Placer(ResidencyIndex(), seed=9), []
        for i in range(50):
            request = request_of(tokens(2000, i))
            decision = placed(placer, request, candidates("p", 8), candidates("d", 8))
            placer.began(request, decision, 0.0)
            made.append((decision.prefill, decision.decode))
        return made

    assert run() == run()


def serve(
    speeds_ms_per_token: Sequence[float], *, num_placers: int, load: float, num_requests: int, num_tokens: int = 2048
) -> collections.Counter[MemberId]:
    """Prefill workers as queues in virtual time; returns how many prompts each computed. Nobody is told any speed."""
    seeded = random.Random(11)
    prefill = candidates("p", len(speeds_ms_per_token))
    speed = {worker.member.member_id: ms for worker, ms in zip(prefill, speeds_ms_per_token, strict=True)}
    # So many decode workers, so slow at prompts, that prefill workers are the ones to compute.
    decode = candidates("d", 64)
    cost_defaults = dataclasses.replace(PRIORS, interference_weight=100.0)
    placers = [Placer(ResidencyIndex(), cost_defaults, seed=seed) for seed in range(num_placers)]
    free_at = dict.fromkeys(speed, 0.0)
    served: collections.Counter[MemberId] = collections.Counter()
    done: list[tuple[float, int, Placer, RequestId, MemberId, float, int]] = []
    now_s = 0.0
    capacity_per_s = sum(1000 / (ms * num_tokens) for ms in speeds_ms_per_token)
    for i in range(num_requests):
        now_s += seeded.expovariate(load * capacity_per_s)
        while done and done[0][0] <= now_s:
            at_s, _i, placer, request_id, worker, began_s, ahead = heapq.heappop(done)
            placer.prefilled(request_id, at_s)
            placer.observed_prefill(worker, num_tokens, 1000 * (at_s - began_s), ahead)
            placer.first_token(request_id, at_s)
            placer.ended(request_id, at_s)
        placer = placers[i % num_placers]
        request = request_of(tokens(num_tokens, next(_fresh)))
        waiting = collections.Counter(entry[4] for entry in done)
        reported = [
            dataclasses.replace(worker, stats=EngineStats(num_running=waiting[worker.member.member_id]))
            for worker in prefill
        ]
        decision = placer.place(request, reported, decode, now_s)
        assert decision is not None
        placer.began(request, decision, now_s)
        worker = decision.prefill
        assert worker is not None
        ahead = waiting[worker] * num_tokens
        free_at[worker] = max(free_at[worker], now_s) + speed[worker] * num_tokens / 1000
        heapq.heappush(done, (free_at[worker], i, placer, request.request_id, worker, now_s, ahead))
        if i > num_requests // 4:
            served[worker] += 1
    for placer in placers:
        placer.check()
    return served


@pytest.mark.parametrize("num_placers", [1, 3])
def test_a_worker_at_half_speed_gets_half_the_share(num_placers: int) -> None:
    served = serve([0.1, 0.1, 0.1, 0.2], num_placers=num_placers, load=1.1, num_requests=1200)
    fast = sum(served[MemberId(f"p{i}")] for i in range(3)) / 3
    assert 0.4 < served[MemberId("p3")] / fast < 0.6


def test_equal_workers_get_equal_shares() -> None:
    served = serve([0.1] * 4, num_placers=2, load=0.8, num_requests=800)
    assert min(served.values()) / max(served.values()) > 0.8
