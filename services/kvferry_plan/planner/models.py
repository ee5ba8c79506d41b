"""A model as the planner sees it: its KV geometry, its weights, and the FLOPs and bytes of a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvferry.errors import ConfigError
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.pages.geometry.layers import KvLayers, LatentLayers, LayerGroup
from kvferry.pages.geometry.model import ModelGeometry
from kvferry_plan.planner.assumptions import Assumptions

# Bytes of one parameter. NVFP4 has one scale of a byte for 16 values, MXFP4 one for 32.
WEIGHT_BYTES: Final = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5625,
    "nvfp4": 0.5625,
    "mxfp4": 0.53125,
}
_SHORT: Final = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp4": "nvfp4"}
_FULL_PRECISION: Final = ("float32", "bfloat16", "float16")
# Quantization of checkpoints (`ModelGeometry.quantization`) by what a parameter takes.
_METHODS: Final = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt fp8": "fp8",
    "modelopt nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "modelopt_fp4": "nvfp4",
    "awq 4 bits": "int4",
    "gptq 4 bits": "int4",
    "gptq 8 bits": "int8",
}
_WEIGHTS_ALONE: Final = ("gptq", "awq")  # activations keep 16 bits
MAX_CONTEXT_TOKENS: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Geometry and weights. `weights` is a key of WEIGHT_BYTES."""

    geometry: ModelGeometry
    weights: str
    num_parameters: int
    num_active_parameters: int

    @property
    def is_mixture(self) -> bool:
        return self.geometry.num_experts > 1 and self.num_active_parameters < self.num_parameters

    @property
    def expert_parameters(self) -> float:
        """Parameters of all routed experts: total and active ones differ by the experts that a token does not take."""
        if not self.is_mixture:
            return 0.0
        unused = 1 - self.geometry.num_experts_per_token / self.geometry.num_experts
        return min(float(self.num_parameters), (self.num_parameters - self.num_active_parameters) / unused)

    @property
    def checkpoint_weights(self) -> str:
        """Type of the weights by config.json; empty: quantized by a method that leaves the type open."""
        if self.geometry.quantization:
            return _METHODS.get(self.geometry.quantization.lower(), "")
        return self.geometry.dtype

    @property
    def needs_other_checkpoint(self) -> bool:
        """Whether no engine gets these weights from the checkpoint: vLLM casts to 16 or 32 bits, and no further."""
        there = self.checkpoint_weights
        return there not in ("", self.weights) and not (there in _FULL_PRECISION and self.weights in _FULL_PRECISION)

    def weight_bytes(self, assumptions: Assumptions) -> float:
        """Bytes of all weights; of quantized ones a share stays in bfloat16."""
        return self.num_parameters * self.bytes_per_parameter(assumptions)

    def bytes_per_parameter(self, assumptions: Assumptions) -> float:
        quantized = WEIGHT_BYTES[self.weights]
        if self.weights in _FULL_PRECISION:
            return quantized
        kept = assumptions.bf16_weight_share
        return quantized * (1 - kept) + WEIGHT_BYTES["bfloat16"] * kept

    def touched_bytes(self, num_tokens: float, assumptions: Assumptions) -> float:
        """Bytes of weights that a step of `num_tokens` reads: of experts those that at least one token takes."""
        # Expected distinct experts of a layer under even routing: E * (1 - (1 - k/E)^n).
        dense = self.num_parameters - self.expert_parameters
        return (dense + self.expert_parameters * self.touched_share(num_tokens)) * self.bytes_per_parameter(assumptions)

    def touched_share(self, num_tokens: float) -> float:
        if not self.is_mixture:
            return 1.0
        missed = 1 - self.geometry.num_experts_per_token / self.geometry.num_experts
        return float(1 - missed**num_tokens)

    def compute_dtype(self) -> str:
        """Type in which products with the weights are computed, by the names of the GPU catalogue."""
        if self.geometry.quantization.startswith(_WEIGHTS_ALONE):
            return "bfloat16"
        # vLLM prefers its kernels for MXFP4 with activations in bfloat16, on GPUs with FP4 too.
        return {"nvfp4": "fp4", "mxfp4": "bfloat16"}.get(self.weights, self.weights)

    def attention_flops(self, num_tokens: int, num_cached: int = 0, *, is_decode: bool = False) -> float:
        """FLOPs of attention for `num_tokens` after `num_cached`, all heads and layers: Q*K and P*V."""
        heads = self.geometry.num_attention_heads
        return float(
            sum(
                group.num_layers
                * 2
                * heads
                * _values_of_a_pair(group, is_decode)
                * _attended(group, num_tokens, num_cached)
                for group in self.geometry.groups
            )
        )

    def kv_read_bytes(self, context_tokens: float, kv_cache_dtype: str, tensor_parallel_size: int = 1) -> float:
        """Bytes of KV that one rank reads for one token of a sequence with `context_tokens`."""
        dtype = kv_dtype(kv_cache_dtype)
        return sum(
            group.num_layers * group.token_bytes(dtype, tensor_parallel_size) * min(context_tokens, _limit(group))
            for group in self.geometry.groups
        ) + float(self.geometry.state_bytes(tensor_parallel_size))


