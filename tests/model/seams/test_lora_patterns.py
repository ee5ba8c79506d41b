"""engine/vllm/plugins/lora_patterns.py"""

from __future__ import annotations

import itertools

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


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
    """engine/vllm/plugins/lora_patterns.py"""

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

        from kvferry.engine.vllm.plugins.lora_patterns import look_patterns_up

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
