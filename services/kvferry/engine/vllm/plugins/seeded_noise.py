"""Noise of requests with a seed: it follows from the seed and the number of output tokens."""

# So an answer goes on in another engine with the noise that it would have had. vLLM's model runner V1 draws from one
# stream for each request, which another engine would begin anew. It draws also for a prompt that is not at its end, and
# takes the draw back by an offset. Generators of the CPU have none (`CPU Generator does not use offset`): the engine
# ended with the first such request. V2 draws by position.

from __future__ import annotations

import hashlib
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_own_sample = GPUModelRunner._sample
_own_bookkeeping = GPUModelRunner._bookkeeping_sync


def draw_by_position() -> None:
    """Affects all requests of this process. Idempotent."""
    GPUModelRunner._sample = _sample
    GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    batch = self.input_batch
    for row, generator in batch.generators.items():
        request = self.requests[batch.req_ids[row]]
        generator.manual_seed(seed_at(request.sampling_params.seed, len(request.output_token_ids)))
    return _own_sample(self, *args, **kwargs)


def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
    # There is nothing to undo: the next step draws for the same position.
    generators, self.input_batch.generators = self.input_batch.generators, {}
    try:
        return _own_bookkeeping(self, *args, **kwargs)
    finally:
        self.input_batch.generators = generators


def seed_at(seed: int, num_output_tokens: int) -> int:
    """Return 64 bits, signed. Streams of neighbouring seeds and positions have nothing in common."""
    digest = hashlib.blake2b(f"{seed} {num_output_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
