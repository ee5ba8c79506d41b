"""engine/vllm/plugins/tenant_scheduler.py"""

from __future__ import annotations

import copy
import gc
import inspect
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs, to_builtins

from kvferry.engine.base import TierHints
from kvferry.engine.vllm.plugins.core_fields import SET_TERMS
from kvferry.engine.vllm.start.arguments import ADAPTER_SCHEDULER, TENANT_SCHEDULER
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.pages.device_pages import DevicePages
from kvferry.tenancy.terms import TierContract, TierTerms

from .support import parameters

pytestmark = pytest.mark.vllm


BLOCK_SIZE = 4
NUM_BLOCKS = 41  # one is vLLM's null block


class Engine:
    """vLLM's own manager of a device's blocks, with or without our queue and pool."""

    def __init__(self, contracts: dict[str, TierContract] | None = None) -> None:
        import torch
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from kvferry.engine.vllm.plugins.tenant_scheduler import keep_tenants

        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.manager = KVCacheManager(
            KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=8192,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_kv_cache_events=True,
        )
        self.pool: Any = self.manager.block_pool
        if contracts is not None:
            self.pool = keep_tenants(self.manager)
            self.pages.configure(contracts)
        self.num_requests = 0

    @property
    def pages(self) -> DevicePages:
        pages: DevicePages = self.pool.free_block_queue.pages
        return pages

    def request(self, tokens: list[int], tenant: str, max_tokens: int = 1) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256_cbor)
        self.num_requests += 1
        request = Request(
            f"r{self.num_requests}",
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            cache_salt=tenant,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
        )
        if hasattr(self.pool, "tenants"):
            self.pool.tenants[request] = tenant
        return request

    def admit(self, request: Any, *, others_run: bool = False) -> tuple[int, list[int]] | None:
        """Return the tokens that hit and the ids of all its blocks, or None where it has to wait."""
        computed, num_computed, _ = self.manager.get_computed_blocks(request)
        new = self.manager.allocate_slots(
            request,
            len(request.all_token_ids) - num_computed,
            num_new_computed_tokens=num_computed,
            new_computed_blocks=computed,
            full_sequence_must_fit=True,
            has_scheduled_reqs=others_run,
        )
        if new is None:
            return None
        return num_computed, [block.block_id for block in self.manager.get_blocks(request.request_id).blocks[0]]

    def run(self, first: int, num_blocks: int, tenant: str) -> int:
        """Return the tokens that hit."""
        request = self.request(prompt_of(first, num_blocks), tenant)
        admitted = self.admit(request)
        assert admitted is not None
        self.manager.free(request)
        return admitted[0]


def prompt_of(first: int, num_blocks: int) -> list[int]:
    return [first, *range(num_blocks * BLOCK_SIZE)]


def test_vllm_uses_the_queue_as_we_do() -> None:
    import vllm.v1.core.block_pool as block_pool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    from kvferry.engine.vllm.plugins.tenant_scheduler import TenantFreeQueue

    used = set(re.findall(r"free_block_queue\.(\w+)", inspect.getsource(block_pool)))
    assert used == {"append_n", "num_free_blocks", "popleft", "popleft_n", "prepend_n", "remove"}
    for name in used - {"num_free_blocks"}:
        assert parameters(getattr(TenantFreeQueue, name)) == parameters(getattr(FreeKVCacheBlockQueue, name))


def test_vllm_hashes_blocks_only_where_we_see_it() -> None:
    from vllm.v1.core.block_pool import BlockPool

    callers = {
        name
        for name, function in vars(BlockPool).items()
        if inspect.isfunction(function) and "self._insert_block_hash(" in inspect.getsource(function)
    }
    assert callers == {"cache_full_blocks", "cache_partial_block", "move_block_hashes"}
    forgetting = {
        name
        for name, function in vars(BlockPool).items()
        if inspect.isfunction(function) and ".reset_hash()" in inspect.getsource(function)
    }
    assert forgetting == {"_remove_cached_block_hashes", "reset_prefix_cache"}


