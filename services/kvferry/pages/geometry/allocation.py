"""How vLLM 0.32 divides one rank's memory for KV pages among the layers of a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.pages.geometry.kv_dtypes import KvDtype
from kvferry.pages.geometry.layers import KvLayers, LatentLayers, LayerGroup, LayerKind, StateLayers

# Imitates vllm/v1/core/kv_cache_utils.py (get_kv_cache_groups, _get_kv_cache_bytes_per_block) and
# Platform._align_hybrid_block_size. Layers of one group share a block table. All groups draw block ids from one pool,
# and a block id takes `block_bytes` of memory, whichever group has it.

# vLLM pads groups to the largest one, if it has fewer layers than this times the smallest one.
_PADDED_UP_TO = 1.5


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers of one kind that share a block table."""

    kind: LayerKind
    num_layers: int
    block_size: int  # tokens of one block; of states: without meaning
    page_bytes: int  # of one layer, padding included
    limit_tokens: int = 0  # window or chunk, tokens in flight included; 0: none
    num_state_blocks: int = 0  # of one sequence

    def num_blocks(self, num_tokens: int) -> int:
        if num_tokens <= 0:
            return 0
        if self.kind is LayerKind.STATE:
            return self.num_state_blocks
        wanted = _ceil(num_tokens, self.block_size)
        if not self.limit_tokens:
            return wanted
        limit = _ceil(self.limit_tokens, self.block_size)
        # A window may begin in the middle of a block.
        return min(wanted, limit + (self.kind is LayerKind.WINDOW))


@dataclass(frozen=True, slots=True)
class KvPool:
    block_size: int  # tokens, of layers that keep every token; hybrids raise it
    block_bytes: int  # of one block id, on one rank
    groups: tuple[PageGroup, ...]

    def num_blocks_of_sequence(self, num_tokens: int) -> int:
        return sum(group.num_blocks(num_tokens) for group in self.groups)

    def bytes_of_sequence(self, num_tokens: int) -> int:
        return self.num_blocks_of_sequence(num_tokens) * self.block_bytes


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers with equal pages."""

    kind: LayerKind
    num_layers: int
    block_size: int
    page_bytes: int
    limit_tokens: int
    can_pad: bool
    num_state_blocks: int = 0


def kv_pool(
    groups: Sequence[LayerGroup],
    dtype: KvDtype,
    *,
    block_size: int,
    tensor_parallel_size: int,
    model_dtype: str,
    max_in_flight_tokens: int = 0,
    prefix_caching: bool = True,
) -> KvPool:
    """Raises ConfigError for sizes that vLLM cannot combine."""
    if block_size < 1:
        raise ConfigError(f"block size {block_size}: at least 1 token is needed")
    if not groups:
        raise ConfigError("the model keeps nothing of a sequence")
    states = [group for group in groups if isinstance(group, StateLayers)]
    attention = [group for group in groups if not isinstance(group, StateLayers)]
    state_bytes = max((group.state_bytes(model_dtype, tensor_parallel_size) for group in states), default=0)
    if states and attention:
        block_size = _hybrid_block_size(attention, dtype, block_size, tensor_parallel_size, state_bytes)
    layers = _attention_layers(attention, dtype, block_size, tensor_parallel_size, max_in_flight_tokens)
    attention_page = max((each.page_bytes for each in layers), default=0)
    for group in states:
        # vLLM pads states to the page of attention, which it made at least as large.
        page = max(group.state_bytes(model_dtype, tensor_parallel_size), attention_page)
        # vLLM caches no prefixes of models without attention.
        num_blocks = group.num_blocks(prefix_caching=prefix_caching and bool(attention))
        layers.append(_Layers(LayerKind.STATE, group.num_layers, block_size, page, 0, True, num_blocks))
    if _is_one_type(layers):
        first = layers[0]
        block_bytes = sum(each.page_bytes * each.num_layers for each in layers)
        num_layers = sum(each.num_layers for each in layers)
        kind = first.kind if len({each.kind for each in layers}) == 1 else LayerKind.FULL
        page = block_bytes // num_layers
        only = PageGroup(kind, num_layers, first.block_size, page, first.limit_tokens, first.num_state_blocks)
        return KvPool(first.block_size, block_bytes, (only,))
    return _shared_pool(_with_equal_pages(layers), block_size)


def _attention_layers(
    groups: Sequence[LayerGroup], dtype: KvDtype, block_size: int, tensor_parallel_size: int, in_flight: int
) -> list[_Layers]:
    counts: Counter[_Layers] = Counter()
    for group in groups:
        limit = 0
        if isinstance(group, KvLayers) and group.window is not None:
            limit = group.window - 1 + in_flight
        elif isinstance(group, KvLayers) and group.chunk is not None:
            limit = group.chunk + in_flight
        page = block_size * group.token_bytes(dtype, tensor_parallel_size)
        counts[_Layers(group.kind, 0, block_size, page, limit, not isinstance(group, LatentLayers))] += group.num_layers
    return [dataclasses.replace(each, num_layers=num_layers) for each, num_layers in counts.items()]


def _is_one_type(layers: Sequence[_Layers]) -> bool:
    kinds = {each.kind for each in layers}
    if kinds <= {LayerKind.FULL, LayerKind.LATENT}:
        return True
    return len(kinds) == 1 and len({(each.limit_tokens, each.page_bytes) for each in layers}) == 1


def _with_equal_pages(layers: Sequence[_Layers]) -> list[_Layers]:
    """Raise the block sizes of layers with smaller pages, or pad their pages."""
    largest = max(each.page_bytes for each in layers)
    equal = []
    for each in layers:
        block_size = each.block_size
        if each.kind is not LayerKind.STATE and largest % each.page_bytes == 0:
            block_size *= largest // each.page_bytes
        elif not each.can_pad and each.page_bytes != largest:
            raise ConfigError(f"pages of {each.page_bytes} and {largest} bytes: vLLM pads no pages of latents (MLA)")
        equal.append(dataclasses.replace(each, block_size=block_size, page_bytes=largest))
    return equal


def _shared_pool(layers: Sequence[_Layers], block_size: int) -> KvPool:
    """Split kinds into groups of as many layers as the rarest kind has."""
    counts = [each.num_layers for each in layers]
    group_layers = max(counts) if max(counts) < min(counts) * _PADDED_UP_TO else min(counts)
    groups = []
    for each in layers:
        num_groups = _ceil(each.num_layers, group_layers)
        for i in range(num_groups):
            num_layers = len(range(i, each.num_layers, num_groups))
            groups.append(
                PageGroup(
                    each.kind, num_layers, each.block_size, each.page_bytes, each.limit_tokens, each.num_state_blocks
                )
            )
    block_bytes = max(group.num_layers * group.page_bytes for group in groups)
    return KvPool(block_size, block_bytes, tuple(groups))


def _hybrid_block_size(
    groups: Sequence[LayerGroup], dtype: KvDtype, block_size: int, tensor_parallel_size: int, state_bytes: int
) -> int:
    """Return a size at which attention's page holds a state."""
    token_bytes = max(group.token_bytes(dtype, tensor_parallel_size) for group in groups)
    if any(isinstance(group, LatentLayers) for group in groups):
        block_size = max(block_size, 128)
    return block_size * max(1, _ceil(state_bytes, block_size * token_bytes))


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit)
