"""A cheap asyncio queue."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class SingleReaderQueue(Generic[T]):
    """One reader, any number of writers, one event loop; `put` wakes only a sleeping reader.

    `get` raises the error given to `fail` after earlier items.
    """

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> T:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def pop_all(self) -> list[T]:
        items = list(self._items)
        self._items.clear()
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
