"""Decode slots of one worker."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from kvferry.tenancy.keyed_heap import KeyedHeap

# Tenants that came within this time have a part in the slots.
_SEEN_S: Final = 30.0
_MIN_EXCESS_STREAMS: Final = 2.0
# A tenant's claim is what it lately wanted at once, at most its share: its peak in this period and the one before.
_PEAK_PERIOD_S: Final = 5.0
_CLAIMS_S: Final = 0.5  # between two counts of all claims

Stream = TypeVar("Stream", bound=Hashable)


class _Tenant(Generic[Stream]):
    __slots__ = ("_peak", "_peak_before", "_period", "claim", "num_waiting", "streams", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.num_waiting = 0
        self.claim = 0.0  # in slots
        self.streams: OrderedDict[Stream, None] = OrderedDict()  # oldest first
        self._peak = self._peak_before = self._period = 0

    @property
    def filled(self) -> float:
        return min(len(self.streams), self.claim)

    def peak(self, now_s: float) -> int:
        """To be asked before each change."""
        period, demand = int(now_s / _PEAK_PERIOD_S), len(self.streams) + self.num_waiting
        if period != self._period:
            self._peak_before = self._peak if period == self._period + 1 else demand
            self._peak, self._period = 0, period
        self._peak = max(self._peak, demand)
        return max(self._peak, self._peak_before)


class DecodeSlots(Generic[Stream]):
    """The last slots are for tenants below their share: `num_reserved`, or as many as such tenants lately wanted beside
    those that they have, up to `max_reserved`.
    """

    def __init__(self, num_slots: int, num_reserved: int, max_reserved: int | None = None) -> None:
        max_reserved = num_reserved if max_reserved is None else max_reserved
        if not 0 <= num_reserved <= max_reserved < num_slots:
            raise ValueError(f"{num_reserved} to {max_reserved} of {num_slots} slots are in reserve")
        self.num_slots = num_slots
        self.num_reserved = num_reserved
        self.max_reserved = max_reserved
        self.num_streams = 0
        self._claimed = self._filled = 0.0  # in slots
        self._claims_end_s = 0.0
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant[Stream]] = {}
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # least recent first; the keys of _tenants
        self._seen_weight = 0.0
        self._by_next = KeyedHeap[str]()  # tenants that wait, by (streams + 1) / weight
        self._by_streams = KeyedHeap[str]()  # the same by streams / weight

    def __repr__(self) -> str:
        return f"<DecodeSlots {self.num_streams} of {self.num_slots}, {len(self._by_next)} tenants wait>"

    def set_weight(self, tenant: str, weight: float) -> None:
        """Raises ValueError unless above 0 and finite."""
        if not 0 < weight < math.inf:
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
        known.peak(now_s)
        self._update(tenant, known)

    def leave(self, tenant: str) -> None:
        known = self._tenants[tenant]
        known.num_waiting -= 1
        self._update(tenant, known)

    def next_tenant(self, now_s: float) -> str | None:
        """Return the tenant that may `begin` a stream."""
        self._forget_unseen(now_s)
        num_free = self.num_slots - self.num_streams
        if num_free <= 0:
            return None
        if num_free > self._num_reserved_now(now_s):
            first = self._by_next.first
            return None if first is None else first[1]
        first = self._by_streams.first
        return None if first is None or first[0] >= self._slots_per_weight() else first[1]

    def begin(self, tenant: str, stream: Stream, now_s: float) -> None:
        """Turn a waiting request into a stream. Raises ValueError for a known stream."""
        known = self._seen(tenant, now_s)
        if stream in known.streams:
            raise ValueError(f"a stream of tenant {tenant} has a slot already")
        known.peak(now_s)
        known.num_waiting -= 1
        self._filled -= known.filled
        known.streams[stream] = None
        self._filled += known.filled
        self.num_streams += 1
        self._update(tenant, known)

    def end(self, tenant: str, stream: Stream, now_s: float) -> None:
        """Free a slot. Raises KeyError for an unknown stream."""
        known = self._tenants[tenant]
        if stream not in known.streams:
            raise KeyError(stream)
        known.peak(now_s)
        self._filled -= known.filled
        del known.streams[stream]
        self._filled += known.filled
        self.num_streams -= 1
        self._update(tenant, self._seen(tenant, now_s))

    def is_short(self, now_s: float) -> bool:
        """Whether a tenant below its share waits though another one is above its own."""
        return bool(self._above_share(now_s))

    def victim(self, now_s: float, may_end: Callable[[Stream], bool] = lambda _: True) -> tuple[str, Stream] | None:
        """Return the stream to preempt, and its tenant, while a tenant below its share waits.

        It is the oldest that `may_end` of the tenant furthest above its share that has one.
        """
        for _, tenant in sorted(self._above_share(now_s), reverse=True):
            for stream in self._tenants[tenant].streams:
                if may_end(stream):
                    return tenant, stream
        return None

    def _above_share(self, now_s: float) -> list[tuple[float, str]]:
        # By excess and name; none while no tenant below its share waits.
        self._forget_unseen(now_s)
        first = self._by_streams.first
        per_weight = self._slots_per_weight()
        if self.num_streams < self.num_slots or first is None or first[0] >= per_weight:
            return []
        # At most as many tenants have streams as there are slots.
        excesses = ((len(known.streams) - per_weight * known.weight, name) for name, known in self._tenants.items())
        return [(excess, name) for excess, name in excesses if excess >= _MIN_EXCESS_STREAMS]

    def check(self) -> None:
        assert self.num_streams == sum(len(known.streams) for known in self._tenants.values())
        assert self._tenants.keys() == self._seen_s.keys()
        assert abs(self._filled - sum(known.filled for known in self._tenants.values())) < 1e-6
        assert abs(self._seen_weight - sum(known.weight for known in self._tenants.values())) < 1e-6
        waiting = {name for name, known in self._tenants.items() if known.num_waiting}
        assert len(waiting) == len(self._by_next) == len(self._by_streams)
        assert all(name in self._by_next for name in waiting)

    def _num_reserved_now(self, now_s: float) -> int:
        if self.max_reserved == self.num_reserved:
            return self.num_reserved
        if now_s >= self._claims_end_s:
            self._claims_end_s = now_s + _CLAIMS_S
            per_weight = self._slots_per_weight()
            for known in self._tenants.values():
                known.claim = min(known.peak(now_s), per_weight * known.weight)
            self._claimed = sum(known.claim for known in self._tenants.values())
            self._filled = sum(known.filled for known in self._tenants.values())
        return max(self.num_reserved, min(self.max_reserved, int(self._claimed - self._filled)))

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
            self._seen_weight -= known.weight

    def _update(self, tenant: str, known: _Tenant[Stream]) -> None:
        if known.num_waiting:
            num_streams = len(known.streams)
            self._by_next.put(tenant, (num_streams + 1) / known.weight)
            self._by_streams.put(tenant, num_streams / known.weight)
        else:
            self._by_next.remove(tenant)
            self._by_streams.remove(tenant)
