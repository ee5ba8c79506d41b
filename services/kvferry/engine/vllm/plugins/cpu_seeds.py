"""Noise of requests with a seed on the CPU device, where a prompt takes several steps."""

# vLLM draws also for a request whose prompt is not at its end, and takes the draw back by an offset that generators of
# the CPU do not have (`CPU Generator does not use offset`): the engine ended with the first such request.

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_STATE = "kvferry_generator_state"  # of vLLM's CachedRequestState: after the last draw that counted
_own = GPUModelRunner._bookkeeping_sync


def take_back_draws_on_the_cpu() -> None:
    """Affects all requests of this process. Idempotent."""
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
    batch, generators = self.input_batch, self.input_batch.generators
    rows = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]
    # Put aside, so that vLLM does not try.
    unfinished = {int(row): generators.pop(int(row)) for row in rows if int(row) in generators}
    for row, generator in unfinished.items():
        generator.set_state(_last_state(self.requests[batch.req_ids[row]], generator))
    for row, generator in generators.items():
        setattr(self.requests[batch.req_ids[row]], _STATE, generator.get_state())
    try:
        return _own(self, *args, **kwargs)
    finally:
        generators.update(unfinished)


def _last_state(request: Any, generator: torch.Generator) -> torch.Tensor:
    state: torch.Tensor | None = getattr(request, _STATE, None)
    return torch.Generator().manual_seed(generator.initial_seed()).get_state() if state is None else state