def test_vllm_says_only_of_admissions_whether_others_run() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import scheduler

    assert inspect.getsource(scheduler).count("has_scheduled_reqs=bool(self.running)") == 1
    assert inspect.getsource(scheduler).count("has_scheduled_reqs") == 1
    assert parameters(KVCacheManager.allocate_slots)[:3] == ["self", "request", "num_new_tokens"]
    assert KVCacheManager.allocate_slots.__code__.co_names.count("get_num_free_blocks") == 1


@pytest.mark.parametrize("seed", range(10))
def test_without_contracts_blocks_go_as_in_vllm(seed: int) -> None:
    stock, ours = Engine(), Engine({})
    ours.pages._bonus_s = 0.0
    rng = random.Random(seed)
    running: list[tuple[Any, Any]] = []
    num_hits = 0
    for _ in range(300):
        if rng.random() < 0.6:
            tokens = prompt_of(rng.randrange(6), rng.randint(1, 8))
            pair = stock.request(tokens, "a"), ours.request(tokens, "a")
            admitted = stock.admit(pair[0])
            assert admitted == ours.admit(pair[1])
            if admitted is not None:
                running.append(pair)
                num_hits += admitted[0] > 0
        elif running:
            pair = running.pop(rng.randrange(len(running)))
            stock.manager.free(pair[0])
            ours.manager.free(pair[1])
        ours.pages.check()
        assert stock.pool.get_num_free_blocks() == ours.pool.get_num_free_blocks()
        assert len(stock.pool.take_events()) == len(ours.pool.take_events())
    assert num_hits > 20


def test_a_floor_survives_a_flood_of_ten_times_the_memory() -> None:
    for contracts, expected in ((None, 0), ({"acme": TierContract(floor=10, cap=20)}, 40)):
        engine = Engine(contracts)
        assert engine.run(1, 10, "acme") == 0
        for number in range(100):
            engine.run(1000 + number, 4, "noise")
        assert engine.run(1, 10, "acme") == expected


def test_admissions_leave_floors_alone_while_others_run() -> None:
    engine = Engine({"acme": TierContract(floor=20, cap=20)})
    engine.run(1, 19, "acme")
    runs = engine.request(prompt_of(2, 9), "noise")
    assert engine.admit(runs) is not None
    waits = engine.request(prompt_of(3, 14), "noise")
    assert engine.admit(waits, others_run=True) is None
    fits = engine.request(prompt_of(4, 9), "noise")
    assert engine.admit(fits, others_run=True) is not None
    engine.manager.free(runs)
    engine.manager.free(fits)
    own = engine.request(prompt_of(1, 30), "acme")
    assert engine.admit(own, others_run=True) is not None, "a floor never holds its own tenant up"
    engine.manager.free(own)
    alone = engine.request(prompt_of(5, 39), "noise")
    assert engine.admit(alone) is not None, "where nothing runs nothing would ever make room"
    engine.pages.check()


def test_a_running_request_may_take_what_a_floor_keeps() -> None:
    engine = Engine({"acme": TierContract(floor=20, cap=20)})
    engine.run(1, 19, "acme")
    runs = engine.request(prompt_of(2, 18), "noise")
    assert engine.admit(runs) is not None
    runs.num_computed_tokens = runs.num_tokens
    runs.append_output_token_ids(list(range(8 * BLOCK_SIZE)))
    assert engine.manager.allocate_slots(runs, 8 * BLOCK_SIZE) is not None
    engine.pages.check()
    engine.manager.free(runs)
    assert 0 < engine.run(1, 19, "acme") < 19 * BLOCK_SIZE


def test_failed_loads_and_resets_leave_no_owner() -> None:
    engine = Engine({"acme": TierContract(floor=10, cap=20)})
    engine.run(1, 10, "acme")
    num_cached = engine.pages.holding_of("acme").used
    assert num_cached == 10
    cached = [block.block_id for block in engine.pool.blocks if block.block_hash is not None]
    engine.manager.evict_blocks(set(cached[:4]))
    engine.pages.check()
    assert engine.pages.holding_of("acme").used == 6
    assert engine.manager.reset_prefix_cache()
    assert engine.pages.holding_of("acme").used == 0
    assert engine.pages.num_free == NUM_BLOCKS - 1


