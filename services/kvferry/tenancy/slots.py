"""Decode slots of one worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvferry.tenancy.keyed_heap import KeyedHeap

# Tenants that came within this time have a part in the slots.
_SEEN_S = 30.0
_MIN_EXCESS_STREAMS = 2.0

Stream = TypeVar("Stream", bound=Hashable)


class _Tenant(Generic[Stream]):
    __slots__ = ("num_waiting", "streams", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.num_waiting = 0
        self.streams: OrderedDict[Stream, None] = OrderedDict()  # oldest first


class DecodeSlots(Generic[Stream]):
    """The last `num_reserved` slots are for tenants below their share."""

    def __init__(self, num_slots: int, num_reserved: int) -> None:
        if not 0 <= num_reserved < num_slots:
            raise ValueError(f"{num_reserved} of {num_slots} slots are in reserve")
        self.num_slots = num_slots
        self.num_reserved = num_reserved
        self.num_streams = 0
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant[Stream]] = {}
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # least recent first; the keys of _tenants
        self._seen_weight = 0.0
        self._by_next = KeyedHeap()  # tenants that wait, by (streams + 1) / weight
        self._by_streams = KeyedHeap()  # the same by streams / weight

    def __repr__(self) -> str:
        return f"<DecodeSlots {self.num_streams} of {self.num_slots}, {len(self._by_next)} tenants wait>"

    def set_weight(self, tenant: str, weight: float) -> None:
        """Raises ValueError unless above 0 and finite."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"tenant {tenant} has weight {weight}")
        self._weights[tenant] = weight
        known = self._tenants.get(tenant)
        if known is not None:
            self._seen_weight += weight - known.weight
            known.weight = weight
            self._update(tenant, known)

    def forget(self, tenant: str) -> None:
        self._weights.pop(tenant, None)

    def wait(self, tenant: str, now_s: float) -> None:
        known = self._seen(tenant, now_s)
        known.num_waiting += 1
        self._update(tenant, known)

    def leave(self, tenant: str) -> None:
        known = self._tenants[tenant]
        known.num_waiting -= 1
        self._update(tenant, known)

    def next_tenant(self, now_s: float) -> str | None:
        """Return the tenant that may `begin` a stream."""
        self._forget_unseen(now_s)
        num_free = self.num_slots - self.num_streams
        if num_free > self.num_reserved:
            first = self._by_next.first()
            return None if first is None else first[1]
        first = self._by_streams.first()
        if num_free <= 0 or first is None or first[0] >= self._slots_per_weight():
            return None
        return first[1]

    def begin(self, tenant: str, stream: Stream, now_s: float) -> None:
        """Turn a waiting request into a stream. Raises ValueError for a known stream."""
        known = self._seen(tenant, now_s)
        if stream in known.streams:
            raise ValueError(f"a stream of tenant {tenant} has a slot already")
        known.num_waiting -= 1
        known.streams[stream] = None
        self.num_streams += 1
        self._update(tenant, known)

    def end(self, tenant: str, stream: Stream, now_s: float) -> None:
        """Free a slot. Raises KeyError for an unknown stream."""
        del self._tenants[tenant].streams[stream]
        self.num_streams -= 1
        self._update(tenant, self._seen(tenant, now_s))

    def victim(self, now_s: float) -> tuple[str, Stream] | None:
        """Return the stream to preempt, and its tenant, while a tenant below its share waits."""
        self._forget_unseen(now_s)
        first = self._by_streams.first()
        per_weight = self._slots_per_weight()
        if self.num_streams < self.num_slots or first is None or first[0] >= per_weight:
            return None
        # The oldest stream of the tenant furthest above its share. At most as many tenants have streams as there are
        # slots.
        excess, tenant = max(
            (len(known.streams) - per_weight * known.weight, name)
            for name, known in self._tenants.items()
            if known.streams
        )
        if excess < _MIN_EXCESS_STREAMS:
            return None
        return tenant, next(iter(self._tenants[tenant].streams))

    def check(self) -> None:
        assert self.num_streams == sum(len(known.streams) for known in self._tenants.values())
        assert self._tenants.keys() == self._seen_s.keys()
        assert abs(self._seen_weight - sum(known.weight for known in self._tenants.values())) < 1e-6
        waiting = {name for name, known in self._tenants.items() if known.num_waiting}
        assert len(waiting) == len(self._by_next) == len(self._by_streams)
        assert all(name in self._by_next for name in waiting)

    def _slots_per_weight(self) -> float:
        return self.num_slots / self._seen_weight if self._seen_weight > 0 else 0.0

    def _seen(self, tenant: str, now_s: float) -> _Tenant[Stream]:
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(self._weights.get(tenant, 1.0))
            self._seen_weight += known.weight
        self._seen_s[tenant] = now_s
        self._seen_s.move_to_end(tenant)
        return known

    def _forget_unseen(self, now_s: float) -> None:
        while self._seen_s:
            tenant, seen_s = next(iter(self._seen_s.items()))
            if now_s - seen_s < _SEEN_S:
                return
            known = self._tenants[tenant]
            if known.streams or known.num_waiting:
                self._seen(tenant, now_s)
                continue
            del self._seen_s[tenant], self._tenants[tenant]
            self._seen_weight = self._seen_weight - known.weight if self._tenants else 0.0

    def _update(self, tenant: str, known: _Tenant[Stream]) -> None:
        if known.num_waiting:
            num_streams = len(known.streams)
            self._by_next.set(tenant, (num_streams + 1) / known.weight)
            self._by_streams.set(tenant, num_streams / known.weight)
        else:
            self._by_next.discard(tenant)
            self._by_streams.discard(tenant)
