"""Terms of a tenant's contract, as parts of what a cluster has, and the classes of tenants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec

from kvferry.tenancy.contract import DEFAULT_CAP, TierContract

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
    """What a tenant may keep in a tier, as parts of the tier's capacity."""

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


class EngineTerms(msgspec.Struct, frozen=True):
    """What a tenant may keep in each engine."""

    cpu: TierTerms
    device: TierTerms


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
    ttl = "no end" if terms.ttl_s is None else f"{terms.ttl_s:g} s"
    return f"floor {terms.floor:.3g}, cap {terms.cap:.3g}, {'borrows' if terms.borrow else 'floor only'}, ttl {ttl}"
