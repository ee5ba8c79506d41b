"""Eviction in an engine's pool of pages, by the policy of `retention`, at the price of a step of the engine.

A pool hands its pages out, and cached pages that no request uses are free all the same: they go when others are
needed. A floor therefore keeps pages from other tenants' admissions, and yields to requests that already run.
There are no ghosts and no wishes here; otherwise the order is that of `Retention`, as a test compares.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from kvferry.tenancy.contract import TierContract, check_floors
from kvferry.tenancy.indexed_heap import IndexedHeap
from kvferry.tenancy.outcome import Cause
from kvferry.tenancy.page import MAX_REUSES
from kvferry.tenancy.tenant_counts import Counts, TenantCounts
from kvferry.tenancy.usage_report import Holding

_DEFAULT = TierContract()
_NEVER = float("inf")


class _Tenant:
    __slots__ = ("bonus_s", "contract", "counts", "levels", "limit", "name", "num_cached", "num_free", "reserved")

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

    def lowest(self) -> tuple[float, int]:
        """Return the lowest score and its level; there must be a free page."""
        best, best_level = _NEVER, 0
        for reuses, level in enumerate(self.levels):
            if level:
                score = next(iter(level.values())) + self.bonus_s * (reuses + 1)
                if score < best:
                    best, best_level = score, reuses
        return best, best_level

    def key(self) -> tuple[bool, float, str]:
        """Return the place in the order in which tenants lose pages to others."""
        return self.num_cached <= self.limit, self.lowest()[0], self.name

    def expiry(self) -> tuple[float, int]:
        """Return when the first page expires, and its level."""
        ttl_s = self.contract.ttl_s
        if ttl_s is None or not self.num_free:
            return _NEVER, 0
        used_s, reuses = min((next(iter(level.values())), reuses) for reuses, level in enumerate(self.levels) if level)
        return used_s + ttl_s, reuses


class PoolPages:
    """The free pages of a pool, and the owners of cached ones. Pages are numbers below `num_pages`.

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
        self._by_key: IndexedHeap[_Tenant] = IndexedHeap()  # tenants above their floors, with free pages
        self._by_expiry: IndexedHeap[_Tenant] = IndexedHeap()
        self._changed: set[_Tenant] = set()
        self._unreported: set[str] = set()  # tenants
        self._reserved = 0
        self._now_s = -_NEVER

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Replace all contracts. Raises ValueError if their floors exceed the capacity."""
        check_floors({name: contract.floor for name, contract in contracts.items()}, self.capacity)
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

    # Free pages

    def put_blank(self, pages: Sequence[int]) -> None:
        """Free pages that are not cached; the first goes first."""
        for page in reversed(pages):
            self._blank[page] = None
            self._is_free[page] = 1
        self.num_free += len(pages)

    def put(self, pages: Sequence[int], now_s: float) -> None:
        """Free cached pages; the first goes first."""
        self._now_s = now_s = max(self._now_s, now_s)
        for page in pages:
            owner = self._owners[page]
            assert owner is not None, "a page that is not cached"
            owner.levels[self._reuses[page]][page] = now_s
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
        if self._owners[page] is not None and self._reuses[page] < MAX_REUSES:
            self._reuses[page] += 1

    def take(self, num: int, tenant: str, now_s: float) -> list[int]:
        """Take `num` free pages for a tenant: blank ones, and others that are no longer cached then."""
        assert num <= self.num_free, "more pages than are free"
        self._now_s = max(self._now_s, now_s)
        taken = [self._blank.popitem()[0] for _ in range(min(num, len(self._blank)))]
        if len(taken) < num:
            self._take_cached(taken, num, self._tenant(tenant))
        for page in taken:
            self._is_free[page] = 0
        self.num_free -= num
        return taken

    def expired(self, now_s: float, max_pages: int) -> list[int]:
        """Return free pages whose time to live has ended, which `forget` is to remove."""
        self._now_s = max(self._now_s, now_s)
        self._refresh()
        found: list[int] = []
        for tenant in list(self._by_expiry):
            ttl_s = tenant.contract.ttl_s or _NEVER
            for level in tenant.levels:
                for page, used_s in level.items():
                    if used_s + ttl_s > self._now_s or len(found) == max_pages:
                        break
                    found.append(page)
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
            self._evict(own, own.lowest()[1], Cause.OWN, taken, own)
        self._changed.add(own)
        while len(taken) < num:
            self._refresh()
            if (due := self._by_expiry.first) is not None and due[0][0] <= self._now_s:
                self._evict(due[1], due[1].expiry()[1], Cause.EXPIRED, taken, own)
            elif (first := self._by_key.first) is not None:
                self._take_from(first[1], own, taken, num)
            elif own.num_free:
                self._evict(own, own.lowest()[1], Cause.OWN, taken, own)
            else:
                # Floors yield to requests that run.
                lender = min((each for each in self._tenants.values() if each.num_free), key=_Tenant.lowest)
                self._evict(lender, lender.lowest()[1], Cause.BORROWED, taken, own)
        own.num_cached -= num
        self._changed.add(own)

    def _take_from(self, tenant: _Tenant, own: _Tenant, taken: list[int], num: int) -> None:
        """Take from one tenant until another one is next."""
        self._by_key.remove(tenant)
        self._changed.add(tenant)
        limit = None if (following := self._by_key.first) is None else following[0]
        ttl_s = tenant.contract.ttl_s
        while len(taken) < num and tenant.num_free and tenant.num_cached > tenant.contract.floor:
            score, level = tenant.lowest()
            within_limit = tenant.num_cached <= tenant.limit
            if limit is not None and (within_limit, score, tenant.name) > limit:
                return
            cause = Cause.OWN if tenant is own else Cause.BORROWED if within_limit else Cause.OVER_CAP
            self._evict(tenant, level, cause, taken, own)
            if ttl_s is not None:
                return  # the next may have expired

    def _evict(self, tenant: _Tenant, level: int, cause: Cause, taken: list[int], own: _Tenant) -> None:
        page, _ = tenant.levels[level].popitem(last=False)
        tenant.num_free -= 1
        tenant.counts.evicted[cause] += 1
        if tenant is not own and cause is not Cause.EXPIRED:
            own.counts.displaced += 1
        self._disown(page, tenant)
        taken.append(page)

    def _unlink(self, page: int, owner: _Tenant) -> None:
        del owner.levels[self._reuses[page]][page]
        owner.num_free -= 1
        self._changed.add(owner)

    def _disown(self, page: int, owner: _Tenant) -> None:
        self._owners[page] = None
        self._reuses[page] = 0
        owner.num_cached -= 1
        self._changed.add(owner)

    def _refresh(self) -> None:
        for tenant in self._changed:
            self._unreported.add(tenant.name)
            floor = tenant.contract.floor
            self._reserved -= tenant.reserved
            tenant.reserved = max(0, min(tenant.num_free, floor - (tenant.num_cached - tenant.num_free)))
            self._reserved += tenant.reserved
            if tenant.num_free and tenant.num_cached > floor:
                self._by_key.put(tenant, tenant.key())
            else:
                self._by_key.remove(tenant)
            if (expires_s := tenant.expiry()[0]) < _NEVER:
                self._by_expiry.put(tenant, (expires_s, tenant.name))
            else:
                self._by_expiry.remove(tenant)
            if not tenant.num_cached and tenant.name not in self._contracts:
                del self._tenants[tenant.name]
        self._changed.clear()

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
        self._changed.add(tenant)

    def check(self) -> None:
        """Assert the invariants."""
        self._refresh()
        free = {page for page, is_free in enumerate(self._is_free) if is_free}
        listed = list(self._blank)
        for tenant in self._tenants.values():
            pages = [page for level in tenant.levels for page in level]
            assert all(self._owners[page] is tenant for page in pages), "a page of another tenant"
            assert all(page in level for level in tenant.levels for page in level)
            assert all(self._reuses[page] == reuses for reuses, level in enumerate(tenant.levels) for page in level)
            assert all(list(level.values()) == sorted(level.values()) for level in tenant.levels), "out of order"
            assert tenant.num_free == len(pages), "free pages of a tenant"
            assert tenant.num_cached == sum(owner is tenant for owner in self._owners), "pages of a tenant"
            listed += pages
        assert len(listed) == len(free) == self.num_free, "free pages"
        assert set(listed) == free, "pages in lists"
        assert self._reserved == sum(tenant.reserved for tenant in self._tenants.values()), "reserved pages"
        self._by_key.check()
        self._by_expiry.check()
