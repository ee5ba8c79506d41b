"""engine/vllm/plugins/chunk_layout.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.model

pytest.importorskip("vllm")


class TestChunkLayout:
    """engine/vllm/plugins/chunk_layout.py and exchange_fields.py"""

    @pytest.fixture(autouse=True)
    def _known_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvferry.engine.vllm.plugins.exchange_fields.attention_backend", lambda config: "CPU_ATTN")

    def test_keys_are_still_packed_by_instruction_set(self) -> None:
        from vllm.platforms import cpu
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        assert parameters(_get_attn_isa) == ["dtype", "block_size", "head_size", "kv_cache_dtype"]
        assert "isa = _get_attn_isa(" in inspect.getsource(cpu.CpuPlatform.pack_kv_cache)

    @staticmethod
    def config(**changes: Any) -> Any:
        import torch

        values = {"dtype": torch.float32, "cache_dtype": "auto", "block_size": 32, "heads": 3, "tensor_parallel": 1}
        values |= {"max_model_len": 4096, "rope": {"factor": 1.0}}
        values |= changes
        return SimpleNamespace(
            lora_config=None,
            model_config=SimpleNamespace(
                dtype=values["dtype"],
                max_model_len=values["max_model_len"],
                quantization=None,
                hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": "a", "rope": values["rope"]}),
                hf_text_config=SimpleNamespace(to_dict=dict),
                get_total_num_hidden_layers=lambda: 30,
                get_total_num_kv_heads=lambda: values["heads"],
                get_head_size=lambda: 64,
            ),
            cache_config=SimpleNamespace(
                cache_dtype=values["cache_dtype"], block_size=values["block_size"], kv_cache_layout="LBHNC"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=values["tensor_parallel"], pipeline_parallel_size=1),
        )

    def test_whatever_changes_a_byte_changes_the_digest(self) -> None:
        import torch

        from kvferry.engine.vllm.plugins.chunk_layout import layout_fields
        from kvferry.store.layout import ChunkLayout

        named = {"model_name": "m", "weights_revision": "r", "blocks_per_chunk": 1}

        def digest(names: dict[str, Any], **changes: Any) -> bytes:
            return ChunkLayout(**layout_fields(self.config(**changes), **names), payload_bytes=1_474_560).digest  # type: ignore[arg-type]

        digests = [
            digest(named),
            digest(named, dtype=torch.bfloat16),
            digest(named, cache_dtype="bfloat16"),
            digest(named, block_size=64),
            digest(named, heads=4),
            digest(named, tensor_parallel=2),
            digest(named, max_model_len=8192),
            digest(named, rope={"factor": 2.0}),
            digest(named | {"weights_revision": "s"}),
            digest(named | {"model_name": "n"}),
            digest(named | {"blocks_per_chunk": 2}),
        ]
        assert len(set(digests)) == len(digests)
        assert digest(named) == digest(named, cache_dtype="auto")

    def test_it_does_not_matter_where_a_model_lies(self) -> None:
        from kvferry.engine.vllm.plugins.exchange_fields import model_config_digest

        def digest(**values: Any) -> str:
            config = SimpleNamespace(to_dict=lambda: {"rope": {"factor": 2.0}, **values})
            return model_config_digest(SimpleNamespace(hf_config=config, hf_text_config=config))

        assert digest(_name_or_path="/here", transformers_version="4") == digest(_name_or_path="/there")
        assert digest(vision={"_name_or_path": "/here"}) == digest(vision={})
        assert digest(head_dim=64) != digest(head_dim=128)

    def test_the_instruction_set_is_named(self) -> None:
        import platform

        from kvferry.engine.vllm.plugins.exchange_fields import instruction_set

        assert instruction_set(self.config()).startswith(platform.machine())


def test_every_field_is_resolved() -> None:
    """No field may be `auto`: what it means differs from machine to machine."""
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields
    from kvferry.model_folder import resolve

    config = EngineArgs(model=str(resolve("default")), dtype="float32", block_size=32).create_engine_config()
    fields = dict(exchange_fields(config, weights="w"))
    assert fields["attention_backend"] == "CPU_ATTN"
    assert fields["kv_cache_dtype"] == "float32"
    assert not {"auto", "", "None"} & set(fields.values())
    assert len(fields) == 14
