"""Arguments and environment of vLLM, NIXL and UCX."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kvferry.arguments.vllm_arguments import DRAFT_METHODS, SPECULATION, equal_values
from kvferry.config import AdaptersConfig, EngineConfig, ModelConfig, TierConfig
from kvferry.engine.base import EngineId, EngineInfo
from kvferry.engine.vllm.start.argument_parser import key_of, parsed
from kvferry.engine.vllm.start.draft_model import DraftModel
from kvferry.errors import ConfigError
from kvferry.model_folder import cache_folder
from kvferry.pages.exchange import ARGUMENTS, WEIGHTS
from kvferry.pages.geometry.config_json import from_config
from kvferry.util.addresses import ucx_environment

CONNECTOR_MODULE = "kvferry.engine.vllm.plugins.nixl.nixl_connector"
CONNECTOR_CLASS = "KvTransferConnector"
TIER_CONNECTOR_MODULE = "kvferry.engine.vllm.plugins.tier.tier_connector"
TIER_CONNECTOR_CLASS = "TierConnector"
CPU_TIER_MODULE = "kvferry.engine.vllm.plugins.tier.cpu_tier"
CPU_POLICY_CLASS = "TenantCachePolicy"
CPU_POLICY_MODULE = "kvferry.engine.vllm.plugins.tier.tenant_policy"
CPU_TIER_CLASS = "CpuTierSpec"
ADAPTER_SCHEDULER = "kvferry.engine.vllm.plugins.adapter_turns.adapter_scheduler"
TENANT_SCHEDULER = "kvferry.engine.vllm.plugins.tenant_scheduler.tenant_scheduler"
# Batches of KV events that vLLM keeps for replay: more than a subscriber's socket holds (1,000).
NUM_REPLAYABLE = 2000
_PRODUCER = "kv_producer"
# How long a prefill engine keeps pages that no decode engine pulls, or asks it to keep.
TRANSFER_LEASE_S = 120
_NUMA_NODES = Path("/sys/devices/system/node")
RELEASE_EXTENSION = "kvferry.engine.vllm.plugins.nixl.nixl_lease.ReleaseExtension"

# As vLLM does on GPUs. On CPUs it starts another process for the model, to bind threads to cores (see ADR 5).
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_BINDING, _UNBOUND = "VLLM_CPU_OMP_THREADS_BIND", "nobind"


_EVENTS = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "buffer_steps": NUM_REPLAYABLE}


def engine_arguments(
    model_folder: str,
    model: ModelConfig,
    engine: EngineConfig,
    *,
    kv_transfer: dict[str, Any],
    events_endpoint: str,
    replay_endpoint: str,
    has_tenants: bool = False,
    adapters: AdaptersConfig = AdaptersConfig(),  # noqa: B008 - frozen
    draft: DraftModel | None = None,
    hf_overrides: Mapping[str, Any] = MappingProxyType({}),
    keys: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Raises ConfigError for values of `engine.args` that vLLM refuses. `keys` as for `parsed`."""
    on_cpu = engine.device == "cpu"
    scheduler = TENANT_SCHEDULER if has_tenants else ADAPTER_SCHEDULER if adapters.served else None
    optional: dict[str, Any] = {
        "max_model_len": model.max_model_len,
        "hf_overrides": dict(hf_overrides) or None,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        # The engine needs it to apply a grammar where the reasoning ends.
        "reasoning_parser": model.reasoning_parser or None,
        "scheduler_cls": scheduler,
        "scheduling_policy": "priority" if scheduler else None,
        "gpu_memory_utilization": None if on_cpu else engine.gpu_memory_utilization,
        # What vLLM prefers on a GPU, FlashAttention, has no kernels for them.
        "attention_backend": "TRITON_ATTN" if not on_cpu and engine.kv_cache_dtype == "fp8_e5m2" else None,
        "distributed_executor_backend": _ONE_PROCESS if on_cpu and _can_compute_in_one_process(engine) else None,
    }
    num_adapters = {"max_loras": adapters.max_active, "max_cpu_loras": adapters.num_loaded}
    lora = {"enable_lora": True, "max_lora_rank": adapters.max_rank, **num_adapters}
    return {
        "model": model_folder,
        "tokenizer": model_folder,
        "dtype": "float32" if on_cpu and model.dtype == "auto" else model.dtype,
        "block_size": engine.block_size,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "enable_log_requests": False,
        # An image comes with its features, or with none where its pages come from another engine; vLLM would look for
        # the latter in this cache.
        "mm_processor_cache_gb": 0,
        "worker_extension_cls": RELEASE_EXTENSION,
        "kv_transfer_config": kv_transfer,
        "kv_events_config": {**_EVENTS, "endpoint": events_endpoint, "replay_endpoint": replay_endpoint},
        **{name: value for name, value in optional.items() if value is not None},
        **(lora if adapters.served else {}),
        **_arguments_of_operator(engine, keys, draft, producer=kv_transfer["kv_role"] == _PRODUCER),
    }