def test_what_has_expired_is_gone_before_it_is_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine({"acme": TierContract(cap=40, ttl_s=60.0)})
    engine.run(1, 10, "acme")
    engine.pool.evict_expired()
    assert engine.run(1, 10, "acme") == 40
    engine.pool.take_events()
    later_s = time.monotonic() + 61.0
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    engine.pool.evict_expired()
    assert len(engine.pool.take_events()) == 10, "and gateways hear of it"
    assert engine.run(1, 10, "acme") == 0


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    from vllm.engine.arg_utils import EngineArgs

    from kvferry import model_folder

    config = EngineArgs(
        model=str(model_folder.resolve("default")),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        max_model_len=512,
        scheduler_cls=TENANT_SCHEDULER,
        scheduling_policy="priority",
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


class Steps:
    """A scheduler of vLLM, whose steps answer each request with one token."""

    def __init__(self, vllm_config: Any, *, is_async: bool) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        vllm_config.scheduler_config.async_scheduling = is_async
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        make = vllm_config.scheduler_config.get_scheduler_cls()
        self.scheduler = make(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            log_stats=True,
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        self.requests = Engine()
        self.hits: dict[str, int] = {}  # tokens

    def set_terms(self, **terms: TierTerms | None) -> None:
        """Change terms in the device's memory, as a worker calls the engine's core."""
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        sent = MsgpackDecoder().decode(MsgpackEncoder().encode(to_builtins({"device": terms})))
        getattr(EngineCore, SET_TERMS)(SimpleNamespace(scheduler=self.scheduler), sent)

    def add(
        self,
        tokens: list[int],
        hints: TierHints | None,
        max_tokens: int = 1,
        *,
        due: int = 0,
        adapter: int = 0,
    ) -> Any:
        from vllm.lora.request import LoRARequest

        from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints

        request = self.requests.request(tokens, hints.namespace.tenant if hints is not None else "", max_tokens)
        request.kv_hints = None if hints is None else to_kv_hints("r", hints)
        request.priority = due
        if adapter:
            request.lora_request = LoRARequest(f"adapter-{adapter}", adapter, "/adapters")
        self.scheduler.add_request(request)
        return request

    def step(self) -> dict[str, int]:
        """Return the tokens that each request got."""
        from vllm.v1.outputs import ModelRunnerOutput

        output = self.scheduler.schedule()
        self.hits |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        ids = list(output.num_scheduled_tokens)
        sampled = [
            [] if (request := self.scheduler.requests[each]).is_prefill_chunk else [len(request.all_token_ids)]
            for each in ids
        ]
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)
        )
        if hasattr(self.scheduler, "_pages"):
            self.scheduler._pages.check()
        num_scheduled_tokens: dict[str, int] = output.num_scheduled_tokens
        return num_scheduled_tokens

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError("requests that never end")


@pytest.mark.parametrize("is_async", [False, True])
def test_either_scheduler_keeps_floors(vllm_config: Any, is_async: bool) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    acme, noise = TierHints(Namespace("acme")), TierHints(Namespace("noise"))
    steps = Steps(vllm_config, is_async=is_async)
    assert isinstance(steps.scheduler, AsyncScheduler) == is_async
    steps.set_terms(acme=TierTerms(floor=0.5, cap=0.5, ttl_s=60.0), noise=TierTerms(cap=1.0, ttl_s=60.0))
    steps.add(prompt_of(1, 18), acme)
    steps.run()
    assert steps.scheduler._pages._contracts["acme"] == TierContract(floor=20, cap=20, ttl_s=60.0)
    # Ten at a time want 90 blocks of 40; without bounds of admission their growth would take what the floor keeps.
    for number in range(50):
        steps.add(prompt_of(1000 + number, 8), noise if number % 2 else None)
    steps.run()
    again = steps.add(prompt_of(1, 18), acme)
    steps.run()
    assert steps.hits[again.request_id] == 18 * BLOCK_SIZE
    del again
    gc.collect()
    assert not steps.scheduler._pool.tenants, "ended requests are forgotten"
    assert not steps.scheduler._pool.wanted_s


