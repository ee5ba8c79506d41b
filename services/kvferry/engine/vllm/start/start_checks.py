"""Checks before an engine allocates memory: arguments that the machine cannot serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.config import EngineConfig
from kvferry.engine.vllm.start.argument_parser import key_of
from kvferry.engine.vllm.start.arguments import page_sizes

_NUMA_NODES = Path("/sys/devices/system/node")


def why_not_startable(
    vllm_config: Any, engine: EngineConfig, keys: Mapping[str, str], numa_nodes: Path = _NUMA_NODES
) -> str:
    """Return why the engine would hang or die with an argument, with its key, or an empty string."""
    scheduler, parallel = vllm_config.scheduler_config, vllm_config.parallel_config
    most, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    if "max_num_scheduled_tokens" in engine.args and scheduled > most:
        key = key_of("max_num_scheduled_tokens", keys)
        return f"{key}: expected at most engine.max_num_batched_tokens ({most}), not {scheduled}"
    nodes = parallel.numa_bind_nodes if "numa_bind_nodes" in engine.args else None
    if nodes is not None and len(nodes) < (ranks := parallel.tensor_parallel_size):
        return f"{key_of('numa_bind_nodes', keys)}: expected a node for each of {ranks} ranks, not {len(nodes)}"
    if missing := [node for node in nodes or () if not (numa_nodes / f"node{node}").exists()]:
        return f"{key_of('numa_bind_nodes', keys)}: this machine has no NUMA node {missing[0]}"
    num_blocks = vllm_config.cache_config.num_gpu_blocks_override
    if engine.device == "cpu" and "num_gpu_blocks_override" in engine.args and num_blocks is not None:
        # vLLM would take this memory whatever there is; a GPU refuses it.
        fit = int(engine.kv_cache_gib * (1 << 30)) // page_sizes(vllm_config).block_bytes
        if num_blocks > fit:
            return (
                f"{key_of('num_gpu_blocks_override', keys)}: engine.kv_cache_gib holds {fit} blocks, not {num_blocks}"
            )
    return ""