def _can_compute_in_one_process(engine: EngineConfig) -> bool:
    binding = (os.environ | engine.env).get(_BINDING, _UNBOUND)
    binds_threads = binding != _UNBOUND or "numa_bind_cpus" in engine.args
    return engine.tensor_parallel_size == 1 and not binds_threads


def _arguments_of_operator(
    engine: EngineConfig, keys: Mapping[str, str], draft: DraftModel | None, *, producer: bool
) -> dict[str, Any]:
    values, compared = parsed(engine.args, keys), engine.args
    if draft is not None:
        values[SPECULATION] = draft.for_engine(values[SPECULATION], producer=producer)
        compared = {**compared, SPECULATION: draft.for_digest(engine.args[SPECULATION])}
    if equal := equal_values(compared, engine.env):
        # Each of vLLM's processes reads it there for the exchange digest; vLLM itself has no use for it here.
        values["additional_config"] = {ARGUMENTS: equal}
    return values


def kv_transfer_config(
    engine: EngineConfig, engine_id: EngineId, *, producer: bool, weights: str, tiers: dict[str, Any] | None
) -> dict[str, Any]:
    role = _PRODUCER if producer else "kv_consumer"
    config = nixl_connector(engine, role, weights)
    if tiers is not None:
        # NIXL first: if two connectors have a prompt's pages, vLLM asks the first. vLLM adds `engine_id` to each child,
        # and refuses a second one.
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"connectors": [config, tiers]},
        }
    return {
        **config,
        # New on every start: peers never repeat the handshake with an engine id they know, and would silently compute
        # every prompt of a restarted engine.
        "engine_id": engine_id,
        "kv_load_failure_policy": "recompute",
    }


def nixl_connector(engine: EngineConfig, role: str, weights: str) -> dict[str, Any]:
    on_cpu = engine.device == "cpu"
    return {
        "kv_connector": CONNECTOR_CLASS,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": role,
        "kv_buffer_device": "cpu" if on_cpu else "cuda",
        "kv_connector_extra_config": {
            "kv_lease_duration": TRANSFER_LEASE_S,
            WEIGHTS: weights,
            # With the 4 threads that vLLM asks NIXL for, an idle decode engine that had read many descriptors kept
            # 0.97 of a core busy; without them 0.03.
            **({"num_threads": 0} if on_cpu else {}),
        },
    }


def tier_connector(
    tier: TierConfig,
    *,
    keeper_socket: str,
    volume_pool: str = "",
    model_name: str,
    weights_revision: str,
    has_tenants: bool,
) -> dict[str, Any]:
    policy = {"eviction_policy": CPU_POLICY_CLASS, "cache_policy_module_path": CPU_POLICY_MODULE}
    return {
        "kv_connector": TIER_CONNECTOR_CLASS,
        "kv_connector_module_path": TIER_CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": CPU_TIER_CLASS,
            "spec_module_path": CPU_TIER_MODULE,
            "cpu_bytes_to_use": cpu_tier_bytes(tier),
            # A follow-up request sends the answer again.
            "offload_prompt_only": False,
            "blocks_per_chunk": tier.blocks_per_chunk,
            "keeper_socket": keeper_socket,
            "volume_pool": volume_pool,
            "load_timeout_s": tier.load_timeout_s,
            "model_name": model_name,
            "weights_revision": weights_revision,
            **(policy if has_tenants else {}),
        },
    }


def cpu_tier_bytes(tier: TierConfig) -> int:
    return int(tier.cpu_gib * (1 << 30)) if tier.enabled else 0


