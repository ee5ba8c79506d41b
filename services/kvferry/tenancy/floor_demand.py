"""Demand of tenants on one node, which decides where their floors go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

HALF_LIFE_S: Final = 60.0


class FloorDemand:
    """Uses of the last minute or so, by tenant."""

    def __init__(self, now_s: Callable[[], float], least: float) -> None:
        """Demand below `least` is none."""
        self._now_s = now_s
        self._least = least
        self._counted_s = now_s()
        self._demand: dict[str, float] = {}

    def count(self, num_uses: Mapping[str, float]) -> Mapping[str, float]:
        """Add uses since the last call, and return the demand of these tenants. Others are forgotten."""
        now_s = self._now_s()
        left = 0.5 ** ((now_s - self._counted_s) / HALF_LIFE_S)
        self._counted_s = now_s
        demand = {tenant: self._demand.get(tenant, 0.0) * left + uses for tenant, uses in num_uses.items()}
        self._demand = {tenant: uses for tenant, uses in demand.items() if uses >= self._least}
        return self._demand
