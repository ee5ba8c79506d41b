"""Policies that choose the chunks to evict. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.pages.outcome import Refusal, TenantUsage, Victim
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings

# Remembered evicted chunks of a tenant, for each chunk that it has; 160 bytes each.
GHOSTS_PER_CHUNK = 2


class EvictableChunk(Protocol):
    """Compared by identity."""

    handle: object  # of the policy

    @property
    def layout(self) -> LayoutDigest: ...

    @property
    def chunk(self) -> ChunkId: ...

    @property
    def num_bytes(self) -> int: ...


MayGo = Callable[[EvictableChunk], bool]


class EvictionPolicy(Protocol):
    """Called under the index's lock. `now_s` never decreases."""

    def select(
        self, tenant: str, num_bytes: int, num_missing: int, now_s: float, may_go: MayGo
    ) -> Sequence[EvictableChunk] | None:
        """Remove and return chunks of `num_missing` bytes, and hold `num_bytes`; or None, removing nothing."""
        ...

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of a tenant until `add`, `add_oldest` or `release`."""
        ...

    def release(self, tenant: str, num_bytes: int) -> None: ...

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        """Add a chunk as the most recently used one."""
        ...

    def add_oldest(self, chunk: EvictableChunk) -> None:
        """Add a chunk as the least recently used one."""
        ...

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        """Ignores unknown chunks."""
        ...

    def hint(self, chunks: Sequence[EvictableChunk], wanted_s: float, now_s: float) -> None:
        """Want chunks in the order of their prompt; 0: their session ends. Ignores unknown chunks."""
        ...

    def discard(self, chunk: EvictableChunk) -> None:
        """Idempotent."""
        ...

    def expire(self, now_s: float, max_chunks: int, may_go: MayGo) -> Sequence[EvictableChunk]:
        """Remove and return expired chunks."""
        ...

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Raises ValueError for floors beyond the capacity."""
        ...

    def usages(self, names: Collection[str] | None = None) -> Mapping[str, TenantUsage]:
        """Return what tenants hold: those of these names, or all, by name or as `OTHER`."""
        ...

    def __contains__(self, chunk: EvictableChunk) -> bool: ...

    def __len__(self) -> int: ...

    def check(self) -> None:
        """Raise AssertionError for a broken invariant while no bytes are held."""
        ...


class Lru:
    """One order for all tenants."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[EvictableChunk, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Lru of {len(self._chunks)} chunks>"

    def __len__(self) -> int:
        return len(self._chunks)

    def select(
        self, tenant: str, num_bytes: int, num_missing: int, now_s: float, may_go: MayGo
    ) -> Sequence[EvictableChunk] | None:
        chosen: list[EvictableChunk] = []
        for chunk in self._chunks:
            if num_missing <= 0:
                break
            if may_go(chunk):
                chosen.append(chunk)
                num_missing -= chunk.num_bytes
        if num_missing > 0:
            return None
        for chunk in chosen:
            del self._chunks[chunk]
        return chosen

    def hold(self, tenant: str, num_bytes: int) -> None:
        pass

    def release(self, tenant: str, num_bytes: int) -> None:
        pass

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk)

    def add_oldest(self, chunk: EvictableChunk) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk, last=False)

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        if chunk in self._chunks:
            self._chunks.move_to_end(chunk)

    def hint(self, chunks: Sequence[EvictableChunk], wanted_s: float, now_s: float) -> None:
        pass  # of a tenant, which it does not know

    def discard(self, chunk: EvictableChunk) -> None:
        self._chunks.pop(chunk, None)

    def expire(self, now_s: float, max_chunks: int, may_go: MayGo) -> Sequence[EvictableChunk]:
        return ()

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        pass

    def usages(self, names: Collection[str] | None = None) -> Mapping[str, TenantUsage]:
        return {}

    def __contains__(self, chunk: EvictableChunk) -> bool:
        return chunk in self._chunks

    def check(self) -> None:
        pass


class _ChunkPage(Page):
    __slots__ = ("chunk",)

    def __init__(self, chunk: EvictableChunk) -> None:
        super().__init__(chunk.chunk.namespace.tenant, chunk.chunk.key, chunk.num_bytes, 0.0)
        self.chunk = chunk


class TenantRetention:
    """Floors, caps and times to live of tenants, in bytes (`tenancy/pages/retention.py`)."""

    def __init__(self, capacity_bytes: int) -> None:
        self._retention = Retention(TierSettings(max(1, capacity_bytes), ghosts_per_page=GHOSTS_PER_CHUNK))
        self._num_chunks = 0

    def __repr__(self) -> str:
        return f"<TenantRetention {self._retention!r}>"

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        self._retention.configure(contracts)

    def usages(self, names: Collection[str] | None = None) -> Mapping[str, TenantUsage]:
        if names is not None:
            return {name: self._retention.usage_of(name) for name in names}
        return self._retention.usages()

    def select(
        self, tenant: str, num_bytes: int, num_missing: int, now_s: float, may_go: MayGo
    ) -> Sequence[EvictableChunk] | None:
        victims = self._retention.reserve(tenant, num_bytes, num_missing, now_s, _asking(may_go))
        return None if isinstance(victims, Refusal) else self._gone(victims)

    def hold(self, tenant: str, num_bytes: int) -> None:
        self._retention.hold(tenant, num_bytes)

    def release(self, tenant: str, num_bytes: int) -> None:
        self._retention.release(tenant, num_bytes)

    def add(self, chunk: EvictableChunk, now_s: float) -> None:
        self._fill(chunk, now_s)

    def add_oldest(self, chunk: EvictableChunk) -> None:
        self._fill(chunk, None)

    def touch(self, chunk: EvictableChunk, now_s: float) -> None:
        if isinstance(chunk.handle, _ChunkPage):
            self._retention.touch(chunk.handle, now_s)

    def hint(self, chunks: Sequence[EvictableChunk], wanted_s: float, now_s: float) -> None:
        pages = [chunk.handle for chunk in chunks if isinstance(chunk.handle, _ChunkPage)]
        self._retention.hint(pages, wanted_s, now_s)

    def discard(self, chunk: EvictableChunk) -> None:
        if isinstance(chunk.handle, _ChunkPage):
            self._retention.discard(chunk.handle)
            self._forget(chunk.handle)

    def expire(self, now_s: float, max_chunks: int, may_go: MayGo) -> Sequence[EvictableChunk]:
        return self._gone(self._retention.reclaim(now_s, max_chunks, _asking(may_go)))

    def __contains__(self, chunk: EvictableChunk) -> bool:
        return isinstance(chunk.handle, _ChunkPage) and chunk.handle.is_resident

    def __len__(self) -> int:
        return self._num_chunks

    def check(self) -> None:
        self._retention.check()

    def _fill(self, chunk: EvictableChunk, used_s: float | None) -> None:
        chunk.handle = page = _ChunkPage(chunk)
        self._num_chunks += 1
        self._retention.fill(page, used_s)

    def _gone(self, victims: Sequence[Victim]) -> list[EvictableChunk]:
        pages = [victim.page for victim in victims]
        return [self._forget(page) for page in pages if isinstance(page, _ChunkPage)]

    def _forget(self, page: _ChunkPage) -> EvictableChunk:
        self._num_chunks -= 1
        page.chunk.handle = None
        return page.chunk


def _asking(may_go: MayGo) -> Callable[[Page], bool]:
    return lambda page: not isinstance(page, _ChunkPage) or may_go(page.chunk)
