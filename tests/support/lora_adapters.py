"""LoRA adapters with random weights, for models whose safetensors are at hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvferry.engine.vllm.adapter_folder import CONFIG, MODULES, WEIGHTS, read_header


def make_adapter(
    folder: Path,
    model_folder: Path,
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = tuple(sorted(MODULES)),
    strength: float = 1.0,
    **config: Any,
) -> Path:
    """Write an adapter of all linear layers of these names. `config` replaces values of its configuration."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors = {}
    for name, (num_outputs, num_inputs) in sorted(linear_shapes(model_folder, modules).items()):
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, num_inputs) / num_inputs**0.5
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(num_outputs, rank) * strength / rank
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(adapter_config(rank, modules) | config))
    return folder


def merged_answer(model_folder: Path, adapter: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the greedy answer of transformers, with the adapter's products added to the model's weights."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    config, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    answer: list[int] = []
    with torch.no_grad():
        for name, weight in model.named_parameters():
            a = tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
            if a is None:
                continue
            b = tensors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
            alphas = [
                alpha for end, alpha in config.get("alpha_pattern", {}).items() if f".{name}".endswith(f".{end}.weight")
            ]
            rank, alpha = a.shape[0], (alphas or [config["lora_alpha"]])[0]
            weight += alpha / (rank**0.5 if config.get("use_rslora") else rank) * b @ a
        for _ in range(num_tokens):
            answer.append(int(model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, -1].argmax()))
    return answer


def adapter_config(rank: int, modules: Sequence[str] = ("q_proj",)) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": "a model",
    }


def linear_shapes(model_folder: Path, modules: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Return shapes of weights by their layers' names."""
    shapes = {}
    for file in model_folder.glob("*.safetensors"):
        for name, (_, shape) in read_header(file).items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in modules and len(shape) == 2:
                shapes[layer] = shape
    return shapes


def write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "F32", fill: int = 0) -> None:
    """Write a safetensors file whose bytes are all `fill`."""
    num_bytes, header, end = {"F32": 4, "I32": 4, "BF16": 2}[dtype], {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * num_bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes([fill]) * end)
