"""Which arguments of vLLM's engine `engine.args` may hold, and why.

Each of vLLM 0.32's `AsyncEngineArgs` is in one of four tables: refused, equal in both roles and part of the exchange
digest, free by role, or unproven (refused unless `engine.unproven` names it or the value is a tested one).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from typing import Any

from kvferry.util.addresses import is_url

MAX_ARGUMENTS = 64  # of one section
MAX_VALUE_CHARS = 16_384  # of one value, as JSON


class Rule(StrEnum):
    REFUSED = "refused"
    EQUAL = "equal"
    FREE = "free"
    UNPROVEN = "unproven"


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
        "decode.replicas instead, which is the same for models without experts; experts on several data-parallel ranks "
        "are untested (vLLM's CPU backend lacks their exchange)",
    ),
    **_each(
        "nnodes node_rank master_addr master_port distributed_executor_backend ray_workers_use_nsight",
        "all ranks of an engine run on its worker's node, so an engine has at most the GPUs of one node: use "
        "engine.tensor_parallel_size within it, and replicas beyond it",
    ),
    "pipeline_parallel_size": "vLLM's NIXL connector refuses decode engines of several stages: use "
    "engine.tensor_parallel_size",
    **_each("logits_processors", "answers that another worker continues need kvferry's own"),
    "structured_outputs_config": "llguidance follows all grammars, which gateways try before: limits of "
    "time and memory, and answers that go on elsewhere, are untested with any other backend",
    **_each("additional_config", "vLLM's processes find values of the exchange digest in it"),
    **_each("disable_log_stats", "loads and times of requests are read from these statistics"),
    **_each("enable_log_requests", "prompts of tenants do not go into logs"),
    **_each("max_num_queued_reqs max_num_queued_tokens", "gateways and workers admit requests"),
    **_each("max_logprobs logprobs_mode", "gateways check and describe log-probabilities"),
    **_each("generation_config override_generation_config", "gateways apply a model's defaults"),
    **_each("mm_processor_cache_gb", "images come to engines processed, and once for each request"),
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

EQUAL: Mapping[str, str] = {
    "seed": "starts the noise of sampled answers, which another engine may continue",
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

UNPROVEN: Mapping[str, str] = {
    **_each(
        "prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend "
        "dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size device_ids enable_expert_parallel "
        "enable_ep_weight_filter enable_elastic_ep enable_eplb eplb_config expert_placement_strategy all2all_backend "
        "enable_hc_sp enable_batch_sharded_sampling",
        "parallelism beside tensor parallelism on one node",
    ),
    **_each(
        "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold disable_custom_all_reduce "
        "enable_shm_tensor_arena enable_nccl_comm_suspend",
        "exchanges between GPUs",
    ),
    **_each(
        "attention_backend attention_config kernel_config linear_backend moe_backend sparse_indexer_topk_backend "
        "model_impl compilation_config optimization_level performance_mode cudagraph_capture_sizes "
        "max_cudagraph_capture_size disable_cascade_attn use_fp64_gumbel ir_op_priority enable_flashinfer_autotune "
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend",
        "other kernels than those that were compared",
    ),
    **_each(
        "hf_config_path config_format model_class_overrides disable_sliding_window quantization "
        "quantization_config allow_deprecated_quantization",
        "another model than its folder describes; gateways read the folder",
    ),
    "hf_overrides": "another model than its folder describes; for rotations (YaRN) use model.hf_overrides, which "
    "gateways read too",
    **_each(
        "load_format model_loader_extra_config",
        "other weights than those whose digest engines compare, or ways to read them that were not compared",
    ),
    **_each(
        "speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics watermark_config "
        "diffusion_config",
        "tokens that are not sampled one at a time from the model's own distribution",
    ),
    **_each(
        "default_mm_loras fully_sharded_loras lora_dtype lora_target_modules enable_tower_connector_lora "
        "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
        "adapters of other kinds, or computed otherwise, than those that were compared",
    ),
    **_each(
        "allowed_local_media_path allowed_media_domains language_model_only limit_mm_per_prompt enable_mm_embeds "
        "interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_type "
        "mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_mm_processor_stats "
        "disable_chunked_mm_input enable_prompt_embeds",
        "inputs beside text",
    ),
    **_each(
        "mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend "
        "mamba_ssu_algorithm enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding "
        "mamba_cache_philox_rounds replayssm_buffer_len use_replayssm",
        "recurrent state",
    ),
    **_each(
        "kv_cache_dtype_skip_layers kv_sharing_fast_prefill swa_bounded_replay prefix_cache_retention_interval "
        "prefix_match_unit disable_hybrid_kv_cache_manager engram_config",
        "other pages than those that were compared",
    ),
    **_each(
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params",
        "weights that lie outside the device",
    ),
    **_each(
        "async_scheduling enable_chunked_prefill scheduler_reserve_full_isl prefill_schedule_interval "
        "long_prefill_token_threshold_adaptive max_num_active_seqs stream_interval",
        "other steps than those that shares of tenants count on",
    ),
    **_each(
        "enable_cumem_allocator enable_fault_tolerance fault_tolerance_config",
        "pages in memory of another allocator, or of an engine that lost a rank, while others read them",
    ),
    **_each(
        "ec_transfer_config ec_manager_config aux_output_config reasoning_config reasoning_parser_plugin "
        "enable_return_routed_experts return_sampling_mask enable_trace_replay collect_detailed_traces "
        "profiler_config",
        "outputs that workers do not pass on, or files that engines write",
    ),
}

_TABLES: Mapping[Rule, Mapping[str, str]] = {
    Rule.REFUSED: REFUSED,
    Rule.EQUAL: EQUAL,
    Rule.FREE: FREE,
    Rule.UNPROVEN: UNPROVEN,
}
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
RULES: Mapping[str, Rule] = {name: rule for rule, table in _TABLES.items() for name in table}
REASONS: Mapping[str, str] = {name: reason for table in _TABLES.values() for name, reason in table.items()}


SPECULATION = "speculative_config"
_SPECULATION_IN_PARTS = ("spec_method", "spec_model", "spec_tokens")
MAX_DRAFT_TOKENS = 16  # of one step
MAX_NGRAM_TOKENS = 1024  # vLLM makes an array of as many for each request and step
# Accepted keys of vLLM's n-gram drafts. Drafts are tokens that followed the same n-gram earlier in the request: no
# model makes them, and there are no pages beside the model's own.
_NGRAM_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")

# A smaller model makes the drafts. Its pages lie beside the model's own and are moved and kept with them, so both roles
# have it.
DRAFT_MODEL = "draft_model"
# Heads, which draft from what the model has computed. They have pages too.
EAGLE_METHODS = ("eagle", "eagle3")
DRAFT_METHODS = (DRAFT_MODEL, *EAGLE_METHODS)
_DRAFT_MODEL_KEYS = ("method", "model", "num_speculative_tokens")
_MAX_DRAFT_PATH = 4096  # characters
_METHODS = ("ngram", *DRAFT_METHODS)
# Further ones of vLLM's. Those of MTP (of any name that ends so) are of models that are not served.
OTHER_METHODS = (
    "medusa", "mlp_speculator", "suffix", "custom_class", "extract_hidden_states", "dflash", "dspark", "ngram_gpu",
)  # fmt: skip
# Further ones that vLLM has, at the operator's own risk.
_OTHER_SPECULATION_KEYS = (
    "enforce_eager", "draft_tensor_parallel_size", "tensor_parallel_size", "quantization", "moe_backend",
    "attention_backend", "kv_cache_dtype", "max_model_len", "revision", "code_revision",
    "index_share_for_mtp_iteration",
    "disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction", "use_heterogeneous_vocab",
    "parallel_drafting", "target_model_config", "target_parallel_config", "num_speculative_tokens_per_batch_size",
    "draft_model_config", "draft_parallel_config", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "draft_load_config", "rejection_sample_method", "synthetic_acceptance_rates", "synthetic_acceptance_length",
    "enable_adaptive_verification", "draft_sample_method", "dspark_draft_topk",
)  # fmt: skip


def why_no_ngrams(value: object) -> str:
    """Return why a `speculative_config` of n-grams is wrong or untested, or an empty string."""
    if not isinstance(value, Mapping) or value.get("method") != "ngram":
        return f"tested methods of speculative decoding: {', '.join(_METHODS)}"
    if reason := _why_other_keys(value, _NGRAM_KEYS):
        return reason
    for key in ("prompt_lookup_min", "prompt_lookup_max"):
        if not isinstance(length := value.get(key, 1), int) or length > MAX_NGRAM_TOKENS:
            return f"{key}: expected a whole number from 1 to {MAX_NGRAM_TOKENS}"
    return _why_wrong_speculation(value)


def why_no_draft_model(value: Mapping[str, object]) -> str:
    """Return why a `speculative_config` with a model is wrong or untested, or an empty string."""
    return _why_other_keys(value, _DRAFT_MODEL_KEYS) or _why_wrong_speculation(value)


def _why_wrong_speculation(value: object) -> str:
    """Return the mistake in a `speculative_config`, which no permission covers, or an empty string."""
    if not isinstance(value, Mapping):
        return f"expected a mapping with method ({', '.join(_METHODS)}) and num_speculative_tokens"
    method, model = str(value.get("method", ""))[:80], value.get("model")
    if not method:
        return f"method: expected one of {', '.join(_METHODS)}; the mapping replaces a whole other one"
    if method.endswith("mtp"):
        return "method: models that draft by MTP are not served (docs/user/models.md)"
    if method not in _METHODS + OTHER_METHODS:
        near = difflib.get_close_matches(method.lower(), _METHODS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(_METHODS)}"
        return f"method: vLLM has no {method!r}; {hint}"
    num_tokens = value.get("num_speculative_tokens", None if method in _METHODS else 1)
    if type(num_tokens) is not int or num_tokens < 1:
        return f"num_speculative_tokens: expected a whole number from 1 to {MAX_DRAFT_TOKENS}"
    if method in DRAFT_METHODS or model is not None:
        what = "the EAGLE head" if method in EAGLE_METHODS else "the draft model"
        if not isinstance(model, str) or not 0 < len(model) <= _MAX_DRAFT_PATH or is_url(model):
            return f"model: expected {what}'s folder or hub id (owner/name)"
    lengths = [value[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in value]
    if any(type(length) is not int or length < 1 for length in lengths):
        return f"prompt_lookup_min, prompt_lookup_max: expected whole numbers from 1 to {MAX_NGRAM_TOKENS}"
    return "prompt_lookup_min: expected at most prompt_lookup_max" if lengths != sorted(lengths) else ""


def _why_other_keys(value: Mapping[str, object], keys: Collection[str]) -> str:
    if unknown := [str(key)[:80] for key in value if key not in keys]:
        return f"method {value['method']}: tested keys are {', '.join(keys)}; {unknown[0]!r} is untested"
    num_tokens = value.get("num_speculative_tokens")
    if isinstance(num_tokens, int) and num_tokens > MAX_DRAFT_TOKENS:
        return f"num_speculative_tokens: expected a whole number from 1 to {MAX_DRAFT_TOKENS}"
    return ""


def draft_model(args: Mapping[str, object]) -> str:
    """Return the folder or hub id of the draft model; empty if none is configured or its settings are untested."""
    value = args.get(SPECULATION)
    if not isinstance(value, Mapping) or value.get("method") not in DRAFT_METHODS or why_no_draft_model(value):
        return ""
    return str(value["model"])


LOAD_FORMAT, LOADER_OPTIONS = "load_format", "model_loader_extra_config"
SAFETENSORS, STREAMED = "safetensors", "runai_streamer"
MAX_LOADER_THREADS = 256
_TESTED_LOAD_FORMATS = ("auto", SAFETENSORS, STREAMED)
_UNLIKE_THE_FILES: Mapping[str, str] = {
    "dummy": "weights are random, not those of the files",
    "fastsafetensors": "vLLM reads with it into the memory of a GPU alone",
    "instanttensor": "vLLM reads with it into the memory of a GPU alone",
}
# Keys of `model_loader_extra_config`, with the load formats that read them.
_LOADER_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "enable_multithread_load": ("auto", SAFETENSORS),
    "num_threads": ("auto", SAFETENSORS),
    "concurrency": (STREAMED,),
    "memory_limit": (STREAMED,),
}


def why_no_load_format(value: object) -> str:
    """Return why a load format is unknown to read the folder's weights as they are, or an empty string."""
    if value in _TESTED_LOAD_FORMATS:
        return ""
    why = _UNLIKE_THE_FILES.get(str(value), "")
    got = f"{value}: {why}" if why else f"not {str(value)[:80]!r}"
    return f"expected one of {', '.join(_TESTED_LOAD_FORMATS)}, which are tested to read the folder's weights; {got}"


