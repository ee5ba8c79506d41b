"""Which layers of a model keep what of a sequence, by `model_type`, as vLLM 0.32 serves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import ConfigFields
from kvferry.pages.geometry.layers import KvLayers, LatentLayers, LayerGroup
from kvferry.pages.geometry.state_families import STATE_FAMILIES

_FULL, _SLIDING = "full_attention", "sliding_attention"
_INDEX_SCALE_BYTES, _INDEX_VALUES_PER_SCALE = 4, 128

# Values that transformers supplies where config.json leaves a field out.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {"sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 128},
    "cohere2": {"sliding_window": 4096},
    "falcon": {"multi_query": True, "max_position_embeddings": 2048},
    "bloom": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "hunyuan": {},
}
# One pattern repeats: the last layer of so many attends to all tokens, the others to a window.
_PATTERN_FIELDS = ("sliding_window_pattern", "_sliding_window_pattern")
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "cohere2": 4, "olmo3": 4, "gpt_oss": 2}
# Their sliding_window counts only with use_sliding_window.
_SWITCHED_WINDOWS = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
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
        "internlm2",
        "llama",
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
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)
_LATENT = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "longcat_flash"})


def model_types() -> frozenset[str]:
    return _DENSE | _LATENT | frozenset(_OTHERS) | frozenset(STATE_FAMILIES)


def layers_of(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Return the groups of layers that keep something. Raises ConfigError for a field that is missing."""
    if make := STATE_FAMILIES.get(fields.model_type) or _OTHERS.get(fields.model_type):
        return make(fields, num_layers)
    if fields.model_type in _LATENT and fields.get("kv_lora_rank") is not None:
        return _latent(fields, num_layers)
    return _dense(fields, num_layers)


def num_kv_heads(fields: ConfigFields) -> int:
    if fields.model_type == "falcon" and not fields.flag("new_decoder_architecture") and fields.flag("multi_query"):
        return 1
    given = fields.optional_size(
        "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"
    )
    return given or fields.size("num_attention_heads", "n_head", "n_heads")


def head_dim(fields: ConfigFields) -> int:
    given = fields.optional_size("head_dim")
    if given is not None:
        return given
    hidden, heads = (
        fields.size("hidden_size", "n_embd", "d_model"),
        fields.size("num_attention_heads", "n_head", "n_heads"),
    )
    if hidden % heads:
        raise ConfigError(f"config.json lacks head_dim, and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def _dense(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    return _windowed(fields, _windows(fields, num_layers))


def _windowed(fields: ConfigFields, windows: list[int | None]) -> tuple[LayerGroup, ...]:
    heads, dim = num_kv_heads(fields), head_dim(fields)
    return tuple(KvLayers(count, heads, dim, dim, window=window) for window, count in Counter(windows).items())


def _windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Return the window of each layer; None for one that keeps every token."""
    if fields.model_type in _SWITCHED_WINDOWS and not fields.flag("use_sliding_window"):
        return [None] * num_layers
    kinds = _layer_kinds(fields, num_layers)
    if kinds is None:
        return [fields.optional_size("sliding_window") or None] * num_layers
    if unknown := set(kinds) - {_FULL, _SLIDING}:
        raise ConfigError(f"layers of kind {', '.join(sorted(map(str, unknown)))[:80]} are not known")
    if _SLIDING not in kinds:
        return [None] * num_layers
    window = fields.size("sliding_window") + (fields.model_type in _WINDOW_BESIDE_ITSELF)
    return [window if kind == _SLIDING else None for kind in kinds]


def _layer_kinds(fields: ConfigFields, num_layers: int) -> list[Any] | None:
    if (given := fields.layer_list("layer_types", num_layers)) is not None:
        return given
    every = fields.optional_size(*_PATTERN_FIELDS) or _PATTERNS.get(fields.model_type)
    if every is None:
        return None
    return [_SLIDING if (i + 1) % every else _FULL for i in range(num_layers)]


def _latent(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    index = 0
    if fields.model_type == "deepseek_v32":
        dim = fields.size("index_head_dim")
        index = dim + dim // _INDEX_VALUES_PER_SCALE * _INDEX_SCALE_BYTES
    return (LatentLayers(num_layers, fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim"), index),)


def _llama4(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Layers with rotary embeddings attend to chunks, the others to everything."""
    with_rope = fields.layer_list("no_rope_layers", num_layers)
    if not with_rope:
        every = fields.size("no_rope_layer_interval")
        with_rope = [int((i + 1) % every != 0) for i in range(num_layers)]
    chunk = fields.optional_size("attention_chunk_size")
    heads, dim = num_kv_heads(fields), head_dim(fields)
    counts = Counter(chunk if has_rope else None for has_rope in with_rope)
    return tuple(KvLayers(count, heads, dim, dim, chunk=chunk) for chunk, count in counts.items())


def _gemma3n(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """The last layers read the pages of earlier ones."""
    num_shared = fields.optional_size("num_kv_shared_layers", most=num_layers - 1) or 0
    return _windowed(fields, _windows(fields, num_layers)[: num_layers - num_shared])


def _hunyuan(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Cross-layer attention: the first of so many layers stores the pages that all of them read."""
    share = fields.size("cla_share_factor") if fields.flag("use_cla") else 1
    heads, dim = num_kv_heads(fields), head_dim(fields)
    return (KvLayers(-(-num_layers // share), heads, dim, dim),)


_OTHERS: Mapping[str, Callable[[ConfigFields, int], tuple[LayerGroup, ...]]] = {
    "llama4_text": _llama4,
    "gemma3n_text": _gemma3n,
    "hunyuan": _hunyuan,
}
