"""engine/vllm/plugins/cpu_device.py"""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.vllm


class TestCpuTokenRanks:
    """engine/vllm/plugins/cpu_device.py"""

    def test_vllm_still_compiles_the_function_that_we_replace(self) -> None:
        """When this fails, the repair may have to change, or can go."""
        from vllm.v1.sample import sampler
        from vllm.v1.sample.ops import logprobs

        assert "@torch.compile(backend=current_platform.simple_compile_backend)\ndef" in inspect.getsource(logprobs)
        assert "return (x >= values).sum(-1)" in inspect.getsource(logprobs)
        assert inspect.getsource(sampler).count("batched_count_greater_than(") == 2

    def test_ranks_are_those_of_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch
        from vllm.v1.sample import sampler

        from kvferry.engine.vllm.plugins import cpu_device

        monkeypatch.setattr(sampler, "batched_count_greater_than", None)
        cpu_device.count_without_compiled_code()
        logprobs = torch.tensor([[-1.0, -2.0, -2.0, -9.0], [-3.0, -0.5, float("-inf"), -0.5]])
        tokens = torch.tensor([1, 2])
        seen = sampler.Sampler.gather_logprobs(logprobs, 2, tokens)
        assert seen.selected_token_ranks.tolist() == [3, 4]
        assert seen.logprob_token_ids.tolist() == [[1, 0, 1], [2, 1, 3]]
