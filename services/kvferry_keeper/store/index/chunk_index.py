"""Index of a volume's chunks. No I/O.

A thread *claims* a key, removing it from the index, to write, move or remove the file. *Pinned* chunks are never
evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.keeper.layout import ChunkId, ChunkKey, LayoutDigest
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.terms import TierContract
from kvferry_keeper.store.index.change_log import Change, ChangeLog
from kvferry_keeper.store.index.chunk_table import ChunkTable, IndexEntry, RecentUses
from kvferry_keeper.store.index.eviction import EvictableChunk, EvictionPolicy
from kvferry_keeper.store.index.leftovers import Leftovers
from kvferry_keeper.store.index.space_ledger import File, SpaceLedger
from kvferry_keeper.store.outcome import Outcome


@dataclass(slots=True)
class Reservation:
    layout: LayoutDigest
    chunk: ChunkId
    chunk_bytes: int
    recycled: File | None = None  # to be renamed and overwritten
    removed: list[File] = field(default_factory=list)  # to be removed before the write
    evicted: list[IndexEntry] = field(default_factory=list)
    # The larger of freed and needed bytes: nothing is written before the last of those files is gone.
    num_bytes: int = 0


class ChunkIndex(ChunkTable):
    """Thread-safe; each method is atomic."""

    def __init__(self, root: str, writer: str, capacity_bytes: int, eviction: EvictionPolicy) -> None:
        super().__init__(root, writer)
        self._eviction = eviction
        self._space = SpaceLedger(capacity_bytes)
        self.leftovers = Leftovers(self._space, self._lock)
        self.changes = ChangeLog()
        # The outcome of a write to a claimed key.
        self._claims: dict[tuple[LayoutDigest, ChunkKey], Outcome] = {}
        self.num_evicted = 0
        self._uses: RecentUses[IndexEntry] = RecentUses()

    def __repr__(self) -> str:
        return f"<ChunkIndex of {self._num_chunks} chunks: {self._space!r}>"

    # Queries

    @property
    def capacity_bytes(self) -> int:
        return self._space.capacity_bytes

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._space.bytes_used

    # Tenants

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Raises ValueError for floors beyond the capacity."""
        with self._lock:
            self._eviction.configure(contracts)

    def usages(self, names: Collection[str] | None = None) -> Mapping[str, TenantUsage]:
        with self._lock:
            return self._eviction.usages(names)

    # Uses

    def pin(self, layout: LayoutDigest, key: ChunkKey) -> IndexEntry | None:
        with self._lock:
            if (entry := self._find(layout, key)) is not None:
                entry.num_pins += 1
            return entry

    def unpin(self, entry: IndexEntry) -> None:
        with self._lock:
            entry.num_pins -= 1

    def touch(self, layout: LayoutDigest, keys: Iterable[ChunkKey], now_s: float, *, is_recorded: bool = False) -> None:
        """`is_recorded`: the uses need no record."""
        with self._lock:
            for entry in self._found(layout, keys):
                self._eviction.touch(entry, now_s)
                if not is_recorded:
                    self._uses.note(entry)

    def hint(self, layout: LayoutDigest, keys: Iterable[ChunkKey], wanted_s: float, now_s: float) -> None:
        with self._lock:
            self._eviction.hint(list(self._found(layout, keys)), wanted_s, now_s)

    def take_uses(self) -> list[IndexEntry]:
        with self._lock:
            return self._uses.take()

    # Additions

    def add(
        self, entries: Iterable[IndexEntry], now_s: float, used_s: Iterable[float] | None = None
    ) -> list[IndexEntry]:
        """Add files, oldest first. Return those whose key is present or claimed."""
        refused: list[IndexEntry] = []
        with self._lock:
            times = itertools.repeat(now_s) if used_s is None else used_s
            for entry, entry_used_s in zip(entries, times, strict=False):
                layout, key = entry.layout, entry.chunk.key
                if self._find(layout, key) is not None or (self._claims and (layout, key) in self._claims):
                    refused.append(entry)
                    continue
                if entry.writer == self._writer:
                    self._eviction.hold(entry.chunk.namespace.tenant, entry.num_bytes)
                self._insert(entry, entry_used_s)
        return refused

    def reserve(self, layout: LayoutDigest, chunk: ChunkId, chunk_bytes: int, now_s: float) -> Reservation | Outcome:
        """Reserve space until `commit` or `cancel`; or return EXISTS or REFUSED."""
        with self._lock:
            if (claim := self._claims.get((layout, chunk.key))) is not None:
                return claim
            existing = self._find(layout, chunk.key)
            if existing is not None and existing.chunk.namespace == chunk.namespace and not existing.is_hidden:
                return Outcome.EXISTS
            path = self.path_of(IndexEntry(layout, chunk, self._writer, chunk_bytes))
            if self._space.is_removing_abandoned(path):
                return Outcome.REFUSED
            if chunk_bytes > self.capacity_bytes:
                return Outcome.REFUSED
            # A hidden chunk, the same key of another tenant or epoch, and an abandoned file at the path have to go.
            is_ours = existing is not None and existing.writer == self._writer
            evicted = [existing] if existing is not None and is_ours else []
            files = [self._file_of(entry) for entry in evicted]
            if (abandoned := self._space.abandoned_at(path)) is not None:
                files.append(abandoned)
            num_missing = (
                self._space.bytes_used + chunk_bytes - self.capacity_bytes - sum(file.num_bytes for file in files)
            )
            victims = self._select_victims(chunk.namespace.tenant, chunk_bytes, num_missing, files, evicted, now_s)
            if victims is None:
                return Outcome.REFUSED
            evicted += victims
            if existing is not None and not is_ours:
                self._drop(existing)
            reservation = Reservation(layout, chunk, chunk_bytes)
            self._claims[layout, chunk.key] = Outcome.EXISTS
            self._assign(reservation, files, evicted)
            return reservation

    def reserve_adoption(
        self, layout: LayoutDigest, chunk: ChunkId, writer: str, chunk_bytes: int
    ) -> Reservation | Outcome:
        """Reserve free space for another writer's file, until `commit`, or `roll_back` and `cancel`.

        Or return REFUSED for a claimed key, EXISTS where another file has the chunk, NO_SPACE without room.
        """
        with self._lock:
            if (layout, chunk.key) in self._claims:
                return Outcome.REFUSED
            existing = self._find(layout, chunk.key)
            if existing is not None and (existing.writer != writer or existing.chunk != chunk):
                return Outcome.EXISTS
            path = self.path_of(IndexEntry(layout, chunk, self._writer, chunk_bytes))
            if self._space.is_removing_abandoned(path) or self._space.abandoned_at(path) is not None:
                return Outcome.REFUSED
            if self._space.bytes_used + chunk_bytes > self._space.capacity_bytes:
                return Outcome.NO_SPACE
            reservation = Reservation(layout, chunk, chunk_bytes)
            self._claims[layout, chunk.key] = Outcome.EXISTS
            self._eviction.hold(chunk.namespace.tenant, chunk_bytes)
            self._resize(reservation, chunk_bytes)
            return reservation

    def reserve_by_recycling(self, reservation: Reservation, now_s: float) -> bool:
        """Reserve a file of equal size for a rolled-back reservation."""
        with self._lock:
            assert not reservation.num_bytes, "the reservation is not rolled back"
            num_bytes, tenant = reservation.chunk_bytes, reservation.chunk.namespace.tenant
            for file in self._space.abandoned:
                if file.num_bytes == num_bytes:
                    self._assign(reservation, [file], [])
                    return True
            self._eviction.release(tenant, num_bytes)
            chosen = self._eviction.select(
                tenant, num_bytes, num_bytes, now_s, lambda chunk: _may_go(chunk) and chunk.num_bytes == num_bytes
            )
            if chosen is not None:
                evicted = _entries(chosen)
                self._assign(reservation, [self._file_of(entry) for entry in evicted], evicted)
                return True
            self._eviction.hold(tenant, num_bytes)
            for file in self._space.quarantined:
                if file.num_bytes == num_bytes:
                    self._assign(reservation, [file], [])
                    return True
            return False

    def finish_eviction(self, reservation: Reservation, left: list[File]) -> None:
        """Record the reservation's files as removed, except those in `left`, which become abandoned."""
        with self._lock:
            for entry in reservation.evicted:
                # The key that is being written stays claimed.
                if self._claims.get((entry.layout, entry.chunk.key)) is Outcome.REFUSED:
                    del self._claims[entry.layout, entry.chunk.key]
            for file in left:
                self._space.end_transit(file, is_removed=False)
                reservation.num_bytes -= file.num_bytes
            gone = [*reservation.removed, *([] if reservation.recycled is None else [reservation.recycled])]
            for file in gone:
                self._space.end_transit(File(file.path, 0), is_removed=True)  # the reservation counts its bytes
            reservation.recycled, reservation.removed, reservation.evicted = None, [], []
            self._resize(reservation, reservation.num_bytes if left else reservation.chunk_bytes)

    def roll_back(self, reservation: Reservation, left: File | None = None) -> None:
        """Nothing was written, except the abandoned file `left`."""
        with self._lock:
            if left is not None:
                self._space.end_transit(left, is_removed=False)
                reservation.num_bytes -= left.num_bytes
            self._resize(reservation, 0)

    def commit(self, reservation: Reservation, used_s: float | None) -> None:
        """`used_s` is None for the least recently used chunk."""
        key = (reservation.layout, reservation.chunk.key)
        number = next(self._numbers)
        entry = IndexEntry(reservation.layout, reservation.chunk, self._writer, reservation.chunk_bytes, number)
        with self._lock:
            assert reservation.num_bytes == reservation.chunk_bytes, "a chunk without reserved space"
            assert self._space.abandoned_at(self.path_of(entry)) is None, "a chunk at the path of an abandoned file"
            self._resize(reservation, 0)
            if (existing := self._find(*key)) is not None:
                self._drop(existing)
            self._insert(entry, used_s)
            del self._claims[key]

    def cancel(self, reservation: Reservation) -> None:
        with self._lock:
            assert not reservation.num_bytes, "the reservation is not rolled back"
            self._eviction.release(reservation.chunk.namespace.tenant, reservation.chunk_bytes)
            del self._claims[reservation.layout, reservation.chunk.key]

    # Removals

    def begin_remove(self, layout: LayoutDigest, chunk: ChunkId, *, only_ours: bool = False) -> File | None:
        """Return the file, to be ended with `end_remove`, or None. `only_ours`: forget another writer's chunk."""
        with self._lock:
            entry = self._find(layout, chunk.key)
            if entry is None or entry.chunk.namespace != chunk.namespace:
                return None
            if only_ours and entry.writer != self._writer:
                self._drop(entry)
                return None
            return self._claim(entry)

    def end_remove(self, layout: LayoutDigest, chunk: ChunkId, file: File, *, is_removed: bool) -> None:
        with self._lock:
            self._space.end_transit(file, is_removed=is_removed)
            del self._claims[layout, chunk.key]

    def forget(self, entry: IndexEntry) -> None:
        """Idempotent."""
        with self._lock:
            if self._find(entry.layout, entry.chunk.key) is entry:
                self._drop(entry)

    def hide(self, entry: IndexEntry) -> None:
        """Keep the file and offer it no more, until a write of its key replaces it. Idempotent."""
        with self._lock:
            if self._find(entry.layout, entry.chunk.key) is entry and not entry.is_hidden:
                entry.is_hidden = True
                self.changes.record(Change(entry.layout, (), (entry.chunk,)))

    def begin_quarantine(self, entry: IndexEntry) -> File | None:
        """Return the chunk's file, to be ended with `end_quarantine`, or None.

        Another writer's file becomes ours if the capacity allows; else `num_bytes` is 0.
        """
        with self._lock:
            if self._find(entry.layout, entry.chunk.key) is not entry:
                return None
            file = self._claim(entry)
            if entry.writer != self._writer and self._space.bytes_used + entry.num_bytes <= self.capacity_bytes:
                file = self._space.begin_transit(File(file.path, entry.num_bytes))
            return file

    def end_quarantine(
        self, entry: IndexEntry, file: File, moved: File | None, *, is_removed: bool = False
    ) -> list[File]:
        """The file is `moved` and no larger, or removed, or abandoned.

        Return older quarantined files to remove, each to be ended with `end_removal`.
        """
        with self._lock:
            del self._claims[entry.layout, entry.chunk.key]
            if moved is None:
                self._space.end_transit(file, is_removed=is_removed)
                return []
            self._space.end_transit(file, is_removed=True)
            self._space.add_quarantined(moved)
            return self._space.withdraw_quarantine_excess(moved.path)

    def withdraw_over_capacity(self, now_s: float) -> list[File]:
        """End each file with `end_removal`."""
        with self._lock:
            files: list[File] = []
            num_missing = self._space.bytes_used - self._space.capacity_bytes
            tenant = DEFAULT_NAMESPACE.tenant
            if num_missing > 0:
                victims = self._select_victims(tenant, 0, num_missing, files, (), now_s)
                if victims is not None:
                    self._eviction.release(tenant, 0)
                for entry in victims or ():
                    self._drop(entry)
            return [self._space.begin_transit(file) for file in files]

    def withdraw_expired(self, now_s: float, max_files: int) -> list[File]:
        """End each file with `end_removal`."""
        with self._lock:
            entries = _entries(self._eviction.expire(now_s, max_files, _may_go))
            for entry in entries:
                self._drop(entry)
            self.num_evicted += len(entries)
            return [self._space.begin_transit(self._file_of(entry)) for entry in entries]

    # With the lock held

    def _insert(self, entry: IndexEntry, used_s: float | None) -> None:
        self._put(entry)
        if entry.writer == self._writer:
            self._space.stored_bytes += entry.num_bytes
            if used_s is None:
                self._eviction.add_oldest(entry)
            else:
                self._eviction.add(entry, used_s)
        self.changes.record(Change(entry.layout, (entry.chunk,), ()))

    def _drop(self, entry: IndexEntry) -> None:
        self._remove(entry)
        self._uses.discard(entry)
        if entry.writer == self._writer:
            self._space.stored_bytes -= entry.num_bytes
            self._eviction.discard(entry)
        if not entry.is_hidden:
            self.changes.record(Change(entry.layout, (), (entry.chunk,)))

    def _claim(self, entry: IndexEntry) -> File:
        self._drop(entry)
        self._claims[entry.layout, entry.chunk.key] = Outcome.REFUSED
        file = self._file_of(entry)
        # Bytes of another writer are not counted here, except those of a file that was abandoned: they stay counted.
        return self._space.begin_transit(file) if file.num_bytes else file

    def _select_victims(
        self,
        tenant: str,
        num_bytes: int,
        num_missing: int,
        files: list[File],
        going: Sequence[IndexEntry],
        now_s: float,
    ) -> list[IndexEntry] | None:
        """Append the files that go, and return the chunks among them; or None."""
        num_missing = _append_files(self._space.abandoned, num_missing, files)

        def may_go(chunk: EvictableChunk) -> bool:
            return _may_go(chunk) and chunk not in going

        chosen = self._eviction.select(tenant, num_bytes, num_missing, now_s, may_go)
        if chosen is None:
            num_missing = _append_files(self._space.quarantined, num_missing, files)
            chosen = self._eviction.select(tenant, num_bytes, num_missing, now_s, may_go)
        if chosen is None:
            return None
        victims = _entries(chosen)
        files += map(self._file_of, victims)
        return victims

    def _assign(self, reservation: Reservation, files: list[File], evicted: list[IndexEntry]) -> None:
        for file in files:
            self._space.withdraw(file)
        for entry in evicted:
            self._drop(entry)
            self._claims.setdefault((entry.layout, entry.chunk.key), Outcome.REFUSED)
        self.num_evicted += len(evicted)
        num_freed = sum(file.num_bytes for file in files)
        if len(files) == 1 and num_freed == reservation.chunk_bytes and not any(entry.num_pins for entry in evicted):
            reservation.recycled = files.pop()
        reservation.removed, reservation.evicted = files, evicted
        self._resize(reservation, max(num_freed, reservation.chunk_bytes))

    def _resize(self, reservation: Reservation, num_bytes: int) -> None:
        self._space.bytes_in_transit += num_bytes - reservation.num_bytes
        reservation.num_bytes = num_bytes

    # Invariants

    def check(self, now_s: float) -> dict[str, int]:
        """Raise AssertionError for a broken invariant while idle. Return path -> size."""
        entries = self.entries()
        ours = [entry for entry in entries if entry.writer == self._writer]
        assert len(entries) == self._num_chunks, f"{self._num_chunks} chunks counted, {len(entries)} in the index"
        assert not any(entry.num_pins for entry in entries), "chunks are pinned"
        assert not self._claims, f"keys are claimed: {self._claims}"
        self.changes.check()
        assert self._space.stored_bytes == sum(entry.num_bytes for entry in ours), "bytes of chunks"
        others = self._space.check()
        self._eviction.check()
        assert len(self._eviction) == len(ours), "the eviction policy's chunks are not those of the index"
        assert all(entry in self._eviction for entry in ours), "the eviction policy's chunks are not those of the index"
        sizes = {self.path_of(entry): entry.num_bytes for entry in ours}
        assert len(sizes) == len(ours), "two chunks in one file"
        assert not sizes.keys() & others.keys(), "a file in two states"
        return sizes | others


def _may_go(chunk: EvictableChunk) -> bool:
    return isinstance(chunk, IndexEntry) and not chunk.num_pins


def _entries(chunks: Sequence[EvictableChunk]) -> list[IndexEntry]:
    return [chunk for chunk in chunks if isinstance(chunk, IndexEntry)]


def _append_files(found: Iterable[File], num_missing: int, files: list[File]) -> int:
    """Return the bytes that are still missing."""
    for file in found:
        if num_missing > 0 and file not in files:
            files.append(file)
            num_missing -= file.num_bytes
    return num_missing
