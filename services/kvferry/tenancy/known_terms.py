"""The terms of tenants in a tier that learns them from requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import msgspec

from kvferry.tenancy.contract import TierContract
from kvferry.tenancy.terms import TierTerms, contracts_in

MAX_KNOWN: Final = 2048  # tenants


class KnownTerms:
    """Terms of the tenants that were seen last, as contracts in `capacity` units of a tier."""

    def __init__(self, tier: str, capacity: int) -> None:
        self._tier = tier
        self._capacity = capacity
        self._terms: OrderedDict[str, TierTerms] = OrderedDict()  # least recently seen first
        self._moved: dict[str, float] = {}  # floors that follow demand, as parts of the tier
        self._contracts: dict[str, TierContract] = {}  # as returned last

    def learn(self, tenant: str, terms: TierTerms) -> dict[str, TierContract] | None:
        """Return the contracts of all, or None where none has changed."""
        before = self._terms.get(tenant)
        is_same = before == terms
        if before is not None and before.floor != terms.floor:
            self._moved.pop(tenant, None)  # it was a part of the floor before
        self._terms[tenant] = terms
        self._terms.move_to_end(tenant)
        if is_same:
            return None
        if len(self._terms) > MAX_KNOWN:
            self._terms.popitem(last=False)
        return self.contracts()

    def move(self, floors: Mapping[str, float]) -> dict[str, TierContract] | None:
        """As `learn`, for all floors that follow demand: they replace those in the terms of their tenants."""
        if floors == self._moved:
            return None  # as at most times: they come every few seconds
        before, self._moved = self._contracts, dict(floors)
        contracts = self.contracts()
        return None if contracts == before else contracts

    def contracts(self) -> dict[str, TierContract]:
        tiers = {tenant: {self._tier: self._with_moved(tenant, terms)} for tenant, terms in self._terms.items()}
        self._contracts = contracts_in(self._tier, tiers, self._capacity)
        return self._contracts

    def _with_moved(self, tenant: str, terms: TierTerms) -> TierTerms:
        # A floor that was taken away since is not brought back.
        if not terms.floor or (floor := self._moved.get(tenant)) is None:
            return terms
        return msgspec.structs.replace(terms, floor=min(floor, terms.cap))
