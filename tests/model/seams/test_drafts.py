"""engine/vllm/plugins/drafts.py"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
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
        from kvferry.engine.vllm.plugins.drafts import count_drafts_for_min_tokens

        count_drafts_for_min_tokens()
        count_drafts_for_min_tokens()
        assert masked([[5, 5], [5], [], [5, 5, 5]]) == [False, True, True, False]
        assert masked([[5, 5], [5, 5]]) == [False, False]
        assert masked([[], []], min_tokens=2) == [False, False]
        assert masked([[5, 5]], is_bonus=False) == [True], "the token after the answer itself"


class TestDraftSampling:
    @pytest.fixture(autouse=True)
    def _vllms_own(self) -> Iterator[None]:
        from vllm.v1.sample import rejection_sampler

        own = rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_sampling_constraints
        yield
        rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_sampling_constraints = own

    def test_vllm_calls_the_function_by_the_name_that_is_replaced(self) -> None:
        from vllm.v1.sample import rejection_sampler

        source = inspect.getsource(rejection_sampler.apply_sampling_constraints)
        assert source.count("expand_batch_to_tokens(") == 3, "temperature, top-k and top-p"
        assert parameters(rejection_sampler.expand_batch_to_tokens) == [
            "x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to",
        ]  # fmt: skip

    def test_vllms_own_kernel_still_writes_into_a_copy(self) -> None:
        """When this fails, the repair can go."""
        from vllm.utils import cpu_triton_utils

        assert "_ensure_int64(output)" in inspect.getsource(cpu_triton_utils._expand_kernel_impl)

    def test_each_draft_has_the_value_of_its_request(self) -> None:
        import torch
        from vllm.v1.sample import rejection_sampler

        from kvferry.engine.vllm.plugins.drafts import expand_settings_of_drafts

        expand_settings_of_drafts()
        expand = rejection_sampler.expand_batch_to_tokens
        temperature = expand(
            torch.tensor([0.7, 0.0, 1.5, 9.0]), torch.tensor([2, 3, 6, 6], dtype=torch.int32), 6, replace_to=1
        )
        assert temperature.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.5, 1.5, 1.5])
        assert temperature.dtype == torch.float32
        top_k = expand(torch.tensor([5, 7], dtype=torch.int32), torch.tensor([0, 2]), 2)
        assert top_k.tolist() == [7, 7]
        assert top_k.dtype == torch.int32
        assert expand(torch.tensor([0.5]), torch.tensor([0]), 0).tolist() == []

    def test_vllms_own_top_k_still_fails_without_drafts(self) -> None:
        """When this fails, the repair can go."""
        from vllm.v1.sample import rejection_sampler

        assert "apply_sampling_constraints(" in inspect.getsource(rejection_sampler.RejectionSampler.forward)
        with pytest.raises(RuntimeError, match="numel"):
            self._constrain_none(rejection_sampler.apply_sampling_constraints)

    def test_a_step_without_drafts_is_left_alone(self) -> None:
        from vllm.v1.sample import rejection_sampler

        from kvferry.engine.vllm.plugins.drafts import constrain_steps_with_drafts

        constrain_steps_with_drafts()
        assert self._constrain_none(rejection_sampler.apply_sampling_constraints).shape == (0, 11)

    def _constrain_none(self, constrain: Callable[..., Any]) -> Any:
        import torch

        from kvferry.engine.vllm.plugins.drafts import expand_settings_of_drafts

        expand_settings_of_drafts()
        metadata = SimpleNamespace(
            all_greedy=False, temperature=torch.tensor([1.0]), top_k=torch.tensor([3], dtype=torch.int32), top_p=None
        )
        return constrain(torch.empty(0, 11), torch.tensor([0], dtype=torch.int32), metadata)