@pytest.mark.parametrize("changed", [None, 0.5, 0.1])
def test_a_floor_that_changed_is_kept(vllm_config: Any, changed: float | None) -> None:
    steps = Steps(vllm_config, is_async=False)
    steps.set_terms(acme=TierTerms(floor=0.25, cap=0.5), noise=TierTerms(cap=1.0))
    steps.add(prompt_of(1, 18), TierHints(Namespace("acme")))
    steps.run()
    if changed is not None:
        steps.set_terms(acme=TierTerms(floor=changed, cap=0.5), gone=TierTerms(floor=0.5))
    floor = int(NUM_BLOCKS - 1) * (0.25 if changed is None else changed)
    assert steps.scheduler._pages._contracts["acme"].floor == floor
    for number in range(50):
        steps.add(prompt_of(1000 + number, 8), TierHints(Namespace("noise")))
        steps.run()
    assert steps.scheduler._pages.holding_of("acme").used == min(18, floor)


def test_an_idle_engine_has_changed_terms_at_once(vllm_config: Any) -> None:
    steps = Steps(vllm_config, is_async=False)
    steps.add(prompt_of(1, 18), TierHints(Namespace("acme")))
    steps.run()
    for floor, ttl_s in ((0.5, None), (0.25, 60.0), (0.0, 5.0)):
        steps.set_terms(acme=TierTerms(floor=floor, cap=0.75, ttl_s=ttl_s))
        contract = TierContract(floor=int((NUM_BLOCKS - 1) * floor), cap=30, ttl_s=ttl_s)
        assert steps.scheduler._pages._contracts == {"acme": contract}
    steps.set_terms(acme=None)
    assert steps.scheduler._pages._contracts == {}


