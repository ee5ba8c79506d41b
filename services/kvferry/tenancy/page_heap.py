"""A heap of pages whose keys change."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

Key = tuple[float, int]  # numbers make keys unique

# Entries that a later change replaced stay until they come first, or until they are the larger part. Tenants have an
# `IndexedHeap`, which is smaller; for tens of thousands of pages it takes a third longer.
_MIN_COMPACTED = 64


class PageHeap(Generic[T]):
    """The smallest key is first; changes take O(log n), amortized."""

    __slots__ = ("_entries", "_page_to_key")

    def __init__(self) -> None:
        self._entries: list[tuple[Key, T]] = []
        self._page_to_key: dict[T, Key] = {}

    def __len__(self) -> int:
        return len(self._page_to_key)

    def __iter__(self) -> Iterator[T]:
        return iter(self._page_to_key)

    def __contains__(self, page: object) -> bool:
        return page in self._page_to_key

    def key_of(self, page: T) -> Key | None:
        return self._page_to_key.get(page)

    @property
    def first(self) -> tuple[Key, T] | None:
        entries = self._entries
        while entries:
            key, page = entries[0]
            if self._page_to_key.get(page) == key:
                return entries[0]
            heapq.heappop(entries)
        return None

    def put(self, page: T, key: Key) -> None:
        """Add or move a page."""
        self._page_to_key[page] = key
        heapq.heappush(self._entries, (key, page))
        self._compact()

    def remove(self, page: T) -> None:
        if self._page_to_key.pop(page, None) is not None:
            self._compact()

    def _compact(self) -> None:
        # Evicted pages are freed here, too.
        if len(self._entries) > _MIN_COMPACTED + 2 * len(self._page_to_key):
            self._entries = [(key, page) for page, key in self._page_to_key.items()]
            heapq.heapify(self._entries)

    def check(self) -> None:
        assert set(self._entries) >= {(key, page) for page, key in self._page_to_key.items()}, "a page without an entry"
        assert len(self._entries) <= _MIN_COMPACTED + 2 * len(self._page_to_key), "too many old entries"
