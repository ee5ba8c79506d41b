"""Settings of a cache tier, and the part of a tenant's contract that a tier enforces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_CAP = 0.5  # of the tier


@dataclass(frozen=True, slots=True)
class TierContract:
    """Limits in units of the tier, pages or bytes. Raises ValueError."""

    floor: int = 0  # units that demand of other tenants cannot evict
    cap: int | None = None  # most units it may hold; None: half of the tier, or the floor where that is more
    weight: float = 1.0  # how much each use of a page counts against pages of other borrowers
    borrow: bool = True  # may hold more than the floor
    ttl_s: float | None = None  # since the last use

    def __post_init__(self) -> None:
        if self.floor < 0:
            raise ValueError(f"floor {self.floor} is negative")
        if self.cap is not None and self.cap < self.floor:
            raise ValueError(f"cap {self.cap} is below the floor of {self.floor}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight {self.weight} is no positive number")
        if self.ttl_s is not None and not (math.isfinite(self.ttl_s) and self.ttl_s > 0):
            raise ValueError(f"ttl_s {self.ttl_s} is no positive number of seconds")

    def cap_in(self, capacity: int) -> int:
        return self.cap if self.cap is not None else max(self.floor, int(capacity * DEFAULT_CAP))


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Raises ValueError."""

    capacity: int
    high_water: float = 1.0  # of the capacity: a reclaim starts above it
    low_water: float = 1.0  # and ends at it
    bonus_s: float = 60.0  # worth of one use
    ghosts_per_page: int = 8  # about 160 bytes each; a page about 250 (`make bench-retention`)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity {self.capacity} is less than 1")
        if not 0 <= self.low_water <= self.high_water <= 1:
            raise ValueError(f"low_water {self.low_water} and high_water {self.high_water}: 0 <= low <= high <= 1")
        if not (math.isfinite(self.bonus_s) and self.bonus_s >= 0):
            raise ValueError(f"bonus_s {self.bonus_s} is no number of seconds")
        if self.ghosts_per_page < 0:
            raise ValueError(f"ghosts_per_page {self.ghosts_per_page} is negative")


def check_floors(tenant_to_floor: Mapping[str, int], capacity: int) -> None:
    """Raise ValueError if the floors exceed the capacity."""
    total = sum(tenant_to_floor.values())
    if total > capacity:
        named = ", ".join(f"{tenant} {floor}" for tenant, floor in sorted(tenant_to_floor.items()) if floor)
        raise ValueError(f"floors sum to {total}, but the capacity is {capacity}: {named}")
