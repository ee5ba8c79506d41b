"""Bytes of KV pages by model: known values, windows, states, copies on ranks, and faults of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import MAX_LAYERS
from kvferry.pages.geometry.config_json import from_config
from kvferry.pages.geometry.kv_dtypes import KV_DTYPES, kv_dtype
from kvferry.pages.geometry.layers import KvLayers, LayerKind
from kvferry_plan.model_catalogue import catalogue, find, geometry_of

# Bytes of a token over all layers, while no window is full.
KNOWN = {
    ("Llama-3.1-8B", "bf16"): 131_072,
    ("Llama-3.1-70B", "bf16"): 327_680,
    ("Llama-3.1-70B", "fp8"): 163_840,
    ("Llama-3.1-70B", "int8"): 168_960,
    ("Llama-3.1-70B", "int4"): 87_040,
    ("Llama-3.1-70B", "nvfp4"): 92_160,
    ("Llama-3.1-405B", "bf16"): 516_096,
    ("Qwen2.5-72B", "bf16"): 327_680,
    ("Mistral-7B-v0.3", "bf16"): 131_072,
    ("Mistral-7B-v0.1", "bf16"): 131_072,
    ("Qwen3-235B-A22B", "bf16"): 192_512,
    ("Qwen3-30B-A3B", "bf16"): 98_304,
    ("DeepSeek-V3", "bf16"): 70_272,
    ("DeepSeek-V3", "fp8_ds_mla"): 40_016,
    ("Mixtral-8x22B-v0.1", "bf16"): 229_376,
    ("Llama-2-7B", "bf16"): 524_288,
    ("Falcon-7B", "bf16"): 8_192,
    ("Hunyuan-Large", "bf16"): 131_072,
    ("Gemma-3-27B", "bf16"): 507_904,  # 62 layers x 16 heads x 128 x 2 x 2
    ("gpt-oss-20b", "bf16"): 49_152,  # 24 layers x 8 heads x 64 x 2 x 2
    ("gpt-oss-120b", "bf16"): 73_728,
    ("SmolLM2-135M-Instruct", "fp32"): 46_080,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}


SPARSE = {"model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
JAMBA = {"model_type": "jamba", "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}


@pytest.mark.parametrize(("model", "dtype"), KNOWN)
def test_bytes_of_a_token_are_the_published_ones(model: str, dtype: str) -> None:
    assert geometry_of(model).bytes_per_token(dtype) == KNOWN[model, dtype]


class TestWindows:
    def test_layers_with_a_full_window_take_no_more(self) -> None:
        gemma, gpt_oss = geometry_of("Gemma-3-27B"), geometry_of("gpt-oss-20b")
        assert gemma.lasting_bytes_per_token("bf16") == 10 * 16 * 128 * 2 * 2
        assert gpt_oss.lasting_bytes_per_token("bf16") == 12 * 8 * 64 * 2 * 2
        assert geometry_of("Mistral-7B-v0.1").lasting_bytes_per_token("bf16") == 0

    def test_learned_sinks_take_no_pages(self) -> None:
        groups = {group.kind: group for group in geometry_of("gpt-oss-20b").groups}
        assert isinstance(window := groups[LayerKind.WINDOW], KvLayers)
        assert (window.num_layers, window.window, groups[LayerKind.FULL].num_layers) == (12, 128, 12)

    def test_a_long_sequence_takes_its_windows_and_a_page_beside(self) -> None:
        mistral = geometry_of("Mistral-7B-v0.1")
        pages = -(-(4096 - 1) // 16) + 1
        assert mistral.pool("bf16").bytes_of_sequence(32_768) == pages * 16 * 131_072
        # Tokens that are computed at once stay until they are.
        assert mistral.pool("bf16", max_in_flight_tokens=2048).bytes_of_sequence(32_768) == (
            (-(-(4095 + 2048) // 16) + 1) * 16 * 131_072
        )
        assert mistral.pool("bf16").bytes_of_sequence(1) == 16 * 131_072

    def test_llama_4_keeps_one_chunk_in_three_of_four_layers(self) -> None:
        kinds = {group.kind: group.num_layers for group in geometry_of("Llama-4-Scout").groups}
        assert kinds == {LayerKind.CHUNK: 36, LayerKind.FULL: 12}

    @pytest.mark.parametrize(
        ("change", "num_windowed"),
        [
            ({"model_type": "qwen2"}, 0),  # its first 28 layers have none
            ({"model_type": "qwen2", "max_window_layers": 0}, 4),
            ({"model_type": "qwen3", "max_window_layers": 3}, 1),
            ({"model_type": "qwen3", "max_window_layers": 0, "use_sliding_window": False}, 0),
            ({"model_type": "qwen2_moe", "max_window_layers": 0}, 0),
            ({"model_type": "smollm3"}, 1),
            ({"model_type": "smollm3", "no_rope_layers": [0, 1, 0, 0]}, 3),
            ({"model_type": "gemma3_text", "_sliding_window_pattern": 2}, 4),
        ],
    )
    def test_a_switch_gives_windows_to_the_layers_that_vllm_gives_them(
        self, change: dict[str, Any], num_windowed: int
    ) -> None:
        geometry = from_config(LLAMA | {"use_sliding_window": True, "sliding_window": 64} | change)
        assert sum(group.num_layers for group in geometry.groups if group.kind is LayerKind.WINDOW) == num_windowed

    def test_a_chunk_that_is_null_is_none(self) -> None:
        scout = find("Llama-4-Scout")
        assert scout is not None
        text = scout.config["text_config"] | {"attention_chunk_size": None}
        geometry = from_config(scout.config | {"text_config": text})
        assert geometry.lasting_bytes_per_token("bf16") == geometry.bytes_per_token("bf16") == 196_608


class TestAbsentFields:
    """vLLM's own layers have the same sizes: tests/model/seams/test_kv_specs.py."""

    @pytest.mark.parametrize(
        ("change", "heads", "dim"),
        [
            ({"model_type": "qwen3"}, 2, 128),
            ({"model_type": "gemma"}, 2, 256),
            ({"model_type": "qwen3", "head_dim": None}, 2, 64),
            ({"model_type": "qwen2", "head_dim": 48}, 2, 64),
            ({"model_type": "olmoe", "head_dim": 48}, 2, 64),
        ],
    )
    def test_heads_have_the_size_of_their_kind(self, change: dict[str, Any], heads: int, dim: int) -> None:
        (group,) = from_config(LLAMA | change).groups
        assert group == KvLayers(4, heads, dim, dim)

    @pytest.mark.parametrize(("model_type", "heads"), [("llama", 8), ("starcoder2", 2), ("phimoe", 8), ("smollm3", 4)])
    def test_kv_heads_are_those_of_their_kind(self, model_type: str, heads: int) -> None:
        config = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
        (group,) = from_config(config | {"model_type": model_type}).groups
        assert group == KvLayers(4, heads, 64, 64)

    @pytest.mark.parametrize(
        ("change", "heads"),
        [
            ({"multi_query": True}, 1),
            ({"multi_query": False, "num_kv_heads": 2}, 8),
            ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
            ({"new_decoder_architecture": True, "n_head_kv": 2}, 8),
        ],
    )
    def test_falcons_kv_heads_are_those_of_its_architecture(self, change: dict[str, Any], heads: int) -> None:
        (group,) = from_config(LLAMA | {"model_type": "falcon"} | change).groups
        assert isinstance(group, KvLayers)
        assert group.num_kv_heads == heads

    def test_mistral_has_a_window_unless_it_is_null(self) -> None:
        kinds = [
            from_config(LLAMA | {"model_type": "mistral"} | change).groups[0].kind
            for change in ({}, {"sliding_window": None})
        ]
        assert kinds == [LayerKind.WINDOW, LayerKind.FULL]

    def test_jambas_attention_is_the_fifth_of_eight_layers(self) -> None:
        groups = from_config(LLAMA | JAMBA | {"num_hidden_layers": 16}).groups
        assert {group.kind: group.num_layers for group in groups} == {LayerKind.FULL: 2, LayerKind.STATE: 14}


