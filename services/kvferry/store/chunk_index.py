"""Index of a volume's chunks. No I/O.

A thread *claims* a key, removing it from the index, to write, move or remove the file. *Pinned* chunks are never
evicted.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from kvferry.store import paths
from kvferry.store.change_log import Change, ChangeLog
from kvferry.store.eviction import EvictionPolicy
from kvferry.store.layout import ChunkId, ChunkKey, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.store.recent_uses import RecentUses
from kvferry.store.space_ledger import File, SpaceLedger
from kvferry.tenancy.namespace import Namespace


@dataclass(slots=True, eq=False)
class IndexEntry:
    layout: LayoutDigest
    chunk: ChunkId
    writer: str
    num_bytes: int
    number: int = 0  # grows with every entry
    num_pins: int = 0
    is_hidden: bool = False


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


_NO_CHUNKS: Mapping[ChunkKey, IndexEntry] = MappingProxyType({})


class ChunkIndex:
    """Thread-safe; each method is atomic."""

    def __init__(self, root: str, writer: str, capacity_bytes: int, eviction: EvictionPolicy) -> None:
        self._root = root
        self._writer = writer
        self._eviction = eviction
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._layout_to_chunks: dict[LayoutDigest, dict[ChunkKey, IndexEntry]] = {}
        self._num_chunks = 0
        self._space = SpaceLedger(capacity_bytes)
        self.changes = ChangeLog()
        # The outcome of a write to a claimed key.
        self._claims: dict[tuple[LayoutDigest, ChunkKey], Outcome] = {}
        self.num_evicted = 0
        self._uses: RecentUses[IndexEntry] = RecentUses()

    def __repr__(self) -> str:
        return f"<ChunkIndex of {self._num_chunks} chunks: {self._space!r}>"

    def path_of(self, entry: IndexEntry) -> str:
        return f"{self._root}/{paths.chunk_path(entry.writer, entry.layout, entry.chunk)}"

    # Queries

    @property
    def capacity_bytes(self) -> int:
        return self._space.capacity_bytes

    @property
    def num_chunks(self) -> int:
        return self._num_chunks

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._space.bytes_used

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
            chunks = self._layout_to_chunks.get(layout, _NO_CHUNKS)
            for entry in filter(None, map(chunks.get, keys)):
                self._eviction.touch(entry, now_s)
                if not is_recorded:
                    self._uses.note(entry)

    def take_uses(self) -> list[IndexEntry]:
        with self._lock:
            return self._uses.take()

    # Additions

    def add(self, entries: Iterable[IndexEntry], now_s: float) -> list[IndexEntry]:
        """Add files, oldest first. Return those whose key is present or claimed."""
        refused: list[IndexEntry] = []
        with self._lock:
            for entry in entries:
                layout, key = entry.layout, entry.chunk.key
                if self._find(layout, key) is not None or (self._claims and (layout, key) in self._claims):
                    refused.append(entry)
                else:
                    self._insert(entry, now_s)
        return refused

    def add_quarantined(self, file: File) -> None:
        with self._lock:
            self._space.add_quarantined(file)

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
            if chunk_bytes > self.capacity_bytes or not self._eviction.admits(chunk.namespace, chunk_bytes, now_s):
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
            if not self._select_victims(chunk.namespace, num_missing, files, evicted, now_s):
                return Outcome.REFUSED
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
            self._resize(reservation, chunk_bytes)
            return reservation

    def reserve_by_recycling(self, reservation: Reservation, now_s: float) -> bool:
        """Reserve a file of equal size for a rolled-back reservation."""
        with self._lock:
            assert not reservation.num_bytes, "the reservation is not rolled back"
            for file, entry in self._victims(reservation.chunk.namespace, now_s):
                if file.num_bytes == reservation.chunk_bytes:
                    self._assign(reservation, [file], [] if entry is None else [entry])
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

    def withdraw_quarantined(self, namespace: Namespace) -> list[File]:
        """End each file with `end_removal`."""
        part = f"/{namespace}/"
        with self._lock:
            return [self._space.begin_transit(file) for file in self._space.quarantined if part in file.path]

    def withdraw_abandoned(self) -> list[File]:
        with self._lock:
            return [self._space.begin_transit(file) for file in self._space.abandoned]

    def withdraw_quarantine_excess(self) -> list[File]:
        with self._lock:
            quarantined = self._space.quarantined
            return self._space.withdraw_quarantine_excess(quarantined[-1].path if quarantined else "")

    def withdraw_over_capacity(self, now_s: float) -> File | None:
        with self._lock:
            if self._space.bytes_used <= self._space.capacity_bytes:
                return None
            for file, entry in self._victims(Namespace(), now_s):
                if entry is not None:
                    self._drop(entry)
                return self._space.begin_transit(file)
            return None

    def end_removal(self, file: File, *, is_removed: bool) -> None:
        with self._lock:
            self._space.end_transit(file, is_removed=is_removed)

    # With the lock held

    def _find(self, layout: LayoutDigest, key: ChunkKey) -> IndexEntry | None:
        return self._layout_to_chunks.get(layout, _NO_CHUNKS).get(key)

    def _file_of(self, entry: IndexEntry) -> File:
        return File(self.path_of(entry), entry.num_bytes if entry.writer == self._writer else 0)

    def _insert(self, entry: IndexEntry, used_s: float | None) -> None:
        self._layout_to_chunks.setdefault(entry.layout, {})[entry.chunk.key] = entry
        self._num_chunks += 1
        if entry.writer == self._writer:
            self._space.stored_bytes += entry.num_bytes
            if used_s is None:
                self._eviction.add_oldest(entry)
            else:
                self._eviction.add(entry, used_s)
        self.changes.record(Change(entry.layout, (entry.chunk,), ()))

    def _drop(self, entry: IndexEntry) -> None:
        del self._layout_to_chunks[entry.layout][entry.chunk.key]
        self._num_chunks -= 1
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

    def _victims(self, namespace: Namespace, now_s: float) -> Iterator[tuple[File, IndexEntry | None]]:
        """Nothing may change during the iteration."""
        for file in self._space.abandoned:
            yield file, None
        for victim in self._eviction.victims(namespace, now_s):
            assert isinstance(victim, IndexEntry), "the eviction policy returned a foreign object"
            if not victim.num_pins:
                yield self._file_of(victim), victim
        for file in self._space.quarantined:
            yield file, None

    def _select_victims(
        self, namespace: Namespace, num_missing: int, files: list[File], evicted: list[IndexEntry], now_s: float
    ) -> bool:
        if num_missing <= 0:
            return True
        for file, entry in self._victims(namespace, now_s):
            if file in files:
                continue
            if entry is not None:
                evicted.append(entry)
            files.append(file)
            num_missing -= file.num_bytes
            if num_missing <= 0:
                return True
        return False

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
        victims = set(self._eviction.victims(Namespace(), now_s))
        assert victims == set(ours), "the eviction policy's chunks are not those of the index"
        sizes = {self.path_of(entry): entry.num_bytes for entry in ours}
        assert len(sizes) == len(ours), "two chunks in one file"
        assert not sizes.keys() & others.keys(), "a file in two states"
        return sizes | others
