"""Bytes of KV pages by model: known values, windows, states, copies on ranks, and faults of config.json."""

from __future__ import annotations

import pytest

from kvferry.model_catalogue import geometry_of

# Bytes of a token over all layers, while no window is full.
KNOWN = {
    ("Llama-3.1-8B", "bf16"): 131_072,
    ("Llama-3.1-70B", "bf16"): 327_680,
    ("Llama-3.1-70B", "fp8"): 163_840,
    ("Llama-3.1-405B", "bf16"): 516_096,
    ("Qwen2.5-72B", "bf16"): 327_680,
    ("Mistral-7B-v0.3", "bf16"): 131_072,
    ("Qwen3-235B-A22B", "bf16"): 192_512,
    ("Qwen3-30B-A3B", "bf16"): 98_304,
    ("DeepSeek-V3", "bf16"): 70_272,
    ("DeepSeek-V3", "fp8_ds_mla"): 40_016,
    ("Mixtral-8x22B-v0.1", "bf16"): 229_376,
    ("Llama-2-7B", "bf16"): 524_288,
    ("Falcon-7B", "bf16"): 8_192,
}


@pytest.mark.parametrize(("model", "dtype"), KNOWN)
def test_bytes_of_a_token_are_the_published_ones(model: str, dtype: str) -> None:
    assert geometry_of(model).bytes_per_token(dtype) == KNOWN[model, dtype]
