"""What a tier counts of its tenants: a bounded number of them by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal

MAX_COUNTED: Final = 200  # tenants with counts of their own


class Counts:
    """Counts of one tenant, or of all that have none of their own."""

    __slots__ = ("displaced", "evicted", "refused")

    def __init__(self) -> None:
        self.evicted: Counter[Cause] = Counter()
        self.refused: Counter[Refusal] = Counter()
        self.displaced = 0  # pages of other tenants that were evicted for pages of this one


class TenantCounts:
    """Counts by name of the first tenants with a contract, and under `OTHER` the sums of all else. None ever falls."""

    def __init__(self) -> None:
        self._by_name = {OTHER: Counts()}

    def add_names(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._by_name) > MAX_COUNTED:
                return
            if name not in self._by_name:
                self._by_name[name] = Counts()

    @property
    def names(self) -> list[str]:
        """Without `OTHER`."""
        return [name for name in self._by_name if name != OTHER]

    def has_name(self, name: str) -> bool:
        return name in self._by_name

    def of(self, name: str) -> Counts:
        return self._by_name.get(name) or self._by_name[OTHER]
