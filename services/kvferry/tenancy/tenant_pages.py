"""The pages of one tenant in one tier, in the order in which they may go."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvferry.tenancy.contract import TierContract
from kvferry.tenancy.ghosts import GhostHistory
from kvferry.tenancy.indexed_heap import IndexedHeap
from kvferry.tenancy.outcome import Cause, Refusal
from kvferry.tenancy.page import MAX_REUSES, Page, PageList

NEVER = float("inf")


class Candidate(NamedTuple):
    cause: Cause
    score: float
    page: Page


class TenantPages:
    def __init__(self, name: str) -> None:
        self.name = name
        self.contract = TierContract()
        self.cap = 0
        self.usage = 0
        self.pinned = 0
        self.wanted = 0
        self.lent = 0  # what other tenants could evict when `Retention` counted last
        self.next_out: Candidate | None = None  # as `TenantOrder` saw it last
        self.num_pages = 0
        self.num_evicted: Counter[Cause] = Counter()
        self.num_refused: Counter[Refusal] = Counter()
        self.num_uses = 0  # hits and stores
        self.num_displaced = 0  # pages of others
        self.ghosts = GhostHistory()
        self._bonus_s = 0.0
        self._levels = tuple(PageList() for _ in range(MAX_REUSES + 1))
        self._ended: IndexedHeap[Page] = IndexedHeap()  # by last use
        self._wanted: IndexedHeap[Page] = IndexedHeap()  # by the end of their protection

    def configure(self, contract: TierContract, cap: int, bonus_s: float) -> None:
        self.contract, self.cap, self._bonus_s = contract, cap, bonus_s * contract.weight
        for page in list(self._wanted):
            self._wanted.put(page, self._wanted_until(page))

    @property
    def limit(self) -> int:
        return self.cap if self.contract.borrow else self.contract.floor

    # Where a page waits

    def link(self, page: Page) -> None:
        if page.is_ended:
            page.home = self._ended
            self._ended.put(page, page.used_s)
        elif page.wanted_s is not None and self.wanted + page.size <= self.contract.floor:
            page.home = self._wanted
            self._wanted.put(page, self._wanted_until(page))
            self.wanted += page.size
        else:
            page.wanted_s = None
            level = self._levels[page.reuses]
            page.home = level
            level.append(page)

    def link_oldest(self, page: Page, now_s: float) -> None:
        level = page.home = self._levels[0]
        page.used_s = now_s if level.oldest is None else level.oldest.used_s
        level.put_back(page)

    def unlink(self, page: Page) -> PageList | IndexedHeap[Page]:
        home = page.home
        assert home is not None, "the page is in no list"
        home.remove(page)
        page.home = None
        if home is self._wanted:
            self.wanted -= page.size
        return home

    def put_back(self, page: Page, home: PageList | IndexedHeap[Page]) -> None:
        """Undo `unlink` of a list's first page."""
        if isinstance(home, PageList):
            page.home = home
            home.put_back(page)
        else:
            self.link(page)

    def move(self, page: Page) -> None:
        if page.home is not None:
            self.unlink(page)
            self.link(page)

    def want(self, page: Page, wanted_s: float, now_s: float) -> bool:
        others = self.wanted - (page.size if page.home is self._wanted else 0)
        if others + page.size > self.contract.floor:
            return False
        page.wanted_s, page.is_ended, page.used_s = wanted_s, False, now_s
        self.move(page)
        return True

    def end(self, page: Page) -> None:
        page.wanted_s, page.is_ended = None, True
        self.move(page)

    def end_wanted(self, now_s: float, max_pages: int) -> int:
        """Return the number of pages that were wanted until now."""
        for num_ended in range(max_pages):
            first = self._wanted.first
            if first is None or first[0] > now_s:
                return num_ended
            self.end(first[1])
        return max_pages

    # Which page goes

    def candidate(self) -> Candidate | None:
        """Return the page that other tenants' demand would evict."""
        if (first := self._ended.first) is not None:
            found = Candidate(Cause.ENDED, first[0], first[1])
        elif (best := self._lowest_score() or self._unprotected()) is not None:
            cause = Cause.OVER_CAP if self.usage > self.limit else Cause.BORROWED
            found = Candidate(cause, *best)
        else:
            return None
        return found if self.usage - found.page.size >= self.contract.floor else None

    def own_victim(self, now_s: float) -> Candidate | None:
        """Return the page that the tenant's own demand would evict."""
        if self.expires_s <= now_s and (oldest := self._oldest()):
            return Candidate(Cause.EXPIRED, oldest.used_s, oldest)
        if first := self._ended.first:
            return Candidate(Cause.ENDED, *first)
        found = self._lowest_score() or self._wanted.first
        return None if found is None else Candidate(Cause.OWN, *found)

    @property
    def expires_s(self) -> float:
        if self.contract.ttl_s is None or (page := self._oldest()) is None:
            return NEVER
        return page.used_s + self.contract.ttl_s

    def expired(self) -> Candidate:
        page = self._oldest()
        assert page is not None, "no page expires"
        return Candidate(Cause.EXPIRED, page.used_s, page)

    @property
    def wanted_until_s(self) -> float:
        first = self._wanted.first
        return NEVER if first is None else first[0]

    @property
    def lendable(self) -> int:
        """The units that other tenants' demand could evict."""
        floor = self.contract.floor
        return max(0, min(self.usage - self.pinned - min(self.wanted, floor), self.usage - floor))

    def _lowest_score(self) -> tuple[float, Page] | None:
        best: Page | None = None
        lowest = NEVER
        for reuses, level in enumerate(self._levels):
            if (page := level.oldest) is not None:
                score = page.used_s + self._bonus_s * (reuses + 1)
                if score < lowest:
                    lowest, best = score, page
        return None if best is None else (lowest, best)

    def _wanted_until(self, page: Page) -> float:
        ttl_s = NEVER if self.contract.ttl_s is None else self.contract.ttl_s
        return page.used_s + min(page.wanted_s or 0.0, ttl_s)

    def _unprotected(self) -> tuple[float, Page] | None:
        # A floor was lowered below what is wanted.
        if self.wanted <= self.contract.floor or (first := self._wanted.first) is None:
            return None
        page = first[1]
        if self.wanted - page.size < self.contract.floor:
            return None
        return page.used_s + self._bonus_s * (page.reuses + 1), page

    def _oldest(self) -> Page | None:
        heads = [page for level in self._levels if (page := level.oldest) is not None]
        if (first := self._ended.first) is not None:
            heads.append(first[1])
        return min(heads, key=lambda page: page.used_s, default=None)

    def check(self) -> None:
        pages = [page for level in self._levels for page in level]
        for level in self._levels:
            used = [page.used_s for page in level]
            assert used == sorted(used), "a level is out of order"
        self._ended.check()
        self._wanted.check()
        assert self.wanted == sum(page.size for page in self._wanted), "wanted units"
        pages += [*self._ended, *self._wanted]
        assert all(page.is_resident and not page.num_pins and page.tenant == self.name for page in pages), (
            "a wrong page"
        )
        assert self.usage == self.pinned + sum(page.size for page in pages), "units of pages and of usage differ"
        assert all(page.tenant == self.name for page in pages), "a page of another tenant"
        assert len(pages) <= self.num_pages, "more pages than counted"