def prepare_environment(config: EngineConfig, *, side_channel_port: int) -> None:
    """Set variables of vLLM, NIXL and UCX. An operator's values stay."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # NIXL moves states of recurrent layers in this layout alone.
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    }
    if config.device == "cpu":
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // 2)
        values |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            # vLLM's own binding would put all engines of this machine on the same cores.
            _BINDING: _UNBOUND,
            **ucx_environment(config.side_channel_host),
            # Huge pages, where the system has them, make KV pages cheaper to move and read.
            "THP_MEM_ALLOC_ENABLE": "1",
            # Keeps compiled code across restarts; the default is a temporary folder.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor"),
        }
        # Ray sets OMP_NUM_THREADS to a replica's reserved cores, which are not its compute threads.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if config.side_channel_host.startswith("127."):
            values["VLLM_HOST_IP"] = config.side_channel_host
    os.environ.update(config.env)
    for name, value in values.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = config.side_channel_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)


def describe(
    vllm_config: Any,
    engine_id: EngineId,
    model_folder: str,
    *,
    weights: str,
    pool_bytes: int,
    cpu_bytes: int = 0,
    adapters: frozenset[str] = frozenset(),
    without_tiers: str = "",
) -> EngineInfo:
    from kvferry.engine.vllm.plugins.exchange_fields import device_name, exchange_fields, page_dtype, type_name

    model, cache = vllm_config.model_config, vllm_config.cache_config
    page_bytes = 0
    with contextlib.suppress(ConfigError):  # of a model that the geometry does not know, or that has states alone
        page_bytes = page_sizes(vllm_config).page_bytes
    page_bytes = page_bytes or pool_bytes // cache.num_gpu_blocks
    return EngineInfo(
        engine_id=engine_id,
        model=model_folder,
        max_model_len=model.max_model_len,
        block_size=cache.block_size,
        page_bytes=page_bytes,
        num_pages=cache.num_gpu_blocks,
        kv_cache_dtype=type_name(page_dtype(vllm_config)),
        num_cpu_pages=cpu_bytes // page_bytes,
        exchange=exchange_fields(vllm_config, weights=weights),
        device=device_name(vllm_config.parallel_config.tensor_parallel_size),
        pool_bytes=pool_bytes,
        adapters=adapters,
        without_tiers=without_tiers,
    )


class PageSizes(NamedTuple):
    page_bytes: int  # of `block_size` tokens in all layers, over all tensor-parallel ranks
    block_bytes: int  # of one block id of the engine's pool, on one rank


def page_sizes(vllm_config: Any) -> PageSizes:
    """Raises ConfigError for a model whose pages are not known before it is loaded."""
    speculation = vllm_config.speculative_config
    draft = None if speculation is None else speculation.draft_model_config
    # A draft model's layers have pages of the same block ids.
    models = [vllm_config.model_config, *([draft] if draft is not None and speculation.method in DRAFT_METHODS else [])]
    sizes = [_sizes_of(model, vllm_config) for model in models]
    return PageSizes(sum(each.page_bytes for each in sizes), sum(each.block_bytes for each in sizes))


def _sizes_of(model: Any, vllm_config: Any) -> PageSizes:
    from kvferry.engine.vllm.plugins.exchange_fields import kv_cache_dtype

    cache, ranks = vllm_config.cache_config, vllm_config.parallel_config.tensor_parallel_size
    dtype = kv_cache_dtype(vllm_config)
    config = getattr(model.hf_config, "model", None) or model.hf_config  # vLLM wraps that of an EAGLE head
    geometry = from_config(config.to_dict(), name=model.architecture)
    page_bytes = geometry.bytes_per_token(dtype, ranks) * cache.block_size
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        # All layers have one block table, also those with a window.
        return PageSizes(page_bytes * ranks, page_bytes)
    pool = geometry.pool(dtype, block_size=cache.block_size, tensor_parallel_size=ranks)
    return PageSizes(page_bytes * ranks, pool.block_bytes)


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
        with contextlib.suppress(ConfigError):
            fit = int(engine.kv_cache_gib * (1 << 30)) // page_sizes(vllm_config).block_bytes
            if num_blocks > fit:
                key = key_of("num_gpu_blocks_override", keys)
                return f"{key}: engine.kv_cache_gib holds {fit} blocks, not {num_blocks}"
    return ""
