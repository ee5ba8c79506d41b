"""Finds the rank and scale of an adapter's module among thousands of keys at once."""

from __future__ import annotations

from vllm.lora.peft_helper import PEFTHelper

from kvferry.engine.vllm.adapter_folder import match_pattern

# vLLM 0.32 compiles a regular expression for each key of `rank_pattern` and `alpha_pattern`, and each module, while all
# requests of the engine wait: minutes for adapters with a key per module (AdaLoRA), which counts as a hang. Keys are
# names of modules or ends of them (`adapter_folder`), so a look-up finds the same.


def look_patterns_up() -> None:
    """Idempotent."""
    PEFTHelper._match_pattern = staticmethod(match_pattern)
