"""Tenants' floors and caps in vLLM's CPU tier."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvferry.engine.base import TierHints
from kvferry.engine.vllm.plugins.request_tier_state import RequestTierState
from kvferry.tenancy.contract import TierSettings
from kvferry.tenancy.known_terms import KnownTerms
from kvferry.tenancy.outcome import Refusal
from kvferry.tenancy.page import Page
from kvferry.tenancy.retention import Retention
from kvferry.tenancy.terms import CPU_TIER


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
        self.clear()

    def store_for(self, hints: TierHints) -> None:
        """Let what follows be of this tenant."""
        self._tenant = hints.namespace.tenant
        if hints.terms is None:
            return
        contracts = self._terms.learn(self._tenant, hints.terms.cpu)
        if contracts is not None:
            self._retention.configure(contracts)

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        chunk = self._chunks.get(key)
        return None if chunk is None else chunk.status

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self._chunks[key] = page = _Chunk(self._tenant, key, chunk)
        self._retention.hold(self._tenant, 1)
        self._retention.fill(page, time.monotonic())
        self._retention.pin(page, time.monotonic())  # until it is stored

    def remove(self, key: OffloadKey) -> None:
        self._retention.discard(self._chunks.pop(key))

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
        if isinstance(victims, Refusal):
            return None
        self._retention.release(self._tenant, n)  # `insert` counts them
        gone = [self._chunks.pop(victim.page.key) for victim in victims]
        return [(chunk.key, chunk.status) for chunk in gone]

    def clear(self) -> None:
        self._chunks: dict[Any, _Chunk] = {}
        self._retention = Retention(TierSettings(max(1, self.cache_capacity)))
        self._retention.configure(self._terms.contracts())

    def mark_evictable(self, key: OffloadKey) -> None:
        self._retention.unpin(self._chunks[key], time.monotonic())

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._retention.pin(self._chunks[key], time.monotonic())


def keep_contracts(primary: Any) -> None:
    """Tell the policy of a manager of vLLM for whom it stores: from the device, and from volumes."""
    policy = primary._policy
    if not isinstance(policy, TenantCachePolicy):
        return
    prepare_store = primary.prepare_store

    def prepare(keys: Collection[OffloadKey], context: ReqContext) -> Any:
        state = context.get_state(RequestTierState)
        policy.store_for(TierHints() if state is None else state.hints)
        return prepare_store(keys, context)

    primary.prepare_store = primary.prepare_write = prepare
