"""What vLLM's own code says that the KV pages of a model take: its layers are built without weights."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from kvferry.pages.geometry.model import ModelGeometry


@dataclass(frozen=True)
class VllmPages:
    """Sizes on one rank, in bytes."""

    token_bytes: int  # of one token in all layers that store tokens, without padding of pages
    lasting_token_bytes: int  # the same, of layers that keep every token
    state_bytes: int  # of one sequence in all layers with a state, without padding of pages
    block_size: int
    block_bytes: int  # of one block id of the pool
    groups: tuple[tuple[int, int, int], ...]  # sorted: layers, tokens of a block, bytes of a layer's page
    longest_bytes: int  # of one sequence of the longest context
    max_model_len: int
    max_in_flight_tokens: int
    tensor_parallel_size: int


@contextlib.contextmanager
def vllm_process_group() -> Iterator[None]:
    """Start torch.distributed with one process, as vLLM's layers want it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


def vllm_pages(
    config: Mapping[str, Any], *, tensor_parallel_size: int = 1, device: str = "meta", **arguments: Any
) -> VllmPages:
    """Return the sizes that vLLM's layers and pool have. Needs `vllm_process_group`."""
    with built_model(config, tensor_parallel_size=tensor_parallel_size, device=device, **arguments) as vllm_config:
        return sizes_of(vllm_config)


@contextlib.contextmanager
def built_model(
    config: Mapping[str, Any], *, tensor_parallel_size: int = 1, device: str = "meta", **arguments: Any
) -> Iterator[Any]:
    """Build the layers of a config.json on the meta device; yield vLLM's resolved configuration.

    With more than one rank, vLLM is only told so: layers are built as of rank 0.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from kvferry.engine.vllm.rendering.text_model import inspect_models_in_this_process

    inspect_models_in_this_process()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        vllm_config = EngineArgs(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, **arguments
        ).create_engine_config()
        vllm_config.parallel_config.tensor_parallel_size = tensor_parallel_size
        stack.enter_context(mock.patch.object(get_tp_group(), "world_size", tensor_parallel_size))
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(set_default_torch_dtype(vllm_config.model_config.dtype))
        with torch.device(device):
            initialize_model(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        yield vllm_config


def our_pages(geometry: ModelGeometry, kv_cache_dtype: str, block_size: int, vllm: VllmPages) -> VllmPages:
    """Return what kvferry computes, for the settings with which vLLM's sizes were recorded."""
    pool = geometry.pool(
        kv_cache_dtype,
        block_size=block_size,
        tensor_parallel_size=vllm.tensor_parallel_size,
        max_in_flight_tokens=vllm.max_in_flight_tokens,
    )
    return VllmPages(
        token_bytes=geometry.bytes_per_token(kv_cache_dtype, vllm.tensor_parallel_size),
        lasting_token_bytes=geometry.lasting_bytes_per_token(kv_cache_dtype, vllm.tensor_parallel_size),
        state_bytes=geometry.state_bytes(vllm.tensor_parallel_size),
        block_size=pool.block_size,
        block_bytes=pool.block_bytes,
        groups=tuple(sorted((group.num_layers, group.block_size, group.page_bytes) for group in pool.groups)),
        longest_bytes=pool.bytes_of_sequence(vllm.max_model_len),
        max_model_len=vllm.max_model_len,
        max_in_flight_tokens=vllm.max_in_flight_tokens,
        tensor_parallel_size=vllm.tensor_parallel_size,
    )


def sizes_of(vllm_config: Any) -> VllmPages:
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    specs = get_kv_cache_spec(vllm_config)
    layout = KVCacheLayout.LBHNC
    vllm_config.cache_config.kv_cache_layout = layout.name
    attention = [spec for spec in specs.values() if not isinstance(spec, MambaSpec)]
    local = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    groups = get_kv_cache_groups(vllm_config, dict(specs))
    shown = []
    longest_blocks = 0
    for group in groups:
        spec = group.kv_cache_spec
        page = spec.page_size_bytes
        if isinstance(spec, UniformTypeKVCacheSpecs):
            page //= len(group.layer_names)
        # Without attention, vLLM takes the longest context for a state's block: it has no meaning.
        block_size = vllm_config.cache_config.block_size if isinstance(spec, MambaSpec) else spec.block_size
        shown.append((len(group.layer_names), block_size, page))
        required = -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
        if isinstance(spec, SlidingWindowSpec):
            # vLLM reserves a page beside the window, also where the window is longer than the context.
            required = min(required, -(-vllm_config.model_config.max_model_len // spec.block_size))
        longest_blocks += required
    block_bytes = _get_kv_cache_bytes_per_block(groups, layout)
    return VllmPages(
        token_bytes=sum(spec.real_page_size_bytes // spec.block_size for spec in attention),
        lasting_token_bytes=sum(
            spec.real_page_size_bytes // spec.block_size for spec in attention if not isinstance(spec, local)
        ),
        state_bytes=sum(spec.real_page_size_bytes for spec in specs.values() if isinstance(spec, MambaSpec)),
        block_size=vllm_config.cache_config.block_size,
        block_bytes=block_bytes,
        groups=tuple(sorted(shown)),
        longest_bytes=longest_blocks * block_bytes,
        max_model_len=vllm_config.model_config.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
    )
