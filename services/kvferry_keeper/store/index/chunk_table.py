"""The table of a volume's chunks, and of their uses that are not recorded yet. No I/O."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from kvferry.keeper.layout import ChunkId, ChunkKey, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import paths
from kvferry_keeper.store.index.eviction import EvictableChunk
from kvferry_keeper.store.index.space_ledger import File


@dataclass(slots=True, eq=False)
class IndexEntry:
    layout: LayoutDigest
    chunk: ChunkId
    writer: str
    num_bytes: int
    number: int = 0  # grows with every entry
    num_pins: int = 0
    is_hidden: bool = False
    handle: object = None  # of the eviction policy


_NO_CHUNKS: Mapping[ChunkKey, IndexEntry] = MappingProxyType({})


class ChunkTable:
    def __init__(self, root: str, writer: str) -> None:
        self._root = root
        self._writer = writer
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._layout_to_chunks: dict[LayoutDigest, dict[ChunkKey, IndexEntry]] = {}
        self._num_chunks = 0

    @property
    def num_chunks(self) -> int:
        return self._num_chunks

    def path_of(self, entry: IndexEntry) -> str:
        return f"{self._root}/{paths.chunk_path(entry.writer, entry.layout, entry.chunk)}"

    def next_number(self) -> int:
        return next(self._numbers)

    def contains(self, layout: LayoutDigest, key: ChunkKey) -> bool:
        # Two dictionary look-ups in a row are safe without the lock, and this path must be fast.
        entry = self._layout_to_chunks.get(layout, _NO_CHUNKS).get(key)
        return entry is not None and not entry.is_hidden

    def layouts(self) -> list[LayoutDigest]:
        with self._lock:
            return [layout for layout, chunks in self._layout_to_chunks.items() if chunks]

    def chunks(self, layout: LayoutDigest) -> list[ChunkId]:
        with self._lock:
            chunks = self._layout_to_chunks.get(layout, _NO_CHUNKS)
            return [entry.chunk for entry in chunks.values() if not entry.is_hidden]

    def entries(self, namespace: Namespace | None = None) -> list[IndexEntry]:
        with self._lock:
            entries = [entry for chunks in self._layout_to_chunks.values() for entry in chunks.values()]
        return entries if namespace is None else [entry for entry in entries if entry.chunk.namespace == namespace]

    # With the lock held

    def _find(self, layout: LayoutDigest, key: ChunkKey) -> IndexEntry | None:
        return self._layout_to_chunks.get(layout, _NO_CHUNKS).get(key)

    def _file_of(self, entry: IndexEntry) -> File:
        return File(self.path_of(entry), entry.num_bytes if entry.writer == self._writer else 0)

    def _found(self, layout: LayoutDigest, keys: Iterable[ChunkKey]) -> Iterator[IndexEntry]:
        return filter(None, map(self._layout_to_chunks.get(layout, _NO_CHUNKS).get, keys))

    def _put(self, entry: IndexEntry) -> None:
        self._layout_to_chunks.setdefault(entry.layout, {})[entry.chunk.key] = entry
        self._num_chunks += 1

    def _remove(self, entry: IndexEntry) -> None:
        del self._layout_to_chunks[entry.layout][entry.chunk.key]
        self._num_chunks -= 1


_Chunk = TypeVar("_Chunk", bound=EvictableChunk)

MAX_USES = 65_536  # of the last ones


class RecentUses(Generic[_Chunk]):
    """Not thread-safe."""

    def __init__(self) -> None:
        self._chunks: dict[_Chunk, None] = {}

    def __repr__(self) -> str:
        return f"<RecentUses of {len(self._chunks)} chunks>"

    def note(self, chunk: _Chunk) -> None:
        self._chunks.pop(chunk, None)
        self._chunks[chunk] = None
        if len(self._chunks) > MAX_USES:
            del self._chunks[next(iter(self._chunks))]

    def discard(self, chunk: _Chunk) -> None:
        self._chunks.pop(chunk, None)

    def take(self) -> list[_Chunk]:
        """Return the chunks since the last call, least recently used first."""
        chunks, self._chunks = self._chunks, {}
        return list(chunks)
