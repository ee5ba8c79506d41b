"""Refusal of models whose KV pages are not tested to survive a transfer; docs/user/models.md has the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.arguments.vllm_arguments import DRAFT_METHODS, DRAFT_MODEL

# Heads that were tried: tests/model/test_draft_model.py.
EAGLE_ARCHITECTURES = frozenset({"EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"})

# Tried by `make test-models`. vLLM 0.32 has 391; another one is refused until it was tried.
ARCHITECTURES = frozenset(
    {
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
)

# Those whose LoRA adapters were compared: tests/model/test_adapters.py.
ADAPTER_ARCHITECTURES = frozenset(
    {
        "Gemma3ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Olmo2ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)

# Those that were compared with `model.hf_overrides`.
ROPE_ARCHITECTURES = frozenset({"Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"})

# Architectures with images that are tested: tests/model/test_images.py.
IMAGE_ARCHITECTURES = frozenset({"Idefics3ForConditionalGeneration"})

# Tested quantizations of weights, as method and format, both with eight bits; vLLM's other kernels compute in half
# precision, where answers depend on how prompts are cut.
_QUANTIZATIONS = frozenset({("compressed-tensors", "int-quantized"), ("compressed-tensors", "float-quantized")})
_WEIGHT_BITS = 8

# Values in a text configuration's `layer_types`.
_FULL, _SLIDING = "full_attention", "sliding_attention"

TABLE = "docs/user/models.md has the models that are served"


def why_refused(vllm_config: Any, *, has_tiers: bool) -> str:
    """Return the reason; empty for a model that is served. `vllm_config` is vLLM's, resolved."""
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    reasons = {
        **_of_model(model),
        f"KV pages of type {cache_dtype}": _is_quantized(cache_dtype) or _is_of_another_type(cache_dtype, model),
        "a sliding window, with tier.enabled": has_tiers and has_sliding_window(model),
    }
    if speculation is not None:
        reasons |= _of_speculation(vllm_config)
    if "rope_parameters" in (model.hf_overrides or {}):
        reasons[f"model.hf_overrides, of {model.architecture},"] = model.architecture not in ROPE_ARCHITECTURES
    if model.architecture in IMAGE_ARCHITECTURES:
        reasons |= _of_image_models(vllm_config, has_tiers=has_tiers)
    found = [kind for kind, is_there in reasons.items() if is_there]
    if not found and model.architecture not in ARCHITECTURES | IMAGE_ARCHITECTURES:
        found = [f"the architecture {model.architecture}"]
    if not found and vllm_config.lora_config is not None:
        if not _is_tested_with_adapters(model):
            found = [f"{_quantization(model) or model.architecture} and LoRA adapters"]
        elif str(model.dtype) == "torch.float16":
            # Products of an adapter's weights may exceed its range. The pages then hold what is no number, and whoever
            # gets a freed one next gets wrong answers: attention multiplies all rows of a page, unused ones by 0.
            found = ["LoRA adapters, computed in float16,"]
    if not found:
        return ""
    return f"models with {' and '.join(found)} are untested here; {TABLE}"


def _of_model(model: Any) -> Mapping[str, bool]:
    text = model.hf_text_config
    layer_types = _layer_types(model)
    return {
        "no generation (pooling, classification)": model.runner_type not in ("generate", "draft"),
        "recurrent state (Mamba, linear attention)": model.is_hybrid or model.is_attention_free,
        "multi-head latent attention (MLA)": model.use_mla,
        "an encoder": model.is_encoder_decoder,
        "attention to later tokens": getattr(text, "is_causal", True) is False,
        "chunked local attention": bool(getattr(text, "attention_chunk_size", None)),
        "dual chunk attention": bool(getattr(text, "dual_chunk_attention_config", None)),
        "attention sinks": getattr(text, "model_type", "") == "gpt_oss",
        "KV pages shared by layers": bool(getattr(text, "num_kv_shared_layers", 0)),
        "ALiBi": bool(getattr(text, "alibi", False)),
        "layers of kind " + ", ".join(sorted(layer_types - {_FULL, _SLIDING})): bool(layer_types - {_FULL, _SLIDING}),
        f"weights quantized as {_quantization(model)}": not _is_tested_quantization(model),
    }


