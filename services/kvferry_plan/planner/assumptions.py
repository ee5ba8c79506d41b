"""Factors of the planner that are assumptions: each is named, can be set, and is replaced by `--calibrate`."""

# None of the defaults was measured on a GPU by this project.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from kvferry.errors import ConfigError


def _assumed(default: float, low: float, high: float, text: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "text": text})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Values; what each means is in its metadata, see `describe`."""

    prefill_mfu: float = _assumed(0.5, 1e-4, 1, "share of the GPU's dense FLOP/s that prefill reaches")
    decode_mfu: float = _assumed(0.3, 1e-4, 1, "share of the GPU's dense FLOP/s that decode reaches")
    memory_efficiency: float = _assumed(0.75, 1e-4, 1, "share of the memory bandwidth that a decode step reaches")
    peer_efficiency: float = _assumed(0.7, 1e-3, 1, "share of NVLink, Infinity Fabric or PCIe that all-reduce reaches")
    network_efficiency: float = _assumed(0.8, 1e-3, 1, "share of the network that KV transfer reaches")
    host_efficiency: float = _assumed(0.6, 1e-3, 1, "share of the link to the host that loads from CPU memory reach")
    volume_bytes_s: float = _assumed(12e9, 1e6, 1e13, "bytes/s that one node reads from its NVMe volumes")
    peer_latency_s: float = _assumed(10e-6, 0, 1, "seconds of one all-reduce of few bytes between peers")
    step_overhead_s: float = _assumed(1e-3, 0, 10, "seconds of an engine step that no roofline covers")
    prefill_overhead_s: float = _assumed(5e-3, 0, 60, "seconds of a prefill that no roofline covers")
    routing_s: float = _assumed(5e-3, 0, 60, "seconds of gateway, rendering and placement in the TTFT")
    engine_bytes: float = _assumed(2.5e9, 0, 1e12, "bytes of one GPU for CUDA's context, NCCL and CUDA graphs")
    activation_factor: float = _assumed(
        12, 0, 1000, "activations: this times hidden size times 2 bytes for each token of the largest step"
    )
    bf16_weight_share: float = _assumed(
        0.03, 0, 1, "share of a quantized model's parameters that stay in bfloat16 (embeddings, head, norms)"
    )
    utilization_limit: float = _assumed(0.85, 0.05, 0.99, "share of their time that prefill workers may be busy")
    least_load: float = _assumed(
        0.05,
        0,
        0.5,
        "share of what an engine could serve by KV pages, TPOT and prefill; a TTFT that several engines keep only "
        "below it counts as missed",
    )
    kv_limit: float = _assumed(0.85, 0.05, 1, "share of the KV pages that the plan may use (rules: kv-use-high)")
    ttft_percentile: float = _assumed(0.99, 0.5, 0.9999, "share of requests that meet the TTFT objective")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, low, high = getattr(self, each.name), each.metadata["low"], each.metadata["high"]
            if not low <= value <= high:
                raise ConfigError(f"assumption {each.name}: {value:g} is not within {low:g} to {high:g}")


DEFAULTS: Final = Assumptions()


def with_values(given: Mapping[str, float], base: Assumptions = DEFAULTS) -> Assumptions:
    """Raises ConfigError for an unknown name or a value out of range."""
    known = {each.name for each in fields(Assumptions)}
    for name in given:
        if name not in known:
            raise ConfigError(f"--assume {name[:80]!r}: unknown; known are {', '.join(sorted(known))}")
    return replace(base, **given)


def describe(assumptions: Assumptions) -> list[tuple[str, float, str]]:
    """Return name, value and meaning of each."""
    return [(each.name, getattr(assumptions, each.name), each.metadata["text"]) for each in fields(assumptions)]
