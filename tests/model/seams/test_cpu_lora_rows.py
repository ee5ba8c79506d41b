"""engine/vllm/plugins/cpu_lora_rows.py"""

from __future__ import annotations

from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


NAMES = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
NUM_ADAPTERS, RANK, NUM_INPUTS, NUM_OUTPUTS = 3, 2, 5, 7


class TestCpuLoraRows:
    """engine/vllm/plugins/cpu_lora_rows.py"""

    @pytest.fixture(autouse=True)
    def _restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu

        self.originals = {name: getattr(lora_ops, name) for name in NAMES}
        for module in (lora_ops, punica_cpu):
            for name, function in self.originals.items():
                monkeypatch.setattr(module, name, function)

    def test_vllm_still_gives_rows_without_an_adapter_the_last_one(self) -> None:
        """If this fails, vLLM has fixed it, and the seam can go."""
        alone, mixed = self.outcome([-1, -1]), self.outcome([-1, 1])
        assert not alone.any(), "a step without adapters is left alone"
        assert mixed[0].any()

    def test_the_signatures_are_vllms(self) -> None:
        from kvferry.engine.vllm.plugins import cpu_lora_rows

        for name, function in self.originals.items():
            assert parameters(getattr(cpu_lora_rows, name)) == parameters(function)

    @pytest.mark.parametrize("indices", [[0], [2, 2, 2], [0, 1, 2, 0], [1, 0, 1]])
    def test_rows_with_adapters_are_what_vllm_computes(self, indices: list[int]) -> None:
        import torch

        from kvferry.engine.vllm.plugins.cpu_lora_rows import leave_other_rows_alone

        expected = self.outcome(indices)
        leave_other_rows_alone()
        torch.testing.assert_close(self.outcome(indices), expected)

    def test_rows_without_an_adapter_are_left_alone(self) -> None:
        import torch

        from kvferry.engine.vllm.plugins.cpu_lora_rows import leave_other_rows_alone

        expected = self.outcome([0, 0, 2, 0])
        leave_other_rows_alone()
        leave_other_rows_alone()
        mixed = self.outcome([-1, 0, 2, -1])
        assert not mixed[[0, 3]].any()
        torch.testing.assert_close(mixed[[1, 2]], expected[[1, 2]])

    def outcome(self, indices: list[int]) -> Any:
        """What vLLM's wrapper adds to each row of a layer with two slices."""
        import torch
        from vllm.lora.layers import LoRAMapping
        from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator)

        wrapper = PunicaWrapperCPU(64, 16, "cpu")
        ids = tuple(index + 1 for index in indices)
        wrapper.update_metadata(LoRAMapping(ids, ids, is_prefill=True), [1, 2, 3], NUM_ADAPTERS, 100)
        shrinking = tuple(random(NUM_ADAPTERS, 1, RANK, NUM_INPUTS) for _ in range(2))
        expanding = tuple(random(NUM_ADAPTERS, 1, NUM_OUTPUTS, RANK) for _ in range(2))
        inputs = random(16, NUM_INPUTS)[: len(indices)]
        added = torch.zeros(len(indices), 2 * NUM_OUTPUTS)
        wrapper.add_lora_linear(added, inputs, shrinking, expanding, 1.0, (NUM_OUTPUTS, NUM_OUTPUTS))
        return added
