"""Steps with drafts: stop tokens where a request has `min_tokens`, and temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler

# vLLM 0.32 samples the token that follows accepted drafts with the stop tokens masked if the answer was shorter than
# `min_tokens` before these drafts. With them it may be long enough: an answer that should have ended there went on.
_apply_processors = Sampler.apply_logits_processors


def count_drafts_for_min_tokens() -> None:
    """Affects all requests of this process. Idempotent."""
    Sampler.apply_logits_processors = _applied


def _applied(self: Any, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool) -> torch.Tensor:
    with ExitStack() as changed:
        if predict_bonus_token and sampling_metadata.spec_token_ids:
            for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
                if isinstance(processor, MinTokensLogitsProcessor):
                    changed.enter_context(_unmasked(processor, sampling_metadata.spec_token_ids))
        masked: torch.Tensor = _apply_processors(self, logits, sampling_metadata, predict_bonus_token)
        return masked


@contextmanager
def _unmasked(processor: Any, row_to_drafts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Leave rows alone that are long enough with their drafts."""
    rows = [
        row
        for row, (min_tokens, given, *_) in processor.min_toks.items()
        if len(given) + len(row_to_drafts[row]) >= min_tokens
    ]
    before = processor.logits_slice, processor.restore_logits_slice
    if rows:
        processor.logits_slice, processor.restore_logits_slice = (_without(rows, each) for each in before)
    try:
        yield
    finally:
        processor.logits_slice, processor.restore_logits_slice = before


def _without(rows: list[int], entries: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`entries` are pairs of a row and a token, in two tensors."""
    others = torch.isin(entries[0], torch.tensor(rows, dtype=entries[0].dtype, device=entries[0].device), invert=True)
    return entries[0][others], entries[1][others]


# vLLM 0.32 expands temperature, top-k and top-p of drafts from one value for each request to one for each draft by a
# kernel that writes into a copy of another type: what it returns is memory that was never written. Drafts were accepted
# too often, and a seed did not give its answer again.
_constrain = rejection_sampler.apply_sampling_constraints


def constrain_steps_with_drafts() -> None:
    """Affects all requests of this process. Idempotent."""
    # vLLM 0.32 applies settings to drafts in a step without any, too, as the first one of an answer. On a CPU, top-k
    # alone is then the largest of no numbers: an error that ended the engine, at one request.
    rejection_sampler.apply_sampling_constraints = _constrained


def _constrained(logits: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """`logits` are [num_draft_tokens, vocab_size]."""
    return _constrain(logits, *args, **named) if logits.shape[0] else logits


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
