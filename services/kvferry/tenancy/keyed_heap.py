"""A heap of items whose keys change."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Entries that a later change replaced stay until they come first, or until they are the larger part.
_MIN_COMPACTED = 64


class KeyedHeap(Generic[T]):
    """The smallest key is first, and of equal ones the oldest; changes take O(log n), amortized."""

    __slots__ = ("_entries", "_item_to_entry", "_last_number")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._item_to_entry: dict[T, tuple[Any, int, T]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._item_to_entry)

    def __iter__(self) -> Iterator[T]:
        return iter(self._item_to_entry)

    def __contains__(self, item: object) -> bool:
        return item in self._item_to_entry

    def key_of(self, item: T) -> Any:
        """None for an item that is not there."""
        entry = self._item_to_entry.get(item)
        return None if entry is None else entry[0]

    @property
    def first(self) -> tuple[Any, T] | None:
        entries = self._entries
        while entries:
            key, _, item = entry = entries[0]
            if self._item_to_entry.get(item) is entry:
                return key, item
            heapq.heappop(entries)
        return None

    def put(self, item: T, key: Any) -> None:
        """Add or move an item."""
        self._last_number += 1
        entry = self._item_to_entry[item] = (key, self._last_number, item)
        heapq.heappush(self._entries, entry)
        self._compact()

    def remove(self, item: T) -> None:
        if self._item_to_entry.pop(item, None) is not None:
            self._compact()

    def _compact(self) -> None:
        # Items that were removed are freed here, too.
        if len(self._entries) > _MIN_COMPACTED + 2 * len(self._item_to_entry):
            self._entries = list(self._item_to_entry.values())
            heapq.heapify(self._entries)

    def check(self) -> None:
        there = set(map(id, self._entries))
        assert all(id(entry) in there for entry in self._item_to_entry.values()), "an item without an entry"
        assert len(self._entries) <= _MIN_COMPACTED + 2 * len(self._item_to_entry), "too many old entries"
