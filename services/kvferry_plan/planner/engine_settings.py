"""Settings of other engines, and of earlier vLLM releases, by what vLLM 0.32 takes for them."""

# `COUNTERPARTS` has one row for each thing that can be set, with its name in each engine; an empty name means that the
# engine has no counterpart. `published-settings.json` has every setting that the sources of the published figures
# name, and what became of it. vLLM's column is checked against its argument parser by tests. Those of other engines are
# not checked: their releases rename settings, so compare with the release that is migrated from.

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Final, Literal

import msgspec

from kvferry.errors import ConfigError

Fate = Literal["kept", "default", "gone", "refused", "other meaning"]


@dataclass(frozen=True, slots=True)
class Counterpart:
    """One thing that can be set. `kvferry` is its key in kvferry's configuration; empty: kvferry sets or lacks it."""

    meaning: str
    vllm: str
    kvferry: str
    sglang: str
    tensorrt_llm: str
    llama_cpp: str
    note: str = ""


COUNTERPARTS: Final = (
    Counterpart(
        "GPUs that share a layer",
        "--tensor-parallel-size",
        "engine.tensor_parallel_size",
        "--tensor-parallel-size",
        "tensor_parallel_size",
        "",
        "llama.cpp splits by rows or layers: --split-mode, --tensor-split",
    ),
    Counterpart(
        "longest prompt and answer, tokens",
        "--max-model-len",
        "model.max_model_len",
        "--context-length",
        "max_seq_len",
        "-c",
        "llama-server divides -c among its slots",
    ),
    Counterpart(
        "type of KV pages",
        "--kv-cache-dtype",
        "engine.kv_cache_dtype",
        "--kv-cache-dtype",
        "kv_cache_config.dtype",
        "--cache-type-k, --cache-type-v",
        "q8_0 takes 34 bytes for 32 values",
    ),
    Counterpart(
        "tokens of a KV page",
        "--block-size",
        "engine.block_size",
        "--page-size",
        "kv_cache_config.tokens_per_block",
        "",
        "llama.cpp has no pages",
    ),
    Counterpart(
        "share of device memory for the engine",
        "--gpu-memory-utilization",
        "engine.gpu_memory_utilization",
        "--mem-fraction-static",
        "kv_cache_config.free_gpu_memory_fraction",
        "",
        "vLLM: of all memory, weights included; TensorRT-LLM: of what weights leave",
    ),
    Counterpart(
        "requests computed at once",
        "--max-num-seqs",
        "engine.max_num_seqs",
        "--max-running-requests",
        "max_batch_size",
        "--parallel",
    ),
    Counterpart(
        "tokens of one step",
        "--max-num-batched-tokens",
        "engine.max_num_batched_tokens",
        "--chunked-prefill-size",
        "max_num_tokens",
        "--batch-size",
    ),
    Counterpart(
        "prefix cache",
        "--enable-prefix-caching",
        "",
        "--disable-radix-cache",
        "kv_cache_config.enable_block_reuse",
        "--cache-reuse",
        "on by default but in llama.cpp; kvferry needs it",
    ),
    Counterpart(
        "prompts computed in parts",
        "--enable-chunked-prefill",
        "",
        "--chunked-prefill-size",
        "enable_chunked_prefill",
        "--ubatch-size",
        "always on in kvferry",
    ),
    Counterpart(
        "KV pages in CPU memory",
        "--kv-offloading-size",
        "tier.cpu_gib",
        "--hicache-size",
        "kv_cache_config.host_cache_size",
        "",
        "vLLM: GiB over all ranks; llama.cpp: --cache-ram keeps whole prompts",
    ),
    Counterpart(
        "KV pages on NVMe",
        "",
        "tier.volumes",
        "--hicache-storage-backend",
        "",
        "--slot-save-path",
        "vLLM: by a connector alone, whose file tier verifies no bytes",
    ),
    Counterpart(
        "weights in CPU memory",
        "--cpu-offload-gb",
        "",
        "--cpu-offload-gb",
        "",
        "--n-cpu-moe",
        "moves weights, not KV; kvferry has none",
    ),
    Counterpart(
        "order of waiting requests",
        "--scheduling-policy",
        "",
        "--schedule-policy",
        "scheduler_config.capacity_scheduler_policy",
        "",
        "kvferry: shares of tenants",
    ),
    Counterpart(
        "GPUs that share the depth",
        "--pipeline-parallel-size",
        "",
        "--pipeline-parallel-size",
        "pipeline_parallel_size",
        "--split-mode",
        "kvferry's engines have one stage",
    ),
    Counterpart(
        "experts on ranks as wholes",
        "--enable-expert-parallel",
        "",
        "--expert-parallel-size",
        "moe_expert_parallel_size",
        "",
        "kvferry has none",
    ),
    Counterpart(
        "prefill and decode apart",
        "--kv-transfer-config",
        "prefill.replicas, decode.replicas",
        "--disaggregation-mode",
        "disaggregated_serving",
        "",
    ),
)


class PublishedSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A setting as published. `today`: what the engine says of it now; `vllm`: what to give vLLM 0.32."""

    engine: str
    setting: str
    fate: Fate
    vllm: str = ""
    today: str = ""

    @property
    def holds(self) -> bool:
        """Whether the engine's present release takes the setting with the meaning given."""
        return self.fate in ("kept", "default")


@functools.cache
def published() -> tuple[PublishedSetting, ...]:
    """Return every setting that the sources of the published figures name."""
    content = resources.files("kvferry_plan.planner").joinpath("published-settings.json").read_bytes()
    return msgspec.json.decode(content, type=tuple[PublishedSetting, ...])


def find(engine: str, setting: str) -> PublishedSetting:
    """Raises ConfigError for a setting that no source names."""
    for each in published():
        if (each.engine, each.setting) == (engine, setting):
            return each
    raise ConfigError(f"no published setting {setting!r} of {engine}")
