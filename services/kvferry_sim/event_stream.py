"""KV events of a simulator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvferry.engine.base import KvEvent, KvEventBatch
from kvferry.errors import EngineDead
from kvferry_sim.single_reader_queue import SingleReaderQueue

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
