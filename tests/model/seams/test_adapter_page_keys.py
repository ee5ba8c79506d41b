"""engine/vllm/plugins/adapter_page_keys.py"""

from __future__ import annotations

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
    """engine/vllm/plugins/adapter_page_keys.py"""

    @pytest.fixture(autouse=True)
    def _patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.core import kv_cache_utils

        from kvferry.engine.vllm.plugins.adapter_page_keys import hash_adapters_by_name

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

        from kvferry.engine.vllm.plugins.adapter_page_keys import lora_hash_keys

        assert lora_hash_keys(request("", "")) == []
        keys = [self.keys("sql@00", "/here"), self.keys("sql@00", "/here", start=32)]
        assert to_event_extra_keys(keys) == [("sql@00", "s"), ("sql@00",)]

    def keys(self, name: str, path: str, start: int = 0) -> Any:
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        return generate_block_hash_extra_keys(request(name, path), start, start + 32, 0)[0]
