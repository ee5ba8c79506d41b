"""The order of tenants by the page that each loses next."""

from __future__ import annotations

from kvferry.tenancy.keyed_heap import KeyedHeap
from kvferry.tenancy.pages.tenant_pages import NEVER, Candidate, TenantPages


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
