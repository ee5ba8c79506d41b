"""Temperature, top-k and top-p of drafts on the CPU device."""

# vLLM 0.32 expands them from one value for each request to one for each draft by a kernel that writes into a copy of
# another type: what it returns is memory that was never written. Drafts were accepted too often, and a seed did not
# give its answer again.

from __future__ import annotations

import torch
from vllm.v1.sample import rejection_sampler


def expand_settings_of_drafts() -> None:
    """Affects all requests of this process. Idempotent."""
    rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return [num_tokens] values of x [batch_size], each as often as its request has tokens."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)
