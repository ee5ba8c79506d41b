"""engine/vllm/plugins/draft_sampling.py"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestDraftSampling:
    """engine/vllm/plugins/draft_sampling.py"""

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

        from kvferry.engine.vllm.plugins.draft_sampling import expand_settings_of_drafts

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

        from kvferry.engine.vllm.plugins.draft_sampling import constrain_steps_with_drafts

        constrain_steps_with_drafts()
        assert self._constrain_none(rejection_sampler.apply_sampling_constraints).shape == (0, 11)

    def _constrain_none(self, constrain: Callable[..., Any]) -> Any:
        import torch

        from kvferry.engine.vllm.plugins.draft_sampling import expand_settings_of_drafts

        expand_settings_of_drafts()
        metadata = SimpleNamespace(
            all_greedy=False, temperature=torch.tensor([1.0]), top_k=torch.tensor([3], dtype=torch.int32), top_p=None
        )
        return constrain(torch.empty(0, 11), torch.tensor([0], dtype=torch.int32), metadata)
