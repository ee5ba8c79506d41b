"""Eviction in an engine's device memory, by the policy of `retention`, at the price of a step of the engine.

Cached pages that no request uses go when others are needed. A floor therefore keeps pages from other tenants'
admissions, and yields to requests that run. Without ghosts, the order is that of `Retention`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvferry.tenancy.keyed_heap import KeyedHeap
from kvferry.tenancy.pages.hinted_pages import NEVER, HintedPages, Place, first_private
from kvferry.tenancy.pages.outcome import Cause
from kvferry.tenancy.pages.page import MAX_COUNTED_REUSES, MAX_REUSES
from kvferry.tenancy.pages.usage_report import Counts, Holding, TenantCounts
from kvferry.tenancy.terms import TierContract, check_sum_of_floors

_DEFAULT = TierContract()
_ENDS_PER_CALL = 64  # as `Retention`


class _Tenant:
    __slots__ = (
        "bonus_s", "contract", "counts", "due_s", "hinted", "levels", "limit", "name", "num_cached", "num_free",
        "reserved",
    )  # fmt: skip

    def __init__(self, name: str, counts: Counts) -> None:
        self.name = name
        self.counts = counts
        self.contract = _DEFAULT
        self.limit = 0
        self.bonus_s = 0.0
        self.num_cached = 0  # in use or free
        self.num_free = 0
        self.reserved = 0  # of the free ones, those within the floor
        # Times of last use by page, oldest first, for each number of reuses.
        self.levels = tuple(OrderedDict[int, float]() for _ in range(MAX_REUSES + 1))
        self.hinted: HintedPages[int] | None = None  # made with the first hint
        self.due_s = NEVER  # no hint ends before; pages allocated since may have later hints

    def lowest(self) -> tuple[float, int]:
        """Return the lowest score of pages without hints, and its level."""
        best, best_level = NEVER, 0
        for reuses, level in enumerate(self.levels):
            if level:
                score = next(iter(level.values())) + self.bonus_s * (reuses + 1)
                if score < best:
                    best, best_level = score, reuses
        return best, best_level

    def next_out(self) -> _Next:
        """Return the page that goes next; there must be a free one."""
        if self.hinted is not None and (ended := self.hinted.ended()) is not None:
            return _Next(Cause.ENDED, *ended)
        cause = Cause.OVER_CAP if self.num_cached > self.limit else Cause.BORROWED
        score, reuses = self.lowest()
        found = None if score == NEVER else (score, next(iter(self.levels[reuses])))
        if self.hinted is not None:
            chosen = self.hinted.choose(found, self.bonus_s)
            assert chosen is not None, "no page is free"
            return _Next(cause, *chosen)
        assert found is not None, "no page is free"
        return _Next(cause, *found)

    def key(self) -> tuple[Cause, float, str]:
        """Return the place in the order in which tenants lose pages to others."""
        if self.hinted is None:
            return Cause.OVER_CAP if self.num_cached > self.limit else Cause.BORROWED, self.lowest()[0], self.name
        following = self.next_out()
        return following.cause, following.score, self.name

    def expiry(self) -> tuple[float, int]:
        """Return when the first page expires, and the page."""
        ttl_s = self.contract.ttl_s
        if ttl_s is None or not self.num_free:
            return NEVER, 0
        heads = [next(iter(level.items())) for level in self.levels if level]
        used_s, page = min(((used_s, page) for page, used_s in heads), key=lambda head: head[0], default=(NEVER, 0))
        if self.hinted is not None and (oldest := self.hinted.oldest()) is not None and oldest[0] < used_s:
            used_s, page = oldest
        return used_s + ttl_s, page

    def hints(self) -> HintedPages[int]:
        if self.hinted is None:
            self.hinted = HintedPages(self.contract.ttl_s)
        return self.hinted


class _Next(NamedTuple):
    cause: Cause
    score: float
    page: int
    instead_of: int | None = None  # the wanted page whose place it is


class DevicePages:
    """The free pages of an engine, and the owners of cached ones. Pages are numbers below `num_pages`.

    A page is in use from `take` or `use` until `put`. An earlier `now_s` counts as the latest.
    """

    def __init__(self, num_pages: int, capacity: int, bonus_s: float = 60.0) -> None:
        self.capacity = capacity
        self.num_free = 0
        self.counts = TenantCounts()
        self._bonus_s = bonus_s
        self._blank: OrderedDict[int, None] = OrderedDict()  # free and not cached; the last goes first
        self._owners: list[_Tenant | None] = [None] * num_pages  # of cached pages
        self._reuses = bytearray(num_pages)
        self._is_free = bytearray(num_pages)
        self._tenants: dict[str, _Tenant] = {}
        self._contracts: dict[str, TierContract] = {}
        self._by_key: KeyedHeap[_Tenant] = KeyedHeap()  # tenants above their floors, with free pages
        self._by_expiry: KeyedHeap[_Tenant] = KeyedHeap()
        self._changed: set[_Tenant] = set()
        self._unreported: set[str] = set()  # tenants
        self._reserved = 0
        self._by_due: KeyedHeap[_Tenant] = KeyedHeap()  # tenants with hints that end
        self._now_s = -NEVER

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Replace all contracts. Raises ValueError if their floors exceed the capacity."""
        check_sum_of_floors({name: contract.floor for name, contract in contracts.items()}, self.capacity)
        self._unreported |= self._contracts.keys() | contracts.keys()
        self._contracts = dict(contracts)
        self.counts.add_names(contracts)
        for tenant in list(self._tenants.values()):
            self._configure(tenant)

    # Owners

    def claim(self, page: int, tenant: str) -> None:
        """Count a page as cached by a tenant, unless it has an owner. It is in use."""
        if self._owners[page] is None:
            self._owners[page] = owner = self._tenant(tenant)
            owner.num_cached += 1
            self._changed.add(owner)

    def owner_of(self, page: int) -> str | None:
        owner = self._owners[page]
        return None if owner is None else owner.name

    def forget(self, page: int, cause: Cause | None = None) -> None:
        """Note that a page is not cached any more, or evicted for a cause. If it is free, it stays free. Idempotent."""
        owner = self._owners[page]
        if owner is None:
            return
        if cause is not None:
            owner.counts.evicted[cause] += 1
        if self._is_free[page]:
            self._unlink(page, owner)
            self._blank[page] = None
        self._disown(page, owner)

    # Hints, of pages in use

    def want(self, pages: Sequence[int], ttl_s: float, now_s: float) -> None:
        """As `Retention.want`."""
        self._advance(now_s)
        owner, hinted, most, until_s = None, None, 0, self._now_s + ttl_s
        for page in pages:
            found = self._owners[page]
            if found is not None and found is not owner:
                owner, hinted, most = found, found.hints(), max(found.contract.floor, found.limit // 2)
            if found is not None and hinted is not None:
                hinted.want(page, 1, until_s, most)

    def first_private(self, pages: Sequence[int]) -> int:
        return first_private([self._reuses[page] for page in pages])

    def end(self, page: int) -> None:
        """As `Retention.end`."""
        if (owner := self._owners[page]) is not None:
            owner.hints().end(page)

    # Free pages

    def put_blank(self, pages: Sequence[int]) -> None:
        """Free pages that are not cached; the first goes first."""
        for page in reversed(pages):
            self._blank[page] = None
            self._is_free[page] = 1
        self.num_free += len(pages)

    def put(self, pages: Sequence[int], now_s: float) -> None:
        """Free cached pages; the first goes first."""
        self._advance(now_s)
        now_s = self._now_s
        for page in pages:
            owner = self._owners[page]
            assert owner is not None, "a page that is not cached"
            level = min(self._reuses[page], MAX_REUSES)
            hinted = owner.hinted
            if hinted is None or not hinted.link(page, Place(now_s, level), owner.contract.ttl_s):
                owner.levels[level][page] = now_s
            elif hinted.due_s < owner.due_s:
                self._note_due(owner)
            owner.num_free += 1
            self._is_free[page] = 1
            self._changed.add(owner)
        self.num_free += len(pages)

    def use(self, page: int) -> None:
        """Take this free page."""
        owner = self._owners[page]
        if owner is None:
            del self._blank[page]
        else:
            self._unlink(page, owner)
        self._is_free[page] = 0
        self.num_free -= 1

    def reuse(self, page: int) -> None:
        """Count a hit of a page in use."""
        if (owner := self._owners[page]) is None:
            return
        if self._reuses[page] < MAX_COUNTED_REUSES:
            self._reuses[page] += 1
        if owner.hinted is not None:
            owner.hinted.use(page)

    def take(self, num: int, tenant: str, now_s: float) -> list[int]:
        """Take `num` free pages for a tenant: blank ones, and others that are no longer cached then."""
        assert num <= self.num_free, "more pages than are free"
        self._advance(now_s)
        taken = [self._blank.popitem()[0] for _ in range(min(num, len(self._blank)))]
        if len(taken) < num:
            self._take_cached(taken, num, self._tenant(tenant))
        for page in taken:
            self._is_free[page] = 0
        self.num_free -= num
        return taken

    def expired(self, now_s: float, max_pages: int) -> list[int]:
        """Return free pages whose time to live has ended, which `forget` is to remove."""
        self._advance(now_s)
        self._refresh()
        found: list[int] = []
        for tenant in list(self._by_expiry):
            ttl_s = tenant.contract.ttl_s or NEVER
            for level in tenant.levels:
                for page, used_s in level.items():
                    if used_s + ttl_s > self._now_s or len(found) == max_pages:
                        break
                    found.append(page)
            if tenant.hinted is not None and tenant.expiry()[0] <= self._now_s:
                found += tenant.hinted.used_before(self._now_s - ttl_s, max_pages - len(found))
        return found

    def reserved_for_others(self, tenant: str) -> int:
        """Return how many free pages are within the floors of other tenants."""
        self._refresh()
        own = self._tenants.get(tenant)
        return self._reserved - (0 if own is None else own.reserved)

    def holding_of(self, tenant: str) -> Holding:
        """Return what a tenant holds, in use or free; nothing for one that has neither pages nor a contract."""
        known, contract = self._tenants.get(tenant), self._contracts.get(tenant, _DEFAULT)
        if known is None and contract is _DEFAULT:
            return Holding()
        used = 0 if known is None else known.num_cached
        return Holding(used, contract.floor, contract.cap_in(self.capacity), max(0, used - contract.floor))

    def changed_holdings(self) -> Iterator[tuple[str, Holding]]:
        """Return what tenants hold where it, or a count of theirs, may have changed since the call before."""
        self._refresh()
        changed, self._unreported = self._unreported, set()
        return ((tenant, self.holding_of(tenant)) for tenant in changed)

    # Inside

    def _take_cached(self, taken: list[int], num: int, own: _Tenant) -> None:
        # The new pages count from here on: they are what lifts their tenant above its floor, or its cap.
        own.num_cached += num
        for _ in range(min(num - len(taken), max(0, own.num_cached - own.limit), own.num_free)):
            self._evict_own(own, taken)
        self._changed.add(own)
        while len(taken) < num:
            self._refresh()
            if (due := self._by_expiry.first) is not None and due[0][0] <= self._now_s:
                self._evict(due[1], _Next(Cause.EXPIRED, 0.0, due[1].expiry()[1]), taken, own)
            elif (first := self._by_key.first) is not None:
                self._take_from(first[1], own, taken, num)
            elif own.num_free:
                self._evict_own(own, taken)
            else:
                # Floors yield to requests that run.
                lender = min((each for each in self._tenants.values() if each.num_free), key=_loss)
                self._evict(lender, lender.next_out()._replace(cause=Cause.BORROWED), taken, own)
        own.num_cached -= num
        self._changed.add(own)

    def _take_from(self, tenant: _Tenant, own: _Tenant, taken: list[int], num: int) -> None:
        self._by_key.remove(tenant)
        self._changed.add(tenant)
        limit = None if (following := self._by_key.first) is None else following[0]
        ttl_s = tenant.contract.ttl_s
        while len(taken) < num and tenant.num_free and tenant.num_cached > tenant.contract.floor:
            if tenant.hinted is None:
                score, level = tenant.lowest()
                cause = Cause.OVER_CAP if tenant.num_cached > tenant.limit else Cause.BORROWED
                if limit is not None and (cause, score, tenant.name) > limit:
                    return
                self._evict_oldest(tenant, level, Cause.OWN if tenant is own else cause, taken, own)
                if ttl_s is not None:
                    return  # the next may have expired
                continue
            found = tenant.next_out()
            if limit is not None and (found.cause, found.score, tenant.name) > limit:
                return
            is_own = tenant is own and found.cause is not Cause.ENDED
            self._evict(tenant, found._replace(cause=Cause.OWN) if is_own else found, taken, own)
            if ttl_s is not None:
                return  # the next may have expired

    def _evict_oldest(self, tenant: _Tenant, level: int, cause: Cause, taken: list[int], own: _Tenant) -> None:
        # For a tenant without hints.
        page, _ = tenant.levels[level].popitem(last=False)
        tenant.num_free -= 1
        self._count_evicted(page, tenant, cause, own)
        taken.append(page)

    def _evict_own(self, own: _Tenant, taken: list[int]) -> None:
        expires_s, page = own.expiry()
        found = _Next(Cause.EXPIRED, 0.0, page) if expires_s <= self._now_s else own.next_out()
        self._evict(own, found if found.cause <= Cause.ENDED else found._replace(cause=Cause.OWN), taken, own)

    def _evict(self, tenant: _Tenant, found: _Next, taken: list[int], own: _Tenant) -> None:
        page = found.page
        if found.instead_of is not None and (hinted := tenant.hinted) is not None:
            level = min(self._reuses[page], MAX_REUSES)
            used_s = tenant.levels[level].get(page)
            place = hinted.place_of(page) or Place(hinted.used_s(page) if used_s is None else used_s, level)
            hinted.move(found.instead_of, place)
        self._unlink(page, tenant)
        self._count_evicted(page, tenant, found.cause, own)
        taken.append(page)

    def _count_evicted(self, page: int, tenant: _Tenant, cause: Cause, own: _Tenant) -> None:
        tenant.counts.evicted[cause] += 1
        if tenant is not own and cause is not Cause.EXPIRED:
            own.counts.displaced += 1
        self._disown(page, tenant)

    def _unlink(self, page: int, owner: _Tenant) -> None:
        if owner.levels[min(self._reuses[page], MAX_REUSES)].pop(page, None) is None and owner.hinted is not None:
            owner.hinted.unlink(page)
        owner.num_free -= 1
        self._changed.add(owner)

    def _disown(self, page: int, owner: _Tenant) -> None:
        if owner.hinted is not None:
            owner.hinted.forget(page)
        self._owners[page] = None
        self._reuses[page] = 0
        owner.num_cached -= 1
        self._changed.add(owner)

    def _refresh(self) -> None:
        for tenant in self._changed:
            if tenant.hinted is not None and tenant.hinted.is_empty:
                tenant.hinted = None
                self._note_due(tenant)
            self._unreported.add(tenant.name)
            floor = tenant.contract.floor
            self._reserved -= tenant.reserved
            tenant.reserved = max(0, min(tenant.num_free, floor - (tenant.num_cached - tenant.num_free)))
            self._reserved += tenant.reserved
            if tenant.num_free and tenant.num_cached > floor:
                self._by_key.put(tenant, tenant.key())
            else:
                self._by_key.remove(tenant)
            if (expires_s := tenant.expiry()[0]) < NEVER:
                self._by_expiry.put(tenant, (expires_s, tenant.name))
            else:
                self._by_expiry.remove(tenant)
            if not tenant.num_cached and tenant.name not in self._contracts:
                del self._tenants[tenant.name]
        self._changed.clear()

    def _advance(self, now_s: float) -> None:
        self._now_s = now_s = max(self._now_s, now_s)
        num_left = _ENDS_PER_CALL
        while num_left and (first := self._by_due.first) is not None and first[0][0] <= now_s:
            tenant = first[1]
            hinted, due_s = tenant.hinted, tenant.due_s
            # Tenants whose first hints are gone find their place first: hints end in the order of their times.
            if hinted is not None and hinted.due_s == due_s:
                num_left -= hinted.end_due(now_s, num_left)
                self._changed.add(tenant)
            self._note_due(tenant)

    def _note_due(self, tenant: _Tenant) -> None:
        tenant.due_s = NEVER if tenant.hinted is None else tenant.hinted.due_s
        if tenant.due_s == NEVER:
            self._by_due.remove(tenant)
        else:
            self._by_due.put(tenant, (tenant.due_s, tenant.name))

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self.counts.of(name))
            self._configure(tenant)
        return tenant

    def _configure(self, tenant: _Tenant) -> None:
        contract = self._contracts.get(tenant.name, _DEFAULT)
        tenant.contract = contract
        tenant.counts = self.counts.of(tenant.name)
        tenant.limit = contract.cap_in(self.capacity) if contract.borrow else contract.floor
        tenant.bonus_s = self._bonus_s * contract.weight
        if tenant.hinted is not None:
            tenant.hinted.shorten(contract.ttl_s)
            self._note_due(tenant)
        self._changed.add(tenant)

    def check(self) -> None:
        """Assert the invariants."""
        self._refresh()
        free = {page for page, is_free in enumerate(self._is_free) if is_free}
        listed = list(self._blank)
        for tenant in self._tenants.values():
            pages = [page for level in tenant.levels for page in level]
            if tenant.hinted is not None:
                tenant.hinted.check()
                assert tenant.due_s <= tenant.hinted.due_s, "a hint that ends unnoticed"
                pages += tenant.hinted.linked()
            assert all(self._owners[page] is tenant for page in pages), "a page of another tenant"
            for reuses, level in enumerate(tenant.levels):
                assert all(min(self._reuses[page], MAX_REUSES) == reuses for page in level), "a page in a wrong level"
            assert all(list(level.values()) == sorted(level.values()) for level in tenant.levels), "out of order"
            assert tenant.num_free == len(pages), "free pages of a tenant"
            assert tenant.num_cached == sum(owner is tenant for owner in self._owners), "pages of a tenant"
            listed += pages
        assert len(listed) == len(free) == self.num_free, "free pages"
        assert set(listed) == free, "pages in lists"
        assert self._reserved == sum(tenant.reserved for tenant in self._tenants.values()), "reserved pages"
        self._by_key.check()
        self._by_expiry.check()
        self._by_due.check()
        ending = {tenant for tenant in self._tenants.values() if tenant.due_s < NEVER}
        assert ending == set(self._by_due), "tenants with hints that end"


def _loss(tenant: _Tenant) -> tuple[float, str]:
    return tenant.next_out().score, tenant.name