def planned(geometry: ModelGeometry, weights: str | None, parameters: int | None, active: int | None) -> PlannedModel:
    """Raises ConfigError if parameters or the weights' type are not known."""
    total = parameters or geometry.num_parameters
    is_mixture = geometry.num_experts > 1
    if total is None:
        both = ", and --active-parameters (12.9e9), as it is a mixture of experts" if is_mixture else ""
        raise ConfigError(
            f"{geometry.name}: its parameters cannot be counted from config.json; give --parameters (such as "
            f"70.6e9){both}"
        )
    used = active or (geometry.num_active_parameters if parameters is None else None) or (None if is_mixture else total)
    if used is None:
        raise ConfigError(f"{geometry.name}: a mixture of experts; give --active-parameters (such as 37e9)")
    if not 0 < used <= total:
        raise ConfigError(f"--active-parameters {used}: expected 1 to {total}, the parameters in all")
    return PlannedModel(geometry, _weights(geometry, weights), total, used)


def _weights(geometry: ModelGeometry, given: str | None) -> str:
    name = _SHORT.get(given or "", given or "") or _METHODS.get(geometry.quantization.lower(), "")
    if not name:
        if geometry.quantization:
            raise ConfigError(
                f"{geometry.name}: weights quantized by {geometry.quantization!r}: give --weights, one of "
                f"{', '.join(WEIGHT_BYTES)}"
            )
        name = geometry.dtype
    if name not in WEIGHT_BYTES:
        raise ConfigError(f"--weights {name[:40]!r}: expected one of {', '.join((*WEIGHT_BYTES, *_SHORT))}")
    return name


def native_kv_dtype(model: PlannedModel, kv_cache_dtype: str) -> str:
    """Return the type of pages that `auto` means: what the checkpoint declares, or the model's own."""
    own = model.geometry.checkpoint_kv_dtype or model.geometry.dtype
    return own if kv_cache_dtype == "auto" else kv_cache_dtype


def head_dim(geometry: ModelGeometry) -> int | None:
    """Return the head size of layers with K and V, or None for a model without."""
    return next((group.head_dim for group in geometry.groups if isinstance(group, KvLayers)), None)


def _values_of_a_pair(group: LayerGroup, is_decode: bool) -> int:
    if isinstance(group, KvLayers):
        return group.head_dim + group.head_dim_v
    if isinstance(group, LatentLayers) and group.nope_dim and not is_decode:
        return group.nope_dim + group.rope_dim + group.value_dim
    # The absorbed form: scores over latent and rotated values, output over the latent.
    return 2 * group.latent_dim + group.rope_dim if isinstance(group, LatentLayers) else 0


def _limit(group: LayerGroup) -> float:
    if isinstance(group, KvLayers):
        return group.window or group.chunk or float("inf")
    return float("inf") if isinstance(group, LatentLayers) else 0


def _attended(group: LayerGroup, num_tokens: int, num_cached: int) -> float:
    # Sum of min(position, limit) over the positions num_cached + 1 ... num_cached + num_tokens.
    limit, last = _limit(group), num_cached + num_tokens
    full_until = min(last, max(num_cached, limit))
    growing = (full_until * (full_until + 1) - num_cached * (num_cached + 1)) / 2
    return growing + (last - full_until) * limit if last > full_until else growing
