"""Eviction in a cache tier of many tenants, one policy for GPU pages, CPU pages and NVMe chunks."""

# A page's score is its last use + 60 s x weight x uses (at most 5; ghosts remember them). First go expired pages, then
# those of ended sessions, of tenants above their cap, and the lowest score of all tenants above their floors. Clients'
# hints order pages of one tenant (`hinted_pages`).

# One order of all that is borrowed, instead of the largest usage per weight first: on the conversation trace the
# aggregate stays above that of a global LRU, and floors give a tenant the hits of a partition (`make bench-tenants`).

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from kvferry.tenancy.pages.hinted_pages import Place, Spot, first_private
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, Stored, TenantUsage, Victim
from kvferry.tenancy.pages.page import MAX_COUNTED_REUSES, Page, PageList
from kvferry.tenancy.pages.tenant_pages import NEVER, Candidate, TenantOrder, TenantPages
from kvferry.tenancy.pages.usage_report import TenantCounts
from kvferry.tenancy.terms import TierContract, TierSettings, check_sum_of_floors

_DEFAULT = TierContract()

# Bounds the work of one call; pages that were wanted until now and are left stay wanted until the next call.
ENDS_PER_CALL = 64


class _Taken(NamedTuple):
    candidate: Candidate
    home: PageList | Spot[Page]
    is_evicted: bool  # or set aside, because it may not go now
    left: Place | None = None  # by the wanted page that has its place now


def _any(page: Page) -> bool:
    return True


