"""KV events of a simulator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Generic, TypeVar

from kvferry.engine.base import KvEvent, KvEventBatch
from kvferry.errors import EngineDead

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


MAX_UNREAD_BATCHES = 100_000  # further batches are dropped, and the listener sees the gap in the numbers


class _ListenerReplaced(Exception):
    pass


class KvEventStream:
    """Serves one listener at a time."""

    def __init__(self) -> None:
        self._listener: SingleReaderQueue[KvEventBatch] | None = None
        self._failure: EngineDead | None = None
        self._next_sequence = 0

    def publish(self, events: Sequence[KvEvent]) -> None:
        if not events:
            return
        batch = KvEventBatch(self._next_sequence, events)
        self._next_sequence += 1
        if self._listener is not None and len(self._listener) < MAX_UNREAD_BATCHES:
            self._listener.put(batch)

    def listen(self) -> AsyncIterator[KvEventBatch]:
        if self._listener is not None:
            self._listener.fail(_ListenerReplaced())
        self._listener = listener = SingleReaderQueue[KvEventBatch]()
        if self._failure is not None:
            listener.fail(self._failure)
        return self._read(listener)

    def close(self, failure: EngineDead) -> None:
        self._failure = failure
        if self._listener is not None:
            self._listener.fail(failure)

    async def _read(self, listener: SingleReaderQueue[KvEventBatch]) -> AsyncIterator[KvEventBatch]:
        try:
            while True:
                yield await listener.get()
        except (_ListenerReplaced, EngineDead):
            return
        finally:
            if self._listener is listener:
                self._listener = None
