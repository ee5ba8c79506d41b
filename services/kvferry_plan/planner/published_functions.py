"""Functions that published figures name: the planner's own arithmetic under the terms of the figures."""

# `functions` binds them to a source of geometries, so that this package stays without I/O. Bytes, seconds, tokens.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.pages.geometry.layers import KvLayers, LatentLayers
from kvferry.pages.geometry.model import ModelGeometry
from kvferry_plan.planner import engine_settings, gpu_catalogue, kv_dtypes
from kvferry_plan.planner.memory import pool_bytes

GeometryOf = Callable[[str], ModelGeometry]
_BF16_BYTES = 2.0


def functions(geometry_of: GeometryOf) -> Mapping[str, Callable[..., float | bool]]:
    """Return the functions by name."""
    bound = _Published(geometry_of)
    found: tuple[Callable[..., float | bool], ...] = (
        bound.kv_bytes,
        bound.gqa_factor,
        bound.mla_factor,
        bound.is_latent,
        bound.kv_ratio,
        bound.kv_saving,
        bound.element_bytes,
        bound.kv_dtype_share,
        bound.kv_dtype_factor,
        bound.kv_dtype_saving_percent,
        bound.weight_bytes,
        bound.kv_over_weights,
        bound.footprint_bytes,
        bound.gpus_for,
        bound.heads_left_over,
        bound.requests_in_memory,
        bound.restore_s,
        bound.sessions_to_equal,
        bound.price_per_gpu_hour,
        bound.prefill_tokens,
        bound.kv_dtype_runs,
        bound.kv_dtype_needs,
        bound.context_fits,
        bound.kv_scale_is,
        bound.utilization_is_of,
        bound.setting_holds,
    )
    return {function.__name__: function for function in found}