def why_no_loader_options(value: object) -> str:
    """As `why_no_load_format`, for `model_loader_extra_config`."""
    known = f"tested keys are {', '.join(_LOADER_OPTIONS)}"
    if not isinstance(value, Mapping):
        return f"expected a mapping; {known}"
    for key, each in value.items():
        if key not in _LOADER_OPTIONS:
            return f"{known}, not {str(key)[:80]!r}"
        least, most = (0, 1 << 50) if key == "memory_limit" else (1, MAX_LOADER_THREADS)
        if key == "enable_multithread_load":
            if not isinstance(each, bool):
                return f"{key}: expected true or false"
        elif type(each) is not int or not least <= each <= most:
            return f"{key}: expected a whole number from {least} to {most}"
    return ""


def why_no_loading(args: Mapping[str, object]) -> str:
    """Return an option that the load format does not take, and why; or an empty string."""
    options, chosen = args.get(LOADER_OPTIONS), args.get(LOAD_FORMAT, "auto")
    for key in options if isinstance(options, Mapping) else ():
        takers = _LOADER_OPTIONS.get(str(key), ())
        if takers and chosen in _TESTED_LOAD_FORMATS and chosen not in takers:
            return f"{key}: only with {LOAD_FORMAT} {' or '.join(takers)}, and it is {chosen}"
    return ""


