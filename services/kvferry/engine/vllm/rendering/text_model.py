"""Models of which only texts and tokens are needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def use_cpu_platform() -> None:
    """Call in a process without an engine, before anything imports vLLM.

    On a node without a GPU vLLM's CUDA wheel finds no platform (`Failed to infer device type`), unless this says so.
    """
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"


def text_model_config(
    model_folder: str, *, trust_remote_code: bool, hf_overrides: Mapping[str, Any] = {}, **values: Any
) -> Any:
    """Return vLLM's ModelConfig; the folder needs no weights."""
    from vllm.config import ModelConfig

    return ModelConfig(
        model=model_folder,
        tokenizer=model_folder,
        trust_remote_code=trust_remote_code,
        # Texts and tokens do not depend on it, and some need a GPU, or a plugin that only engines load.
        hf_overrides={"quantization_config": None, **hf_overrides},
        **values,
    )