class TestRanks:
    def test_kv_heads_are_divided_and_then_copied(self) -> None:
        llama = geometry_of("Llama-3.1-70B")
        assert [llama.bytes_per_token("bf16", tp) for tp in (1, 2, 8, 16)] == [327_680, 163_840, 40_960, 40_960]

    def test_every_rank_has_the_whole_latent(self) -> None:
        deepseek = geometry_of("DeepSeek-V3")
        assert deepseek.bytes_per_token("bf16", 8) == deepseek.bytes_per_token("bf16") == 70_272

    def test_sizes_that_do_not_divide_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="64 attention heads cannot be divided among 3"):
            geometry_of("Llama-3.1-70B").bytes_per_token("bf16", 3)
        with pytest.raises(ConfigError, match="at least 1"):
            geometry_of("Llama-3.1-70B").check_tensor_parallel(0)
        six_heads = from_config(LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 64})
        with pytest.raises(ConfigError, match="6 KV heads cannot be divided among 4"):
            six_heads.bytes_per_token("bf16", 4)


class TestSequences:
    @given(
        num_tokens=st.integers(0, 200_000),
        block_size=st.sampled_from([16, 32, 128]),
        model=st.sampled_from(catalogue()),
    )
    def test_more_tokens_never_take_less(self, num_tokens: int, block_size: int, model: Any) -> None:
        pool = model.geometry().pool("bf16", block_size=block_size)
        here = pool.bytes_of_sequence(num_tokens)
        assert here <= pool.bytes_of_sequence(num_tokens + 1)
        assert here % pool.block_bytes == 0

    def test_a_block_of_a_pool_is_a_page_of_all_layers(self) -> None:
        assert geometry_of("Llama-3.1-8B").pool("bf16").block_bytes == 16 * 131_072


