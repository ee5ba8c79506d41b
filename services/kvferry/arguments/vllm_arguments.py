"""Which arguments of vLLM's engine `engine.args` may hold, and why.

Those of `REFUSED` are refused by name, and each role may have its own of `FREE`. Of any other, both roles have the
same, and the exchange digest includes it. vLLM refuses names and values that it does not know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvferry.util.addresses import is_url

MAX_ARGUMENTS = 64  # of one section
MAX_VALUE_CHARS = 16_384  # of one value, as JSON
_NAME = re.compile(r"[A-Za-z_]\w{0,99}", re.ASCII)


def _each(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_USE = {
    "model": "model.path",
    "tokenizer": "model.path",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "reasoning_parser": "model.reasoning_parser",
    "block_size": "engine.block_size",
    "kv_cache_dtype": "engine.kv_cache_dtype",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "enforce_eager": "engine.enforce_eager",
    "otlp_traces_endpoint": "tracing.endpoint",
    "kv_offloading_size": "tier.cpu_gib",
    "enable_lora": "adapters.served",
    "max_loras": "adapters.max_active",
    "max_cpu_loras": "adapters.max_loaded",
    "max_lora_rank": "adapters.max_rank",
    "default_mm_loras": "adapters.served",
    **_each("spec_method spec_model spec_tokens", "speculative_config"),
    "device_ids": "prefill.num_gpus and decode.num_gpus",
}

# Keys that `prefill.engine` and `decode.engine` have too.
KEYS_OF_ROLES = ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size")

REFUSED: Mapping[str, str] = {
    **{name: f"use {key}" for name, key in _USE.items()},
    **_each("kv_transfer_config kv_events_config", "workers move pages and report them with it"),
    "trust_remote_code": "code of a model's folder is never run: no architecture that is served needs any",
    **_each("kv_offloading_backend", "tiers are configured by `tier`"),
    **_each("enable_prefix_caching prefix_caching_hash_algo", "pages are found by these hashes"),
    **_each("scheduler_cls scheduling_policy", "shares of tenants are kept with it"),
    **_each("worker_extension_cls worker_cls", "workers release pages with it"),
    **_each(
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend elastic_ep_max_dp_size dp_sync_interval disable_nccl_for_dp_synchronization",
        "each rank has KV pages of its own, and gateways know one set of pages per worker: set prefill.replicas and "
        "decode.replicas instead, which is the same for models without experts",
    ),
    **_each(
        "nnodes node_rank master_addr master_port distributed_executor_backend ray_workers_use_nsight",
        "all ranks of an engine run on its worker's node, so an engine has at most the GPUs of one node: use "
        "engine.tensor_parallel_size within it, and replicas beyond it",
    ),
    "prefill_context_parallel_size": "a worker has GPUs for engine.tensor_parallel_size ranks",
    "pipeline_parallel_size": "vLLM's NIXL connector refuses decode engines of several stages: use "
    "engine.tensor_parallel_size",
    **_each("logits_processors", "answers that another worker continues need kvferry's own"),
    "structured_outputs_config": "gateways try all grammars before with llguidance, which engines follow too",
    **_each("additional_config", "vLLM's processes find values of the exchange digest in it"),
    **_each("disable_log_stats", "loads and times of requests are read from these statistics"),
    **_each("enable_log_requests", "prompts of tenants do not go into logs"),
    **_each("max_num_queued_reqs max_num_queued_tokens", "gateways and workers admit requests"),
    **_each("max_logprobs logprobs_mode", "gateways check and describe log-probabilities"),
    **_each("generation_config override_generation_config", "gateways apply a model's defaults"),
    **_each("mm_processor_cache_gb", "images come to engines processed, and once for each request"),
    **_each(
        "allowed_local_media_path allowed_media_domains interleave_mm_strings language_model_only limit_mm_per_prompt "
        "media_io_kwargs mm_encoder_only mm_processor_cache_type mm_processor_device mm_processor_kwargs "
        "video_pruning_method video_pruning_rate",
        "gateways accept, fetch and process images, and would not know it",
    ),
    "reasoning_parser_plugin": "gateways would not have the parser: model.reasoning_parser names one of vLLM's",
    "hf_config_path": "gateways and the exchange digest read the configuration in the folder of model.path",
    **_each("renderer_num_workers skip_tokenizer_init tokenizer_revision", "gateways render prompts"),
    "tokenizer_mode": "gateways render prompts, with the tokenizer that vLLM takes for the folder by itself: leave one "
    "kind of tokenizer in model.path",
    **_each("revision code_revision hf_token download_dir", "models are downloaded before engines start: model.path"),
    **_each(
        "ignore_patterns pt_load_map_location",
        "weights and their digest are read from the files as they lie in the folder",
    ),
    **_each("runner convert pooler_config io_processor_plugin", "only generation is served"),
    **_each(
        "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
        "a sleeping engine gives up pages that other engines read, and kvferry wakes none: change replicas instead",
    ),
    **_each(
        "weight_transfer_config",
        "weights that change in a running engine would leave the pages, and the digest, of those before",
    ),
    **_each("shutdown_timeout", "workers end their engines"),
    **_each("log_level log_config_file logging_config", "use engine.env.VLLM_LOGGING_LEVEL"),
    **_each("max_parallel_loading_workers", "vLLM ignores it"),
    **_each("model_weights _api_process_count _api_process_rank tokens_only", "vLLM's own processes set it"),
}

FREE: Mapping[str, str] = {
    **_each(
        "kv_cache_memory_bytes num_gpu_blocks_override watermark",
        "number of pages: engines tell it, and need not have the same",
    ),
    **_each(
        "max_num_scheduled_tokens long_prefill_token_threshold",
        "how prompts are cut: answers are the same however they are cut (docs/user/models.md)",
    ),
    **_each(
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load",
        "how the same weights are read",
    ),
    **_each(
        "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics custom_histogram_buckets "
        "show_hidden_metrics_for_version enable_logging_iteration_details aggregate_engine_logging "
        "enable_layerwise_nvtx_tracing jit_monitor_mode jit_monitor_verbose",
        "what an engine reports of itself",
    ),
    **_each(
        "distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind numa_bind_nodes numa_bind_cpus",
        "where an engine's processes run, and how long they wait for each other",
    ),
    **_each("fail_on_environ_validation", "whether vLLM starts with variables that it does not know"),
}

# Refused beside `tier.enabled`.
REFUSED_WITH_TIERS: Mapping[str, str] = _each(
    "kv_cache_dtype_skip_layers kv_sharing_fast_prefill swa_bounded_replay prefix_cache_retention_interval "
    "prefix_match_unit disable_hybrid_kv_cache_manager engram_config mamba_config mamba_cache_dtype "
    "mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend mamba_ssu_algorithm "
    "enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
    "replayssm_buffer_len use_replayssm",
    "pages have another layout with it, and it is not proven that tiers give such pages back as they were",
)

# Arguments that `vllm serve` takes beside those of its engine.
_KEYS_OF_THE_SERVER: Mapping[str, str] = {
    "api_key": "gateway.keys_file",
    "api_server_count": "gateway.replicas",
    "chat_template": "model.chat_template",
    "enable_auto_tool_choice": "model.tool_parser",
    "host": "gateway.host",
    "port": "gateway.http_port",
    "ssl_ca_certs": "gateway.tls.client_ca_file",
    "ssl_certfile": "gateway.tls.cert_file",
    "ssl_keyfile": "gateway.tls.key_file",
    "tool_call_parser": "model.tool_parser",
}
SPECULATION = "speculative_config"
NGRAM = "ngram"  # drafts are tokens that followed the same n-gram earlier in the request: without pages
DRAFT_MODEL = "draft_model"
# A model or head makes the drafts. Its pages lie beside the model's own and are moved and kept with them.
DRAFT_METHODS = (DRAFT_MODEL, "eagle", "eagle3")
# Methods whose `model` is neither a folder nor a hub id.
_METHODS_WITHOUT_MODEL = (NGRAM, "ngram_gpu", "suffix", "custom_class", "extract_hidden_states")
MAX_DRAFT_TOKENS = 16  # of one step
MAX_NGRAM_TOKENS = 1024  # vLLM makes an array of as many for each request and step
_MAX_DRAFT_PATH = 4096  # characters
_LIMITS = {
    "num_speculative_tokens": MAX_DRAFT_TOKENS,
    "prompt_lookup_min": MAX_NGRAM_TOKENS,
    "prompt_lookup_max": MAX_NGRAM_TOKENS,
}

LOAD_FORMAT, LOADER_OPTIONS = "load_format", "model_loader_extra_config"
SAFETENSORS, STREAMED = "safetensors", "runai_streamer"
_OF_THE_SAME_WEIGHTS = ("auto", SAFETENSORS, STREAMED)

# Arguments that a role may have of its own: all values of some, a few values of others.
OF_ROLES = (*FREE, SPECULATION, LOAD_FORMAT, LOADER_OPTIONS)


def is_ngram(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("method") == NGRAM


def speculates(args: Mapping[str, object]) -> bool:
    """Return whether engines with these arguments check drafts of several tokens in one step."""
    return SPECULATION in args


def draft_model(args: Mapping[str, object]) -> str:
    """Return the folder or hub id of the model or head that makes drafts, or an empty string."""
    value = args.get(SPECULATION)
    if not isinstance(value, Mapping) or value.get("method") in _METHODS_WITHOUT_MODEL:
        return ""
    return str(value.get("model") or "")


def _why_no_speculation(value: object, role: str) -> str:
    """Return why a `speculative_config` is refused before vLLM sees it, or an empty string."""
    if not isinstance(value, Mapping) or not isinstance(method := value.get("method"), str):
        return "expected a mapping with method (ngram, draft_model, eagle3, mtp or another of vLLM's)"
    for key, most in _LIMITS.items():
        if key in value and (type(number := value[key]) is not int or not 1 <= number <= most):
            return f"{key}: expected a whole number from 1 to {most}"
    model = value.get("model")
    has_model = method in DRAFT_METHODS or (model is not None and method not in _METHODS_WITHOUT_MODEL)
    # Its files are downloaded and read before the engine starts.
    if has_model and not (isinstance(model, str) and 0 < len(model) <= _MAX_DRAFT_PATH and not is_url(model)):
        return "model: expected the draft model's folder or hub id (owner/name)"
    if has_model and not {"revision", "code_revision"}.isdisjoint(value):
        return "revision: of a hub id the newest one is used; name a folder that holds another one in model"
    if method == NGRAM and role != "decode":
        return "prefill engines generate no answers: give it in decode.engine.args"
    return ""


def why_no_name(name: str, *, role: str = "") -> str:
    """Return why no value of an argument is accepted, or an empty string.

    `role` is that whose `engine.args` it stands in, empty for those of both roles.
    """
    underscored = name.replace("-", "_").lstrip("_")
    if key := _KEYS_OF_THE_SERVER.get(underscored):
        return f"an argument of vLLM's server, which kvferry does not run: use {key}"
    if reason := REFUSED.get(name):
        also = f", or {name} beside these args" if role and name in KEYS_OF_ROLES else ""
        return f"not accepted here: {reason}{also}"
    if _NAME.fullmatch(name):
        return ""
    return f"written as {underscored!r} here" if _NAME.fullmatch(underscored) else "vLLM's engine has no such argument"


def why_refused(name: str, args: Mapping[str, object], *, role: str, of_both: Mapping[str, object]) -> str:
    """Return why an argument's value cannot stand here, or an empty string.

    `role` as for `why_no_name`; `of_both` are the arguments of `engine.args`, where `args` are those of a role.
    """
    if name == SPECULATION and (reason := _why_no_speculation(args[name], role)):
        return reason
    if role and (must_be_equal(name, {**of_both, **args}) or (name in of_both and must_be_equal(name, of_both))):
        return "both roles need the same: give it in engine.args"
    return ""


def why_not_removed(name: str, of_both: Mapping[str, object], *, role: str = "") -> str:
    """Return why no null may stand for an argument, in a role or an entry of `models`; or an empty string."""
    if reason := why_no_name(name, role=role):
        return reason
    if name not in of_both:
        return "null removes nothing: engine.args has no such argument"
    if role and must_be_equal(name, of_both):
        return "both roles need the same: remove it in engine.args"
    return ""


def replaced(args: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with those of a role or an entry of `models` over them; None removes one."""
    return {name: value for name, value in {**args, **own}.items() if value is not None}


