"""vLLM's configuration of a model, also where only texts and tokens are needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvferry.config import ModelConfig
from kvferry.engine.vllm.model_kinds import leave_untested_images_out
from kvferry.errors import ConfigError


def use_cpu_platform() -> None:
    """Call in a process without an engine, before anything imports vLLM."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"


def hf_overrides(model_folder: str, model: ModelConfig) -> dict[str, Any]:
    """Return `model.hf_overrides` as vLLM's argument; empty without any.

    vLLM takes the rotations whole: with another base than config.json's it would answer fluently, and wrong. Raises
    ConfigError if config.json has none.
    """
    if not model.hf_overrides.context:
        return {}
    from vllm.transformers_utils.config import get_config

    rotations = getattr(get_config(model_folder, trust_remote_code=False), "rope_parameters", None) or {}
    if (rope_theta := rotations.get("rope_theta")) is None:
        raise ConfigError("model.hf_overrides: the model's config.json has no rope_theta")
    return model.hf_overrides.values(float(rope_theta))


def inspect_models_in_this_process() -> None:
    """Idempotent."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # vLLM 0.32 starts a process for it, which imports vLLM (10 to 25 s of CPU), lest the asking one initialize CUDA.
    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()


def text_model_config(model_folder: str, *, hf_overrides: Mapping[str, Any] = {}, **values: Any) -> Any:
    """Return vLLM's ModelConfig; the folder needs no weights."""
    from vllm.config import ModelConfig

    inspect_models_in_this_process()
    config = ModelConfig(
        model=model_folder,
        tokenizer=model_folder,
        # Texts and tokens do not depend on it, and some need a GPU, or a plugin that only engines load.
        hf_overrides={"quantization_config": None, **hf_overrides},
        **values,
    )
    leave_untested_images_out(config)
    return config
