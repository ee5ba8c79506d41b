"""engine/vllm/plugins/draft_min_tokens.py"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


STOP = 3


def masked(drafts: list[list[int]], *, is_bonus: bool = True, given: int = 2, min_tokens: int = 4) -> list[bool]:
    """Return for each request whether its stop token is masked, as vLLM samples the token after these drafts."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.sample.sampler import Sampler

    vllm_config: Any = SimpleNamespace()
    processor = MinTokensLogitsProcessor(vllm_config, torch.device("cpu"), is_pin_memory=False)
    outputs = [[7] * given for _ in drafts]
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=[STOP])
    added = [(row, params, None, output) for row, output in enumerate(outputs)]
    processor.update_state(BatchUpdate(batch_size=len(drafts), removed=[], added=added, moved=[]))
    metadata: Any = SimpleNamespace(
        bad_words_token_ids={},
        no_penalties=True,
        output_token_ids=outputs,
        allowed_token_ids_mask=None,
        logitsprocs=LogitsProcessors([processor]),
        spec_token_ids=drafts,
        thinking_budget_state_holder=None,
    )
    logits = Sampler().apply_logits_processors(torch.zeros(len(drafts), 8), metadata, is_bonus)
    assert torch.isfinite(logits).sum() >= logits.numel() - len(drafts), "nothing else is masked"
    return [bool(value) for value in torch.isneginf(logits[:, STOP])]


class TestDraftMinTokens:
    """engine/vllm/plugins/draft_min_tokens.py"""

    @pytest.fixture(autouse=True)
    def _vllms_own(self) -> Iterator[None]:
        from vllm.v1.sample.sampler import Sampler

        own = Sampler.apply_logits_processors
        yield
        Sampler.apply_logits_processors = own

    def test_the_function_that_is_replaced_has_these_parameters(self) -> None:
        from vllm.v1.sample.sampler import Sampler

        assert parameters(Sampler.apply_logits_processors) == [
            "self", "logits", "sampling_metadata", "predict_bonus_token",
        ]  # fmt: skip

    def test_vllms_own_still_counts_no_drafts(self) -> None:
        """When this fails, the repair can go."""
        assert masked([[5, 5], [5]]) == [True, True]

    def test_an_answer_that_is_long_enough_with_its_drafts_may_end(self) -> None:
        from kvferry.engine.vllm.plugins.draft_min_tokens import count_drafts_for_min_tokens

        count_drafts_for_min_tokens()
        count_drafts_for_min_tokens()
        assert masked([[5, 5], [5], [], [5, 5, 5]]) == [False, True, True, False]
        assert masked([[5, 5], [5, 5]]) == [False, False]
        assert masked([[], []], min_tokens=2) == [False, False]
        assert masked([[5, 5]], is_bonus=False) == [True], "the token after the answer itself"
