"""The terms of tenants in a tier that learns them from requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvferry.tenancy.contract import TierContract
from kvferry.tenancy.terms import TierTerms, contracts_in

MAX_KNOWN: Final = 2048  # tenants


class KnownTerms:
    """Terms of the tenants that were seen last, as contracts in `capacity` units of a tier."""

    def __init__(self, tier: str, capacity: int) -> None:
        self._tier = tier
        self._capacity = capacity
        self._terms: OrderedDict[str, TierTerms] = OrderedDict()  # least recently seen first

    def learn(self, tenant: str, terms: TierTerms) -> dict[str, TierContract] | None:
        """Return the contracts of all, or None where none has changed."""
        is_same = self._terms.get(tenant) == terms
        self._terms[tenant] = terms
        self._terms.move_to_end(tenant)
        if is_same:
            return None
        if len(self._terms) > MAX_KNOWN:
            self._terms.popitem(last=False)
        return self.contracts()

    def contracts(self) -> dict[str, TierContract]:
        tiers = {tenant: {self._tier: terms} for tenant, terms in self._terms.items()}
        return contracts_in(self._tier, tiers, self._capacity)
