"""States of fixed size (Mamba, linear attention) of models, by `model_type`, as vLLM 0.32 keeps them.

Shapes are those of vLLM's `MambaStateShapeCalculator`: a convolution keeps one value less than its kernel has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import ConfigFields
from kvferry.pages.geometry.heads import attention_layers
from kvferry.pages.geometry.layers import LayerGroup, StateLayers, StateTensor

ATTENTION_FREE = frozenset({"mamba", "mamba2", "falcon_mamba"})
_ATTENTION_KINDS = frozenset({"attention", "full_attention"})
_STATE_KINDS = frozenset({"mamba", "linear_attention"})
_MAMBA2_CHECKPOINTS = 1  # vLLM keeps the state of a block's end inside a prompt, too
_STATE_DTYPE_IS_READ = frozenset({"qwen3_5_moe_text", "qwen3_5_text"})  # not of Qwen3-Next
_OTHER_KINDS = frozenset({"mlp", "moe"})  # feed-forward layers of Nemotron-H, which keep nothing


def _mamba(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    inner = fields.optional_size("intermediate_size") or fields.size("expand") * fields.size("hidden_size")
    return (StateLayers(num_layers, _mamba1_tensors(inner, fields.size("state_size"), fields.size("conv_kernel"))),)


def _mamba2(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    tensors = _mamba2_tensors(
        fields.size("expand") * fields.size("hidden_size"),
        num_groups=fields.size("n_groups"),
        num_heads=fields.size("num_heads"),
        head_dim=fields.size("head_dim"),
        state_size=fields.size("state_size"),
        conv_kernel=fields.size("conv_kernel"),
    )
    return (StateLayers(num_layers, tensors, _MAMBA2_CHECKPOINTS),)


def _falcon_h1(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    inner = fields.optional_size("mamba_d_ssm") or fields.size("mamba_expand") * fields.size("hidden_size")
    return (
        *attention_layers(fields, num_layers),
        StateLayers(num_layers, _mamba2_of_hybrid(fields, inner), _MAMBA2_CHECKPOINTS),
    )


def _granite_hybrid(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    inner = fields.size("mamba_expand") * fields.size("hidden_size")
    kinds = _kinds(fields, num_layers, "layer_types", "layers_block_type")
    return _mixed(fields, kinds, lambda: _mamba2_of_hybrid(fields, inner), _MAMBA2_CHECKPOINTS)


def _jamba(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    period, offset = fields.size("attn_layer_period"), fields.count("attn_layer_offset", most=num_layers)
    kinds = ["attention" if i % period == offset else "mamba" for i in range(num_layers)]
    inner = fields.size("mamba_expand") * fields.size("hidden_size")
    return _mixed(
        fields, kinds, lambda: _mamba1_tensors(inner, fields.size("mamba_d_state"), fields.size("mamba_d_conv"))
    )


def _nemotron_h(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    letters = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    pattern = fields.text("hybrid_override_pattern")
    if pattern and (len(pattern) != num_layers or set(pattern) - letters.keys()):
        raise ConfigError(f"hybrid_override_pattern needs {num_layers} letters of {' '.join(letters)}")
    kinds = [letters[each] for each in pattern] or _kinds(fields, num_layers, "layers_block_type")

    def tensors() -> tuple[StateTensor, ...]:
        heads, dim = fields.size("mamba_num_heads"), fields.size("mamba_head_dim")
        return _mamba2_tensors(
            heads * dim,
            num_groups=fields.size("n_groups"),
            num_heads=heads,
            head_dim=dim,
            state_size=fields.size("ssm_state_size"),
            conv_kernel=fields.size("conv_kernel"),
            dtype=fields.text("mamba_ssm_cache_dtype") or "float32",
        )

    return _mixed(fields, kinds, tensors, _MAMBA2_CHECKPOINTS)


def _gated_delta_net(fields: ConfigFields, num_layers: int) -> tuple[LayerGroup, ...]:
    kinds = fields.layer_list("layer_types", num_layers)
    if kinds is None:
        every = fields.size("full_attention_interval")
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]

    def tensors() -> tuple[StateTensor, ...]:
        key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
        key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        conv = StateTensor((channels, fields.size("linear_conv_kernel_dim") - 1))
        dtype = _state_dtype(fields.text("mamba_ssm_dtype")) if fields.model_type in _STATE_DTYPE_IS_READ else ""
        return (conv, StateTensor((value_heads, value_dim, key_dim), dtype))

    return _mixed(fields, kinds, tensors)


def _mixed(
    fields: ConfigFields,
    kinds: Sequence[str],
    tensors: Callable[[], tuple[StateTensor, ...]],
    num_checkpoints: int = 0,
) -> tuple[LayerGroup, ...]:
    if unknown := set(kinds) - _ATTENTION_KINDS - _STATE_KINDS - _OTHER_KINDS:
        raise ConfigError(f"layers of kind {', '.join(sorted(map(str, unknown)))[:80]} are not known")
    num_attention = sum(kind in _ATTENTION_KINDS for kind in kinds)
    num_states = sum(kind in _STATE_KINDS for kind in kinds)
    attention = attention_layers(fields, num_attention) if num_attention else ()
    return (*attention, *((StateLayers(num_states, tensors(), num_checkpoints),) if num_states else ()))


def _kinds(fields: ConfigFields, num_layers: int, *names: str) -> list[str]:
    for name in names:
        if (kinds := fields.layer_list(name, num_layers)) is not None:
            return kinds
    raise ConfigError(f"config.json of model_type {fields.model_type!r} lacks {' or '.join(names)}")


def _mamba2_of_hybrid(fields: ConfigFields, inner: int) -> tuple[StateTensor, ...]:
    heads = fields.size("mamba_n_heads")
    dim = inner // heads if fields.get("mamba_d_head") == "auto" else fields.size("mamba_d_head")
    return _mamba2_tensors(
        inner,
        num_groups=fields.size("mamba_n_groups"),
        num_heads=heads,
        head_dim=dim,
        state_size=fields.size("mamba_d_state"),
        conv_kernel=fields.size("mamba_d_conv"),
    )


def _mamba1_tensors(inner: int, state_size: int, conv_kernel: int) -> tuple[StateTensor, ...]:
    return (StateTensor((inner, conv_kernel - 1)), StateTensor((inner, state_size)))


def _mamba2_tensors(
    inner: int,
    *,
    num_groups: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    conv_kernel: int,
    dtype: str = "",
) -> tuple[StateTensor, ...]:
    channels = inner + 2 * num_groups * state_size
    conv = StateTensor((channels, conv_kernel - 1), groups=(num_groups, 2 * state_size))
    return (conv, StateTensor((num_heads, head_dim, state_size), _state_dtype(dtype)))


def _state_dtype(name: str) -> str:
    if name not in ("", "float32", "float16", "bfloat16"):
        raise ConfigError(f"states of type {name[:80]!r}; expected float32, float16 or bfloat16")
    return name


STATE_FAMILIES: Mapping[str, Callable[[ConfigFields, int], tuple[LayerGroup, ...]]] = {
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _mamba,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
}
