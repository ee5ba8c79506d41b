"""Inspects model classes without a process for each, where no GPU is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

T = TypeVar("T")


def inspect_models_in_this_process() -> None:
    """Idempotent."""
    # vLLM 0.32 starts a process, so that the asking one does not initialize CUDA. It imports vLLM (10 to 25 s of CPU),
    # once for each engine and gateway that start together beside an empty cache.
    if current_platform.is_cpu():
        registry._run_in_subprocess = _run_here


def _run_here(inspect: Callable[[], T]) -> T:
    return inspect()
