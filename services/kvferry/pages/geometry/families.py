"""KV layers of models by `model_type`, as vLLM 0.32 serves them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import MAX_LAYERS, ConfigFields
from kvferry.pages.geometry.heads import head_dim, num_kv_heads, windowed_layers
from kvferry.pages.geometry.layers import KvLayers, LatentLayers, LayerGroup
from kvferry.pages.geometry.state_families import STATE_FAMILIES

_FULL, _SLIDING = "full_attention", "sliding_attention"
_INDEX_SCALE_BYTES, _INDEX_VALUES_PER_SCALE = 4, 128

_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
# Values that transformers supplies where config.json leaves a field out, unless a general rule gives them: as many KV
# heads as query heads, and an even share of the hidden size for each head.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"max_position_embeddings": 2048},
    "cohere2": {"sliding_window": 4096},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "falcon": {"multi_query": True, "max_position_embeddings": 2048},
    "falcon_h1": {"num_key_value_heads": 8},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "gemma3n_text": {"num_key_value_heads": 2, "head_dim": 256},
    "gemma4_text": {"num_key_value_heads": 4, "head_dim": 256},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128},
    "glm4_moe": {"num_key_value_heads": 8},
    "glm4_moe_lite": {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256},
    "glm_moe_dsa": _MLA,
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64},
    "hunyuan": {},
    "jamba": {"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4},
    "kimi_k2": _MLA,
    "llama4_text": {
        "num_key_value_heads": 8,
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "head_dim": 128,
    },
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "ministral3": {"num_key_value_heads": 8, "head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "phimoe": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256},
    "qwen3_vl_moe_text": {"num_key_value_heads": 16},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "no_rope_layer_interval": 4},
    "stablelm": {"num_key_value_heads": 32},
    "starcoder2": {"num_key_value_heads": 2},
}
_ON_GPUS_ONLY = "vLLM builds sparse attention on GPUs only"
# Why sizes were not compared with vLLM's own.
NOT_COMPARED: Mapping[str, str] = {
    "deepseek_v32": _ON_GPUS_ONLY,
    "glm_moe_dsa": _ON_GPUS_ONLY,
    "hunyuan": "vLLM 0.32 does not have the model",
    "qwen3_5_moe_text": "only the equal layers of Qwen3-Next were",
    "qwen3_5_text": "only the equal layers of Qwen3-Next were",
    "qwen3_vl_moe_text": "only the equal layers of Qwen3-MoE were",
    "qwen3_vl_text": "only the equal layers of Qwen3 were",
}
# A pattern of this many layers repeats: its last layer attends to all tokens, the others to a window.
_PATTERN_FIELD = "sliding_window_pattern"
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "olmo3": 4, "gpt_oss": 2}
# Their sliding_window counts only with use_sliding_window.
_SWITCHED_WINDOWS = frozenset({"qwen2", "qwen3", "qwen3_moe", "smollm3"})
_WITHOUT_WINDOWS = frozenset({"qwen2_moe"})  # vLLM's layers do not read the switch
_WINDOWS_ABOVE = frozenset({"qwen2", "qwen3"})  # the first max_window_layers layers have none
_WINDOW_BESIDE_ITSELF = frozenset({"cohere2"})  # the window does not count the present token

_DENSE = frozenset(
    {
        "bloom",
        "cohere",
        "cohere2",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
_SPARSE = frozenset({"deepseek_v32", "glm_moe_dsa"})
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"}) | _SPARSE


def model_types() -> frozenset[str]:
    return _DENSE | _LATENT | frozenset(_OTHERS) | frozenset(STATE_FAMILIES)


def layers_of(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Raises ConfigError for a missing field."""
    if make := STATE_FAMILIES.get(fields.model_type) or _OTHERS.get(fields.model_type):
        return make(fields, num_layers)
    if fields.model_type in _LATENT:
        return _latent(fields, num_layers)
    return _dense(fields, num_layers)


