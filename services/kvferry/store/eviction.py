"""Which chunk goes next. Pure: the time is passed in, and whoever asks does what is answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvferry.store.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace


class EvictableChunk(Protocol):
    """A chunk that takes room; told apart from others by identity."""

    @property
    def layout(self) -> LayoutDigest: ...

    @property
    def chunk(self) -> ChunkId: ...

    @property
    def num_bytes(self) -> int:
        """Its whole file."""
        ...


class EvictionPolicy(Protocol):
    """The order of eviction. Not thread-safe: a volume asks under its own lock. `now_s` never goes back."""

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        """Whether a chunk of this size may be kept at all; otherwise the write is refused."""
        ...

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        """It is kept from now on, as the most recently used."""
        ...

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        """It was used. Nothing where it is not kept."""
        ...

    def discard(self, chunk: EvictableChunk) -> None:
        """It is not kept any more. May be repeated."""
        ...

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[EvictableChunk]:
        """Chunks that may go to make room for one of `namespace`, first to last. Nothing is called while it is read."""
        ...


class Lru:
    """The least recently used chunk goes first, whoever it belongs to."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[EvictableChunk, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Lru of {len(self._chunks)} pages>"

    def __len__(self) -> int:
        return len(self._chunks)

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        return True

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk)

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def discard(self, chunk: EvictableChunk) -> None:
        self._chunks.pop(chunk, None)

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[EvictableChunk]:
        return iter(self._chunks)
