"""Reports of what tenants hold in a tier, by one process to another. A report costs what has changed since the last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, TenantUsage

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


class Holding(NamedTuple):
    """Usage, floor and cap of a tenant, in units of the tier."""

    used: int = 0
    floor: int = 0
    cap: int = 0
    borrowed: int = 0  # above the floor


_NOTHING = Holding()

# A name, and numbers: those of `Holding`, pages displaced, pages evicted by `Cause`, pages refused by `Refusal`.
Row = tuple[str, Sequence[int]]


class UsageReport:
    """The sums under `OTHER` follow from changes of their terms. An object of one tier, whose `counts` it reports."""

    def __init__(self, counts: TenantCounts, pages_per_unit: int = 1) -> None:
        self._counts = counts
        self._pages_per_unit = pages_per_unit
        self._unnamed: dict[str, Holding] = {}  # as reported last, without those that hold nothing
        self._sum = [0] * len(_NOTHING)  # of these

    def rows(self, changed: Iterable[tuple[str, Holding]]) -> list[Row]:
        """Return what to report where the holdings of these tenants may have changed."""
        rows: list[Row] = []
        has_other = False
        for name, holding in changed:
            is_named = name != OTHER and self._counts.has_name(name)
            if is_named:
                rows.append(self._row(name, holding))
            if not is_named or name in self._unnamed:
                self._sum_up(name, _NOTHING if is_named else holding)
                has_other = True
        if has_other:
            rows.append(self._row(OTHER, self._sum))
        return rows

    def _sum_up(self, name: str, holding: Holding) -> None:
        before = self._unnamed.pop(name, _NOTHING)
        self._sum = [total + now - then for total, now, then in zip(self._sum, holding, before, strict=True)]
        if holding != _NOTHING:
            self._unnamed[name] = holding

    def _row(self, name: str, holding: Sequence[int]) -> Row:
        counts = self._counts.of(name)
        units = (
            *holding,
            counts.displaced,
            *(counts.evicted[cause] for cause in Cause),
            *(counts.refused[refusal] for refusal in Refusal),
        )
        return name, [number * self._pages_per_unit for number in units]


def usages_of(rows: Iterable[Row]) -> dict[str, TenantUsage]:
    """Return the usages that `UsageReport.rows` has reported, in pages."""
    usages: dict[str, TenantUsage] = {}
    for name, (used, floor, cap, borrowed, displaced, *counts) in rows:
        usages[name] = TenantUsage(
            used=used,
            floor=floor,
            cap=cap,
            borrowed=borrowed,
            displaced=displaced,
            evicted=dict(zip(Cause, counts[: len(Cause)], strict=True)),
            refused=dict(zip(Refusal, counts[len(Cause) :], strict=True)),
        )
    return usages