def _dense(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    return windowed_layers(fields, _windows(fields, num_layers))


def _windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Return each layer's window; None keeps every token."""
    is_off = fields.model_type in _SWITCHED_WINDOWS and not fields.flag("use_sliding_window")
    if is_off or fields.model_type in _WITHOUT_WINDOWS:
        return [None] * num_layers
    kinds = _layer_kinds(fields, num_layers)
    if kinds is None:
        return [fields.count("sliding_window") or None] * num_layers
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise ConfigError(f"layers of kind {', '.join(sorted(map(str, unknown)))[:80]} are not known")
    if _SLIDING not in kinds:
        return [None] * num_layers
    window = fields.size("sliding_window") + (fields.model_type in _WINDOW_BESIDE_ITSELF)
    return [window if kind == _SLIDING else None for kind in kinds]


def _layer_kinds(fields: ConfigFields, num_layers: int) -> list[Any] | None:
    if (given := fields.layer_list("layer_types", num_layers)) is not None:
        return given
    if fields.model_type in _WINDOWS_ABOVE:
        first = fields.count("max_window_layers", most=MAX_LAYERS)
        return [_SLIDING if i >= first else _FULL for i in range(num_layers)]
    if fields.model_type == "smollm3":
        return [_FULL if has_rope else _SLIDING for has_rope in _with_rope(fields, num_layers)]
    every = fields.optional_size(_PATTERN_FIELD) or _PATTERNS.get(fields.model_type)
    if every is None:
        return None
    return [_SLIDING if (i + 1) % every else _FULL for i in range(num_layers)]


def _latent(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Sparse attention stores an index, unless a layer uses an earlier one's choice."""
    dims = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    index = 0
    num_indexed = 0
    if fields.model_type in _SPARSE:
        values = fields.size("index_head_dim")
        index = values + values // _INDEX_VALUES_PER_SCALE * _INDEX_SCALE_BYTES
        num_indexed = sum(_has_index(fields, i) for i in range(num_layers))
    else:
        nope, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
        return (LatentLayers(num_layers, *dims, nope_dim=nope, value_dim=value),)
    layers = (LatentLayers(num_indexed, *dims, index), LatentLayers(num_layers - num_indexed, *dims))
    return tuple(each for each in layers if each.num_layers)


def _has_index(fields: ConfigFields, layer: int) -> bool:
    pattern = fields.text("index_topk_pattern")
    if pattern:
        return layer >= len(pattern) or pattern[layer] != "S"
    every, offset = fields.optional_size("index_topk_freq") or 1, 2
    if fields.get("index_skip_topk_offset") is not None:
        offset = fields.count("index_skip_topk_offset", most=MAX_LAYERS)
    return max(layer - offset + 1, 0) % every == 0


def _gemma4(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Full layers have heads of their own; the last layers read earlier ones' pages."""
    num_shared = fields.count("num_kv_shared_layers", most=num_layers - 1)
    windows = _windows(fields, num_layers)[: num_layers - num_shared]
    heads, dim = num_kv_heads(fields), head_dim(fields)
    global_dim = fields.optional_size("global_head_dim") or dim
    global_heads = (
        fields.optional_size("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else 0
    ) or heads
    sizes = Counter((window, dim if window else global_dim, heads if window else global_heads) for window in windows)
    return tuple(
        KvLayers(count, num_heads, size, size, window=window) for (window, size, num_heads), count in sizes.items()
    )


def _mimo_v2(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Windowed layers have heads of their own; V is smaller than K."""
    pattern = fields.layer_list("hybrid_layer_pattern", num_layers)
    if pattern is None:
        raise ConfigError("config.json lacks hybrid_layer_pattern")
    window = fields.size("sliding_window_size", "sliding_window")
    num_windowed = sum(each == 1 for each in pattern)
    dim, window_dim = fields.size("head_dim"), fields.size("swa_head_dim")
    full = KvLayers(
        num_layers - num_windowed,
        fields.size("num_key_value_heads"),
        dim,
        fields.optional_size("v_head_dim") or dim,
    )
    windowed = KvLayers(
        num_windowed,
        fields.size("swa_num_key_value_heads"),
        window_dim,
        fields.optional_size("swa_v_head_dim") or window_dim,
        window=window,
    )
    return tuple(each for each in (full, windowed) if each.num_layers)


def _llama4(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Layers with rotary embeddings attend to chunks, the others to everything."""
    chunk = fields.optional_size("attention_chunk_size")
    heads, dim = num_kv_heads(fields), head_dim(fields)
    counts = Counter(chunk if has_rope else None for has_rope in _with_rope(fields, num_layers))
    return tuple(KvLayers(count, heads, dim, dim, chunk=chunk) for chunk, count in counts.items())


def _with_rope(fields: ConfigFields, num_layers: int) -> list[Any]:
    if given := fields.layer_list("no_rope_layers", num_layers):
        return given
    every = fields.size("no_rope_layer_interval")
    return [(i + 1) % every != 0 for i in range(num_layers)]


def _gemma3n(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """The last layers read the pages of earlier ones."""
    num_shared = fields.count("num_kv_shared_layers", most=num_layers - 1)
    return windowed_layers(fields, _windows(fields, num_layers)[: num_layers - num_shared])


def _hunyuan(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Cross-layer attention: in each group of layers, one stores pages for all of them."""
    share = fields.size("cla_share_factor") if fields.flag("use_cla") else 1
    heads, dim = num_kv_heads(fields), head_dim(fields)
    return (KvLayers(-(-num_layers // share), heads, dim, dim),)


_OTHERS: Mapping[str, Callable[[ConfigFields, int], tuple[LayerGroup, ...]]] = {
    "llama4_text": _llama4,
    "gemma4_text": _gemma4,
    "mimo_v2": _mimo_v2,
    "mimo_v2_flash": _mimo_v2,
    "gemma3n_text": _gemma3n,
    "hunyuan": _hunyuan,
}
