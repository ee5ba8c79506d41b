"""Policies that choose the chunks to evict. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvferry.store.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace


class EvictableChunk(Protocol):
    """Compared by identity."""

    @property
    def layout(self) -> LayoutDigest: ...

    @property
    def chunk(self) -> ChunkId: ...

    @property
    def num_bytes(self) -> int: ...


class EvictionPolicy(Protocol):
    """Called under the index's lock. `now_s` never decreases."""

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        """Whether a chunk of this size may be stored; if not, the write is refused."""
        ...

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        """As the most recently used."""
        ...

    def add_oldest(self, chunk: EvictableChunk) -> None:
        """As the least recently used."""
        ...

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        """Ignores unknown chunks."""
        ...

    def discard(self, chunk: EvictableChunk) -> None:
        """Idempotent."""
        ...

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[EvictableChunk]:
        """Iterate over chunks to evict for `namespace`, without other calls meanwhile."""
        ...


class Lru:
    def __init__(self) -> None:
        self._chunks: OrderedDict[EvictableChunk, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Lru of {len(self._chunks)} chunks>"

    def __len__(self) -> int:
        return len(self._chunks)

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        return True

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk)

    def add_oldest(self, chunk: EvictableChunk) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk, last=False)

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def discard(self, chunk: EvictableChunk) -> None:
        self._chunks.pop(chunk, None)

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[EvictableChunk]:
        return iter(self._chunks)
