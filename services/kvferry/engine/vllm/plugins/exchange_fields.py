"""Fields of the exchange digest and of chunk layouts, from vLLM's configuration; the same in each engine process."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch
from vllm import __version__
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.selector import get_attn_backend

from kvferry.pages.exchange import ARGUMENTS, PAGE_FORMATS, WEIGHTS, ExchangeFields, exchange_digest, sorted_fields

_MAX_NAME = 100  # characters of a device's name
# Keys of the model's configuration that say where it lies and which program wrote it.
_NOT_OF_THE_MODEL = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})


def exchange_fields(vllm_config: Any, *, weights: str) -> ExchangeFields:
    """`weights` is the digest of the weight files, with `model.revision` before it if there is one."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    # Absent without any: engines of earlier releases have the same digest then.
    arguments = (vllm_config.additional_config or {}).get(ARGUMENTS)
    return sorted_fields(
        {
            **({ARGUMENTS: arguments} if arguments else {}),
            "formats": PAGE_FORMATS,
            "vllm": __version__,
            WEIGHTS: weights,
            "model_config": model_config_digest(model),
            "max_model_len": model.max_model_len,  # LongRoPE and Llama 4 derive rotations and scales from it
            "quantization": model.quantization or "none",
            "dtype": type_name(model.dtype),
            "kv_cache_dtype": kv_cache_dtype(vllm_config),
            "tokens_per_block": cache.block_size,
            "attention_backend": attention_backend(vllm_config),
            "instruction_set": instruction_set(vllm_config),
            # Where each rank has KV heads of its own, NIXL reads those that a rank needs from engines of any size.
            "tensor_parallel": 1 if has_own_heads(vllm_config) else parallel.tensor_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "adapters": "none" if vllm_config.lora_config is None else "lora",
        }
    )


def has_own_heads(vllm_config: Any) -> bool:
    """Return whether no KV head is copied to several tensor-parallel ranks."""
    ranks: int = vllm_config.parallel_config.tensor_parallel_size
    num_heads: int = vllm_config.model_config.get_total_num_kv_heads()
    return num_heads % ranks == 0


def model_config_digest(model_config: Any) -> str:
    """Digest the model's configuration as vLLM resolved it, with overrides."""
    resolved = {"model": model_config.hf_config.to_dict(), "text": model_config.hf_text_config.to_dict()}
    text = json.dumps(_without_origin(resolved), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _without_origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _without_origin(each) for name, each in value.items() if name not in _NOT_OF_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_without_origin(each) for each in value]
    return value


def attention_backend(vllm_config: Any) -> str:
    """Return the backend that vLLM selects, also for `auto`."""
    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            head_size=model.get_head_size(),
            dtype=model.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=model.use_mla,
        )
    return str(backend.get_name())


def instruction_set(vllm_config: Any) -> str:
    # Kernels of the CPU order a page's bytes by it.
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if not current_platform.is_cpu():
        capability = current_platform.get_device_capability()
        return f"{current_platform.device_type}-{capability.as_version_str() if capability else 'unknown'}"
    isa = _get_attn_isa(page_dtype(vllm_config), cache.block_size, model.get_head_size(), cache.cache_dtype)
    vectors = "avx512" if torch.cpu._is_avx512_supported() else "avx2" if torch.cpu._is_avx2_supported() else "plain"
    return f"{platform.machine()}-{vectors}-{isa}"


def device_name(ranks: int) -> str:
    """Return the device's product name with its driver, `2 x` before it for two ranks."""
    if current_platform.is_cpu():
        name = _value_in(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$") or platform.machine()
    else:
        driver = _value_in(Path("/proc/driver/nvidia/version"), r"Kernel Module\s+.*?([0-9]+\.[0-9.]+)")
        name = f"{current_platform.get_device_name()}, driver {driver or 'unknown'}"
    return f"{ranks} x {name}" if ranks > 1 else name


def _value_in(file: Path, pattern: str) -> str:
    try:
        found = re.search(pattern, file.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip()[:_MAX_NAME] if found is not None else ""


def kv_cache_dtype(vllm_config: Any) -> str:
    chosen = vllm_config.cache_config.cache_dtype
    return type_name(vllm_config.model_config.dtype) if chosen == "auto" else str(chosen)


def page_dtype(vllm_config: Any) -> torch.dtype:
    chosen = vllm_config.cache_config.cache_dtype
    dtype: torch.dtype = vllm_config.model_config.dtype if chosen == "auto" else STR_DTYPE_TO_TORCH_DTYPE[chosen]
    return dtype


def type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Pages outlive engines: what changes their bytes changes the layout.
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
