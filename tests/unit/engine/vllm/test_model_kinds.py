"""A model is refused unless its architecture was tried and nothing in its configuration is of an untried kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.tiny_models import OVERRIDDEN, TESTED
from kvferry.engine.vllm.model_kinds import (
    ADAPTER_ARCHITECTURES,
    ARCHITECTURES,
    IMAGE_ARCHITECTURES,
    ROPE_ARCHITECTURES,
    why_refused,
)


def config(*, architecture: str = "LlamaForCausalLM", window: int | None = None, **text: Any) -> SimpleNamespace:
    model = SimpleNamespace(
        architecture=architecture,
        runner_type="generate",
        is_hybrid=False,
        is_attention_free=False,
        use_mla=False,
        is_encoder_decoder=False,
        hf_text_config=SimpleNamespace(**text),
        get_sliding_window=lambda: window,
        quantization=None,
        hf_config=SimpleNamespace(),
        hf_overrides={},
        dtype="torch.bfloat16",
    )
    cache = SimpleNamespace(cache_dtype="auto")
    return SimpleNamespace(model_config=model, cache_config=cache, lora_config=None, speculative_config=None)


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_what_was_tried_is_served(architecture: str, has_tiers: bool) -> None:
    assert why_refused(config(architecture=architecture, layer_types=["full_attention"]), has_tiers=has_tiers) == ""


def test_ngrams_are_served() -> None:
    whole = config()
    whole.speculative_config = SimpleNamespace(method="ngram")
    assert why_refused(whole, has_tiers=True) == ""


def drafted(**changes: Any) -> SimpleNamespace:
    whole = config()
    draft = config().model_config
    draft.runner_type = "draft"
    for each in (draft, whole.model_config):
        each.max_model_len, each.get_vocab_size = 2048, lambda: 49_152
    for name, value in changes.items():
        setattr(draft, name, value)
    whole.speculative_config = SimpleNamespace(method="draft_model", draft_model_config=draft)
    whole.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    return whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"architecture": "MiMoV2FlashForCausalLM"}, "a draft model of the architecture MiMoV2FlashForCausalLM"),
        ({"use_mla": True}, "a draft model with multi-head latent attention"),
        ({"max_model_len": 1024}, "a draft model whose context is shorter"),
        ({"dtype": "torch.float32"}, "a draft model of another type"),
        ({"get_vocab_size": lambda: 50_000}, "a draft model with another vocabulary"),
        ({"get_sliding_window": lambda: 64}, "a draft model and a sliding window"),
        ({"quantization": "gptq"}, "a draft model and quantized weights"),
    ],
)
def test_draft_models_are_served_as_they_were_tried(changes: dict[str, Any], reason: str) -> None:
    found = why_refused(drafted(**changes), has_tiers=True)
    assert (found == "") is (reason == "")
    assert reason in found


def test_a_draft_model_on_several_ranks_is_refused() -> None:
    whole = drafted()
    whole.parallel_config.tensor_parallel_size = 2
    assert "a draft model, on several ranks" in why_refused(whole, has_tiers=False)


@pytest.mark.parametrize(
    ("target", "method", "head", "reason"),
    [
        ("LlamaForCausalLM", "eagle", "EagleLlamaForCausalLM", ""),
        ("LlamaForCausalLM", "eagle3", "LlamaForCausalLMEagle3", ""),
        ("LlamaForCausalLM", "eagle3", "Eagle3Qwen3ForCausalLM", "a draft model of the architecture Eagle3Qwen3"),
        ("Qwen3ForCausalLM", "eagle3", "LlamaForCausalLMEagle3", "an EAGLE head of Qwen3ForCausalLM"),
        ("LlamaForCausalLM", "draft_model", "LlamaForCausalLMEagle3", "a draft model of the architecture Llama"),
    ],
)
def test_eagle_heads_are_served_as_they_were_tried(target: str, method: str, head: str, reason: str) -> None:
    whole = drafted(architecture=head)
    whole.model_config.architecture, whole.speculative_config.method = target, method
    found = why_refused(whole, has_tiers=True)
    assert (found == "") is (reason == "")
    assert reason in found


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_rotations_in_the_place_of_their_own_are_served_where_they_were_compared(architecture: str) -> None:
    whole = config(architecture=architecture)
    whole.model_config.hf_overrides = {"rope_parameters": {}}
    reason = why_refused(whole, has_tiers=False)
    assert (f"model.hf_overrides, of {architecture}," in reason) == (architecture not in ROPE_ARCHITECTURES)


def test_rotations_were_compared_for_each_architecture_that_has_them() -> None:
    names = {type(TESTED[name]()).__name__.removesuffix("Config") for name in OVERRIDDEN}
    assert {f"{name}ForCausalLM" for name in names} == ROPE_ARCHITECTURES


@pytest.mark.parametrize("has_tiers", [False, True])
def test_other_architectures_are_refused_by_name(has_tiers: bool) -> None:
    reason = why_refused(config(architecture="MiMoV2FlashForCausalLM"), has_tiers=has_tiers)
    assert "MiMoV2FlashForCausalLM" in reason
    assert "docs/user/models.md" in reason


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"is_causal": False}, "later tokens"),
        ({"attention_chunk_size": 128}, "chunked local"),
        ({"dual_chunk_attention_config": {"chunk_size": 256}}, "dual chunk"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"num_kv_shared_layers": 2}, "shared by layers"),
        ({"alibi": True}, "ALiBi"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_untried_kinds_of_tried_architectures_are_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in why_refused(config(**values), has_tiers=False)


@pytest.mark.parametrize(
    ("part", "name", "value", "reason"),
    [
        ("model_config", "runner_type", "pooling", "no generation"),
        ("model_config", "use_mla", True, "MLA"),
        ("model_config", "is_hybrid", True, "recurrent"),
        ("model_config", "is_encoder_decoder", True, "encoder"),
        ("cache_config", "cache_dtype", "fp8", "fp8"),
        ("", "speculative_config", SimpleNamespace(method="mtp"), "drafts of method mtp"),
    ],
)
def test_untried_settings_are_refused(part: str, name: str, value: object, reason: str) -> None:
    whole = config()
    setattr(getattr(whole, part) if part else whole, name, value)
    assert reason in why_refused(whole, has_tiers=False)


def quantized(method: str, **values: Any) -> SimpleNamespace:
    whole = config()
    whole.model_config.quantization = method
    whole.model_config.hf_config.quantization_config = values
    return whole


INT8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


@pytest.mark.parametrize("tensor_format", ["int-quantized", "float-quantized"])
def test_weights_of_eight_bits_are_served_in_the_formats_that_were_tried(tensor_format: str) -> None:
    assert why_refused(quantized("compressed-tensors", format=tensor_format, **INT8), has_tiers=True) == ""


@pytest.mark.parametrize(
    ("method", "values", "reason"),
    [
        ("fp8", {}, "weights quantized as fp8 are"),
        ("awq", {"bits": 4}, "weights quantized as awq are"),
        ("compressed-tensors", {"format": "pack-quantized", **INT8}, "compressed-tensors pack-quantized"),
        ("compressed-tensors", {"format": "int-quantized"}, "compressed-tensors int-quantized"),
        (
            "compressed-tensors",
            {"format": "int-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
            "int-quantized",
        ),
        ("compressed-tensors", {"format": "float-quantized", "kv_cache_scheme": {"num_bits": 8}, **INT8}, "float"),
    ],
)
def test_other_quantized_weights_are_refused(method: str, values: dict[str, Any], reason: str) -> None:
    assert reason in why_refused(quantized(method, **values), has_tiers=False)


@pytest.mark.parametrize("use", [True, False])
def test_a_window_is_refused_with_tiers_whatever_the_model_says_of_its_use(use: bool) -> None:
    """vLLM's Mistral and Phi-3 have windows whatever `use_sliding_window` says."""
    windowed = config(window=64, sliding_window=64, use_sliding_window=use)
    assert why_refused(windowed, has_tiers=False) == ""
    assert "sliding window" in why_refused(windowed, has_tiers=True)


