"""Tiny models of kinds whose transfer is proven when engines start: random weights, and the settings that they need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.tiny_models import make_model
from kvferry.model_folder import DEFAULT_NAME

_GROUP = 32  # weights that share a scale


@dataclass(frozen=True)
class Kind:
    title: str
    model: str  # a name in bench/tiny_models.py, or the default model
    dtype: str = "float32"
    settings: Mapping[str, Any] = field(default_factory=dict)  # of both engines
    four_bits: str = ""  # how weights are quantized
    has_states: bool = False  # of recurrent layers


_E4M3, _E5M2 = {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}
KINDS: Mapping[str, Kind] = {
    "default": Kind("SmolLM2-135M, the default model", DEFAULT_NAME),
    "default-bfloat16": Kind("SmolLM2-135M, the default model", DEFAULT_NAME, "bfloat16"),
    "llama": Kind("Llama: grouped attention", "llama"),
    "gemma3": Kind("Gemma 3: a window in some layers", "gemma3"),
    "mistral": Kind("Mistral: a window in all layers", "mistral"),
    "mixtral": Kind("Mixtral: experts", "mixtral"),
    "granite": Kind("Granite: grouped attention, scaled", "granite"),
    "qwen3-int8": Kind("Qwen3, weights and inputs INT8", "qwen3-int8", "bfloat16"),
    "gpt-oss": Kind("gpt-oss: sinks, a window in half the layers", "gpt-oss"),
    "cohere2": Kind("Command R7B: a window in three of four layers", "cohere2"),
    "deepseek-v2": Kind("DeepSeek-V2: latent attention (MLA)", "deepseek-v2", "bfloat16"),
    "falcon-h1": Kind("Falcon-H1: Mamba 2 beside attention", "falcon-h1", has_states=True),
    "falcon-h1-bf16": Kind("Falcon-H1: Mamba 2 beside attention", "falcon-h1", "bfloat16", has_states=True),
    "qwen3-next": Kind("Qwen3-Next: linear attention in some layers", "qwen3-next", "bfloat16", has_states=True),
    "mamba2": Kind("Mamba 2: recurrent layers alone", "mamba2", has_states=True),
    "llama-fp8": Kind("Llama, pages of fp8_e4m3", "llama", "bfloat16", _E4M3),
    "llama-fp8-e5m2": Kind("Llama, pages of fp8_e5m2", "llama", "bfloat16", _E5M2),
    "gemma3n": Kind("Gemma 3n: pages that layers share", "gemma3n"),
    "llama4": Kind("Llama 4: chunked attention", "llama4"),
    "bloom": Kind("BLOOM: ALiBi", "bloom"),
    "opt": Kind("OPT: learned positions", "opt"),
    "llama-gptq": Kind("Llama, 4-bit weights (GPTQ)", "llama", "bfloat16", four_bits="gptq"),
    "llama-awq": Kind("Llama, 4-bit weights (AWQ)", "llama", "bfloat16", four_bits="awq"),
    "llama-w4a16": Kind(
        "Llama, 4-bit weights (compressed-tensors)", "llama", "bfloat16", four_bits="compressed-tensors"
    ),
}


def make(kind: str, folder: Path) -> Path:
    """Write the model, always the same. Not for the default one."""
    which = KINDS[kind]
    make_model(which.model, folder, which.dtype)
    if which.four_bits:
        _quantize(folder, which.four_bits)
    return folder


def _quantize(folder: Path, method: str) -> None:
    """Quantize the weights of linear layers to four bits, in groups of a row."""
    from safetensors.torch import load_file, save_file

    file, config_file = folder / "model.safetensors", folder / "config.json"
    tensors: dict[str, Any] = {}
    for key, weights in load_file(file).items():
        if key.endswith("_proj.weight"):
            tensors |= _packed(key.removesuffix("weight"), weights.float(), method)
        else:
            tensors[key] = weights
    save_file({key: each.contiguous() for key, each in tensors.items()}, file, metadata={"format": "pt"})
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"quantization_config": _CONFIGS[method]}
    config_file.write_text(json.dumps(config), encoding="utf-8")


_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP,
                    "dynamic": False,
                },
            }
        },
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    },
}  # fmt: skip


def _packed(prefix: str, weights: Any, method: str) -> dict[str, Any]:
    import torch

    rows, columns = weights.shape
    grouped = weights.reshape(rows, columns // _GROUP, _GROUP)
    scales = grouped.abs().amax(-1, keepdim=True) / 7
    numbers = ((grouped / scales).round().clamp(-8, 7) + 8).to(torch.int32).reshape(rows, columns)
    scales = scales.squeeze(-1)
    if method == "compressed-tensors":
        shape = torch.tensor([rows, columns])
        return {
            f"{prefix}weight_packed": _in_words(numbers, range(8)),
            f"{prefix}weight_scale": scales.bfloat16(),
            f"{prefix}weight_shape": shape,
        }
    scales = scales.T.half()
    zeros = torch.full((columns // _GROUP, rows), 8, dtype=torch.int32)
    if method == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        values = {"qweight": _in_words(numbers.T, order), "qzeros": _in_words(zeros, order)}
    else:  # GPTQ keeps zeros less one
        values = {
            "qweight": _in_words(numbers, range(8)).T,
            "qzeros": _in_words(zeros - 1, range(8)),
            "g_idx": torch.arange(columns, dtype=torch.int32) // _GROUP,
        }
    return {f"{prefix}{name}": each for name, each in (values | {"scales": scales}).items()}


def _in_words(numbers: Any, order: Any) -> Any:
    """Pack eight numbers of the last dimension into one of 32 bits, the first of `order` in its lowest four."""
    import torch

    parts = numbers.reshape(*numbers.shape[:-1], -1, 8).to(torch.int64)
    words = sum(parts[..., place] << (4 * i) for i, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
