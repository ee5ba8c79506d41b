"""Which models are refused, by their resolved configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine.vllm.plugins.model_kinds import why_refused


def config(cache_dtype: str = "auto", **changes: Any) -> Any:
    text = {"layer_types": None, "attention_chunk_size": None, "model_type": "llama", "sliding_window": None}
    model = {"is_hybrid": False, "is_attention_free": False, "use_mla": False, "is_encoder_decoder": False}
    text |= {name: value for name, value in changes.items() if name not in model}
    model |= {name: value for name, value in changes.items() if name in model}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **model, hf_text_config=SimpleNamespace(**text), get_sliding_window=lambda: text["sliding_window"]
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_hybrid": True}, "recurrent state"),
        ({"is_attention_free": True}, "recurrent state"),
        ({"use_mla": True}, "MLA"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"attention_chunk_size": 8192}, "chunked local attention"),
        ({"model_type": "gpt_oss"}, "attention sinks"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of kind linear_attention"),
        ({"cache_dtype": "fp8"}, "KV pages of type fp8"),
    ],
)
def test_what_was_not_shown_is_refused_and_named(changes: dict[str, Any], named: str) -> None:
    for has_tiers in (False, True):
        reason = why_refused(config(**changes), has_tiers=has_tiers)
        assert named in reason
        assert "docs/models.md" in reason


@pytest.mark.parametrize("changes", [{}, {"cache_dtype": "bfloat16"}, {"layer_types": ["full_attention"]}])
def test_full_attention_is_served(changes: dict[str, Any]) -> None:
    assert why_refused(config(**changes), has_tiers=False) == why_refused(config(**changes), has_tiers=True) == ""


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({"sliding_window": 4096}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "use_sliding_window": False, "layer_types": ["sliding_attention"]}, True),
    ],
)
def test_sliding_windows_are_served_without_tiers(changes: dict[str, Any], slides: bool) -> None:
    assert not why_refused(config(**changes), has_tiers=False)
    assert ("sliding window" in why_refused(config(**changes), has_tiers=True)) == slides
