"""engine/vllm/plugins/lora.py"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


def request(name: str, path: str, salt: str = "s") -> Any:
    from vllm.lora.request import LoRARequest

    return SimpleNamespace(
        lora_request=LoRARequest(lora_name=name, lora_int_id=1, lora_path=path) if name else None,
        cache_salt=salt,
        mm_features=[],
        prompt_embeds=None,
    )


class TestAdapterPageKeys:
    @pytest.fixture(autouse=True)
    def _patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core import kv_cache_utils

        from kvferry.engine.vllm.plugins.lora import hash_adapters_by_name

        original = kv_cache_utils._gen_lora_extra_hash_keys
        assert parameters(original) == ["request"]
        assert original(request("sql@00", "/here")) == [("lora", "sql@00", "/here")], "vLLM hashes name and path"
        monkeypatch.setattr(kv_cache_utils, "_gen_lora_extra_hash_keys", original)
        hash_adapters_by_name()

    def test_pages_of_an_adapter_have_the_same_hash_wherever_its_files_lie(self) -> None:
        assert self.keys("sql@00", "/here") == self.keys("sql@00", "/there")
        assert self.keys("sql@00", "/here", start=32) == self.keys("sql@00", "/there", start=32)

    def test_pages_of_other_files_of_other_adapters_and_of_the_model_differ(self) -> None:
        names = ("", "sql@00", "sql@11", "poems@00")
        assert len({self.keys(name, "/here") for name in names}) == len(names)
        assert len({self.keys(name, "/here", start=32) for name in names}) == len(names)

    def test_events_have_the_name_before_the_salt(self) -> None:
        from vllm.v1.core.kv_cache_utils import to_event_extra_keys

        from kvferry.engine.vllm.plugins.lora import lora_hash_keys

        assert lora_hash_keys(request("", "")) == []
        keys = [self.keys("sql@00", "/here"), self.keys("sql@00", "/here", start=32)]
        assert to_event_extra_keys(keys) == [("sql@00", "s"), ("sql@00",)]

    def keys(self, name: str, path: str, start: int = 0) -> Any:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        return generate_block_hash_extra_keys(request(name, path), start, start + 32, 0)[0]


NAMES = ("model.layers.1.self_attn.q_proj", "model.layers.11.self_attn.q_proj", "lm_head")
KEYS = (
    "q_proj",
    "proj",
    "self_attn.q_proj",
    "1.self_attn.q_proj",
    "layers.1.self_attn.q_proj",
    NAMES[1],
    "lm_head",
    "o",
)


class TestLoraPatterns:
    @pytest.fixture(autouse=True)
    def _restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        self.original = PEFTHelper._match_pattern
        monkeypatch.setattr(PEFTHelper, "_match_pattern", staticmethod(self.original))

    def test_vllm_still_compiles_each_key_for_each_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If this fails, vLLM has fixed it, and the seam can go."""
        from vllm.lora import peft_helper

        from kvferry.engine.vllm.adapter_folder import match_pattern

        assert parameters(match_pattern) == ["pattern", "name"] == parameters(self.original)
        tried: list[str] = []
        monkeypatch.setattr(peft_helper.re, "match", lambda pattern, name: tried.append(pattern))
        assert self.original(dict.fromkeys(KEYS, 1), NAMES[0]) is None
        assert len(tried) == len(KEYS)

    def test_a_look_up_finds_what_vllm_finds(self) -> None:
        from vllm.lora.peft_helper import PEFTHelper

        from kvferry.engine.vllm.plugins.lora import look_patterns_up

        look_patterns_up()
        num_found = 0
        for keys in itertools.permutations(KEYS, 3):
            pattern = {key: number for number, key in enumerate(keys, start=1)}
            for name in NAMES:
                expected = self.original(pattern, name)
                assert PEFTHelper._match_pattern(pattern, name) == expected, (keys, name)
                num_found += expected is not None
        assert num_found > 100
        assert PEFTHelper._match_pattern({}, NAMES[0]) is None

    def test_the_first_key_wins(self) -> None:
        from kvferry.engine.vllm.adapter_folder import match_pattern

        assert match_pattern({"q_proj": 4, "self_attn.q_proj": 8}, NAMES[0]) == 4
        assert match_pattern({"self_attn.q_proj": 8, "q_proj": 4}, NAMES[0]) == 8


FUNCTIONS = ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
NUM_ADAPTERS, RANK, NUM_INPUTS, NUM_OUTPUTS = 3, 2, 5, 7


class TestCpuLoraRows:
    @pytest.fixture(autouse=True)
    def _restored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu

        self.originals = {name: getattr(lora_ops, name) for name in FUNCTIONS}
        for module in (lora_ops, punica_cpu):
            for name, function in self.originals.items():
                monkeypatch.setattr(module, name, function)

    def test_vllm_still_gives_rows_without_an_adapter_the_last_one(self) -> None:
        """If this fails, vLLM has fixed it, and the seam can go."""
        alone, mixed = self.outcome([-1, -1]), self.outcome([-1, 1])
        assert not alone.any(), "a step without adapters is left alone"
        assert mixed[0].any()

    def test_the_signatures_are_vllms(self) -> None:
        from kvferry.engine.vllm.plugins import lora

        for name, function in self.originals.items():
            assert parameters(getattr(lora, name)) == parameters(function)

    @pytest.mark.parametrize("indices", [[0], [2, 2, 2], [0, 1, 2, 0], [1, 0, 1]])
    def test_rows_with_adapters_are_what_vllm_computes(self, indices: list[int]) -> None:
        import torch

        from kvferry.engine.vllm.plugins.lora import leave_other_rows_alone

        expected = self.outcome(indices)
        leave_other_rows_alone()
        torch.testing.assert_close(self.outcome(indices), expected)

    def test_rows_without_an_adapter_are_left_alone(self) -> None:
        import torch

        from kvferry.engine.vllm.plugins.lora import leave_other_rows_alone

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