def must_be_equal(name: str, args: Mapping[str, object]) -> bool:
    """Return whether engines exchange pages only with an equal value of it: part of the exchange digest."""
    if name == SPECULATION:
        return not is_ngram(args[name])
    if name in (LOAD_FORMAT, LOADER_OPTIONS):
        return args.get(LOAD_FORMAT, "auto") not in _OF_THE_SAME_WEIGHTS
    return name not in FREE


_MAX_VARIABLE_CHARS = 4096
# Set by kvferry for each engine, by key of the configuration.
_VARIABLES_OF_KEYS: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "engine.kv_cache_gib",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "engine.side_channel_host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "engine.side_channel_host",
    "VLLM_HOST_IP": "engine.side_channel_host",
    "VLLM_API_KEY": "gateway.keys_file",
}
FREE_VARIABLES = (
    "VLLM_CACHE_ROOT", "VLLM_CONFIGURE_LOGGING", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_COLOR", "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_PREFIX", "VLLM_LOG_STATS_INTERVAL", "VLLM_RINGBUFFER_WARNING_INTERVAL",
)  # fmt: skip
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "_KEY")


def why_no_variable(name: str, value: str) -> str:
    """Return why a variable cannot be in `engine.env`, or an empty string. vLLM refuses unknown ones later."""
    if not (name.startswith("VLLM_") and name.isascii() and name.replace("_", "").isalnum()):
        return "only variables whose names begin with VLLM_ are accepted; set others for the processes themselves"
    if name in _VARIABLES_OF_KEYS:
        return f"kvferry sets it: use {_VARIABLES_OF_KEYS[name]}"
    if name.endswith(_SECRET):
        return "secrets do not belong into a configuration that `kvferry config` prints"
    if len(value) > _MAX_VARIABLE_CHARS or "\0" in value:
        return f"a value has at most {_MAX_VARIABLE_CHARS} characters, none of them NUL"
    return ""


def why_no_value(value: object) -> str:
    """Return why a value cannot be given to any argument, or an empty string. vLLM's parser checks its type."""
    if value is None:
        return "it has no value; leave it out to have vLLM's default"
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return "a value is a text, a number, true, false, a list or a mapping"
    if len(text) > MAX_VALUE_CHARS:
        return f"a value of {len(text)} characters; {MAX_VALUE_CHARS} is the limit"
    return ""


def equal_values(args: Mapping[str, object], env: Mapping[str, str]) -> str:
    """Return what of arguments and variables engines must have in common, as JSON; empty without any."""
    equal = {name: value for name, value in args.items() if must_be_equal(name, args)}
    equal |= {name: value for name, value in env.items() if name not in FREE_VARIABLES}
    return json.dumps(equal, sort_keys=True, separators=(",", ":")) if equal else ""
