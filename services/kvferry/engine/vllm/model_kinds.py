"""Models that cannot be served, and those whose pages may go to tiers; docs/user/models.md says so to users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Models whose pages came back from a volume as they were computed, drafts' among them: `make test-models`.
ARCHITECTURES = frozenset(
    {
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
_EAGLE_ARCHITECTURES = frozenset({"EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"})

# Architectures with images that are tested: tests/model/test_images.py. Others are served for text.
IMAGE_ARCHITECTURES = frozenset({"Idefics3ForConditionalGeneration"})


def why_refused(vllm_config: Any) -> str:
    """Return the reason; empty for a model that is served. `vllm_config` is vLLM's, resolved."""
    reasons = "; ".join(_never_served(vllm_config))
    return f"{reasons}; docs/user/models.md has what is served" if reasons else ""


def why_without_tiers(vllm_config: Any) -> str:
    """Return the reason; empty for a model whose pages may go to tiers."""
    kinds = ", ".join(_not_for_tiers(vllm_config))
    return f"pages of tiers are not proven for {kinds}" if kinds else ""


def _never_served(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    if model.runner_type != "generate":
        yield "models without generation (pooling, classification) are not served"
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not served: requests have no inputs for an encoder"
    of_pages, computed = vllm_config.cache_config.cache_dtype, str(model.dtype).removeprefix("torch.")
    if of_pages in ("float16", "bfloat16") and of_pages != computed:
        # No proof of a transfer sees it: one engine alone gave garbage on a CPU.
        yield f"KV pages of type {of_pages} are not served with a model that is computed in {computed}"
    if vllm_config.lora_config is not None and computed == "float16":
        # Products of an adapter's weights may exceed its range. The pages then hold what is no number, and whoever
        # gets a freed one next gets wrong answers: attention multiplies all rows of a page, unused ones by 0.
        yield "LoRA adapters are not served with a model that is computed in float16: set model.dtype"
    if model.architecture in IMAGE_ARCHITECTURES:
        yield from _not_with_images(vllm_config)


def _not_with_images(vllm_config: Any) -> Iterator[str]:
    model = vllm_config.model_config
    text_type = str(getattr(model.hf_text_config, "model_type", ""))
    found = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA adapters": vllm_config.lora_config is not None,
        "several ranks of tensor parallelism": vllm_config.parallel_config.tensor_parallel_size > 1,
        "quantized weights": bool(model.quantization),
        f"a language model of type {text_type[:80]}": text_type != "llama",
    }
    if kinds := [kind for kind, is_there in found.items() if is_there]:
        yield f"images are untested with {', '.join(kinds)}"


def _not_for_tiers(vllm_config: Any) -> Iterator[str]:
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    of_pages, computed = vllm_config.cache_config.cache_dtype, str(model.dtype).removeprefix("torch.")
    if model.architecture not in ARCHITECTURES:
        yield f"the architecture {model.architecture}"
    if of_pages not in ("auto", computed):
        yield f"KV pages of type {of_pages}"
    if getattr(model.hf_text_config, "dual_chunk_attention_config", None):
        yield "dual chunk attention"
    # vLLM names the model itself as that of drafts which need none.
    draft = speculation.draft_model_config if speculation is not None and speculation.method != "ngram" else None
    if any(each is not None and has_sliding_window(each) for each in (model, draft)):
        yield "a sliding window (a page of a chunk may have left it)"
    if draft is not None and draft.architecture not in ARCHITECTURES | _EAGLE_ARCHITECTURES:
        yield f"drafts of the architecture {draft.architecture}"


def leave_untested_images_out(model_config: Any) -> None:
    """Have vLLM take a multimodal model for its texts alone, unless its images are tested."""
    multimodal = model_config.multimodal_config
    if multimodal is not None and model_config.architecture not in IMAGE_ARCHITECTURES:
        multimodal.language_model_only = True


def has_sliding_window(model_config: Any) -> bool:
    # As vLLM does, whatever `use_sliding_window` says: some models of it ignore that.
    layer_types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    return any(each != "full_attention" for each in layer_types) or model_config.get_sliding_window() is not None
