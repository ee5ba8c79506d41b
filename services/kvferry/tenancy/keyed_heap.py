"""A heap of tenants whose keys change."""

from __future__ import annotations

import heapq

# Entries that a later change replaced stay in the list until they come first, or until they are the larger part.
_MIN_COMPACTED = 64


class KeyedHeap:
    """Smallest key first, then the oldest; changes in O(log n), amortized."""

    __slots__ = ("_entries", "_last_number", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, str]] = []
        self._numbers: dict[str, int] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._numbers

    def set(self, tenant: str, key: float) -> None:
        self._last_number += 1
        self._numbers[tenant] = self._last_number
        heapq.heappush(self._entries, (key, self._last_number, tenant))
        if len(self._entries) > _MIN_COMPACTED + 2 * len(self._numbers):
            self._entries = [entry for entry in self._entries if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def discard(self, tenant: str) -> None:
        self._numbers.pop(tenant, None)

    def first(self) -> tuple[float, str] | None:
        entries = self._entries
        while entries:
            key, number, tenant = entries[0]
            if self._numbers.get(tenant) == number:
                return key, tenant
            heapq.heappop(entries)
        return None
