"""The pages of one tenant in one tier, in the order in which they may go, and tenants by what goes next."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvferry.tenancy.keyed_heap import KeyedHeap
from kvferry.tenancy.pages.hinted_pages import NEVER as NEVER
from kvferry.tenancy.pages.hinted_pages import HintedPages, Place, Spot
from kvferry.tenancy.pages.outcome import Cause, Refusal
from kvferry.tenancy.pages.page import MAX_REUSES, GhostHistory, Page, PageList
from kvferry.tenancy.terms import TierContract


class Candidate(NamedTuple):
    cause: Cause
    score: float
    page: Page
    instead_of: Page | None = None  # the wanted page whose place it is


class TenantPages:
    def __init__(self, name: str) -> None:
        self.name = name
        self.contract = TierContract()
        self.cap = 0
        self.usage = 0
        self.pinned = 0
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
        self._hinted: HintedPages[Page] | None = None  # made with the first hint

    def configure(self, contract: TierContract, cap: int, bonus_s: float) -> None:
        self.contract, self.cap, self._bonus_s = contract, cap, bonus_s * contract.weight
        if self._hinted is not None:
            self._hinted.shorten(contract.ttl_s)

    @property
    def limit(self) -> int:
        return self.cap if self.contract.borrow else self.contract.floor

    @property
    def wanted(self) -> int:
        """The wanted units that are not in use."""
        return 0 if self._hinted is None else self._hinted.num_free

    # Where a page waits

    def link(self, page: Page) -> None:
        hinted = self._hinted
        if hinted is not None and hinted.link(page, Place(page.used_s, page.level), self.contract.ttl_s):
            page.home = hinted
            return
        level = page.home = self._levels[page.level]
        level.append(page)

    def link_oldest(self, page: Page, now_s: float) -> None:
        level = page.home = self._levels[0]
        page.used_s = now_s if level.oldest is None else level.oldest.used_s
        level.put_back(page)

    def unlink(self, page: Page) -> PageList | Spot[Page]:
        home, page.home = page.home, None
        if isinstance(home, PageList):
            home.remove(page)
            return home
        assert self._hinted is not None, "the page is in no list"
        spot = self._hinted.unlink(page)
        assert spot is not None, "the page is in no list"
        return spot

    def put_back(self, page: Page, home: PageList | Spot[Page]) -> None:
        """Undo `unlink` of a list's first page."""
        if isinstance(home, PageList):
            page.home = home
            home.put_back(page)
        else:
            assert self._hinted is not None
            page.home = self._hinted
            self._hinted.put_back(page, home)

    def use(self, page: Page) -> None:
        is_linked = page.home is not None
        if is_linked:
            self.unlink(page)
        if self._hinted is not None:
            self._hinted.use(page)
        if is_linked:
            self.link(page)

    # Hints

    def want(self, page: Page, until_s: float) -> bool:
        hinted = self._hints()
        # The rest is for pages of requests without hints.
        most = max(self.contract.floor, self.limit // 2)
        if page.home is not None and self.contract.ttl_s is not None:
            until_s = min(until_s, page.used_s + self.contract.ttl_s)
        if page.home is None or hinted.place_of(page) is not None:
            return hinted.want(page, page.size, until_s, most)
        if until_s <= page.used_s or not hinted.has_room(page.size, most):
            return False
        self.unlink(page)
        hinted.want(page, page.size, until_s, most)
        self._link_hinted(page)
        return True

    def end(self, page: Page) -> None:
        hinted = self._hints()
        if hinted.place_of(page) is not None:
            return
        hinted.end(page)
        if page.home is not None:
            self.unlink(page)
            self._link_hinted(page)

    def forget(self, page: Page) -> None:
        if self._hinted is not None:
            self._hinted.forget(page)

    def trade_places(self, wanted: Page, page: Page) -> Place | None:
        """Give a wanted page the place of one that goes instead; return its old one, for `take_place`."""
        assert self._hinted is not None
        if wanted.size != page.size:
            return None  # the tenant would lose less, or more
        return self._hinted.move(wanted, self._hinted.place_of(page) or Place(page.used_s, page.level))

    def take_place(self, wanted: Page, place: Place) -> None:
        assert self._hinted is not None
        self._hinted.move(wanted, place)

    def end_wanted(self, now_s: float, max_pages: int) -> int:
        """Return the number of pages that were wanted until now."""
        return 0 if self._hinted is None else self._hinted.end_due(now_s, max_pages)

    def _hints(self) -> HintedPages[Page]:
        if self._hinted is None:
            self._hinted = HintedPages(self.contract.ttl_s)
        return self._hinted

    def _link_hinted(self, page: Page) -> None:
        assert self._hinted is not None
        is_linked = self._hinted.link(page, Place(page.used_s, page.level), self.contract.ttl_s)
        assert is_linked, "a page without hints"
        page.home = self._hinted

    # Which page goes

    def candidate(self) -> Candidate | None:
        """Return the page that other tenants' demand would evict."""
        if (ended := self._ended()) is not None:
            found = Candidate(Cause.ENDED, *ended)
        elif (following := self._next()) is not None:
            cause = Cause.OVER_CAP if self.usage > self.limit else Cause.BORROWED
            found = Candidate(cause, *following)
        else:
            return None
        return found if self.usage - found.page.size >= self.contract.floor else None

    def own_victim(self, now_s: float) -> Candidate | None:
        """Return the page that the tenant's own demand would evict."""
        if self.expires_s <= now_s and (oldest := self._oldest()):
            return Candidate(Cause.EXPIRED, *oldest)
        if (ended := self._ended()) is not None:
            return Candidate(Cause.ENDED, *ended)
        following = self._next()
        return None if following is None else Candidate(Cause.OWN, *following)

    @property
    def expires_s(self) -> float:
        if self.contract.ttl_s is None or (oldest := self._oldest()) is None:
            return NEVER
        return oldest[0] + self.contract.ttl_s

    def expired(self) -> Candidate:
        oldest = self._oldest()
        assert oldest is not None, "no page expires"
        return Candidate(Cause.EXPIRED, *oldest)

    @property
    def wanted_until_s(self) -> float:
        return NEVER if self._hinted is None else self._hinted.due_s

    @property
    def lendable(self) -> int:
        """The units that other tenants' demand could evict."""
        return max(0, min(self.usage - self.pinned, self.usage - self.contract.floor))

    def _ended(self) -> tuple[float, Page] | None:
        return None if self._hinted is None else self._hinted.ended()

    def _next(self) -> tuple[float, Page, Page | None] | None:
        # As `HintedPages.choose`.
        best: Page | None = None
        lowest = NEVER
        for reuses, level in enumerate(self._levels):
            if (page := level.oldest) is not None:
                score = page.used_s + self._bonus_s * (reuses + 1)
                if score < lowest:
                    lowest, best = score, page
        found = None if best is None else (lowest, best)
        if self._hinted is not None:
            return self._hinted.choose(found, self._bonus_s)
        return None if found is None else (*found, None)

    def _oldest(self) -> tuple[float, Page] | None:
        heads = [(page.used_s, page) for level in self._levels if (page := level.oldest) is not None]
        if self._hinted is not None and (found := self._hinted.oldest()) is not None:
            heads.append(found)
        return min(heads, key=lambda head: head[0], default=None)

    def check(self) -> None:
        pages = [page for level in self._levels for page in level]
        for level in self._levels:
            used = [page.used_s for page in level]
            assert used == sorted(used), "a level is out of order"
        if self._hinted is not None:
            self._hinted.check()
            pages += self._hinted.linked()
        assert all(page.is_resident and not page.num_pins and page.tenant == self.name for page in pages), (
            "a wrong page"
        )
        assert self.usage == self.pinned + sum(page.size for page in pages), "units of pages and of usage differ"
        assert all(page.tenant == self.name for page in pages), "a page of another tenant"
        assert len(pages) <= self.num_pages, "more pages than counted"


class TenantOrder:
    """Each change of a tenant takes O(log tenants), when a victim is next needed."""

    __slots__ = ("_by_candidate", "_by_expiry", "_by_wanted_until", "_changed", "lendable")

    def __init__(self) -> None:
        self.lendable = 0  # sum of `lent`
        self._by_candidate: KeyedHeap[TenantPages] = KeyedHeap()
        self._by_expiry: KeyedHeap[TenantPages] = KeyedHeap()
        self._by_wanted_until: KeyedHeap[TenantPages] = KeyedHeap()
        self._changed: set[TenantPages] = set()

    def update(self, tenant: TenantPages) -> None:
        lendable = tenant.lendable
        self.lendable += lendable - tenant.lent
        tenant.lent = lendable
        self._changed.add(tenant)
        _place(self._by_wanted_until, tenant, tenant.wanted_until_s)

    def remove(self, tenant: TenantPages) -> None:
        for heap in (self._by_candidate, self._by_expiry, self._by_wanted_until):
            heap.remove(tenant)
        self._changed.discard(tenant)

    def next_victim(self, now_s: float) -> Candidate | None:
        self._refresh()
        if (first := self._by_expiry.first) is not None and first[0][0] <= now_s:
            return first[1].expired()
        return None if (best := self._by_candidate.first) is None else best[1].next_out

    def first_with_due_wish(self, now_s: float) -> TenantPages | None:
        first = self._by_wanted_until.first
        return None if first is None or first[0][0] > now_s else first[1]

    def _refresh(self) -> None:
        for tenant in self._changed:
            tenant.next_out = candidate = tenant.candidate()
            if candidate is None:
                self._by_candidate.remove(tenant)
            else:
                self._by_candidate.put(tenant, (candidate.cause, candidate.score, tenant.name))
            _place(self._by_expiry, tenant, tenant.expires_s)
        self._changed.clear()

    def check(self) -> None:
        self._refresh()
        for heap in (self._by_candidate, self._by_expiry, self._by_wanted_until):
            heap.check()
        assert all(tenant.lent == tenant.lendable for tenant in self._by_candidate), "lent units are out of date"


def _place(heap: KeyedHeap[TenantPages], tenant: TenantPages, time_s: float) -> None:
    # Names make keys unique: which page goes does not depend on the order in a set.
    if time_s == NEVER:
        heap.remove(tenant)
    else:
        heap.put(tenant, (time_s, tenant.name))
