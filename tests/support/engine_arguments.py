"""Accepted values of `engine.args`, for each free argument and `seed`."""

from __future__ import annotations

from typing import Any

VALUES: dict[str, Any] = {
    "kv_cache_memory_bytes": "4G",
    "num_gpu_blocks_override": 123,
    "watermark": 0.03,
    "max_num_scheduled_tokens": 200,
    "long_prefill_token_threshold": 0,
    "safetensors_load_strategy": "eager",
    "safetensors_prefetch_num_threads": 256,
    "safetensors_prefetch_block_size": "1M",
    "use_tqdm_on_load": False,
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 1,
    "cudagraph_metrics": True,
    "enable_mfu_metrics": False,
    "custom_histogram_buckets": {"request_latency": [0.5, 1, 2.5]},
    "show_hidden_metrics_for_version": 0.31,
    "enable_logging_iteration_details": True,
    "aggregate_engine_logging": True,
    "enable_layerwise_nvtx_tracing": False,
    "jit_monitor_mode": "warn",
    "jit_monitor_verbose": True,
    "distributed_timeout_seconds": 77,
    "cpu_distributed_timeout_seconds": "55",
    "numa_bind": True,
    "numa_bind_nodes": [0, 0, 1, 1],
    "numa_bind_cpus": ["0-3", "4,6-7"],
    "fail_on_environ_validation": True,
    "seed": 2**32 - 1,
}