class Retention:
    """Decisions for one tier; an earlier `now_s` counts as the latest."""

    def __init__(self, settings: TierSettings) -> None:
        self.settings = settings
        self.used = 0
        self.counts = TenantCounts()  # of all pages since the start
        self._low = int(settings.capacity * settings.low_water)
        self._high = int(settings.capacity * settings.high_water)
        self._contracts: dict[str, TierContract] = {}
        self._tenants: dict[str, TenantPages] = {}
        self._order = TenantOrder()
        self._now_s = -NEVER
        self._is_reclaiming = False

    def __repr__(self) -> str:
        return f"<Retention of {self.used} of {self.settings.capacity} units, {len(self._tenants)} tenants>"

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Replace all contracts, or raise ValueError if their floors exceed the capacity."""
        check_sum_of_floors({name: contract.floor for name, contract in contracts.items()}, self.settings.capacity)
        self._contracts = dict(contracts)
        self.counts.add_names(contracts)
        for tenant in list(self._tenants.values()):
            self._configure(tenant)
            self._order.update(tenant)
            self._drop_if_unused(tenant)

    # Pages

    def store(self, name: str, key: Hashable, size: int, now_s: float) -> Stored | Refusal:
        """Admit a new page and evict for it, or refuse it and evict nothing."""
        if size < 1:
            raise ValueError(f"a page of {size} units")
        victims = self.reserve(name, size, max(0, self.used + size - self.settings.capacity), now_s)
        if isinstance(victims, Refusal):
            return victims
        page = Page(name, key, size, self._now_s)
        self.fill(page, self._now_s)
        return Stored(page, victims)

    def reserve(
        self, name: str, size: int, num_missing: int, now_s: float, may_go: Callable[[Page], bool] = _any
    ) -> list[Victim] | Refusal:
        """Evict `num_missing` units for a page and hold `size` of them, until `fill` or `release`; or refuse it."""
        self._advance(now_s)
        tenant = self._tenant(name)
        # Above its limit a tenant grows into free room only, or not at all.
        may_grow = max(0, size - num_missing) if tenant.contract.borrow else 0
        num_own = min(size - may_grow, max(0, tenant.usage + size - tenant.limit))
        # The page counts from here on: it is what lifts its tenant above the floor.
        self.hold(name, size)
        taken: list[_Taken] = []
        refusal = self._make_room(tenant, num_own, num_missing, may_go, taken)
        for each in reversed(taken):
            if refusal is not None or not each.is_evicted:
                self._put_back(each)
        if refusal is not None:
            tenant.num_refused[refusal] += 1
            self.counts.of(name).refused[refusal] += 1
            self.release(name, size)
            return refusal
        victims = [self._evict(each.candidate, tenant) for each in taken if each.is_evicted]
        for victim in victims:
            self._drop_if_unused(self._tenants.get(victim.page.tenant, tenant))
        return victims

    def hold(self, name: str, size: int) -> None:
        """Count a page, as `reserve` does, without limits."""
        tenant = self._tenant(name)
        tenant.pinned += size
        self._resize(tenant, size, 1)

    def release(self, name: str, size: int) -> None:
        tenant = self._tenants[name]
        tenant.pinned -= size
        self._resize(tenant, -size, -1)
        self._trim(tenant)
        self._drop_if_unused(tenant)

    def fill(self, page: Page, used_s: float | None) -> None:
        """End a reservation with its page; with None for the time it is the tenant's least recently used."""
        tenant = self._tenants[page.tenant]
        tenant.pinned -= page.size
        if used_s is None:
            tenant.link_oldest(page, self._now_s)
        else:
            self._advance(used_s)
            reuses = tenant.ghosts.reuses_of(page.key)
            tenant.num_uses += 1
            page.used_s, page.reuses = self._now_s, 0 if reuses is None else min(reuses + 1, MAX_COUNTED_REUSES)
            tenant.link(page)
        tenant.ghosts.forget(page.key)
        self._order.update(tenant)

    def touch(self, page: Page, now_s: float) -> bool:
        """Record a hit, or return False for a page that is evicted or expired."""
        self._advance(now_s)
        if not self._is_live(page):
            return False
        page.reuses, page.used_s = min(page.reuses + 1, MAX_COUNTED_REUSES), self._now_s
        tenant = self._tenants[page.tenant]
        tenant.num_uses += 1
        tenant.use(page)
        self._order.update(tenant)
        return True

    def pin(self, page: Page, now_s: float) -> bool:
        """Keep a page until `unpin`, or return False as `touch` does."""
        self._advance(now_s)
        if not self._is_live(page):
            return False
        page.num_pins += 1
        if page.home is not None:
            tenant = self._tenants[page.tenant]
            tenant.unlink(page)
            tenant.pinned += page.size
            self._order.update(tenant)
        return True

    def unpin(self, page: Page, now_s: float) -> None:
        self._advance(now_s)
        if not page.is_resident:
            return
        if not page.num_pins:
            raise ValueError(f"{page} is not pinned")
        page.num_pins -= 1
        if not page.num_pins:
            tenant = self._tenants[page.tenant]
            tenant.pinned -= page.size
            page.used_s = self._now_s
            tenant.link(page)
            self._order.update(tenant)

    def discard(self, page: Page) -> None:
        """Forget a page that the tier lost. Idempotent."""
        if not page.is_resident:
            return
        tenant = self._tenants[page.tenant]
        if page.home is None:
            tenant.pinned -= page.size
            page.num_pins = 0
        else:
            tenant.unlink(page)
        tenant.forget(page)
        page.is_resident = False
        self._resize(tenant, -page.size, -1)
        self._trim(tenant)
        self._drop_if_unused(tenant)

    # Hints

    def want(self, page: Page, ttl_s: float, now_s: float) -> bool:
        """Let a page go after its tenant's others until then, and first afterwards unless it was used since.

        The longest hint counts. Returns False for a page that is gone, and beyond the floor or half of the limit.
        """
        if not (math.isfinite(ttl_s) and ttl_s > 0):
            raise ValueError(f"ttl_s {ttl_s} is no positive number of seconds")
        self._advance(now_s)
        if not self._is_live(page):
            return False
        tenant = self._tenants[page.tenant]
        is_wanted = tenant.want(page, self._now_s + ttl_s)
        self._order.update(tenant)
        return is_wanted

    def end(self, page: Page) -> None:
        """Let a page of an ended session go first, unless it is wanted or a hit follows."""
        if page.is_resident:
            tenant = self._tenants[page.tenant]
            tenant.end(page)
            self._order.update(tenant)

    def hint(self, pages: Sequence[Page], wanted_s: float, now_s: float) -> None:
        """Want a request's pages, in order; 0: its session ends."""
        if not wanted_s:
            self.end_session(pages)
            return
        for page in pages:
            self.want(page, wanted_s, now_s)

    def end_session(self, pages: Sequence[Page]) -> None:
        """End pages of a request, in order, unless other conversations share them."""
        # Tiers of this policy count the end of the request that stored a page, too.
        reuses = [max(0, page.reuses - 1) for page in pages]
        for page in pages[first_private(reuses) :]:
            self.end(page)

    # Room

    def reclaim(self, now_s: float, max_pages: int, may_go: Callable[[Page], bool] = _any) -> list[Victim]:
        """Evict expired pages and, from the high to the low water mark, others."""
        self._advance(now_s)
        taken: list[_Taken] = []
        self._is_reclaiming = self._is_reclaiming or self.used > self._high
        while len(taken) < max_pages and (found := self._order.next_victim(self._now_s)) is not None:
            self._is_reclaiming = self._is_reclaiming and self.used > self._low
            if not self._is_reclaiming and found.cause is not Cause.EXPIRED:
                break
            self._take(found, may_go, taken)
        for each in reversed(taken):
            if not each.is_evicted:
                self._put_back(each)
        victims = [self._evict(each.candidate, None) for each in taken if each.is_evicted]
        for victim in victims:
            if (tenant := self._tenants.get(victim.page.tenant)) is not None:
                self._drop_if_unused(tenant)
        self._is_reclaiming = self._is_reclaiming and self.used > self._low
        return victims

    def room(self, name: str) -> int:
        """Return the units that the tenant could store, besides the room of expired pages."""
        free = self.settings.capacity - self.used
        tenant = self._tenants.get(name)
        contract = self._contracts.get(name, _DEFAULT) if tenant is None else tenant.contract
        used, own, lent = (0, 0, 0) if tenant is None else (tenant.usage, tenant.usage - tenant.pinned, tenant.lent)
        growth = free + self._order.lendable - lent
        if not contract.borrow:
            return own + min(growth, max(0, contract.floor - used))
        return own + min(growth, max(free, contract.cap_in(self.settings.capacity) - used))

    def usage_of(self, name: str) -> TenantUsage:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._configure(tenant := TenantPages(name))
        return TenantUsage(
            used=tenant.usage,
            pinned=tenant.pinned,
            wanted=tenant.wanted,
            borrowed=max(0, tenant.usage - tenant.contract.floor),
            floor=tenant.contract.floor,
            cap=tenant.cap,
            num_pages=tenant.num_pages,
            num_ghosts=len(tenant.ghosts),
            num_uses=tenant.num_uses,
            displaced=tenant.num_displaced,
            evicted={cause: tenant.num_evicted[cause] for cause in Cause},
            refused={refusal: tenant.num_refused[refusal] for refusal in Refusal},
        )

    def usages(self) -> dict[str, TenantUsage]:
        """Return what tenants that `counts` names hold, and under `OTHER` the sums of all else."""
        usages = {name: self.usage_of(name) for name in self.counts.names}
        other = TenantUsage(evicted=dict.fromkeys(Cause, 0), refused=dict.fromkeys(Refusal, 0))
        for name in self._tenants.keys() - usages.keys():
            other = other.plus(self.usage_of(name))
        return {name: self._since_the_start(name, usage) for name, usage in {**usages, OTHER: other}.items()}

    def _since_the_start(self, name: str, usage: TenantUsage) -> TenantUsage:
        # A tenant's own counts end with its last page, and those of `OTHER` would fall with a tenant that gets a name.
        counts = self.counts.of(name)
        return dataclasses.replace(
            usage,
            displaced=counts.displaced,
            evicted={cause: counts.evicted[cause] for cause in Cause},
            refused={refusal: counts.refused[refusal] for refusal in Refusal},
        )

    # Inside

    def _make_room(
        self,
        tenant: TenantPages,
        num_own: int,
        num_missing: int,
        may_go: Callable[[Page], bool],
        taken: list[_Taken],
    ) -> Refusal | None:
        while num_own > 0:
            found = tenant.own_victim(self._now_s)
            if found is None:
                return Refusal.LIMIT
            num_freed = self._take(found, may_go, taken)
            num_own -= num_freed
            num_missing -= num_freed
        while num_missing > 0:
            # Own pages within the floor go only for their own tenant, and after all that others borrow.
            found = self._order.next_victim(self._now_s) or tenant.own_victim(self._now_s)
            if found is None:
                return Refusal.NO_ROOM
            num_missing -= self._take(found, may_go, taken)
        return None

    def _advance(self, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        num_left = ENDS_PER_CALL
        while num_left and (tenant := self._order.first_with_due_wish(self._now_s)) is not None:
            num_left -= tenant.end_wanted(self._now_s, num_left)
            self._order.update(tenant)

    def _is_live(self, page: Page) -> bool:
        if not page.is_resident:
            return False
        ttl_s = self._tenants[page.tenant].contract.ttl_s
        return ttl_s is None or page.num_pins > 0 or page.used_s + ttl_s > self._now_s

    def _take(self, found: Candidate, may_go: Callable[[Page], bool], taken: list[_Taken]) -> int:
        page = found.page
        tenant = self._tenants[page.tenant]
        is_evicted = may_go(page)
        home = tenant.unlink(page)
        if not is_evicted:
            taken.append(_Taken(found, home, is_evicted))
            tenant.pinned += page.size
            self._order.update(tenant)
            return 0
        left = None if found.instead_of is None else tenant.trade_places(found.instead_of, page)
        taken.append(_Taken(found, home, is_evicted, left))
        page.is_resident = False
        self._resize(tenant, -page.size, -1)
        return page.size

    def _put_back(self, taken: _Taken) -> None:
        page = taken.candidate.page
        tenant = self._tenants[page.tenant]
        if taken.left is not None and taken.candidate.instead_of is not None:
            tenant.take_place(taken.candidate.instead_of, taken.left)
        tenant.put_back(page, taken.home)
        if taken.is_evicted:
            page.is_resident = True
            self._resize(tenant, page.size, 1)
        else:
            tenant.pinned -= page.size
            self._order.update(tenant)

    def _evict(self, found: Candidate, demander: TenantPages | None) -> Victim:
        tenant = self._tenants[found.page.tenant]
        is_own = tenant is demander and found.cause in (Cause.OVER_CAP, Cause.BORROWED)
        cause = Cause.OWN if is_own else found.cause
        tenant.num_evicted[cause] += 1
        self.counts.of(tenant.name).evicted[cause] += 1
        tenant.forget(found.page)
        if demander not in (None, tenant) and cause is not Cause.EXPIRED:
            demander.num_displaced += 1
            self.counts.of(demander.name).displaced += 1
        tenant.ghosts.add(found.page.key, found.page.reuses)
        self._trim(tenant)
        return Victim(found.page, cause)

    def _trim(self, tenant: TenantPages) -> None:
        tenant.ghosts.trim(self.settings.ghosts_per_page * tenant.num_pages)

    def _drop_if_unused(self, tenant: TenantPages) -> None:
        if tenant.num_pages or tenant.name in self._contracts:
            return
        self._order.remove(tenant)
        del self._tenants[tenant.name]

    def _tenant(self, name: str) -> TenantPages:
        if (tenant := self._tenants.get(name)) is None:
            tenant = self._tenants[name] = TenantPages(name)
            self._configure(tenant)
        return tenant

    def _configure(self, tenant: TenantPages) -> None:
        contract = self._contracts.get(tenant.name, _DEFAULT)
        tenant.configure(contract, contract.cap_in(self.settings.capacity), self.settings.bonus_s)

    def _resize(self, tenant: TenantPages, num_units: int, num_pages: int) -> None:
        tenant.usage += num_units
        tenant.num_pages += num_pages
        self.used += num_units
        self._order.update(tenant)

    def check(self) -> None:
        """Assert the invariants."""
        tenants = self._tenants.values()
        for tenant in tenants:
            tenant.check()
            assert len(tenant.ghosts) <= self.settings.ghosts_per_page * tenant.num_pages, "too many ghosts"
            assert tenant.num_pages or tenant.name in self._contracts, "a tenant that holds nothing"
        assert self.used == sum(tenant.usage for tenant in tenants) <= self.settings.capacity, "units of all tenants"
        assert self._order.lendable == sum(tenant.lendable for tenant in tenants), "the sum of what others may evict"
        assert sum(contract.floor for contract in self._contracts.values()) <= self.settings.capacity, "floors"
        self._order.check()
