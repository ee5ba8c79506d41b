"""Memory of one GPU: weights, activations, what is left for KV pages, and how many requests that holds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from kvferry.pages.geometry.allocation import KvPool
from kvferry_plan.planner.assumptions import Assumptions
from kvferry_plan.planner.gpu_catalogue import Gpu
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.models import PlannedModel
from kvferry_plan.planner.workload import Demand

_Z99 = statistics.NormalDist().inv_cdf(0.99)


def pool_bytes(*, memory_bytes: float, gpu_memory_utilization: float, weight_bytes: float, other_bytes: float) -> float:
    """Return the bytes for KV pages of one GPU: as in vLLM 0.32 a share of all memory, less everything else."""
    return memory_bytes * gpu_memory_utilization - weight_bytes - other_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU of an engine. A pipeline's stages are assumed to be equal."""

    total_bytes: float
    usable_bytes: float  # by gpu_memory_utilization
    weight_bytes: float
    activation_bytes: float
    engine_bytes: float
    given_kv_bytes: int | None = None  # that the engine was told to take

    @property
    def kv_bytes(self) -> float:
        return self.left_bytes if self.given_kv_bytes is None else self.given_kv_bytes

    @property
    def left_bytes(self) -> float:
        # An engine that is told how much to take does not look at gpu_memory_utilization.
        most = self.usable_bytes if self.given_kv_bytes is None else self.total_bytes
        return most - self.weight_bytes - self.activation_bytes - self.engine_bytes


def memory(
    model: PlannedModel,
    gpu: Gpu,
    layout: Layout,
    assumptions: Assumptions,
    *,
    gpu_memory_utilization: float,
    max_num_batched_tokens: int,
    kv_cache_bytes: int | None = None,
) -> Memory:
    return Memory(
        total_bytes=gpu.memory_bytes,
        usable_bytes=gpu.memory_bytes * gpu_memory_utilization,
        weight_bytes=model.weight_bytes(assumptions) / layout.num_gpus,
        activation_bytes=2 * assumptions.activation_factor * model.geometry.hidden_size * max_num_batched_tokens,
        engine_bytes=assumptions.engine_bytes,
        given_kv_bytes=kv_cache_bytes,
    )


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Pages of one engine. Sizes are of one rank; pipeline stages each hold the pages of their layers."""

    pool: KvPool
    num_pages: int  # that the plan may use
    num_pages_in_all: int

    def pages_of(self, num_tokens: float) -> int:
        return self.pool.num_blocks_of_sequence(math.ceil(num_tokens))

    def max_requests(self, demand: Demand) -> int:
        """Return how many requests of independent lengths fit with a probability of 99 %."""
        # The shared beginning of prompts is held once.
        shared = self.pages_of(demand.shared_tokens) if demand.shared_tokens else 0
        mean = self.pages_of(demand.request_tokens) - shared
        free = self.num_pages - shared
        if free < mean or mean <= 0:
            return int(free >= mean > 0)
        deviation = mean * math.hypot(demand.prompt.deviation, demand.output.deviation) / demand.request_tokens
        # n mean + z deviation sqrt(n) = free, solved for sqrt(n).
        spread = _Z99 * deviation
        root = (-spread + math.sqrt(spread * spread + 4 * mean * free)) / (2 * mean)
        return math.floor(root * root + 1e-9)


def kv_room(
    model: PlannedModel, layout: Layout, kv_bytes: float, kv_cache_dtype: str, block_size: int, assumptions: Assumptions
) -> KvRoom:
    """Return the pages that `kv_bytes` of each GPU make. A block id of vLLM's pool is kept by vLLM itself."""
    pool = model.geometry.pool(kv_cache_dtype, block_size=block_size, tensor_parallel_size=layout.tensor_parallel_size)
    in_all = max(0, int(kv_bytes * layout.pipeline_parallel_size // pool.block_bytes) - 1)
    return KvRoom(pool, int(in_all * assumptions.kv_limit), in_all)