def test_a_request_before_its_tenants_record_has_the_default_and_then_its_own_terms(vllm_config: Any) -> None:
    steps = Steps(vllm_config, is_async=False)
    steps.set_terms(noise=TierTerms(floor=0.25, cap=1.0, ttl_s=60.0))
    steps.add(prompt_of(2, 2), TierHints(Namespace("noise")))
    running = steps.add(prompt_of(1, 18), TierHints(Namespace("acme")), 8)
    steps.step()
    pages = steps.scheduler._pages
    assert pages._tenants["acme"].contract == TierContract(), "no floor, a cap of half, and nobody else's terms"
    assert (pages.holding_of("acme").floor, pages.holding_of("acme").cap) == (0, (NUM_BLOCKS - 1) // 2)
    steps.set_terms(acme=TierTerms(floor=0.25, cap=0.25, ttl_s=30.0))
    assert not running.is_finished(), "it counts while the request runs"
    assert pages._tenants["acme"].contract == TierContract(floor=10, cap=10, ttl_s=30.0)
    assert pages._tenants["noise"].contract == TierContract(floor=10, cap=40, ttl_s=60.0)
    steps.run()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wanted_prefix_survives_its_tenants_flood_and_no_other_tenant_pays(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    acme, beta = TierHints(Namespace("acme")), TierHints(Namespace("beta"))
    steps.set_terms(acme=TierTerms(cap=0.5), beta=TierTerms(cap=0.5))
    for hints, num_hit in ((acme, 0), (structs.replace(acme, wanted_s=600.0), 6)):
        assert steps.scheduler.reset_prefix_cache()
        steps.add(prompt_of(2, 16), beta)
        steps.run()
        steps.add(prompt_of(1, 6), hints)
        steps.run()
        for number in range(30):
            steps.add(prompt_of(1000 + number, 5), acme)
            steps.run()
        assert steps.scheduler._pages.holding_of("beta").used == 16
        again = steps.add(prompt_of(1, 6), acme)
        steps.run()
        assert steps.hits[again.request_id] == num_hit * BLOCK_SIZE


@pytest.mark.parametrize("is_async", [False, True])
def test_pages_of_an_ended_session_go_before_older_ones(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    steps.set_terms(acme=TierTerms(cap=1.0))
    acme = TierHints(Namespace("acme"))
    steps.add(prompt_of(1, 8), acme)
    steps.run()
    steps.add(prompt_of(2, 16), structs.replace(acme, wanted_s=0.0))
    steps.run()
    steps.add(prompt_of(3, 8), acme)
    steps.run()
    steps.add(prompt_of(4, 16), acme)  # eight blocks are free
    steps.run()
    oldest, ended = steps.add(prompt_of(1, 8), acme), steps.add(prompt_of(2, 16), acme)
    steps.run()
    assert steps.hits[oldest.request_id] == 8 * BLOCK_SIZE
    assert steps.hits[ended.request_id] < 16 * BLOCK_SIZE


def test_the_end_of_a_session_leaves_pages_that_run_or_that_others_share(vllm_config: Any) -> None:
    steps = Steps(vllm_config, is_async=False)
    steps.set_terms(acme=TierTerms(cap=1.0))
    pages = steps.scheduler._pages
    acme = TierHints(Namespace("acme"))
    ending = structs.replace(acme, wanted_s=0.0)

    def num_ended() -> int:
        tenant = pages._tenants["acme"]
        return 0 if tenant.hinted is None else len(tenant.hinted._ended)

    shared = [1, *range(8 * BLOCK_SIZE - 1)]
    running = steps.add([*shared, *range(100, 120)], acme, 40)
    steps.step()
    steps.add([*shared, *range(200, 220)], ending)
    while len(steps.scheduler.requests) > 1:
        steps.step()
    assert num_ended() == 5, "another request runs with the shared eight"
    steps.run()
    assert running.is_finished()
    steps.add([*shared, *range(300, 320)], acme)
    steps.run()
    steps.add([*shared, *range(400, 420)], ending)
    steps.run()
    assert num_ended() == 10, "four conversations share the eight"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_accounts_are_right_whatever_requests_do(vllm_config: Any, seed: int, is_async: bool) -> None:
    """Random requests of four tenants that preempt each other, are aborted, and whose terms change."""
    from vllm.v1.request import RequestStatus

    chance, steps = random.Random(seed), Steps(vllm_config, is_async=is_async)
    scheduler, pages = steps.scheduler, steps.scheduler._pages
    num_preempted = num_aborted = 0
    living: list[Any] = []
    for _ in range(600):
        if len(scheduler.waiting) < 6:
            floor = chance.choice((0.0, 0.1, 0.25))
            device = TierTerms(floor=floor, cap=max(floor, chance.random()), ttl_s=chance.choice((None, 1.0, 60.0)))
            tenant = Namespace(chance.choice(("a", "b", "c")))
            steps.set_terms(**{tenant.tenant: device if chance.random() < 0.9 else None})
            wanted_s = chance.choice((None, None, 0.0, 0.01, 60.0))
            hints = TierHints(tenant, wanted_s=wanted_s)
            prompt = prompt_of(chance.randrange(8), chance.randint(1, 14))
            hints_or_none = hints if chance.random() < 0.8 else None
            living.append(steps.add(prompt, hints_or_none, chance.randint(1, 60), due=chance.randrange(100)))
        if living and chance.random() < 0.1:
            aborted = chance.choice(living)
            scheduler.finish_requests([aborted.request_id], RequestStatus.FINISHED_ABORTED)
            num_aborted += 1
        steps.step()
        living = [request for request in living if request.request_id in scheduler.requests]
        num_preempted += sum(request.num_preemptions for request in living)
    assert num_aborted > 5
    assert num_preempted > 5, "so that memory was short"
    steps.run()
    assert pages.num_free == NUM_BLOCKS - 1
    assert sum(pages.holding_of(tenant).used for tenant in ("a", "b", "c", "default")) == len(
        [block for block in scheduler._pool.blocks if block.block_hash is not None]
    )
    assert scheduler.reset_prefix_cache()
    assert not any(pages.holding_of(tenant).used for tenant in ("a", "b", "c", "default"))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prompt_that_is_due_first_passes_one_that_has_begun(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    stream = steps.add(prompt_of(9, 1), None, max_tokens=40).request_id
    steps.step()
    long = steps.add([1] * 100, None, due=100).request_id
    assert steps.step() == {stream: 1, long: 63}
    short = steps.add([2] * 30, None, due=50).request_id
    later = steps.add([3] * 4, None, due=200).request_id
    assert steps.step() == {stream: 1, short: 30, long: 33}
    assert steps.step() == {stream: 1, long: 4, later: 4}
    steps.run()


@pytest.mark.parametrize("is_async", [False, True])
def test_one_that_has_begun_is_left_out_for_steps_and_goes_on(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    long = steps.add([1] * 66, None, due=100).request_id
    assert steps.step() == {long: 64}
    first = steps.add([2] * 70, None, due=50).request_id
    assert steps.step() == {first: 64}
    assert steps.step() == {first: 6, long: 2}
    steps.run()
    assert steps.scheduler.max_num_active_reqs == vllm_config.scheduler_config.max_num_seqs
    assert vllm_config.scheduler_config.long_prefill_token_threshold == 0


def test_none_is_left_out_for_one_that_does_not_fit(vllm_config: Any) -> None:
    steps = Steps(vllm_config, is_async=False)
    long = steps.add([1] * 100, None, due=100).request_id
    assert steps.step() == {long: 64}
    first = steps.add([2] * 120, None, due=50).request_id  # 30 blocks, and 40 - 25 are free
    assert steps.step() == {long: 36}
    assert steps.step() == {first: 64}
    steps.run()


def test_a_step_in_vain_is_the_only_one(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that seemed to fit does not begin: what it was let pass for goes on in the next step."""
    steps = Steps(vllm_config, is_async=False)
    long = steps.add([1] * 100, None, due=100).request_id
    steps.step()
    monkeypatch.setattr(type(steps.scheduler), "_num_free", lambda self: 1000)
    first = steps.add([2] * 120, None, due=50).request_id
    assert steps.step() == {}
    assert steps.step() == {long: 36}
    assert steps.step() == {first: 64}
    steps.run()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_does_not_fit_holds_up_only_tenants_that_hold_as_much(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    noise, gold = TierHints(Namespace("noise")), TierHints(Namespace("gold"))
    running = steps.add([1] * 60, noise, max_tokens=30).request_id
    small = steps.add([2] * 4, gold, max_tokens=30).request_id
    steps.step()
    stuck = steps.add([3] * 120, noise).request_id  # 30 blocks, and 40 - 17 are free
    steps.add([4] * 40, noise)
    assert steps.step() == {running: 1, small: 1}
    passing = steps.add([5] * 8, gold).request_id
    assert steps.step() == {running: 1, small: 1, passing: 8}
    assert next(request.request_id for request in steps.scheduler.waiting) == stuck
    big = steps.add([6] * 60, gold, max_tokens=2).request_id
    steps.step()  # the one that is stuck is tried again
    steps.step()
    assert big in {request.request_id for request in steps.scheduler.running}
    later = steps.add([7] * 4, gold).request_id
    for _ in range(4):
        assert later not in steps.step() or big not in steps.scheduler.requests, "gold holds as much as noise"
    steps.run()


def test_only_begun_requests_are_left_out_and_none_is_forgotten(vllm_config: Any) -> None:
    """Long and short prompts whose order has nothing to do with when they came."""
    chance, steps = random.Random(5), Steps(vllm_config, is_async=False)
    num_passed = 0
    ended: list[Any] = []
    for _ in range(400):
        if len(steps.scheduler.requests) < 5:
            tokens = [chance.randrange(9)] * chance.choice((3, 20, 60, 90))
            ended.append(steps.add(tokens, None, chance.randint(1, 5), due=chance.randrange(1000)))
        begun = {request.request_id for request in steps.scheduler.running if request.is_prefill_chunk}
        num_passed += not begun <= steps.step().keys()
    steps.run()
    assert num_passed > 10
    assert len(ended) > 100
    assert all(request.num_output_tokens == request.max_tokens for request in ended)


@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_has_more_adapters_than_vllm_takes(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(with_adapters(vllm_config, 1), is_async=is_async)
    long = steps.add([1] * 66, None, due=100, adapter=1).request_id
    assert steps.step() == {long: 64}
    first = steps.add([2] * 70, None, due=50, adapter=2).request_id
    assert steps.step() == {long: 2}
    assert steps.step() == {first: 64}
    steps.run()


@pytest.mark.parametrize("max_adapters", [1, 2, 3])
def test_prompts_of_many_adapters_end(vllm_config: Any, max_adapters: int) -> None:
    chance, steps = random.Random(6), Steps(with_adapters(vllm_config, max_adapters), is_async=False)
    num_passed = 0
    ended: list[Any] = []
    for _ in range(600):
        if len(steps.scheduler.requests) < 5:
            tokens = [chance.randrange(9)] * chance.choice((3, 20, 60, 90))
            due, adapter = chance.randrange(1000), chance.randrange(4)
            ended.append(steps.add(tokens, None, chance.randint(1, 5), due=due, adapter=adapter))
        begun = {request.request_id for request in steps.scheduler.running if request.is_prefill_chunk}
        num_passed += not begun <= steps.step().keys()
    steps.run()
    assert num_passed
    assert all(request.num_output_tokens == request.max_tokens for request in ended)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("max_adapters", [1, 2])
@pytest.mark.parametrize("has_tenants", [False, True])
def test_an_adapter_does_not_wait_for_ever_for_those_in_use(
    vllm_config: Any, has_tenants: bool, max_adapters: int, is_async: bool
) -> None:
    """Later requests of adapters in use keep them in use, one after the other without a gap."""
    config = with_adapters(vllm_config, max_adapters)
    config.scheduler_config.scheduler_cls = TENANT_SCHEDULER if has_tenants else ADAPTER_SCHEDULER
    steps = Steps(config, is_async=is_async)
    due = 0
    for _ in range(4):
        for adapter in range(1, max_adapters + 1):
            due += 10
            steps.add([due % 9] * 8, None, 6, due=due, adapter=adapter)
            steps.step()
    first = steps.add([3] * 8, None, 4, due=due + 1, adapter=7)
    num_steps = 0
    while first.num_output_tokens < 4:
        due += 10
        steps.add([due % 9] * 8, None, 6, due=due, adapter=1 + num_steps % max_adapters)
        steps.add([due % 7] * 8, None, 2, due=due, adapter=0)  # one without an adapter is held up by none
        steps.step()
        num_steps += 1
        assert num_steps < 60
    steps.run()


def test_nor_does_one_whose_pages_have_come_from_another_engine(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.request import RequestStatus

    steps = Steps(with_adapters(vllm_config, 1), is_async=False)
    steps.add([1] * 8, None, 6, adapter=1)
    steps.step()
    first = steps.add([3] * 8, None, 4, due=1, adapter=7)
    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    steps.scheduler.finished_recving_kv_req_ids.add(first.request_id)
    monkeypatch.setattr(steps.scheduler, "_update_waiting_for_remote_kv", lambda request: None)
    for due in range(2, 60):
        steps.add([due % 9] * 8, None, 6, due=due, adapter=1)
        if first.request_id in steps.step():
            break
    else:
        pytest.fail("it never began")
    steps.run()


def with_adapters(vllm_config: Any, max_adapters: int) -> Any:
    from vllm.config.lora import LoRAConfig

    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=max_adapters, max_cpu_loras=max_adapters)
    return config


def test_vllm_schedules_by_what_we_change() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert source.count("self.max_num_active_reqs") == 1
    assert source.count("for req in scheduled_running_reqs") == 1  # whose adapters it counts
    assert source.count("self.adaptive_long_prefill_threshold") == 1
    assert source.count("self.scheduler_config.long_prefill_token_threshold") == 1
    assert "request_queue = self.kv_holding_waiting\n" in source
    assert "while req_index < len(self.running) and token_budget > 0:" in source


def test_another_pool_is_refused() -> None:
    from kvferry.engine.vllm.plugins.tenant_scheduler import keep_tenants

    engine = Engine({})
    with pytest.raises(TypeError, match="not for TenantBlockPool"):
        keep_tenants(engine.manager)
