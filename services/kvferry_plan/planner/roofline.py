"""Seconds of a prefill and of a decode step of one engine: the slower of compute and memory, and the links between."""

# Rooflines (Williams, Waterman, Patterson, 2009) with a named efficiency for each roof. Tensor parallelism adds two
# all-reduces a layer (Shoeybi et al., Megatron-LM, 2019); a ring of n ranks moves 2 (n - 1) / n of the bytes.

from __future__ import annotations

from dataclasses import dataclass

from kvferry_plan.planner.assumptions import Assumptions
from kvferry_plan.planner.gpu_catalogue import Gpu
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.models import PlannedModel

_ACTIVATION_BYTES = 2  # of one value that passes between ranks


@dataclass(frozen=True, slots=True)
class Roof:
    """Seconds by what takes them. Compute and memory overlap; the links and the overhead do not."""

    compute_s: float
    memory_s: float
    link_s: float
    overhead_s: float

    @property
    def total_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.link_s + self.overhead_s

    @property
    def binds(self) -> str:
        parts = {
            "compute": self.compute_s,
            "memory bandwidth": self.memory_s,
            "link between GPUs": self.link_s,
            "step overhead": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: a model, on GPUs of one kind, in one layout."""

    model: PlannedModel
    gpu: Gpu
    layout: Layout
    kv_cache_dtype: str
    assumptions: Assumptions

    @property
    def weight_flops_s(self) -> float:
        """FLOP/s of one rank that multiplies with weights."""
        return self.gpu.flops_of(self.model.compute_dtype())[0]

    @property
    def attention_flops_s(self) -> float:
        """FLOP/s of one rank in attention: in the model's own type, whatever the type of the weights is."""
        return self.gpu.flops_of(self.model.geometry.dtype)[0]

    def attention_s(self, num_tokens: int, num_cached: int, mfu: float, *, is_decode: bool = False) -> float:
        """Seconds of attention of `num_tokens` after `num_cached`, all heads and layers."""
        flops = self.model.attention_flops(num_tokens, num_cached, is_decode=is_decode)
        return flops / (self.attention_flops_s * self.layout.tensor_parallel_size * mfu)

    def weights_s(self, num_tokens: float, mfu: float) -> float:
        """Seconds of the products of `num_tokens` with the weights, if compute binds."""
        flops = 2.0 * self.model.num_active_parameters * num_tokens
        return flops / (self.weight_flops_s * self.layout.tensor_parallel_size * mfu)

    def prefill(self, num_tokens: float, num_cached: float = 0) -> Roof:
        """Compute `num_tokens` of a prompt after `num_cached`. A pipeline's stages run one after the other."""
        tokens, cached = max(1, round(num_tokens)), round(num_cached)
        assume = self.assumptions
        weights = self.model.touched_bytes(tokens, assume) / self.layout.tensor_parallel_size
        return Roof(
            compute_s=self.weights_s(tokens, assume.prefill_mfu) + self.attention_s(tokens, cached, assume.prefill_mfu),
            memory_s=weights / (self.gpu.memory_bytes_s * assume.memory_efficiency),
            link_s=self._link_s(tokens),
            overhead_s=assume.prefill_overhead_s,
        )

    def decode_step(self, num_requests: float, context_tokens: float) -> Roof:
        """Generate one token of each of `num_requests`, with contexts of `context_tokens` on the average."""
        # In a pipeline each stage has its share of the requests at a time, and a token passes all stages.
        assume, tensor = self.assumptions, self.layout.tensor_parallel_size
        batch = max(1.0, num_requests / self.layout.pipeline_parallel_size)
        weights = self.model.touched_bytes(batch, assume) / tensor
        kv = batch * self.model.kv_read_bytes(context_tokens, self.kv_cache_dtype, tensor)
        attention_s = self.attention_s(1, max(0, round(context_tokens) - 1), assume.decode_mfu, is_decode=True)
        return Roof(
            compute_s=self.weights_s(batch, assume.decode_mfu) + batch * attention_s,
            memory_s=(weights + kv) / (self.gpu.memory_bytes_s * assume.memory_efficiency),
            link_s=self._link_s(batch),
            overhead_s=assume.step_overhead_s,
        )

    def tokens_per_s(self, num_requests: float, context_tokens: float) -> float:
        return num_requests / self.decode_step(num_requests, context_tokens).total_s

    def max_requests_within(self, tpot_s: float, context_tokens: float, at_most: int) -> int:
        """Return the largest batch whose step takes at most `tpot_s`; 0 if not even one request's does."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode_step(middle, context_tokens).total_s <= tpot_s:
                low = middle
            else:
                high = middle
        return low

    def kv_bytes_of_rank(self, num_tokens: float) -> float:
        """Bytes of KV that one GPU of the engine holds of a sequence, without page rounding."""
        per_rank = self.model.kv_read_bytes(num_tokens, self.kv_cache_dtype, self.layout.tensor_parallel_size)
        return per_rank / self.layout.pipeline_parallel_size

    def transfer_s(self, num_tokens: float) -> float:
        """Seconds to move the KV of a prompt to another engine: every GPU over its own network link."""
        return self.kv_bytes_of_rank(num_tokens) / (self.gpu.network_bytes_s * self.assumptions.network_efficiency)

    def load_s(self, num_tokens: float, *, from_volume: bool) -> float:
        """Seconds to load KV from CPU memory, or from the node's volumes, whose bandwidth the engine's GPUs share."""
        rank_bytes = self.kv_bytes_of_rank(num_tokens)
        host_s = rank_bytes / (self.gpu.host_bytes_s * self.assumptions.host_efficiency)
        if not from_volume:
            return host_s
        # Read and copied to the GPU chunk by chunk, so the slower of both counts.
        return max(host_s, rank_bytes * self.layout.num_gpus / self.assumptions.volume_bytes_s)

    def _link_s(self, num_tokens: float) -> float:
        geometry, tensor, pipeline = self.model.geometry, *self._sizes()
        message = num_tokens * geometry.hidden_size * _ACTIVATION_BYTES
        seconds = 0.0
        if tensor > 1:
            rate = (self.gpu.peer_bytes_s or self.gpu.host_bytes_s) * self.assumptions.peer_efficiency
            ring = 2 * (tensor - 1) / tensor * message / rate
            seconds += 2 * geometry.num_layers * (ring + self.assumptions.peer_latency_s)
        if pipeline > 1:
            rate = self.gpu.network_bytes_s * self.assumptions.network_efficiency
            seconds += (pipeline - 1) * (message / rate + self.assumptions.peer_latency_s)
        return seconds

    def _sizes(self) -> tuple[int, int]:
        return self.layout.tensor_parallel_size, self.layout.pipeline_parallel_size
