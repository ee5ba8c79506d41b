"""Stop tokens after drafts, where a request has `min_tokens`."""

# vLLM 0.32 samples the token that follows accepted drafts with the stop tokens masked if the answer was shorter than
# `min_tokens` before these drafts. With them it may be long enough: an answer that should have ended there went on.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.sampler import Sampler

_own = Sampler.apply_logits_processors


def count_drafts_for_min_tokens() -> None:
    """Affects all requests of this process. Idempotent."""
    Sampler.apply_logits_processors = _applied


def _applied(self: Any, logits: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool) -> torch.Tensor:
    with ExitStack() as changed:
        if predict_bonus_token and sampling_metadata.spec_token_ids:
            for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
                if isinstance(processor, MinTokensLogitsProcessor):
                    changed.enter_context(_unmasked(processor, sampling_metadata.spec_token_ids))
        masked: torch.Tensor = _own(self, logits, sampling_metadata, predict_bonus_token)
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
