"""pages/geometry computes the sizes that vLLM's own layers and pool have, of the model matrix and of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import tiny_models
from kvferry.pages.geometry.config_json import from_config
from kvferry.pages.geometry.layers import LatentLayers
from kvferry_plan.model_catalogue import catalogue
from support.processors import AVX512_BF16, PROCESSORS, Processor, imitated
from support.vllm_kv_specs import built_model, our_pages, sizes_of, vllm_pages, vllm_process_group

pytestmark = pytest.mark.vllm


BLOCK_SIZE = 32

# vLLM needs a GPU to build its layers. Its pages are those of Qwen2.
NEEDS_A_GPU = frozenset({"qwen2-dual-chunk"})
NOT_KNOWN = frozenset({"opt"})  # to the geometry: their engines say what they take
TINY = sorted((tiny_models.TESTED.keys() | tiny_models.OTHERS.keys()) - NEEDS_A_GPU - NOT_KNOWN)
# Types of pages that vLLM 0.32 takes on the CPU for every model; others are refused when it builds the layers.
CPU_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")

# Real config.json files, as the catalogue has them; the language models of multimodal ones under their own class.
TEXT_CLASSES = {
    "llama4_text": "Llama4ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
}
# Fields that vLLM needs to build the layers, and sizes of pages do not depend on.
BUILT_WITH: Mapping[str, Mapping[str, Any]] = {
    "gemma-4-26B-A4B": {"moe_intermediate_size": 704, "enable_moe_block": True},
    "MiniMax-M2.5": {"rotary_dim": 64, "qk_norm_type": "per_layer", "scoring_func": "sigmoid"},
    "MiMo-V2-Flash": {
        "layernorm_epsilon": 1e-5,
        "moe_layer_freq": [0] + [1] * 47,
        "moe_intermediate_size": 2048,
        "intermediate_size": 16384,
        "swa_num_attention_heads": 64,
        "swa_rope_theta": 10000,
        "rope_theta": 5000000,
        "partial_rotary_factor": 0.334,
        "attention_bias": False,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}
# vLLM's Falcon does not take the type of pages that it is given.
ALWAYS_UNQUANTIZED = frozenset({"Falcon-7B"})
REAL = (
    "SmolLM2-135M-Instruct", "Llama-3.1-8B", "Llama-4-Scout", "Mixtral-8x7B-v0.1", "Mistral-7B-v0.1", "Qwen2.5-7B",
    "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b", "Gemma-2-9B", "Gemma-3-4B", "gemma-4-26B-A4B", "Falcon-7B",
    "Phi-3-mini-4k", "MiniMax-M2.5", "MiMo-V2-Flash", "Nemotron-H-56B", "OLMo-2-7B", "Granite-3.3-8B", "Qwen3-8B",
)  # fmt: skip


_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Further model types that geometry knows: a class of transformers, a class of vLLM, and its fields.
FURTHER: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "CohereConfig": ("CohereForCausalLM", {}),
    "FalconMambaConfig": ("FalconMambaForCausalLM", {}),
    "GPT2Config": ("GPT2LMHeadModel", {"n_layer": 4, "n_head": 4, "n_embd": 128}),
    "GPTJConfig": ("GPTJForCausalLM", {"n_layer": 4, "n_head": 4, "n_embd": 128, "rotary_dim": 16}),
    "GemmaConfig": ("GemmaForCausalLM", {"head_dim": 32}),
    "Glm4Config": ("Glm4ForCausalLM", {"head_dim": 32}),
    "Glm4MoeConfig": ("Glm4MoeForCausalLM", _MOE | {"head_dim": 32, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "Glm4MoeLiteConfig": (
        "Glm4MoeLiteForCausalLM",
        _MOE | {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "n_routed_experts": 4, "first_k_dense_replace": 1},
    ),
    "GraniteMoeConfig": ("GraniteMoeForCausalLM", {"num_local_experts": 4}),
    "GraniteMoeHybridConfig": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 32,
         "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 16, "num_local_experts": 0,
         "shared_intermediate_size": 64},
    ),
    "JambaConfig": (
        "JambaForCausalLM",
        {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 4, "attn_layer_offset": 2},
    ),
    "Mamba2Config": ("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 32, "n_groups": 2, "state_size": 16}),
    "MambaConfig": ("MambaForCausalLM", {}),
    "Ministral3Config": ("Ministral3ForCausalLM", {"head_dim": 32}),
    "NemotronConfig": ("NemotronForCausalLM", {}),
    "Olmo3Config": ("Olmo3ForCausalLM", {"sliding_window": 64}),
    "OlmoConfig": ("OlmoForCausalLM", {}),
    "OlmoeConfig": ("OlmoeForCausalLM", _MOE | {"num_experts": 4}),
    "PhimoeConfig": ("PhiMoEForCausalLM", {"num_local_experts": 4}),
    "Qwen2Config": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    "Qwen2MoeConfig": ("Qwen2MoeForCausalLM", _MOE | {"num_experts": 4, "shared_expert_intermediate_size": 64}),
    "SmolLM3Config": ("SmolLM3ForCausalLM", {"pad_token_id": 0}),
    "StableLmConfig": ("StableLmForCausalLM", {}),
    "Starcoder2Config": ("Starcoder2ForCausalLM", {"sliding_window": 64}),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        with vllm_process_group():
            yield


@pytest.fixture(autouse=True)
def processor(request: pytest.FixtureRequest) -> Iterator[Processor]:
    """vLLM's sizes depend on the processor, so tests name one instead of running on the machine's own."""
    chosen: Processor = getattr(request, "param", AVX512_BF16)
    with imitated(chosen):
        yield chosen


def compare(
    config: Mapping[str, Any],
    *,
    kv_cache_dtype: str = "auto",
    ranks: int = 1,
    device: str = "meta",
    processor: Processor = AVX512_BF16,
) -> None:
    geometry = from_config(config)
    vllm = vllm_pages(
        config,
        tensor_parallel_size=ranks,
        device=device,
        dtype=geometry.dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK_SIZE,
    )
    is_mla = isinstance(geometry.groups[0], LatentLayers)
    block_size = processor.mla_block_size(BLOCK_SIZE) if is_mla else BLOCK_SIZE
    dtype = geometry.dtype if kv_cache_dtype == "auto" else kv_cache_dtype
    assert our_pages(geometry, dtype, block_size, vllm) == vllm


def tiny_config(name: str, folder: Path) -> dict[str, Any]:
    tiny_models.write_config(name, folder)
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values | {"dtype": values.get("dtype") or "float32"}


def real_config(name: str) -> dict[str, Any]:
    config = dict(next(entry.config for entry in catalogue() if entry.name == name))
    extra = BUILT_WITH.get(name, {})
    config.pop("quantization_config", None)
    if "text_config" in config:
        text = dict(config["text_config"])
        return text | {"architectures": [TEXT_CLASSES[text["model_type"]]], "dtype": "bfloat16"} | extra
    return config | extra


@pytest.mark.parametrize("name", TINY)
def test_the_models_of_the_matrix_take_what_geometry_says(name: str, tmp_path: Path) -> None:
    config = tiny_config(name, tmp_path)
    # ALiBi is computed when the layer is built.
    device = "cpu" if name == "bloom" else "meta"
    for kv_cache_dtype in CPU_DTYPES:
        compare(config, kv_cache_dtype=kv_cache_dtype, device=device)
    compare(config, ranks=2, device=device)


def test_every_type_is_compared_or_says_why_not(tmp_path: Path) -> None:
    import transformers

    from kvferry.pages.geometry.families import NOT_COMPARED, model_types

    compared = {tiny_config(name, tmp_path)["model_type"] for name in TINY}
    compared |= {real_config(name)["model_type"] for name in REAL}
    compared |= {getattr(transformers, name).model_type for name in FURTHER}
    same = {"kimi_k2": "deepseek_v3", "mimo_v2": "mimo_v2_flash"}  # the same classes of vLLM
    assert model_types() - compared - NOT_COMPARED.keys() == same.keys()
    assert set(same.values()) <= compared
    assert not compared & NOT_COMPARED.keys()


def further_config(name: str, folder: Path) -> dict[str, Any]:
    import transformers

    architecture, fields = FURTHER[name]
    common = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "max_position_embeddings": 4096, "intermediate_size": 256}
    config = getattr(transformers, name)(**(common | fields))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values | {"dtype": "float32"}


@pytest.mark.parametrize("processor", PROCESSORS, ids=str, indirect=True)
@pytest.mark.parametrize(
    "name", ["deepseek-v2", "Glm4MoeLiteConfig", "DeepSeek-V3", "qwen3-next", "falcon-h1", "llama"]
)
def test_sizes_follow_the_processor(name: str, processor: Processor, tmp_path: Path) -> None:
    """vLLM chooses blocks of MLA, and types of states, by what the processor can do."""
    if name in FURTHER:
        config = further_config(name, tmp_path)
    elif name in REAL:
        config = real_config(name)
    else:
        config = tiny_config(name, tmp_path)
    for kv_cache_dtype in CPU_DTYPES:
        compare(config, kv_cache_dtype=kv_cache_dtype, processor=processor)


@pytest.mark.parametrize("name", FURTHER)
def test_further_kinds_take_what_geometry_says(name: str, tmp_path: Path) -> None:
    compare(further_config(name, tmp_path))


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("qwen3", "head_dim"), ("gpt-oss", "head_dim"), ("gemma3n", "head_dim"), ("gemma3n", "num_key_value_heads"),
        ("qwen3-next", "head_dim"), ("qwen3-next", "num_key_value_heads"), ("deepseek-v2", "kv_lora_rank"),
        ("mistral", "sliding_window"), ("GemmaConfig", "head_dim"), ("Glm4Config", "head_dim"),
        ("Glm4Config", "num_key_value_heads"), ("Glm4MoeLiteConfig", "kv_lora_rank"),
        ("JambaConfig", "attn_layer_offset"), ("Ministral3Config", "head_dim"),
        ("SmolLM3Config", "num_key_value_heads"), ("Starcoder2Config", "num_key_value_heads"),
    ],
)  # fmt: skip
def test_a_field_that_is_absent_has_vllms_default(name: str, field: str, tmp_path: Path) -> None:
    config = further_config(name, tmp_path) if name in FURTHER else tiny_config(name, tmp_path)
    del config[field]
    if name == "JambaConfig":
        config |= {"attn_layer_period": 8}
    compare(config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama4", {"attention_chunk_size": None}),
        ("qwen2", {"head_dim": 48}),
        ("GPT2Config", {"head_dim": 48}),
        ("GPTJConfig", {"head_dim": 48}),
        ("GraniteMoeConfig", {"head_dim": 48}),
        ("OlmoeConfig", {"head_dim": 48}),
        ("Qwen2MoeConfig", {"head_dim": 48}),
        ("StableLmConfig", {"head_dim": 48}),
    ],
)
def test_a_field_that_vllm_does_not_read_changes_nothing(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Nor has a field that is null the default of an absent one."""
    config = further_config(name, tmp_path) if name in FURTHER else tiny_config(name, tmp_path)
    compare(config | changes)


