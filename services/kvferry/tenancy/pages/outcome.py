"""Decisions of a tier's policy: evicted pages, refused stores, usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from kvferry.tenancy.pages.page import Page


class Cause(IntEnum):
    """Causes of evictions; lower ones go first."""

    EXPIRED = 0
    ENDED = 1  # its session ended, or the time for which it was wanted
    OVER_CAP = 2
    BORROWED = 3  # its tenant held more than its floor
    OWN = 4  # for a page of the same tenant


class Refusal(IntEnum):
    """Reasons to refuse a store."""

    LIMIT = 0  # over the cap or, without borrowing, the floor, and too few own pages may go
    NO_ROOM = 1  # all other pages are pinned or within floors


class Victim(NamedTuple):
    """A page that the tier has to remove."""

    page: Page
    cause: Cause


class Stored(NamedTuple):
    page: Page
    victims: list[Victim]  # their room is the page's: the tier removes them before it writes


OTHER: Final = "other"  # tenants that are not named


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    used: int = 0
    pinned: int = 0
    wanted: int = 0
    borrowed: int = 0
    floor: int = 0
    cap: int = 0
    num_pages: int = 0
    num_ghosts: int = 0
    num_uses: int = 0  # hits and stores
    displaced: int = 0  # pages of other tenants that were evicted for its own
    evicted: Mapping[Cause, int]
    refused: Mapping[Refusal, int]

    def plus(self, other: TenantUsage) -> TenantUsage:
        return TenantUsage(
            used=self.used + other.used,
            pinned=self.pinned + other.pinned,
            wanted=self.wanted + other.wanted,
            borrowed=self.borrowed + other.borrowed,
            floor=self.floor + other.floor,
            cap=self.cap + other.cap,
            num_pages=self.num_pages + other.num_pages,
            num_ghosts=self.num_ghosts + other.num_ghosts,
            num_uses=self.num_uses + other.num_uses,
            displaced=self.displaced + other.displaced,
            evicted={cause: self.evicted[cause] + other.evicted[cause] for cause in Cause},
            refused={refusal: self.refused[refusal] + other.refused[refusal] for refusal in Refusal},
        )