def test_every_architecture_was_tried() -> None:
    pytest.importorskip("transformers")
    tried = {type(configure()).__name__.removesuffix("Config").removesuffix("Text") for configure in TESTED.values()}
    assert {f"{name}ForCausalLM" for name in tried} == ARCHITECTURES


@pytest.mark.parametrize(
    ("of_pages", "computed", "is_refused"),
    [
        ("auto", "torch.float32", False),
        ("bfloat16", "torch.bfloat16", False),
        ("bfloat16", "torch.float32", True),
        ("float16", "torch.bfloat16", True),
        ("fp8", "torch.bfloat16", True),
    ],
)
def test_pages_of_another_type_than_the_model_is_computed_in_are_refused(
    of_pages: str, computed: str, is_refused: bool
) -> None:
    values = config()
    values.cache_config.cache_dtype, values.model_config.dtype = of_pages, computed
    reason = why_refused(values, has_tiers=False)
    assert (f"KV pages of type {of_pages}" in reason) == is_refused


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_adapters_are_served_where_they_were_compared(architecture: str) -> None:
    whole = config(architecture=architecture)
    whole.lora_config = object()
    reason = why_refused(whole, has_tiers=True)
    assert ("LoRA adapters" in reason) == (architecture not in ADAPTER_ARCHITECTURES)
    assert ADAPTER_ARCHITECTURES <= ARCHITECTURES


