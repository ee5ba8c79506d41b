"""Faults of a type of KV pages that are known before anything runs: checkpoint, device and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_json import from_config
from kvferry.pages.geometry.kv_dtypes import kv_dtype

_UNSCALED = ("float32", "bfloat16", "float16")
_FP8 = ("fp8_e4m3", "fp8_e5m2")
_ON_CPU = (*_UNSCALED, *_FP8)  # vLLM's CPUAttentionBackend.supported_kv_cache_dtypes
_METHODS_WITH_KV_SCALES = ("fp8", "modelopt", "modelopt_fp4", "quark")
_CPU_HEAD_UNIT = 32
_E4M3_LARGEST, _E5M2_LARGEST = 448, 57_344
_MIN_CAPABILITY = {  # of NVIDIA GPUs, by vLLM 0.32's attention backends; not run
    "bfloat16": 80, "fp8_e4m3": 80, "fp8_e5m2": 80, "fp8_per_token_head": 89, "int8_per_token_head": 75,
    "int4_per_token_head": 75, "nvfp4": 80, "nvfp4_4over6": 100, "fp8_ds_mla": 90, "nvfp4_ds_mla": 100,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Hardware:
    device: str  # cpu or gpu
    name: str
    has_avx512: bool = False  # of a CPU, or AMX
    capability: int = 0  # of a GPU: 90 is SM 9.0


@dataclass(frozen=True, slots=True)
class Obstacles:
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]


def find_obstacles(config: Mapping[str, Any], dtype_name: str, hardware: Hardware) -> Obstacles:
    """Raises ConfigError for a type or a model whose pages are not known."""
    dtype = kv_dtype(dtype_name).name
    geometry = from_config(config)
    refusals, warnings = [], []
    try:
        geometry.bytes_per_token(dtype)
    except ConfigError as error:
        refusals.append(error.message)
    if dtype == "float32" and geometry.checkpoint_kv_dtype:
        refusals.append(
            f"the checkpoint declares pages of type {geometry.checkpoint_kv_dtype}; vLLM has no option for float32 "
            "beside it"
        )
    if dtype == "fp8_e5m2" and _may_have_kv_scales(config):
        refusals.append("vLLM refuses fp8_e5m2 pages with an FP8 checkpoint; fp8_e4m3 is possible")
    if hardware.device == "cpu":
        refusals += _of_cpu(dtype, geometry.groups, hardware)
    elif hardware.capability < _MIN_CAPABILITY.get(dtype, 0):
        needed = _MIN_CAPABILITY[dtype]
        refusals.append(
            f"pages of type {dtype} need compute capability {needed / 10:g}; {hardware.name} has "
            f"{hardware.capability / 10:g}"
        )
    if dtype in _FP8 and not _has_kv_scales(config):
        largest = _E4M3_LARGEST if dtype == "fp8_e4m3" else _E5M2_LARGEST
        warnings.append(
            f"scales are not calibrated: config.json has no kv_cache_scheme, vLLM takes 1.0, and values of K and V "
            f"beyond {largest:,} are cut"
        )
    return Obstacles(tuple(refusals), tuple(warnings))


def _of_cpu(dtype: str, groups: Any, hardware: Hardware) -> list[str]:
    if dtype not in _ON_CPU:
        return [f"vLLM's attention on CPUs has no pages of type {dtype}; it has {', '.join(_ON_CPU)}"]
    if dtype not in _FP8:
        return []
    found = []
    if not hardware.has_avx512:
        found.append(
            f"pages of type {dtype} need AVX-512 or AMX, which {hardware.name} lacks: measure where it is, on a GPU "
            f"(--set engine.device=gpu), or one of {', '.join(_UNSCALED)} here"
        )
    dims = {group.head_dim for group in groups if hasattr(group, "head_dim")}
    if odd := [dim for dim in sorted(dims) if dim % _CPU_HEAD_UNIT]:
        found.append(f"pages of type {dtype} need head sizes that {_CPU_HEAD_UNIT} divides on CPUs, not {odd[0]}")
    return found


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    values = config.get("quantization_config")
    return values if isinstance(values, Mapping) else {}


def _may_have_kv_scales(config: Mapping[str, Any]) -> bool:
    """Whether vLLM looks for scales of pages in the checkpoint, as its Attention layer decides."""
    values = _quantization(config)
    method = str(values.get("quant_method", "")).lower()
    return method in _METHODS_WITH_KV_SCALES or (
        method == "compressed-tensors" and values.get("kv_cache_scheme") is not None
    )


def _has_kv_scales(config: Mapping[str, Any]) -> bool:
    values = _quantization(config)
    return bool(values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo"))
