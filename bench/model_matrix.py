"""The table of models in docs/user/models.md, rendered from what `make test-models` saw."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

DOCS = Path(__file__).parents[1] / "docs" / "user"
SEEN, PAGE = DOCS / "models.json", DOCS / "models.md"
BEGIN, END = "<!-- rendered from models.json -->", "<!-- end -->"

COLUMNS = ("transfer", "transfer that fails", "prefix already held", "tiers and volumes")

# By names in `bench/tiny_models.py`.
TITLES = {
    "gemma3": "Gemma 3: sliding window in some layers",
    "mistral": "Mistral: sliding window in all layers",
    "llama": "Llama: grouped attention (GQA)",
    "qwen2": "Qwen2, Qwen2.5: grouped attention, biases",
    "granite": "Granite: grouped attention, scaled",
    "olmo2": "OLMo 2: grouped attention",
    "qwen3": "Qwen3: grouped attention (GQA)",
    "qwen2-yarn": "Qwen2, Qwen2.5 with YaRN (`model.hf_overrides`)",
    "qwen3-yarn": "Qwen3 with YaRN (`model.hf_overrides`)",
    "qwen3-moe-yarn": "Qwen3-MoE with YaRN (`model.hf_overrides`)",
    "qwen3-tp2": "Qwen3 with `engine.tensor_parallel_size: 2`",
    "qwen3-streamer": "Qwen3 with `load_format` `safetensors`, and `runai_streamer` in decode engines",
    "qwen3-int8": "Qwen3, weights and inputs INT8 (compressed-tensors)",
    "qwen3-fp8": "Qwen3, weights and inputs FP8 (compressed-tensors)",
    "mixtral": "Mixtral: experts",
    "qwen3-moe": "Qwen3-MoE: experts",
    "phi3-longrope": "Phi-3: LongRoPE",
    "idefics3": "Idefics3: images in prompts, Llama after a SigLIP",
}


class Seen(TypedDict):
    vllm: str
    cells: dict[str, dict[str, str]]  # by model and column: "served", or "no tiers"


def update(cells: Mapping[str, Mapping[str, str]], vllm_version: str) -> None:
    """Write both files, with rows that were seen before with the same vLLM. Raises ValueError for an unknown cell."""
    known = read()
    rows = {**(known["cells"] if known["vllm"] == vllm_version else {}), **cells}
    for name in TITLES:
        if unknown := [column for column in COLUMNS if column not in rows.get(name, {})]:
            raise ValueError(f"{name}: {', '.join(unknown)} not seen")
    ordered = {name: {column: rows[name][column] for column in COLUMNS} for name in TITLES}
    SEEN.write_text(json.dumps({"vllm": vllm_version, "cells": ordered}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read()), encoding="utf-8")


def read() -> Seen:
    seen: Seen = json.loads(SEEN.read_text(encoding="utf-8"))
    return seen


def with_table(page: str, seen: Seen) -> str:
    """Return the page with its table rendered anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [
        f"| model, vLLM {seen['vllm']} | {' | '.join(COLUMNS)} |",
        "|---" * (1 + len(COLUMNS)) + "|",
        *(f"| {TITLES[name]} | {' | '.join(cells[column] for column in COLUMNS)} |"
          for name, cells in seen["cells"].items()),
    ]  # fmt: skip
    return f"{before}{BEGIN}\n{chr(10).join(rows)}\n{END}{after}"