class _Published:
    # One method for each function; arguments are those of the entries.

    def __init__(self, geometry_of: GeometryOf) -> None:
        self._geometry_of = geometry_of

    def kv_bytes(
        self, model: str, kv_cache_dtype: str, tokens: int, users: int, as_mha: bool = False, **_: Any
    ) -> float:
        """Bytes of whole tokens of all users: no page rounding. `as_mha`: with a KV head for each query head."""
        geometry = self._geometry_of(model)
        bytes_per_token: float
        if kv_cache_dtype in kv_dtypes.PAYLOADS:
            share = kv_dtypes.PAYLOADS[kv_cache_dtype] / _BF16_BYTES
            bytes_per_token = geometry.bytes_per_token("bfloat16") * share
        else:
            bytes_per_token = geometry.bytes_per_token(kv_cache_dtype)
        if as_mha:
            bytes_per_token *= self.gqa_factor(model)
        return bytes_per_token * tokens * users

    def gqa_factor(self, model: str) -> float:
        geometry = self._geometry_of(model)
        (group,) = geometry.groups
        assert isinstance(group, KvLayers)
        return geometry.num_attention_heads / group.num_kv_heads

    def mla_factor(self, model: str, head_dim: int) -> float:
        """Values of K and V of all query heads by those of the latent."""
        geometry = self._geometry_of(model)
        (group,) = geometry.groups
        assert isinstance(group, LatentLayers)
        return 2 * geometry.num_attention_heads * head_dim / (group.latent_dim + group.rope_dim)

    def is_latent(self, model: str) -> bool:
        return any(isinstance(group, LatentLayers) for group in self._geometry_of(model).groups)

    def kv_ratio(self, model: str, against: str) -> float:
        return self._geometry_of(model).bytes_per_token("bfloat16") / self._geometry_of(against).bytes_per_token(
            "bfloat16"
        )

    def kv_saving(self, model: str, against: str) -> float:
        return 1 - self.kv_ratio(model, against)

    def element_bytes(self, kv_cache_dtype: str, head_dim: int) -> float:
        if kv_cache_dtype in kv_dtypes.PAYLOADS:
            return kv_dtypes.PAYLOADS[kv_cache_dtype]
        return kv_dtype(kv_cache_dtype).head_bytes(head_dim) / head_dim

    def kv_dtype_share(self, kv_cache_dtype: str) -> float:
        """Bytes against bfloat16."""
        return self.element_bytes(kv_cache_dtype, 128) / _BF16_BYTES

    def kv_dtype_factor(self, kv_cache_dtype: str) -> float:
        return 1 / self.kv_dtype_share(kv_cache_dtype)

    def kv_dtype_saving_percent(self, kv_cache_dtype: str) -> float:
        return 100 * (1 - self.kv_dtype_share(kv_cache_dtype))

    def weight_bytes(self, model: str, bytes_per_parameter: float) -> float:
        """All parameters in one type, as the figures count: none of a quantized model's stay in bfloat16."""
        num_parameters = self._geometry_of(model).num_parameters
        assert num_parameters is not None
        return num_parameters * bytes_per_parameter

    def kv_over_weights(self, model: str, weight_bytes_per_parameter: float, **kv: Any) -> float:
        return self.kv_bytes(model, **kv) / self.weight_bytes(model, weight_bytes_per_parameter)

    def footprint_bytes(
        self,
        model: str,
        weight_bytes: float | None = None,
        bytes_per_parameter: float = 1,
        headroom: float = 0,
        **kv: Any,
    ) -> float:
        weights = self.weight_bytes(model, bytes_per_parameter) if weight_bytes is None else weight_bytes
        return (weights + self.kv_bytes(model, **kv)) * (1 + headroom)

    def gpus_for(self, total_bytes: float, usable_bytes: float) -> float:
        return math.ceil(total_bytes / usable_bytes)

    def heads_left_over(self, model: str, tensor_parallel_size: int) -> float:
        return self._geometry_of(model).num_attention_heads % tensor_parallel_size

    def requests_in_memory(
        self,
        model: str,
        gpu: str,
        num_gpus: int,
        gpu_memory_utilization: float,
        bytes_per_parameter: float,
        kv_cache_dtype: str,
        tokens: int,
    ) -> float:
        """Requests of `tokens` beside the weights. Nothing is kept for activations."""
        # The figures take 85.52e9 bytes for an H100: what its driver reports, to four digits.
        memory_bytes = float(f"{gpu_catalogue.shipped()[gpu].memory_bytes:.4g}")
        pool = num_gpus * pool_bytes(
            memory_bytes=memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            weight_bytes=self.weight_bytes(model, bytes_per_parameter) / num_gpus,
            other_bytes=0,
        )
        return pool / self.kv_bytes(model, kv_cache_dtype, tokens, 1)

    def restore_s(self, model: str, kv_cache_dtype: str, tokens: int, stages_bytes_s: Sequence[float]) -> float:
        """Seconds for pages of one sequence through stages one after the other."""
        return sum(self.kv_bytes(model, kv_cache_dtype, tokens, 1) / stage for stage in stages_bytes_s)

    def sessions_to_equal(self, weight_bytes: float, model: str, kv_cache_dtype: str, tokens: int) -> float:
        return weight_bytes / self.kv_bytes(model, kv_cache_dtype, tokens, 1)

    def price_per_gpu_hour(self, gpu: str) -> float:
        price = gpu_catalogue.shipped()[gpu].price()
        assert price is not None
        return price.usd_per_hour

    def prefill_tokens(self, shared_tokens: int, own_tokens: int, requests: int, prefix_cache: bool) -> float:
        times_shared = 1 if prefix_cache else requests
        return times_shared * shared_tokens + requests * own_tokens

    def kv_dtype_runs(self, kv_cache_dtype: str, gpu: str, weights: str) -> bool:
        return kv_dtypes.support(kv_cache_dtype, gpu_catalogue.shipped()[gpu], weights=weights).runs

    def kv_dtype_needs(self, kv_cache_dtype: str, only: Sequence[str]) -> bool:
        """Whether these of the catalogue's NVIDIA GPUs run the type, and no others."""
        gpus = gpu_catalogue.shipped()
        running = {name for name, gpu in gpus.items() if kv_dtypes.support(kv_cache_dtype, gpu).runs}
        return running == set(only)

    def context_fits(self, model: str, tokens: int) -> bool:
        return tokens <= self._geometry_of(model).context_length

    def kv_scale_is(self, granularity: str) -> bool:
        return granularity in kv_dtypes.SCALE_GRANULARITIES

    def utilization_is_of(self, base: str) -> bool:
        """Whether vLLM's gpu_memory_utilization is a share of `base`: compared by what the pool is computed from."""
        halves = {
            "all device memory": pool_bytes(
                memory_bytes=100, gpu_memory_utilization=0.5, weight_bytes=20, other_bytes=0
            )
            == 0.5 * 100 - 20,
            "memory left after weights": pool_bytes(
                memory_bytes=100, gpu_memory_utilization=0.5, weight_bytes=20, other_bytes=0
            )
            == 0.5 * (100 - 20),
        }
        return halves[base]

    def setting_holds(self, engine: str, setting: str) -> bool:
        return engine_settings.find(engine, setting).holds
