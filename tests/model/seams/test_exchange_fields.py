"""engine/vllm/plugins/exchange_fields.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from support.processors import AMX, AVX2, AVX512, AVX512_BF16, PROCESSORS, Processor, imitated

from .support import parameters, vllm_config

pytestmark = pytest.mark.vllm


class TestExchangeFields:
    """engine/vllm/plugins/exchange_fields.py"""

    def test_keys_are_still_packed_by_instruction_set(self) -> None:
        from vllm.platforms import cpu
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        assert parameters(_get_attn_isa) == ["dtype", "block_size", "head_size", "kv_cache_dtype"]
        assert "isa = _get_attn_isa(" in inspect.getsource(cpu.CpuPlatform.pack_kv_cache)

    def test_it_does_not_matter_where_a_model_lies(self) -> None:
        from kvferry.engine.vllm.plugins.exchange_fields import model_config_digest

        def digest(**values: Any) -> str:
            config = SimpleNamespace(to_dict=lambda: {"rope": {"factor": 2.0}, **values})
            return model_config_digest(SimpleNamespace(hf_config=config, hf_text_config=config))

        assert digest(_name_or_path="/here", transformers_version="4") == digest(_name_or_path="/there")
        assert digest(vision={"_name_or_path": "/here"}) == digest(vision={})
        assert digest(head_dim=64) != digest(head_dim=128)

    @pytest.mark.parametrize(("heads", "ranks", "field"), [(4, 1, "1"), (4, 2, "1"), (3, 2, "2"), (2, 4, "4")])
    def test_ranks_matter_where_kv_heads_are_copied(
        self, monkeypatch: pytest.MonkeyPatch, heads: int, ranks: int, field: str
    ) -> None:
        from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields

        monkeypatch.setattr("kvferry.engine.vllm.plugins.exchange_fields.attention_backend", lambda config: "CPU_ATTN")
        config = vllm_config(heads=heads, tensor_parallel=ranks)
        assert dict(exchange_fields(config, weights="w"))["tensor_parallel"] == field

    @pytest.mark.parametrize(
        ("processor", "dtype", "named"),
        [
            (AVX2, "float32", "x86_64-avx2-vec"),
            (AVX2, "bfloat16", "x86_64-avx2-vec"),
            (AVX512, "bfloat16", "x86_64-avx512-vec"),
            (AVX512_BF16, "bfloat16", "x86_64-avx512-vec"),
            (AMX, "float32", "x86_64-avx512-vec"),
            (AMX, "bfloat16", "x86_64-avx512-amx"),
        ],
        ids=str,
    )
    def test_the_instruction_set_is_named(self, processor: Processor, dtype: str, named: str) -> None:
        """vLLM packs the keys of 16-bit pages for AMX: other processors cannot read them."""
        import torch

        from kvferry.engine.vllm.plugins.exchange_fields import instruction_set

        with imitated(processor):
            assert instruction_set(vllm_config(dtype=getattr(torch, dtype))) == named

    @pytest.mark.parametrize("processor", PROCESSORS, ids=str)
    def test_fp8_pages_need_avx512(self, processor: Processor) -> None:
        from kvferry.engine.vllm.plugins.exchange_fields import instruction_set

        config = vllm_config(cache_dtype="fp8_e4m3")
        with imitated(processor):
            if processor.has_avx512:
                assert instruction_set(config) == "x86_64-avx512-vec"
            else:
                with pytest.raises(NotImplementedError, match="AVX-512 or AMX"):
                    instruction_set(config)

    def test_every_field_is_resolved(self) -> None:
        """No field may be `auto`: what it means differs from machine to machine."""
        from vllm.engine.arg_utils import EngineArgs

        from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields
        from kvferry.engine.vllm.rendering.text_model import inspect_models_in_this_process
        from kvferry.model_folder import resolve

        inspect_models_in_this_process()
        config = EngineArgs(model=str(resolve("default")), dtype="float32", block_size=32).create_engine_config()
        fields = dict(exchange_fields(config, weights="w"))
        assert fields["attention_backend"] == "CPU_ATTN"
        assert fields["kv_cache_dtype"] == "float32"
        assert not {"auto", "", "None"} & set(fields.values())
        assert len(fields) == 14
