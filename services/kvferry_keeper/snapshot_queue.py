"""Snapshot, then changes, for one subscriber that may read slowly. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SnapshotQueue(Generic[T]):
    """When waiting changes exceed `max_size`, a snapshot replaces them.

    `snapshot` makes its parts when the first is popped.
    """

    def __init__(
        self, snapshot: Callable[[], Iterable[T]], max_size: int, size_of: Callable[[T], int] = lambda change: 1
    ) -> None:
        self._snapshot = snapshot
        self._max_size = max_size
        self._size_of = size_of
        self._needs_snapshot = False
        self._parts: Iterator[T] = iter(())
        self._changes: deque[T] = deque()
        self._size = 0

    def __repr__(self) -> str:
        return f"<SnapshotQueue of {len(self._changes)} changes{', needs a snapshot' * self._needs_snapshot}>"

    def begin_snapshot(self) -> None:
        self.clear()
        self._needs_snapshot = True

    def put(self, change: T) -> None:
        if self._needs_snapshot:
            return
        self._changes.append(change)
        self._size += self._size_of(change)
        if self._size > self._max_size:
            self.begin_snapshot()

    def pop(self) -> T | None:
        if self._needs_snapshot:
            # While the flag is up, `put` ignores changes that `snapshot` flushes: the snapshot has them.
            self._parts = iter(self._snapshot())
            self._needs_snapshot = False
        for part in self._parts:
            return part
        if not self._changes:
            return None
        change = self._changes.popleft()
        self._size -= self._size_of(change)
        return change

    def clear(self) -> None:
        self._needs_snapshot = False
        self._parts = iter(())
        self._changes.clear()
        self._size = 0
