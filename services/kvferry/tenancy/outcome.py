"""What a tier's policy decides: pages that go, stores that are refused, usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvferry.tenancy.page import Page


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


@dataclass(frozen=True, slots=True)
class TenantUsage:
    used: int
    pinned: int
    wanted: int
    borrowed: int
    floor: int
    cap: int
    num_pages: int
    num_ghosts: int
    evicted: Mapping[Cause, int]
    refused: Mapping[Refusal, int]
