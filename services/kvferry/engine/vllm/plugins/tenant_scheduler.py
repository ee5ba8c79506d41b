"""Tenants in an engine: floors, caps and times to live in the memory of its device, and the order of their prompts.

vLLM's pool learns who owns a cached page, and its queue of free pages who loses one.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import RequestStatus

from kvferry.engine.vllm.plugins.adapter_turns import AdapterTurns, without
from kvferry.engine.vllm.plugins.core_fields import SET_TERMS
from kvferry.engine.vllm.plugins.tenant_holdings import HoldingsReport
from kvferry.engine.vllm.plugins.tier.request_tier_state import hints_of
from kvferry.engine.vllm.plugins.tier.tenant_policy import TenantCachePolicy
from kvferry.engine.vllm.plugins.tier.tier_connector import TierConnector
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE
from kvferry.tenancy.pages.device_pages import DevicePages
from kvferry.tenancy.pages.outcome import Cause
from kvferry.tenancy.shares.step_order import Candidate, StepOrder, step_order
from kvferry.tenancy.terms import CPU_TIER, DEVICE_TIER, KnownTerms, TierTerms

MAX_EXPIRED_PER_STEP = 1024  # about 3 ms
MAX_FIRST = 8  # waiting prompts that are looked at for a step
_UNKNOWN = DEFAULT_NAMESPACE.tenant


class TenantFreeQueue:
    """Takes the place of vLLM's FreeKVCacheBlockQueue."""

    def __init__(self, blocks: Sequence[KVCacheBlock], free: Sequence[KVCacheBlock]) -> None:
        self._blocks = blocks
        self.pages = DevicePages(len(blocks), len(free))
        self.tenant = _UNKNOWN  # whose request allocates pages
        self.prepend_n(free)

    @property
    def num_free_blocks(self) -> int:
        return self.pages.num_free

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks = self._blocks
        return [blocks[page] for page in self.pages.take(n, self.tenant, time.monotonic())]

    def remove(self, block: KVCacheBlock) -> None:
        self.pages.use(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        pages = [block.block_id for block in blocks]
        for page in pages:
            self.pages.claim(page, _UNKNOWN)  # all that vLLM wants kept has an owner
        self.pages.put(pages, time.monotonic())

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        self.pages.put_blank([block.block_id for block in blocks])


class TenantBlockPool(BlockPool):  # type: ignore[misc]
    """Owners of cached pages. A pool of vLLM becomes one in place, because others refer to it."""

    free_block_queue: TenantFreeQueue
    num_reserved: int  # free blocks that the request whose admission is decided may not have
    has_paused: bool  # requests run that this step leaves out
    tenants: weakref.WeakKeyDictionary[Any, str]  # of requests
    wanted_s: weakref.WeakKeyDictionary[Any, float]  # of requests whose clients said it
    _claims_for: str

    def tenant_of(self, request: Any) -> str:
        return self.tenants.get(request, _UNKNOWN)

    def cache_full_blocks(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._claims_for = self.tenant_of(request)
        super().cache_full_blocks(request, *args, **kwargs)

    def cache_partial_block(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._claims_for = self.tenant_of(request)
        return super().cache_partial_block(request, *args, **kwargs)

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        self._claims_for = self.free_block_queue.pages.owner_of(src_block.block_id) or _UNKNOWN
        super().move_block_hashes(src_block, dst_block)

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: KVCacheBlock, num_tokens: int | None) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        self.free_block_queue.pages.claim(block.block_id, self._claims_for)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[Any]:
        self.free_block_queue.pages.forget(block.block_id)
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        return removed

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        super().touch(blocks)
        for block in blocks:
            self.free_block_queue.pages.reuse(block.block_id)

    def reset_prefix_cache(self) -> bool:
        done: bool = super().reset_prefix_cache()
        for block in self.blocks if done else ():
            self.free_block_queue.pages.forget(block.block_id)
        return done

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks - self.num_reserved

    def note_end(self, request: Any, groups: Sequence[Sequence[KVCacheBlock]]) -> None:
        """Apply a client's hint to the pages of its ended request, before they are free."""
        wanted_s = self.wanted_s.get(request)
        if wanted_s is None:
            return
        pages = self.free_block_queue.pages
        for blocks in groups:
            cached = [block for block in blocks if pages.owner_of(block.block_id) is not None]
            if wanted_s:
                pages.want([block.block_id for block in cached], wanted_s, time.monotonic())
                continue
            for block in cached[pages.first_private([block.block_id for block in cached]) :]:
                if block.ref_cnt == 1:  # no other request runs with it
                    pages.end(block.block_id)

    def evict_expired(self) -> None:
        for page in self.free_block_queue.pages.expired(time.monotonic(), MAX_EXPIRED_PER_STEP):
            self.free_block_queue.pages.forget(page, Cause.EXPIRED)
            self._maybe_evict_cached_block(self.blocks[page])


class _TenantScheduling:
    kv_cache_manager: Any
    connector: Any
    block_size: int
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    scheduler_config: Any
    adaptive_long_prefill_threshold: bool
    max_num_active_reqs: int
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pool = keep_tenants(self.kv_cache_manager)
        self._pages = self._pool.free_block_queue.pages
        self._terms = KnownTerms(DEVICE_TIER, self._pages.capacity)
        self._report = HoldingsReport()
        self._report.add(DEVICE_TIER, self._pages)
        self._cpu_tiers: list[TenantCachePolicy] = []
        for connector in connectors_of(self.connector):
            if isinstance(connector, TierConnector) and (policy := connector.tenant_policy) is not None:
                self._report.add(CPU_TIER, policy, connector.blocks_per_chunk)
                self._cpu_tiers.append(policy)
        self._is_in_vain = False  # the last step left out a prompt, and nothing began in its place
        self._stuck: Any = None  # the first request that waits, if the last step had tokens left for it

    def add_request(self, request: Any) -> None:
        hints, _ = hints_of(request)
        tenant = self._pool.tenants[request] = hints.namespace.tenant
        if hints.wanted_s is not None:
            self._pool.wanted_s[request] = hints.wanted_s
        if (contracts := self._terms.see(tenant)) is not None:
            self._pages.configure(contracts)
        super().add_request(request)  # type: ignore[misc]

    def set_terms(self, terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        """See `Engine.set_terms`. Idle engines do so too."""
        if (contracts := self._terms.change(terms.get(DEVICE_TIER, {}))) is not None:
            self._pages.configure(contracts)
        for policy in self._cpu_tiers:
            policy.set_terms(terms.get(CPU_TIER, {}))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._pool.evict_expired()
        order: StepOrder[Any] = StepOrder() if self._is_in_vain else self._order()
        self._is_in_vain = False
        with self._in(order), without(self._held_up(), self.waiting):
            first, num_waiting = self._first_waiting(), len(self.waiting)
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            has_left = output.total_num_scheduled_tokens < self.max_num_scheduled_tokens
            # One that was held up is tried again in the next step.
            self._stuck = first if has_left and first is self._first_waiting() else None
            self._is_in_vain = bool(order.paused) and len(self.waiting) == num_waiting
        return output

    def _free_blocks(self, request: Any) -> None:
        self._pool.note_end(request, self.kv_cache_manager.get_blocks(request.request_id).blocks)
        super()._free_blocks(request)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            self._report.attach_to(stats)
        return stats

    def _first_waiting(self) -> Any:
        return self.waiting.peek_request() if self.waiting else None

    def _held_up(self) -> list[Any]:
        """Return requests that do not fit into memory, before one that does of a tenant that holds fewer pages."""
        stuck = self._stuck
        if stuck is None or stuck is not self._first_waiting() or len(self.waiting) < 2 or not _may_begin(stuck):
            return []
        num_held = Counter[str]()
        for request in (*self.running, *self.kv_holding_waiting):
            blocks = self.kv_cache_manager.get_blocks(request.request_id).blocks
            num_held[self._pool.tenant_of(request)] += sum(map(len, blocks))
        held_up: list[Any] = []
        fewest = num_held[self._pool.tenant_of(stuck)]
        for request in heapq.nsmallest(MAX_FIRST, self.waiting):
            num_blocks = num_held[self._pool.tenant_of(request)]
            if request is not stuck and num_blocks < fewest and _may_begin(request):
                if -(-request.num_tokens // self.block_size) <= self._num_free():
                    return held_up
                fewest = num_blocks
            held_up.append(request)
        return []

    def _order(self) -> StepOrder[Any]:
        prompts = [request for request in self.running if request.is_prefill_chunk]
        if not prompts or not (self.waiting or self.kv_holding_waiting):
            return StepOrder()
        last = max(prompts)
        first = heapq.nsmallest(MAX_FIRST, (each for each in self.waiting if _may_begin(each) and each < last))
        # Prompts whose pages are on their way count too: the engine computes a token of each when its pages are there.
        first += [each for each in self.kv_holding_waiting if each < last]
        candidates = [Candidate(each, each.priority, self._num_left(each), has_begun=True) for each in sorted(prompts)]
        candidates += [Candidate(each, each.priority, self._num_left(each), has_begun=False) for each in first]
        if sum(-(-each.num_tokens // self.block_size) for each in candidates if not each.has_begun) > self._num_free():
            return StepOrder()
        return step_order(candidates, self.max_num_scheduled_tokens - (len(self.running) - len(prompts)))

    def _num_left(self, request: Any) -> int:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return 1
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 1
        num_computed: int = request.num_computed_tokens
        if not num_computed:
            num_computed = self.kv_cache_manager.get_computed_blocks(request)[1]
        num_tokens: int = request.num_tokens
        return max(1, num_tokens - num_computed)

    def _num_free(self) -> int:
        num_free: int = self._pool.get_num_free_blocks() - self._pages.reserved_for_others(_UNKNOWN)
        return num_free

    @contextlib.contextmanager
    def _in(self, order: StepOrder[Any]) -> Iterator[None]:
        if not order.paused and order.max_tokens is None:
            yield
            return
        config, running = self.scheduler_config, self.running
        threshold, is_adaptive = config.long_prefill_token_threshold, self.adaptive_long_prefill_threshold
        paused = set(order.paused)
        if order.max_tokens is not None:
            config.long_prefill_token_threshold = min(order.max_tokens, threshold or math.inf)
            self.adaptive_long_prefill_threshold = False
        if paused:
            self.running = [request for request in running if request not in paused]
            self.max_num_active_reqs -= len(paused)
            self._pool.has_paused = True
        try:
            yield
        finally:
            config.long_prefill_token_threshold = threshold
            self.adaptive_long_prefill_threshold = is_adaptive
            if paused:
                self.running.extend(order.paused)
                self.max_num_active_reqs += len(paused)
                self._pool.has_paused = False


def _set_terms(core: Any, terms: Any) -> None:
    core.scheduler.set_terms(msgspec.convert(terms, dict[str, dict[str, TierTerms | None]]))


# vLLM has no registry of utilities: it looks for a method of the engine core. This module is loaded in its process.
setattr(EngineCore, SET_TERMS, _set_terms)


def connectors_of(connector: Any) -> Sequence[Any]:
    """Return vLLM's connectors in one of its own for several."""
    return connector.sub_connectors if isinstance(connector, MultiConnector) else [connector]


def _may_begin(request: Any) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class TenantScheduler(AdapterTurns, _TenantScheduling, Scheduler):  # type: ignore[misc]
    pass


class TenantAsyncScheduler(AdapterTurns, _TenantScheduling, AsyncScheduler):  # type: ignore[misc]
    pass


def tenant_scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """A `scheduler_cls`: vLLM decides late whether steps are scheduled ahead of their results."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (TenantAsyncScheduler if is_async else TenantScheduler)(vllm_config=vllm_config, **kwargs)


def keep_tenants(manager: Any) -> TenantBlockPool:
    """Make the pool of vLLM's KVCacheManager one of tenants. Raises TypeError for a pool that is not vLLM's own."""
    pool = manager.block_pool
    if type(pool) is not BlockPool or type(pool.free_block_queue) is not FreeKVCacheBlockQueue:
        raise TypeError(f"floors of tenants are made for vLLM's own pool, not for {type(pool).__name__}")
    pool.free_block_queue = queue = TenantFreeQueue(pool.blocks, pool.free_block_queue.get_all_free_blocks())
    pool.__class__ = TenantBlockPool
    pool.num_reserved = 0
    pool.has_paused = False
    pool.tenants = weakref.WeakKeyDictionary()
    pool.wanted_s = weakref.WeakKeyDictionary()
    pool._claims_for = _UNKNOWN
    allocate_slots = manager.allocate_slots

    def allocate(request: Any, *args: Any, **kwargs: Any) -> Any:
        queue.tenant = pool.tenant_of(request)
        # vLLM says it only for a request that waits. It is admitted where nothing else runs, so that it never waits for
        # ever; requests that run may take what floors keep.
        if kwargs.get("has_scheduled_reqs", False) or (pool.has_paused and "has_scheduled_reqs" in kwargs):
            pool.num_reserved = queue.pages.reserved_for_others(queue.tenant)
        try:
            return allocate_slots(request, *args, **kwargs)
        finally:
            pool.num_reserved = 0

    manager.allocate_slots = allocate
    return pool  # type: ignore[no-any-return]
