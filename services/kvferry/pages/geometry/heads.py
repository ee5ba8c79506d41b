"""KV heads and head sizes of attention, from config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import ConfigFields
from kvferry.pages.geometry.layers import KvLayers, LayerGroup

QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN_SIZE = ("hidden_size", "n_embd", "n_embed", "d_model")
# Each query head has KV of its own, whatever other fields say.
_MULTI_HEAD = frozenset({"bloom", "gpt2", "gptj"})
# vLLM divides the hidden size among the query heads, whatever `head_dim` says.
_DERIVED_HEAD_DIM = frozenset(
    {
        "bloom",
        "falcon",
        "gpt2",
        "gptj",
        "granitemoe",
        "granitemoehybrid",
        "jamba",
        "olmoe",
        "qwen2",
        "qwen2_moe",
        "stablelm",
    }
)
_KV_HEADS = ("num_key_value_heads", "multi_query_group_num", "num_attention_groups")


def num_kv_heads(fields: ConfigFields) -> int:
    """Without a field, each query head has its own."""
    if fields.model_type == "falcon":
        return _falcon_kv_heads(fields)
    if fields.model_type in _MULTI_HEAD:
        return fields.size(*QUERY_HEADS)
    return fields.optional_size(*_KV_HEADS) or fields.size(*QUERY_HEADS)


def _falcon_kv_heads(fields: ConfigFields) -> int:
    # vLLM reads the number of the new architecture alone.
    given = fields.optional_size("num_kv_heads") if fields.flag("new_decoder_architecture") else None
    if given is None and fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    return given or fields.size(*QUERY_HEADS)


def head_dim(fields: ConfigFields) -> int:
    given = None if fields.model_type in _DERIVED_HEAD_DIM else fields.optional_size("head_dim")
    if given is not None:
        return given
    hidden, heads = fields.size(*HIDDEN_SIZE), fields.size(*QUERY_HEADS)
    if hidden % heads:
        raise ConfigError(f"config.json lacks head_dim, and hidden_size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def attention_layers(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    """Layers that keep every token."""
    return windowed_layers(fields, [None] * num_layers)


def windowed_layers(fields: ConfigFields, windows: Iterable[int | None]) -> tuple[LayerGroup, ...]:
    """Layers of equal heads, by their windows."""
    heads, dim = num_kv_heads(fields), head_dim(fields)
    return tuple(KvLayers(count, heads, dim, dim, window=window) for window, count in Counter(windows).items())