class TestDtypes:
    def test_scales_are_counted(self) -> None:
        sizes = {name: dtype.head_bytes(128) for name, dtype in KV_DTYPES.items() if not dtype.ds_mla_bytes}
        assert sizes == {
            "float32": 512, "bfloat16": 256, "float16": 256, "fp8_e4m3": 128, "fp8_e5m2": 128,
            "fp8_per_token_head": 132, "int8_per_token_head": 132, "int4_per_token_head": 68,
            "nvfp4": 72, "nvfp4_4over6": 72,
        }  # fmt: skip

    def test_types_that_a_model_cannot_have_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="heads of K and V"):
            geometry_of("Llama-3.1-8B").bytes_per_token("fp8_ds_mla")
        with pytest.raises(ConfigError, match="latents"):
            geometry_of("DeepSeek-V3").bytes_per_token("nvfp4")
        with pytest.raises(ConfigError, match="16 divides, not 72"):
            from_config(LLAMA | {"head_dim": 72}).bytes_per_token("nvfp4")
        with pytest.raises(ConfigError, match="'fp7' is not known; known are float32"):
            kv_dtype("fp7")


class TestQuantization:
    @pytest.mark.parametrize(
        ("config", "name"),
        [
            ({"quant_method": "fp8"}, "fp8"),
            ({"quant_method": "FP8"}, "fp8"),
            ({"quant_method": "gptq", "bits": 4}, "gptq 4 bits"),
            ({"quant_method": "gptq", "bits": 8}, "gptq 8 bits"),
            ({"quant_method": "awq", "w_bit": 4}, "awq 4 bits"),
            ({"quant_method": "gptq"}, "gptq"),
            ({"quant_method": "gptq", "bits": [8]}, "gptq"),
            ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt FP8"),
            ({"quant_method": "modelopt", "quant_algo": "nvfp4"}, "modelopt NVFP4"),
            ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "modelopt NVFP4"),
            ({"quant_method": "modelopt"}, "modelopt"),
            ({"quant_method": ["a"]}, "['a']"),
            ({}, ""),
        ],
    )
    def test_the_method_has_its_bits_or_its_algorithm(self, config: dict[str, Any], name: str) -> None:
        assert from_config(LLAMA | {"quantization_config": config}).quantization == name

    @pytest.mark.parametrize(
        ("config", "dtype"),
        [
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "fp8_e4m3"),
            ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, ""),
            ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
            ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
            (
                {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
                "fp8_e4m3",
            ),
            ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4"),
            ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, ""),
            ({"quant_method": "modelopt", "kv_cache_quant_algo": ["FP8"], "quantization": 3}, ""),
            ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, ""),
        ],
    )
    def test_a_checkpoint_may_declare_the_type_of_its_pages(self, config: dict[str, Any], dtype: str) -> None:
        assert from_config(LLAMA | {"quantization_config": config}).checkpoint_kv_dtype == dtype


