"""The fields of a ChunkLayout that vLLM decides.

Pages outlive engines, so whatever changes a page's bytes must change its layout, also the CPU kernels' instruction set
(`_get_attn_isa`).
"""

from __future__ import annotations

import platform
from typing import Any

import torch
from vllm import __version__
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa


def layout_fields(
    vllm_config: Any, *, model_name: str, weights_revision: str, blocks_per_chunk: int
) -> dict[str, str | int]:
    """Return all fields but `payload_bytes`."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    dtype = _name(model.dtype)
    return {
        "model": model_name,
        "weights_revision": weights_revision,
        "dtype": dtype,
        "kv_cache_dtype": dtype if cache.cache_dtype == "auto" else str(cache.cache_dtype),
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


def instruction_set(vllm_config: Any) -> str:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not current_platform.is_cpu():
        capability = current_platform.get_device_capability()
        backend = getattr(vllm_config.attention_config, "backend", None)
        name = capability.as_version_str() if capability is not None else "unknown"
        return f"{current_platform.device_type}-{name}-{getattr(backend, 'name', backend) or 'auto'}"
    dtype = model.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    isa = _get_attn_isa(dtype, cache.block_size, model.get_head_size(), cache.cache_dtype)
    vectors = "avx512" if torch.cpu._is_avx512_supported() else "avx2" if torch.cpu._is_avx2_supported() else "plain"
    return f"{platform.machine()}-{vectors}-{isa}"


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