# Keys of arguments that are mappings, the tested ones first.
KEYS_OF_MAPPINGS: Mapping[str, tuple[str, ...]] = {
    SPECULATION: (*dict.fromkeys(_NGRAM_KEYS + _DRAFT_MODEL_KEYS), *_OTHER_SPECULATION_KEYS),
    LOADER_OPTIONS: (*_LOADER_OPTIONS, "distributed", "enable_weights_track", "pattern", "tensorizer_config"),
}


def why_misspelt(name: str, value: object) -> str:
    """Return what to write instead of a key that vLLM does not know, or an empty string."""
    known = KEYS_OF_MAPPINGS.get(name)
    if known is None or not isinstance(value, Mapping):
        return ""
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:80], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known[:5])} and others"
            return f"{str(key)[:80]!r}: vLLM has no such key here; {hint}"
    return ""


# Unproven arguments with tested values, which each role may choose: why a value is untested, or an empty string.
_TESTED_VALUES: Mapping[str, Callable[[object], str]] = {
    LOAD_FORMAT: why_no_load_format,
    LOADER_OPTIONS: why_no_loader_options,
}


def speculates(args: Mapping[str, object]) -> bool:
    """Return whether engines with these arguments check drafts of several tokens in one step."""
    return any(name in args for name in (SPECULATION, *_SPECULATION_IN_PARTS))


