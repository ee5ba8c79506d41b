"""Terms of a tenant's contract, as parts of what a cluster has, and the classes of tenants."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

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


def check_sum_of_floors(tenant_to_floor: Mapping[str, int], capacity: int) -> None:
    """Raise ValueError if the floors exceed the capacity."""
    total = sum(tenant_to_floor.values())
    if total > capacity:
        named = ", ".join(f"{tenant} {floor}" for tenant, floor in sorted(tenant_to_floor.items()) if floor)
        raise ValueError(f"floors sum to {total}, but the capacity is {capacity}: {named}")


VOLUME_TIER: Final = "volume"
CPU_TIER: Final = "cpu"
DEVICE_TIER: Final = "device"  # an engine's own memory
TIERS: Final = (VOLUME_TIER, CPU_TIER, DEVICE_TIER)  # those that keep contracts
# Parts of a tier that all floors together may take. Requests that run need the rest of a device's memory.
MAX_FLOORS: Final[Mapping[str, float]] = {VOLUME_TIER: 1.0, CPU_TIER: 1.0, DEVICE_TIER: 0.5}

_DAY_S: Final = 86400.0
MAX_TTL_S: Final = 3650 * _DAY_S
# For which a client's request may say that its pages are wanted.
MAX_WANTED_S: Final = _DAY_S


class TierTerms(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contract of a tenant for a tier, as shares of the tier's capacity."""

    floor: float = 0.0  # that demand of other tenants cannot evict
    cap: float = DEFAULT_CAP  # beyond it the tenant's own pages go first, where nothing is free
    borrow: bool = True  # may hold more than the floor
    ttl_s: float | None = None  # since the last use; None: as long as there is room

    def check(self, tier: str) -> None:
        """Raises ValueError naming the fault."""
        if tier == CPU_TIER and self.ttl_s is not None:
            raise ValueError("ttl: pages have no time to live there")
        if tier in (CPU_TIER, DEVICE_TIER) and not self.borrow:
            raise ValueError("borrow: what is free there may be used")
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor {self.floor}: a part of the tier, from 0 to 1")
        if not 0 < self.cap <= 1:
            raise ValueError(f"cap {self.cap}: a part of the tier, over 0, at most 1")
        if self.cap < self.floor:
            raise ValueError(f"cap {self.cap} is below the floor of {self.floor}")
        if self.ttl_s is not None and not 1 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl {self.ttl_s} s: from 1 s to {MAX_TTL_S:g} s")

    def contract_in(self, capacity: int, floor_scale: float = 1.0) -> TierContract:
        floor = int(self.floor * floor_scale * capacity)
        return TierContract(floor=floor, cap=max(floor, int(self.cap * capacity)), borrow=self.borrow, ttl_s=self.ttl_s)

    def with_floor(self, floor: float | None) -> TierTerms:
        """Return these terms with a floor that followed demand, if it did."""
        return self if floor is None else msgspec.structs.replace(self, floor=min(floor, self.cap))


class TenantClass(msgspec.Struct, frozen=True):
    """Presets of a contract."""

    share: float  # of a saturated cluster's work, to others' shares
    tiers: Mapping[str, TierTerms]


def _class(share: float, cap: float, volume_ttl_s: float) -> TenantClass:
    in_engines = TierTerms(cap=cap)
    tiers = {VOLUME_TIER: TierTerms(cap=cap, ttl_s=volume_ttl_s), CPU_TIER: in_engines, DEVICE_TIER: in_engines}
    return TenantClass(share, tiers)


# Floors are guarantees: they are given to tenants by name, for those of a class could exceed what there is.
CLASSES: Final[Mapping[str, TenantClass]] = {
    "premium": _class(4.0, 0.75, 30 * _DAY_S),
    "standard": _class(1.0, 0.5, 7 * _DAY_S),
    "basic": _class(0.25, 0.25, _DAY_S),
}
DEFAULT_CLASS: Final = "standard"


TenantToTiers = Mapping[str, Mapping[str, TierTerms]]


