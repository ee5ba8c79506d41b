"""Counts a model's parameters from its config.json: transformers builds it without weights, on the device `meta`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kvferry.pages.geometry.model import ModelGeometry

_MAX_LAYERS: Final = 1024
_MAX_EXPERTS: Final = 4096
_ROUTED: Final = re.compile(r"\.experts\.")
# Weights are counted, not their quantized form; code of the model's own is not run.
_LEFT_OUT: Final = ("quantization_config", "auto_map")


def count(config: Mapping[str, Any], geometry: ModelGeometry) -> tuple[int, int] | None:
    """Return all parameters and those that a token takes, or None for a model that transformers does not have.

    Of a multimodal model the language model alone counts, and modules for multi-token prediction do not: as in the
    catalogue, whose counts were made so.
    """
    if geometry.num_layers > _MAX_LAYERS or geometry.num_experts > _MAX_EXPERTS:
        return None
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        values = {key: value for key, value in config.items() if key not in (*_LEFT_OUT, "model_type")}
        text = AutoConfig.for_model(config["model_type"], **values).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
        sizes = {name: each.numel() for name, each in model.named_parameters()}
    # Whatever a config.json makes transformers raise: then the user is asked for the counts.
    except Exception:
        return None
    total = sum(sizes.values())
    if geometry.num_experts <= 1:
        return total, total
    routed = sum(size for name, size in sizes.items() if _ROUTED.search(name))
    unused = 1 - geometry.num_experts_per_token / geometry.num_experts
    return total, total - round(routed * unused)