def why_refused(name: str, value: object, *, role: str, unproven: Collection[str]) -> str:
    """Return why an argument cannot be given here, or an empty string.

    `role` is that whose `engine.args` it stands in, empty for those of both roles.
    """
    if reason := why_unknown(name):
        return reason
    rule = RULES[name]
    if rule is Rule.REFUSED:
        reason = REASONS[name]
        if role and name in KEYS_OF_ROLES:
            reason += f", or {name} beside these args"
        return f"not accepted here: {reason}"
    if (name == SPECULATION or name not in unproven) and (reason := why_misspelt(name, value)):
        return reason
    if name == SPECULATION and (reason := _why_wrong_speculation(value)):
        return reason
    if rule is Rule.UNPROVEN and name not in unproven:
        if name == SPECULATION:
            return _why_no_speculation(value, role)
        reason = f"untested: it may change answers ({REASONS[name]})"
        if name in _TESTED_VALUES:
            reason = _TESTED_VALUES[name](value)
            if not reason:
                return ""
        return reason + _at_own_risk(name)
    if role and must_be_equal(name, value):
        return f"both roles need the same: give it in engine.args ({REASONS[name]})"
    return ""


def why_unknown(name: str) -> str:
    """Return what to write instead of a name that no argument has, or an empty string."""
    if name in RULES:
        return ""
    if "-" in name and name.replace("-", "_").lstrip("_") in RULES:
        return f"written as {name.replace('-', '_').lstrip('_')!r} here"
    if key := _KEYS_OF_THE_SERVER.get(name.replace("-", "_")):
        return f"an argument of vLLM's server, which kvferry does not run: use {key}"
    near = difflib.get_close_matches(name[:80], [each for each in RULES if not each.startswith("_")], n=1)
    return "vLLM's engine has no such argument" + (f"; did you mean {near[0]!r}?" if near else "")