class TestFaults:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_attention_heads": None}, "lacks num_attention_heads or n_head"),
            ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
            ({"num_hidden_layers": MAX_LAYERS + 1}, f"num_hidden_layers is '{MAX_LAYERS + 1}'; expected"),
            ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'; expected a whole number"),
            ({"num_key_value_heads": True}, "num_key_value_heads is 'True'"),
            ({"num_key_value_heads": -1}, "num_key_value_heads is '-1'"),
            ({"hidden_size": float("inf")}, "hidden_size is 'inf'"),
            ({"hidden_size": 513}, "lacks head_dim, and hidden_size 513 is no multiple of 8 heads"),
            ({"model_type": None}, "lacks model_type"),
            ({"model_type": "no-such"}, "model_type 'no-such' are not known; known are .*llama"),
            ({"model_type": "t5"}, "is an encoder-decoder"),
            ({"is_encoder_decoder": True}, "is an encoder-decoder"),
            ({"layer_types": ["sliding_attention"] * 3}, "layer_types .*expected a list of 4 entries"),
            ({"layer_types": [["sliding_attention"]] * 4}, "layer_types .*a text or number for each layer"),
            ({"layer_types": ["sliding_attention"] * 4}, "lacks sliding_window"),
            ({"layer_types": ["other"] * 4}, "layers of kind other are not known"),
            ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "lacks qk_rope_head_dim"),
            ({"model_type": "deepseek_v3", "kv_lora_rank": None}, "lacks kv_lora_rank"),
            ({"model_type": "falcon_h1"}, "lacks mamba_expand"),
            (SPARSE | {"index_skip_topk_offset": "2"}, "index_skip_topk_offset is '2'; expected a whole number"),
            (SPARSE | {"index_skip_topk_offset": -1}, "index_skip_topk_offset is '-1'; expected a whole number"),
            (JAMBA | {"attn_layer_offset": "4"}, "attn_layer_offset is '4'; expected a whole number"),
            ({"model_type": "gemma2", "sliding_window": None}, "lacks sliding_window"),
        ],
    )  # fmt: skip
    def test_the_missing_field_is_named(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=f"my-model: .*{message}"):
            from_config(LLAMA | change, name="my-model")

    @given(st.dictionaries(st.sampled_from([*LLAMA, "layer_types", "head_dim", "text_config"]), st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )))  # fmt: skip
    def test_no_value_gives_anything_but_a_config_error(self, change: dict[str, Any]) -> None:
        try:
            geometry = from_config(LLAMA | change)
        except ConfigError:
            return
        assert geometry.num_layers >= 1

    def test_a_model_type_beside_a_text_model_may_be_anything(self) -> None:
        assert from_config({"model_type": ["x"], "text_config": LLAMA}).model_type == "llama"

    def test_unknown_models_are_named_with_near_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"no catalogue name.*names like it: Llama-3\.1-8B"):
            geometry_of("llama-3.1-8x")
        with pytest.raises(ConfigError, match=r"not a folder with a config\.json"):
            geometry_of("/no/such/folder")

    def test_a_folder_with_an_unusable_file_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        for content, message in [("[1]", "no JSON object"), ("{", "cannot be read"), ("[" * 100_000, "cannot be read")]:
            file.write_text(content, encoding="utf-8")
            with pytest.raises(ConfigError, match=message):
                geometry_of(str(tmp_path))
        file.write_text(" " * ((4 << 20) + 1), encoding="utf-8")
        with pytest.raises(ConfigError, match="more than 4194304 bytes"):
            geometry_of(str(tmp_path))


class TestCatalogue:
    def test_entries_are_complete_and_readable(self) -> None:
        entries = catalogue()
        assert len(entries) >= 40
        names = [name for entry in entries for name in {entry.name.lower(), entry.hub_id.lower()}]
        assert len(names) == len(set(names))
        for entry in entries:
            geometry = entry.geometry()
            assert geometry.bytes_per_token("fp8") > 0
            assert geometry.num_parameters
            assert geometry.num_active_parameters
            assert geometry.num_active_parameters <= geometry.num_parameters
            assert bool(geometry.num_experts) == (entry.num_active_parameters is not None)
            assert entry.source
            assert entry.date >= "2026"

    def test_a_folder_wins_and_equals_the_entry(self, tmp_path: Path) -> None:
        entry = find("meta-llama/Meta-Llama-3.1-8B")
        assert entry is find("llama-3.1-8b") is not None
        (tmp_path / "config.json").write_text(json.dumps(entry.config), encoding="utf-8")
        assert geometry_of(str(tmp_path)).groups == entry.geometry().groups

    def test_the_default_model_is_in_it(self) -> None:
        assert geometry_of("default").name == "SmolLM2-135M-Instruct"
