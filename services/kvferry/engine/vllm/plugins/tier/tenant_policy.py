"""Tenants' floors and caps in vLLM's CPU tier."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvferry.engine.base import TierHints
from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState
from kvferry.tenancy.pages.outcome import Cause, Refusal
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.pages.usage_report import Holding, TenantCounts
from kvferry.tenancy.terms import CPU_TIER, KnownTerms, TierContract, TierSettings, TierTerms


class _Chunk(Page):
    __slots__ = ("status",)

    def __init__(self, tenant: str, key: OffloadKey, status: ChunkStatus) -> None:
        super().__init__(tenant, key, 1, 0.0)
        self.status = status


class TenantCachePolicy(CachePolicy):  # type: ignore[misc]
    """A `cache_policy_module_path` for vLLM. Units are chunks. Call `keep_contracts` for its manager."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._terms = KnownTerms(CPU_TIER, max(1, cache_capacity))
        self._tenant = TierHints().namespace.tenant  # for which the manager stores
        self.counts = TenantCounts()
        self._chunks: dict[Any, _Chunk] = {}
        self._contracts: dict[str, TierContract] = {}
        self._unreported: set[str] = set()  # tenants
        self.clear()

    def store_for(self, hints: TierHints) -> None:
        """Let what follows be of this tenant."""
        self._tenant = hints.namespace.tenant
        self._configure(self._terms.see(self._tenant))

    def set_terms(self, terms: Mapping[str, TierTerms | None]) -> None:
        self._configure(self._terms.change(terms))

    def _configure(self, contracts: dict[str, TierContract] | None) -> None:
        if contracts is not None:
            self._retention.configure(contracts)
            self.counts.add_names(contracts)
            self._unreported |= self._contracts.keys() | contracts.keys()
            self._contracts = contracts

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.status

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = page = _Chunk(self._tenant, key, chunk)
        self._retention.hold(self._tenant, 1)
        self._unreported.add(self._tenant)
        self._retention.fill(page, time.monotonic())
        self._retention.pin(page, time.monotonic())  # until it is stored

    def remove(self, key: OffloadKey) -> None:
        self._retention.discard(chunk := self._chunks.pop(key))
        self._unreported.add(chunk.tenant)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        now_s = time.monotonic()
        # The end of a prefix is of use only with its beginning.
        for chunk in filter(None, map(self._chunks.get, reversed(list(keys)))):
            self._retention.touch(chunk, now_s)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        state = req_context.get_state(RequestTierState)
        if state is None or state.hints.wanted_s is None:
            return
        for keys in key_groups:
            chunks = list(filter(None, map(self._chunks.get, keys)))
            self._retention.hint(chunks, state.hints.wanted_s, time.monotonic())

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        pass

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        victims = self._retention.reserve(self._tenant, n, n, time.monotonic(), lambda page: page.key not in protected)
        self._unreported.add(self._tenant)
        if isinstance(victims, Refusal):
            self.counts.of(self._tenant).refused[victims] += n
            return None
        self._retention.release(self._tenant, n)  # `insert` counts them
        for page, cause in victims:
            self._unreported.add(page.tenant)
            self.counts.of(page.tenant).evicted[cause] += 1
            if page.tenant != self._tenant and cause is not Cause.EXPIRED:
                self.counts.of(self._tenant).displaced += 1
        gone = [self._chunks.pop(victim.page.key) for victim in victims]
        return [(chunk.key, chunk.status) for chunk in gone]

    def changed_holdings(self) -> Iterator[tuple[str, Holding]]:
        """Return what tenants hold where it, or a count of theirs, may have changed since the call before."""
        changed, self._unreported = self._unreported, set()
        for tenant in changed:
            usage = self._retention.usage_of(tenant)
            is_known = usage.used or tenant in self._contracts
            yield tenant, Holding(usage.used, usage.floor, usage.cap, usage.borrowed) if is_known else Holding()

    def clear(self) -> None:
        self._unreported.update(chunk.tenant for chunk in self._chunks.values())
        self._chunks = {}
        self._retention = Retention(TierSettings(max(1, self.cache_capacity)))
        self._retention.configure(self._contracts)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._retention.unpin(self._chunks[key], time.monotonic())

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._retention.pin(self._chunks[key], time.monotonic())


def keep_contracts(primary: Any) -> TenantCachePolicy | None:
    """Tell our policy of a manager of vLLM, if it has it, for whom it stores: from the device, and from volumes."""
    policy = primary._policy
    if not isinstance(policy, TenantCachePolicy):
        return None
    prepare_store = primary.prepare_store

    def prepare(keys: Collection[OffloadKey], context: ReqContext) -> Any:
        state = context.get_state(RequestTierState)
        policy.store_for(TierHints() if state is None else state.hints)
        return prepare_store(keys, context)

    primary.prepare_store = primary.prepare_write = prepare
    return policy