def replaced(args: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with those of a role or an entry of `models` over them; None removes one."""
    return {name: value for name, value in {**args, **own}.items() if value is not None}


def why_not_removed(name: str, value: object = None) -> str:
    """Return why no null may stand for an argument, in a role where both have `value`; or an empty string."""
    if reason := why_unknown(name):
        return reason
    if name in REFUSED:
        return f"not accepted here: {REASONS[name]}"
    if value is not None and must_be_equal(name, value):
        return f"both roles need the same: remove it in engine.args ({REASONS[name]})"
    return ""


def _why_no_speculation(value: object, role: str) -> str:
    if isinstance(value, Mapping) and value.get("method") in DRAFT_METHODS:
        reason = why_no_draft_model(value)
        if not reason:
            # Prefill engines compute the draft model's pages of a prompt too.
            return "both roles need the same draft model or EAGLE head: give it in engine.args" if role else ""
    else:
        reason = why_no_ngrams(value)
        if not reason:
            return "" if role == "decode" else "prefill engines generate no answers: give it in decode.engine.args"
    return reason + _at_own_risk(SPECULATION)


def _at_own_risk(name: str) -> str:
    return f"; to try it at your own risk, add {name!r} to engine.unproven"


def must_be_equal(name: str, value: object) -> bool:
    """Return whether engines exchange pages only with an equal value: part of the exchange digest."""
    if name == SPECULATION and not why_no_ngrams(value):
        return False
    if name in _TESTED_VALUES and not _TESTED_VALUES[name](value):
        return False
    return RULES[name] in (Rule.EQUAL, Rule.UNPROVEN)


def may_be_of_one_role(name: str) -> bool:
    """Return whether `prefill.engine.args` or `decode.engine.args` takes an argument, of some values at least."""
    return RULES[name] is Rule.FREE or name in (SPECULATION, *_TESTED_VALUES)


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


def why_no_variable(name: str, value: str, *, unproven: Collection[str]) -> str:
    """Return why a variable cannot be in `engine.env`, or an empty string. vLLM refuses unknown ones later."""
    if not _is_variable(name):
        return "only variables whose names begin with VLLM_ are accepted; set others for the processes themselves"
    if name in _VARIABLES_OF_KEYS:
        return f"kvferry sets it: use {_VARIABLES_OF_KEYS[name]}"
    if name.endswith(_SECRET):
        return "secrets do not belong into a configuration that `kvferry config` prints"
    if len(value) > _MAX_VARIABLE_CHARS or "\0" in value:
        return f"a value has at most {_MAX_VARIABLE_CHARS} characters, none of them NUL"
    if name not in FREE_VARIABLES and name not in unproven:
        return (
            "untested: it may change answers; to try it at your own risk, add its name to engine.unproven "
            f"(free are {', '.join(FREE_VARIABLES)})"
        )
    return ""


def why_not_unproven(name: str) -> str:
    """Return why `engine.unproven` cannot name an argument or a variable, or an empty string."""
    if _is_variable(name):
        return "it needs no permission" if name in FREE_VARIABLES else ""
    if RULES.get(name) is Rule.UNPROVEN:
        return ""
    return why_refused(name, None, role="", unproven=()) or "it needs no permission"


def must_be_equal_variable(name: str) -> bool:
    """As `must_be_equal`, for `engine.env`."""
    return name not in FREE_VARIABLES


def _is_variable(name: str) -> bool:
    return name.startswith("VLLM_") and name.isascii() and name.replace("_", "").isalnum()


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
    equal = {name: value for name, value in args.items() if must_be_equal(name, value)}
    equal |= {name: value for name, value in env.items() if must_be_equal_variable(name)}
    return json.dumps(equal, sort_keys=True, separators=(",", ":")) if equal else ""
