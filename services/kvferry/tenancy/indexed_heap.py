"""A binary heap whose items change their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class IndexedHeap(Generic[T]):
    """The smallest key is first; every change takes O(log n)."""

    __slots__ = ("_entries", "_item_to_index")

    def __init__(self) -> None:
        self._entries: list[tuple[Any, T]] = []
        self._item_to_index: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        return iter(self._item_to_index)

    @property
    def first(self) -> tuple[Any, T] | None:
        return self._entries[0] if self._entries else None

    def put(self, item: T, key: Any) -> None:
        """Add or move an item."""
        index = self._item_to_index.get(item)
        if index is None:
            self._entries.append((key, item))
            self._rise(len(self._entries) - 1)
        elif self._entries[index][0] != key:
            old_key, _ = self._entries[index]
            self._entries[index] = (key, item)
            if key < old_key:
                self._rise(index)
            else:
                self._sink(index)

    def remove(self, item: T) -> None:
        index = self._item_to_index.pop(item, None)
        if index is None:
            return
        moved = self._entries.pop()
        if index < len(self._entries):
            self._entries[index] = moved
            self._item_to_index[moved[1]] = index
            self._sink(index)
            self._rise(index)

    def _rise(self, index: int) -> None:
        entries, positions = self._entries, self._item_to_index
        entry = entries[index]
        while index:
            parent = (index - 1) >> 1
            if entries[parent][0] <= entry[0]:
                break
            entries[index] = entries[parent]
            positions[entries[index][1]] = index
            index = parent
        entries[index] = entry
        positions[entry[1]] = index

    def _sink(self, index: int) -> None:
        entries, positions = self._entries, self._item_to_index
        entry, end = entries[index], len(entries)
        while (child := 2 * index + 1) < end:
            if child + 1 < end and entries[child + 1][0] < entries[child][0]:
                child += 1
            if entry[0] <= entries[child][0]:
                break
            entries[index] = entries[child]
            positions[entries[index][1]] = index
            index = child
        entries[index] = entry
        positions[entry[1]] = index

    def check(self) -> None:
        for index, (key, item) in enumerate(self._entries):
            assert self._item_to_index[item] == index, "an item is not at its index"
            assert not index or self._entries[(index - 1) >> 1][0] <= key, "a child is before its parent"
        assert len(self._entries) == len(self._item_to_index), "entries and indices differ in number"