def _of_speculation(vllm_config: Any) -> Mapping[str, bool]:
    target, speculation = vllm_config.model_config, vllm_config.speculative_config
    if speculation.method not in DRAFT_METHODS:
        return {f"drafts of method {speculation.method}": speculation.method != "ngram"}
    is_head = speculation.method != DRAFT_MODEL
    tested = EAGLE_ARCHITECTURES if is_head else ARCHITECTURES
    draft = speculation.draft_model_config
    # Their pages lie in one pool.
    is_sliding = has_sliding_window(target) or has_sliding_window(draft)
    return {
        **{f"a draft model with {kind}": is_there for kind, is_there in _of_model(draft).items()},
        f"a draft model of the architecture {draft.architecture}": draft.architecture not in tested,
        f"an EAGLE head of {target.architecture}": is_head and target.architecture != "LlamaForCausalLM",
        # Beside requests that are longer than a head's context, vLLM drafts nothing.
        "a draft model whose context is shorter": not is_head and draft.max_model_len < target.max_model_len,
        "a draft model of another type": draft.dtype != target.dtype,
        "a draft model with another vocabulary": draft.get_vocab_size() != target.get_vocab_size(),
        "a draft model and a sliding window": is_sliding,
        "a draft model and quantized weights": bool(target.quantization or draft.quantization),
        "a draft model, on several ranks of tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
    }


def _of_image_models(vllm_config: Any, *, has_tiers: bool) -> Mapping[str, bool]:
    model = vllm_config.model_config
    text_type = str(getattr(model.hf_text_config, "model_type", ""))
    return {
        "images, with tier.enabled": has_tiers,
        "images, and speculative decoding": vllm_config.speculative_config is not None,
        "images, and LoRA adapters": vllm_config.lora_config is not None,
        "images, on several ranks of tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "images, and quantized weights": bool(model.quantization),
        f"images, and a language model of type {text_type[:80]}": text_type != "llama",
    }


def _layer_types(model_config: Any) -> set[str]:
    return set(getattr(model_config.hf_text_config, "layer_types", None) or ())


def has_sliding_window(model_config: Any) -> bool:
    # As vLLM does, whatever `use_sliding_window` says: some models of it ignore that.
    return _SLIDING in _layer_types(model_config) or model_config.get_sliding_window() is not None


def _is_tested_with_adapters(model_config: Any) -> bool:
    return model_config.architecture in ADAPTER_ARCHITECTURES and not model_config.quantization


def _is_tested_quantization(model_config: Any) -> bool:
    if not model_config.quantization:
        return True
    values = _quantization_values(model_config)
    groups = values.get("config_groups") or {}
    bits = {group["weights"]["num_bits"] for group in groups.values() if group.get("weights")}
    # With a scheme for the cache, vLLM would store pages of another type than it was told.
    is_of_weights_alone = not values.get("kv_cache_scheme")
    is_listed = (model_config.quantization, values.get("format")) in _QUANTIZATIONS
    return is_listed and is_of_weights_alone and bits == {_WEIGHT_BITS}


def _quantization(model_config: Any) -> str:
    values = _quantization_values(model_config)
    return " ".join(str(each)[:80] for each in (model_config.quantization, values.get("format")) if each)


def _quantization_values(model_config: Any) -> Mapping[str, Any]:
    values = getattr(model_config.hf_config, "quantization_config", None)
    return values if isinstance(values, Mapping) else {}


def _is_of_another_type(cache_dtype: str, model_config: Any) -> bool:
    # On a CPU such pages were seen to give garbage.
    return cache_dtype in ("float16", "bfloat16") and str(model_config.dtype) != f"torch.{cache_dtype}"


def _is_quantized(cache_dtype: str) -> bool:
    return cache_dtype not in ("auto", "float16", "bfloat16")
