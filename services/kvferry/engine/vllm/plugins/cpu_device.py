"""On the CPU device: waits in place of spinning (see ADR 5), and ranks of log-probabilities without compiled code."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from nixl._api import nixl_agent
from vllm.v1.sample import sampler

# Some UCX transports need polls even when no data arrives.
PROGRESS_PERIOD_US = 1000


@contextlib.contextmanager
def blocking_progress_thread() -> Iterator[None]:
    """Agents made inside sleep until data arrives, at most PROGRESS_PERIOD_US."""
    bindings: Any = sys.modules[nixl_agent.__module__].nixlBind
    plain = bindings.nixlAgentConfig

    class Waiting(plain):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_PERIOD_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Waiting
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


# Well below a prompt's computing time on the CPU device.
IDLE_STEP_PAUSE_S = 0.01


def slow_idle_steps(scheduler: Any) -> None:
    """Pause before the idle steps of a prefill engine that keeps pages for KV transfer."""
    build_connector_meta = scheduler.build_connector_meta

    def build(scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            time.sleep(IDLE_STEP_PAUSE_S)
        return build_connector_meta(scheduler_output)

    scheduler.build_connector_meta = build


# vLLM compiles a comparison and a sum on all devices: 8 s of CPU at each start, 12 s with an empty cache, for what
# takes milliseconds without.


def count_without_compiled_code() -> None:
    """Idempotent."""
    sampler.batched_count_greater_than = num_at_least


def num_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Count by row of `x` (rows, n) what is at least `values` (rows, 1)."""
    return (x >= values).sum(-1)
