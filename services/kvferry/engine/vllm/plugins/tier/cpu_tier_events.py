"""KV events of the CPU tier, per page and under route keys."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import Medium, get_offload_group_idx

from kvferry.engine.vllm.plugins.core_fields import ROUTE_KEYS_TAG
from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState
from kvferry.pages.keys import pack_keys


class CpuTierEvents:
    """Covers one KV cache group: a page missing there is useless in others."""

    def __init__(self, group_index: int, tokens_per_chunk: int, block_size: int, tokens_per_hash: int) -> None:
        self._group_index = group_index
        self._tokens_per_chunk = tokens_per_chunk
        self._block_size = block_size
        self._tokens_per_hash = tokens_per_hash
        self._names: dict[bytes, tuple[list[Any], array[int]]] = {}  # chunk -> its pages' hashes and route keys

    def __len__(self) -> int:
        return len(self._names)

    def record_stored(self, keys: Collection[bytes], context: Any) -> None:
        state = context.get_state(RequestTierState)
        if state is None:
            return
        for key in keys:
            end_token = context.get_offload_key_position(key)
            if (
                end_token is None
                or end_token % self._tokens_per_chunk
                or get_offload_group_idx(key) != self._group_index
            ):
                continue
            end_page = end_token // self._block_size
            first_page = end_page - self._tokens_per_chunk // self._block_size
            known = state.route_keys(first_page, end_page)
            if len(known) == end_page - first_page:
                self._names[key] = (state.page_hashes(first_page, end_page, self._tokens_per_hash), known)

    def translate(self, events: Iterable[Any]) -> Iterator[KVCacheEvent]:
        """Skips chunks that were not recorded."""
        for event in events:
            if event.medium is not Medium.CPU:
                continue
            hashes: list[BlockHash] = []
            keys = array("Q")
            for key in event.keys:
                named = self._names.pop(key, None) if event.removed else self._names.get(key)
                if named is not None:
                    hashes += named[0]
                    keys += named[1]
            if not hashes:
                continue
            if event.removed:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self._group_index)
            else:
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=MEDIUM_CPU,
                    lora_name=None,
                    extra_keys=[(ROUTE_KEYS_TAG, pack_keys(keys))],
                    group_idx=self._group_index,
                )

    def clear(self) -> None:
        self._names.clear()
