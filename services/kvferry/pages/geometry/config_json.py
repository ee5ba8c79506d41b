"""Reads a model's geometry from its config.json, as vLLM 0.32 would serve it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_fields import MAX_LAYERS, ConfigFields
from kvferry.pages.geometry.families import DEFAULTS, NOT_COMPARED, layers_of, model_types
from kvferry.pages.geometry.heads import HIDDEN_SIZE, QUERY_HEADS
from kvferry.pages.geometry.model import ModelGeometry
from kvferry.pages.geometry.state_families import ATTENTION_FREE

# Parts of a multimodal configuration that describe its language model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_ENCODER_DECODERS = frozenset(
    {"t5", "umt5", "mt5", "bart", "mbart", "whisper", "m2m_100", "marian", "pegasus", "blenderbot", "led", "t5gemma"}
)
_MODELOPT_KV_DTYPES = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}
_DTYPES = ("bfloat16", "float16", "float32")


def from_config(config: Mapping[str, Any], *, name: str = "the model") -> ModelGeometry:
    """Read a parsed config.json; a multimodal one for its language model.

    Raises ConfigError for an encoder-decoder, an unknown `model_type`, and a missing or unusable field.
    """
    try:
        return _read(config, name)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None


def _read(config: Mapping[str, Any], name: str) -> ModelGeometry:
    text = next((config[part] for part in _TEXT_PARTS if isinstance(config.get(part), Mapping)), config)
    model_type = _model_type(config, text)
    if model_type not in model_types():
        known = ", ".join(sorted(model_types()))
        raise ConfigError(f"KV pages of model_type {model_type[:80]!r} are not known; known are {known}")
    fields = ConfigFields(text, DEFAULTS.get(model_type, {}), model_type)
    num_layers = fields.size("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS)
    is_attention_free = model_type in ATTENTION_FREE
    architectures = config.get("architectures")
    quantization = config.get("quantization_config") or text.get("quantization_config")
    return ModelGeometry(
        name=name,
        model_type=model_type,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "",
        groups=layers_of(fields, num_layers),
        num_layers=num_layers,
        not_compared=NOT_COMPARED.get(model_type, ""),
        # States are divided among ranks by their own sizes.
        num_attention_heads=0 if is_attention_free else fields.size(*QUERY_HEADS),
        hidden_size=fields.size(*HIDDEN_SIZE),
        vocab_size=fields.size("vocab_size", "padded_vocab_size"),
        context_length=_context_length(fields, is_attention_free),
        dtype=_dtype(config, text),
        quantization=_quantization(quantization) if isinstance(quantization, Mapping) else "",
        checkpoint_kv_dtype=_declared_kv_dtype(quantization) if isinstance(quantization, Mapping) else "",
        num_experts=fields.count("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"),
        num_experts_per_token=fields.count(
            "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "experts_per_token"
        ),
    )


def _model_type(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    model_type = text.get("model_type") or config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json lacks model_type")
    of_all = config.get("model_type")
    is_listed = any(isinstance(each, str) and each in _ENCODER_DECODERS for each in (model_type, of_all))
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder") or is_listed:
        raise ConfigError(
            f"model_type {model_type[:80]!r} is an encoder-decoder; kvferry serves none, and sizes none: its "
            "cross-attention keeps pages of the encoder's output, too"
        )
    return model_type


def _context_length(fields: ConfigFields, is_attention_free: bool) -> int:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
    if fields.get("model_max_length") is not None:
        return fields.size("model_max_length")
    if is_attention_free and fields.get(*names) is None:
        return 1 << 20  # a state has no longest context
    return fields.size(*names)


def _quantization(values: Mapping[str, Any]) -> str:
    """Return the method, with what decides the width of weights: bits of gptq and awq, the algorithm of modelopt."""
    method = str(values.get("quant_method", "")).lower()
    if method in ("gptq", "awq"):
        bits = values.get("bits", values.get("w_bit"))
        return f"{method} {bits} bits" if isinstance(bits, int) and not isinstance(bits, bool) else method
    if method == "modelopt":
        inner = values.get("quantization")
        algorithm = values.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
        return f"{method} {algorithm.upper()}" if isinstance(algorithm, str) and algorithm else method
    return method


def _declared_kv_dtype(values: Mapping[str, Any]) -> str:
    # As vLLM resolves `auto` (get_kv_cache_quant_algo_string, Attention).
    method = str(values.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return "" if values.get("kv_cache_scheme") is None else "fp8_e4m3"
    if not method.startswith("modelopt"):
        return ""
    inner = values.get("quantization")
    places = (inner, values) if isinstance(inner, Mapping) else (values,)
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    declared = next((place[name] for name in names for place in places if place.get(name)), None)
    if isinstance(declared, Mapping):
        bits = declared.get("num_bits") if declared.get("type") == "float" else None
        declared = "fp8" if bits == 8 and declared.get("dynamic") is False else "nvfp4" if bits == 4 else None
    return _MODELOPT_KV_DTYPES.get(declared.lower(), "") if isinstance(declared, str) else ""


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for values in (config, text):
        for name in ("dtype", "torch_dtype"):
            value = values.get(name)
            if isinstance(value, str) and value.removeprefix("torch.") in _DTYPES:
                return value.removeprefix("torch.")
    return "bfloat16"
