"""The fields of a ChunkLayout that vLLM decides. Pages outlive engines: what changes their bytes changes the layout."""

from __future__ import annotations

from typing import Any

from vllm import __version__

from kvferry.engine.vllm.plugins.exchange_fields import (
    exchange_fields,
    instruction_set,
    kv_cache_dtype,
    type_name,
)
from kvferry.pages.exchange import exchange_digest


def layout_fields(
    vllm_config: Any, *, model_name: str, weights_revision: str, blocks_per_chunk: int
) -> dict[str, str | int]:
    """Return all fields but `payload_bytes`."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "model": model_name,
        "weights_revision": weights_revision,
        "exchange": exchange_digest(exchange_fields(vllm_config, weights=weights_revision)),
        "dtype": type_name(model.dtype),
        "kv_cache_dtype": kv_cache_dtype(vllm_config),
        "tokens_per_block": cache.block_size,
        "blocks_per_chunk": blocks_per_chunk,
        "num_layers": model.get_total_num_hidden_layers(),
        "num_kv_heads": model.get_total_num_kv_heads(),
        "head_size": model.get_head_size(),
        "isa": instruction_set(vllm_config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        # vLLM's layouts are versioned only by vLLM.
        "kv_layout": f"{cache.kv_cache_layout or 'default'}/vllm-{__version__}",
    }
