"""Chunks that were used and whose use is not recorded yet."""

from __future__ import annotations

from typing import Generic, TypeVar

from kvferry.store.index.eviction import EvictableChunk

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