def test_adapters_in_float16_are_refused() -> None:
    """Finite weights of 10,000 gave pages of NaN, and those wrong answers to requests for the model itself."""
    whole = config()
    whole.lora_config = object()
    whole.model_config.dtype = "torch.float16"
    assert "LoRA adapters, computed in float16," in why_refused(whole, has_tiers=False)
    whole.lora_config = None
    assert why_refused(whole, has_tiers=False) == ""


def test_adapters_of_quantized_weights_are_refused() -> None:
    whole = config()
    whole.lora_config = object()
    whole.model_config.quantization = "compressed-tensors"
    whole.model_config.hf_config.quantization_config = {
        "format": "int-quantized",
        "config_groups": {"g": {"weights": {"num_bits": 8}}},
    }
    assert "compressed-tensors int-quantized and LoRA adapters" in why_refused(whole, has_tiers=False)
    whole.lora_config = None
    assert why_refused(whole, has_tiers=False) == ""


def image_model(**text: Any) -> SimpleNamespace:
    (architecture,) = IMAGE_ARCHITECTURES
    whole = config(architecture=architecture, **{"model_type": "llama", **text})
    whole.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    return whole


def test_image_models_are_served_alone() -> None:
    assert why_refused(image_model(), has_tiers=False) == ""
    assert "images, with tier.enabled" in why_refused(image_model(), has_tiers=True)
    assert "language model of type qwen2" in why_refused(image_model(model_type="qwen2"), has_tiers=False)
    changes: dict[str, dict[str, Any]] = {
        "images, and speculative decoding": {"speculative_config": SimpleNamespace(method="ngram")},
        "images, and LoRA adapters": {"lora_config": SimpleNamespace()},
        "several ranks": {"parallel_config": SimpleNamespace(tensor_parallel_size=2)},
    }
    for reason, values in changes.items():
        whole = image_model()
        for name, value in values.items():
            setattr(whole, name, value)
        assert reason in why_refused(whole, has_tiers=False)
    whole = image_model()
    whole.model_config.quantization = "compressed-tensors"
    assert "images, and quantized weights" in why_refused(whole, has_tiers=False)
