"""Questions to the planner: a model, a demand, GPUs, and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvferry.errors import ConfigError
from kvferry_plan.planner.assumptions import DEFAULTS, Assumptions
from kvferry_plan.planner.gpu_catalogue import Gpu, Price
from kvferry_plan.planner.models import PlannedModel, native_kv_dtype
from kvferry_plan.planner.workload import Demand

Mode = Literal["any", "disaggregated", "aggregated"]
MAX_GPUS: Final = 100_000
MAX_KINDS: Final = 32  # of GPUs, in one plan
MAX_TIER_BYTES: Final = 1 << 50


@dataclass(frozen=True, slots=True)
class Question:
    """Settings have vLLM's names and defaults. `gpus` are those that may be used; a CPU node only if it is named."""

    model: PlannedModel
    demand: Demand
    gpus: Mapping[str, Gpu]
    kv_cache_dtype: str = "auto"
    assumptions: Assumptions = field(default=DEFAULTS)
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    mode: Mode = "any"
    budget_usd_per_hour: float | None = None
    max_gpus: int = MAX_GPUS
    cpu_tier_bytes: int = 0  # of one node
    volume_tier_bytes: int = 0
    kv_cache_bytes: int | None = None  # for KV pages of one GPU, whatever its memory leaves; as on the CPU device
    is_calibrated: bool = False  # efficiencies of prefill and decode were measured
    tier_architectures: frozenset[str] = frozenset()  # whose pages kvferry keeps in tiers; empty: not compared

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float, float]] = {
            "--gpu-memory-utilization": (self.gpu_memory_utilization, 0.05, 1),
            "--block-size": (self.block_size, 1, 1024),
            "--max-num-seqs": (self.max_num_seqs, 1, 65536),
            "--max-num-batched-tokens": (self.max_num_batched_tokens, 64, 1 << 20),
            "--max-gpus": (self.max_gpus, 1, MAX_GPUS),
            "--budget": (1 if self.budget_usd_per_hour is None else self.budget_usd_per_hour, 1e-3, 1e9),
            "--cpu-tier": (self.cpu_tier_bytes, 0, MAX_TIER_BYTES),
            "--volume-tier": (self.volume_tier_bytes, 0, MAX_TIER_BYTES),
        }
        for option, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise ConfigError(f"{option} {value:g}: expected {low:g} to {high:g}")
        if len(self.gpus) > MAX_KINDS:
            raise ConfigError(f"{len(self.gpus)} kinds of GPUs: at most {MAX_KINDS} are compared; name some with --gpu")
        longest = self.model.geometry.context_length
        if self.demand.context_tokens > longest:
            raise ConfigError(
                f"--context {self.demand.context_tokens}: {self.model.geometry.name} takes {longest} tokens; vLLM "
                "refuses more without rope overrides"
            )
        if self.demand.restored_share and not (self.cpu_tier_bytes or self.volume_tier_bytes):
            raise ConfigError("--restored-share needs a tier to restore from: --cpu-tier or --volume-tier")

    @property
    def kv_dtype(self) -> str:
        return native_kv_dtype(self.model, self.kv_cache_dtype)

    def with_changes(self, **changes: object) -> Question:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]  # names of fields, checked by replace


def priced(gpus: Mapping[str, Gpu], usd_per_hour: Mapping[str, float]) -> Mapping[str, Gpu]:
    """Return the GPUs, those that `usd_per_hour` names with this price of the user's own."""

    def with_price(gpu: Gpu, usd: float | None) -> Gpu:
        if usd is None:
            return gpu
        return gpu.model_copy(update={"prices": (Price(usd_per_hour=usd, source="--price"),)})

    return {name: with_price(gpu, usd_per_hour.get(name)) for name, gpu in gpus.items()}