_SWITCHED = {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2", _SWITCHED | {"max_window_layers": 0}),
        ("qwen2", _SWITCHED | {"max_window_layers": 4}),
        ("qwen3", _SWITCHED),
        ("qwen3-moe", _SWITCHED),
        ("Qwen2MoeConfig", _SWITCHED),
        ("SmolLM3Config", _SWITCHED),
        ("gemma3", {"_sliding_window_pattern": 3, "layer_types": None, "num_hidden_layers": 6}),
        ("qwen3-next", {"mamba_ssm_dtype": "bfloat16"}),
    ],
)
def test_a_switch_is_read_as_vllm_reads_it(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = (further_config(name, tmp_path) if name in FURTHER else tiny_config(name, tmp_path)) | changes
    compare({field: value for field, value in config.items() if value is not None})


@pytest.mark.parametrize(
    "changes",
    [
        {"multi_query": False, "num_kv_heads": 2},
        {"multi_query": False, "new_decoder_architecture": True, "n_head_kv": 2},
        {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": True, "n_head_kv": 2},
    ],
)
def test_falcons_kv_heads_are_those_of_its_architecture(changes: dict[str, Any]) -> None:
    falcon = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 1024, "hidden_size": 128}
    compare(falcon | {"num_hidden_layers": 4, "num_attention_heads": 4, "dtype": "float32"} | changes)


@pytest.mark.parametrize("name", REAL)
def test_real_models_take_what_geometry_says(name: str) -> None:
    config = real_config(name)
    compare(config)
    if name not in ALWAYS_UNQUANTIZED:
        compare(config, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B", "MiMo-V2-Flash", "Nemotron-H-56B", "DeepSeek-V3"])
@pytest.mark.parametrize("ranks", [8])
def test_ranks_take_what_geometry_says(name: str, ranks: int) -> None:
    compare(real_config(name), ranks=ranks)


@pytest.mark.parametrize("name", ["llama", "deepseek-v2", "gemma3", "gpt-oss", "falcon-h1", "qwen3-next"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engines_pages_are_described_by_what_they_take(name: str, ranks: int, tmp_path: Path) -> None:
    """`EngineInfo.page_bytes`, and the blocks that `kv_cache_gib` holds."""
    from kvferry.engine.vllm.start.arguments import page_sizes

    config = tiny_config(name, tmp_path)
    with built_model(config, tensor_parallel_size=ranks, dtype="float32", block_size=BLOCK_SIZE) as vllm_config:
        ours, vllm = page_sizes(vllm_config), sizes_of(vllm_config)
    assert ours.page_bytes == vllm.token_bytes * vllm.block_size * ranks
    assert ours.block_bytes == vllm.block_bytes


def test_scaled_types_have_the_sizes_of_vllms_backends() -> None:
    """Of backends for GPUs, which no model can be built with here."""
    import torch
    from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
    from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, get_kv_quant_mode

    from kvferry.pages.geometry.kv_dtypes import kv_dtype

    def spec(kind: Any, name: str, **sizes: Any) -> Any:
        dtype = torch.int8 if name.startswith("int8") else torch.uint8
        return kind(block_size=1, dtype=dtype, kv_quant_mode=get_kv_quant_mode(name), **sizes)

    for name in ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
        page = TritonAttentionBackend.customize_spec(spec(FullAttentionSpec, name, num_kv_heads=3, head_size=128))
        assert page.page_size_bytes == 3 * 2 * kv_dtype(name).head_bytes(128), name
    # FlashInfer's backend has two slots of this size for each head, and cannot be imported without a GPU.
    assert kv_dtype("nvfp4").head_bytes(128) == kv_dtype("nvfp4_4over6").head_bytes(128) == nvfp4_kv_cache_full_dim(128)
    for name in ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"):
        page = TritonMLABackend.customize_spec(spec(MLAAttentionSpec, name, num_kv_heads=1, head_size=576))
        assert page.page_size_bytes == kv_dtype(name).latent_bytes(512, 64), name


def test_latents_of_sparse_attention_have_the_sizes_of_vllms_layers() -> None:
    """Sparse attention is built on GPUs only: its two constants are compared with vLLM's source."""
    import inspect

    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    from kvferry.pages.geometry.kv_dtypes import kv_dtype

    source = inspect.getsource(MLAAttention.get_kv_cache_spec)
    for name in ("fp8_ds_mla", "nvfp4_ds_mla"):
        assert f'"{name}": {kv_dtype(name).latent_bytes(512, 64)}' in source
