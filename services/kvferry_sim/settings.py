"""Settings of the simulated engine: the section `sim` of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class SimConfig(BaseModel):
    """Timing model and sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefill_tokens_per_s: float = Field(20_000, gt=0)
    step_ms: float = Field(5.0, ge=0)
    num_pages: int = Field(4096, ge=2)
    page_bytes: int = Field(4096, ge=64)
    max_model_len: int = Field(8192, ge=64)
    answer_tokens: int = Field(64, ge=1)  # mean length of an answer that nothing else ends
    transfer_lease_s: float = Field(30.0, gt=0)
    cpu_pages: int = Field(4096, ge=2)  # pages of the CPU tier, where tier.enabled
    tier_page_ms: float = Field(0.5, ge=0)  # to load one page from the CPU tier


def read_settings(values: Mapping[str, Any]) -> SimConfig:
    """Raises ValueError, which names each setting that is wrong."""
    try:
        return SimConfig.model_validate(values)
    except ValidationError as error:
        faults = (f"sim.{'.'.join(map(str, fault['loc']))}: {_reason(fault)}" for fault in error.errors())
        raise ValueError("; ".join(faults)) from None


def _reason(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return f"no such setting; there are {', '.join(SimConfig.model_fields)}"
    return f"{fault['msg']}, not {fault['input']!r}"
