"""A model is refused if it cannot be served at all, and has no tiers unless its kind was tried with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.tiny_models import TESTED
from kvferry.engine.vllm.model_kinds import (
    ARCHITECTURES,
    IMAGE_ARCHITECTURES,
    leave_untested_images_out,
    why_refused,
    why_without_tiers,
)


def model(*, architecture: str = "LlamaForCausalLM", window: int | None = None, **text: Any) -> SimpleNamespace:
    return SimpleNamespace(
        architecture=architecture,
        runner_type="generate",
        is_encoder_decoder=False,
        hf_text_config=SimpleNamespace(**text),
        get_sliding_window=lambda: window,
        quantization=None,
        dtype="torch.bfloat16",
    )


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=model(**values),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        lora_config=None,
        speculative_config=None,
    )


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_what_was_tried_with_tiers_has_them(architecture: str) -> None:
    assert why_without_tiers(config(architecture=architecture, layer_types=["full_attention"])) == ""


def test_every_architecture_was_tried() -> None:
    pytest.importorskip("transformers")
    names = {type(configure()).__name__.removesuffix("Config") for configure in TESTED.values()}
    tried = {f"{name}ForCausalLM" for name in names}
    assert tried - ARCHITECTURES == {"Gemma3TextForCausalLM"}, "it has windows"
    assert tried >= ARCHITECTURES


NOT_FOR_TIERS = [
    ({"architecture": "MiMoV2FlashForCausalLM"}, "the architecture MiMoV2FlashForCausalLM"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "a sliding window"),
    ({"window": 64, "use_sliding_window": False}, "a sliding window"),
    ({"layer_types": ["chunked_attention"]}, "a sliding window"),
    ({"dual_chunk_attention_config": {"chunk_size": 256}}, "dual chunk attention"),
]


@pytest.mark.parametrize(("values", "kind"), NOT_FOR_TIERS)
def test_other_kinds_are_served_without_tiers(values: dict[str, Any], kind: str) -> None:
    assert why_refused(config(**values)) == ""
    assert why_without_tiers(config(**values)).startswith(f"pages of tiers are not proven for {kind}")


@pytest.mark.parametrize(
    ("of_pages", "with_tiers", "ever"),
    [("auto", "", ""), ("bfloat16", "", ""), ("float16", "float16", "float16 are not"), ("fp8_e4m3", "fp8_e4m3", "")],
)
def test_pages_of_another_type_are_served_without_tiers(of_pages: str, with_tiers: str, ever: str) -> None:
    whole = config()
    whole.cache_config.cache_dtype = of_pages
    for reason, expected in ((why_refused(whole), ever), (why_without_tiers(whole), with_tiers)):
        assert bool(reason) == bool(expected)
        assert expected in reason


@pytest.mark.parametrize(
    ("draft", "kind"),
    [
        ({}, ""),
        ({"architecture": "LlamaForCausalLMEagle3"}, ""),
        ({"architecture": "Eagle3Qwen3ForCausalLM"}, "drafts of the architecture Eagle3Qwen3ForCausalLM"),
        ({"window": 64}, "a sliding window"),
    ],
)
def test_drafts_are_served_without_tiers(draft: dict[str, Any], kind: str) -> None:
    whole = config()
    whole.speculative_config = SimpleNamespace(method="draft_model", draft_model_config=model(**draft))
    assert why_refused(whole) == ""
    reason = why_without_tiers(whole)
    assert bool(reason) == bool(kind)
    assert kind in reason


def test_ngrams_have_tiers() -> None:
    whole = config()
    whole.speculative_config = SimpleNamespace(method="ngram", draft_model_config=whole.model_config)
    assert why_without_tiers(whole) == ""


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("runner_type", "pooling", "models without generation"),
        ("is_encoder_decoder", True, "encoder-decoder models are not served"),
    ],
)
def test_what_cannot_be_served_is_refused(name: str, value: object, reason: str) -> None:
    whole = config()
    setattr(whole.model_config, name, value)
    assert why_refused(whole).startswith(reason)


def test_adapters_in_float16_are_refused() -> None:
    """Finite weights of 10,000 gave pages of NaN, and those wrong answers to requests for the model itself."""
    whole = config(architecture="MixtralForCausalLM")
    whole.lora_config = object()
    assert why_refused(whole) == ""
    whole.model_config.dtype = "torch.float16"
    assert "LoRA adapters are not served with a model that is computed in float16" in why_refused(whole)
    whole.lora_config = None
    assert why_refused(whole) == ""


def image_model(**text: Any) -> SimpleNamespace:
    (architecture,) = IMAGE_ARCHITECTURES
    return config(architecture=architecture, **{"model_type": "llama", **text})


def test_image_models_are_served_alone() -> None:
    assert why_refused(image_model()) == ""
    assert "the architecture Idefics3" in why_without_tiers(image_model())
    assert "a language model of type qwen2" in why_refused(image_model(model_type="qwen2"))
    changes: dict[str, dict[str, Any]] = {
        "speculative decoding": {"speculative_config": SimpleNamespace(method="ngram")},
        "LoRA adapters": {"lora_config": SimpleNamespace()},
        "several ranks": {"parallel_config": SimpleNamespace(tensor_parallel_size=2)},
    }
    for kind, values in changes.items():
        whole = image_model()
        for name, value in values.items():
            setattr(whole, name, value)
        assert f"images are untested with {kind}" in why_refused(whole)
    whole = image_model()
    whole.model_config.quantization = "compressed-tensors"
    assert "images are untested with quantized weights" in why_refused(whole)


@pytest.mark.parametrize(
    ("architecture", "texts_alone"),
    [("LlavaForConditionalGeneration", True), *((each, False) for each in IMAGE_ARCHITECTURES)],
)
def test_other_multimodal_models_are_served_for_texts(architecture: str, texts_alone: bool) -> None:
    multimodal = SimpleNamespace(language_model_only=False)
    leave_untested_images_out(SimpleNamespace(architecture=architecture, multimodal_config=multimodal))
    assert multimodal.language_model_only is texts_alone
    leave_untested_images_out(SimpleNamespace(architecture="LlamaForCausalLM", multimodal_config=None))
