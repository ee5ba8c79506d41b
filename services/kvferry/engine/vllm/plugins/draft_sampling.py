"""Temperature, top-k and top-p of drafts."""

# vLLM 0.32 expands them from one value for each request to one for each draft by a kernel that writes into a copy of
# another type: what it returns is memory that was never written. Drafts were accepted too often, and a seed did not
# give its answer again.

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

_own = rejection_sampler.apply_sampling_constraints


def constrain_steps_with_drafts() -> None:
    """Affects all requests of this process. Idempotent."""
    # vLLM 0.32 applies settings to drafts in a step without any, too, as the first one of an answer. On a CPU, top-k
    # alone is then the largest of no numbers: an error that ended the engine, at one request.
    rejection_sampler.apply_sampling_constraints = _constrained


def _constrained(logits: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """`logits` are [num_draft_tokens, vocab_size]."""
    return _own(logits, *args, **named) if logits.shape[0] else logits


def expand_settings_of_drafts() -> None:
    """Affects all requests of this process, on the CPU device. Idempotent."""
    rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return [num_tokens] values of x [batch_size], each as often as its request has tokens."""
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)
