"""Checks that `model.hf_overrides` keep the base of rotations that a model was trained with."""

from __future__ import annotations

from kvferry.config import ModelConfig
from kvferry.errors import ConfigError


def check_rope_theta(folder: str, model: ModelConfig) -> None:
    """Raises ConfigError for another base than config.json's: vLLM would answer fluently, and wrong."""
    given = model.hf_overrides.rope_parameters.rope_theta
    if given is None:
        return
    from vllm.transformers_utils.config import get_config

    own = (getattr(get_config(folder, model.trust_remote_code), "rope_parameters", None) or {}).get("rope_theta")
    if own is None or given != float(own):
        raise ConfigError(
            f"model.hf_overrides.rope_parameters.rope_theta: {given:g}, and config.json has "
            f"{'none' if own is None else format(own, 'g')}"
        )
