"""What one session knows of tenants: whose its requests are, and what it has told of their work."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Final

from kvferry.wire.v1 import worker_pb2 as pb

# What tenants were served goes with stats, this often, of so many tenants at once.
SERVED_INTERVAL_S: Final = 0.5
MAX_SERVED: Final = 64

_NUM_KEPT: Final = 64  # requests that are gone, beside those that are not


class SessionTenants:
    # `is_there` tells whether a request of this number is on the worker, or has a place.
    def __init__(self, is_there: Callable[[int], bool]) -> None:
        self._is_there = is_there
        self._by_number: dict[int, str] = {}
        self._max_numbers = _NUM_KEPT
        self._told_ms: dict[str, float] = {}
        self._told_s = 0.0

    def __len__(self) -> int:
        return len(self._by_number)

    def note(self, number: int, message: pb.Reserve | pb.Submit) -> None:
        if not message.HasField("turn"):
            return
        self._by_number[number] = message.turn.tenant
        if len(self._by_number) > self._max_numbers:
            self._by_number = {each: tenant for each, tenant in self._by_number.items() if self._is_there(each)}
            self._max_numbers = 2 * len(self._by_number) + _NUM_KEPT

    def num_requests(self, tenant: str) -> int:
        """O(requests)."""
        return sum(each == tenant and self._is_there(number) for number, each in self._by_number.items())

    def add_served(self, stats: pb.Load, served_ms: Mapping[str, float], now_s: float) -> None:
        """Add totals that changed since they were told."""
        if now_s - self._told_s < SERVED_INTERVAL_S:
            return
        changed = ((tenant, ms) for tenant, ms in served_ms.items() if self._told_ms.get(tenant) != ms)
        for tenant, ms in itertools.islice(changed, MAX_SERVED):
            stats.served.add(tenant=tenant, ms=ms)
            self._told_ms[tenant] = ms
            self._told_s = now_s