def contracts_in(tier: str, tenant_to_terms: TenantToTiers, capacity: int) -> dict[str, TierContract]:
    """Return the contracts of a tier with `capacity` units. Floors that together exceed their part are scaled down."""
    terms = {tenant: tiers[tier] for tenant, tiers in tenant_to_terms.items()}
    scale = _scale(tier, terms)
    return {tenant: each.contract_in(capacity, scale) for tenant, each in terms.items()}


def floor_parts(tier: str, tenant_to_terms: TenantToTiers) -> dict[str, float]:
    """Return the floors of tenants that have one, as parts of a tier's capacity; as `contracts_in` scales them."""
    terms = {tenant: tiers[tier] for tenant, tiers in tenant_to_terms.items()}
    scale = _scale(tier, terms)
    return {tenant: each.floor * scale for tenant, each in terms.items() if each.floor}


def _scale(tier: str, terms: Mapping[str, TierTerms]) -> float:
    total = math.fsum(each.floor for each in terms.values())
    return min(1.0, MAX_FLOORS[tier] / total) if total else 1.0


def check_floors(tenant_to_terms: TenantToTiers) -> None:
    """Raise ValueError where the tenants' floors in a tier exceed their part of it."""
    for tier in TIERS:
        floors = {tenant: tiers[tier].floor for tenant, tiers in tenant_to_terms.items()}
        total = math.fsum(floors.values())
        if total > MAX_FLOORS[tier] + 1e-9:
            largest = sorted(filter(floors.__getitem__, floors), key=lambda tenant: -floors[tenant])[:5]
            named = ", ".join(f"{tenant} {floors[tenant]:.0%}" for tenant in largest)
            limit = f"{MAX_FLOORS[tier]:.0%} is the limit"
            raise ValueError(f"floors in the {tier} tier sum to {total:.1%}; {limit}: {named}")


def describe(terms: TierTerms) -> str:
    """For people."""
    ttl = "no end" if terms.ttl_s is None else f"{terms.ttl_s:.10g} s"
    return f"floor {terms.floor:.3g}, cap {terms.cap:.3g}, {'borrows' if terms.borrow else 'floor only'}, ttl {ttl}"


MAX_KNOWN: Final = 2048  # tenants


class KnownTerms:
    """Terms of all tenants, and contracts in `capacity` units of a tier for those that were seen last."""

    def __init__(self, tier: str, capacity: int) -> None:
        self._tier = tier
        self._capacity = capacity
        self._terms: dict[str, TierTerms] = {}
        self._seen: OrderedDict[str, None] = OrderedDict()  # also tenants without terms; least recently seen first
        self._contracts: dict[str, TierContract] = {}  # as returned last

    def see(self, tenant: str) -> dict[str, TierContract] | None:
        """Return the contracts of all tenants that are seen, or None where none has changed."""
        if tenant in self._seen:
            self._seen.move_to_end(tenant)
            return None
        self._seen[tenant] = None
        forgotten = None
        if len(self._seen) > MAX_KNOWN:  # floors are guarantees, also of tenants that pause
            may_go = (each for each in self._seen if each not in self._terms or not self._terms[each].floor)
            forgotten = next(may_go, tenant)
            del self._seen[forgotten]
        return self._changed() if tenant in self._terms or forgotten in self._terms else None

    def change(self, terms: Mapping[str, TierTerms | None]) -> dict[str, TierContract] | None:
        """As `see`, for new terms of tenants; with None a tenant has none any more."""
        for tenant in terms:
            self._terms.pop(tenant, None)
        self._terms |= {tenant: each for tenant, each in terms.items() if each is not None}
        return self._changed() if any(tenant in self._seen for tenant in terms) else None

    def _changed(self) -> dict[str, TierContract] | None:
        tiers = {tenant: {self._tier: self._terms[tenant]} for tenant in self._seen if tenant in self._terms}
        before, self._contracts = self._contracts, contracts_in(self._tier, tiers, self._capacity)
        return None if self._contracts == before else self._contracts
