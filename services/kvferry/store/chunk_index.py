"""What a volume keeps, and where every byte of its capacity is. No I/O.

A file of ours is in exactly one place:

    kept         a chunk in the index
    quarantined  a chunk that was not what its name says; the oldest go first
    abandoned    in nobody's way, but it could not be removed yet
    in hand      being written, moved or removed by one thread

All of them count, so that their sum is never less than what lies on the drive, and it never exceeds the capacity.
Whoever has something in hand has it alone: its name is *claimed* and not in the index meanwhile, so that nobody puts a
chunk where another thread is about to move a file away. A chunk that is being read is *pinned*, and no victim: its file
would be overwritten.

Chunks of other writers of a shared volume are in the index too, and count for nothing.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from kvferry.store import paths
from kvferry.store.eviction import EvictionPolicy
from kvferry.store.layout import ChunkId, ChunkKey, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.tenancy.namespace import Namespace

# Evidence is worth a sixteenth of the capacity; a drive that rots must not fill itself with it.
QUARANTINE_SHARE = 16

_Name = tuple[LayoutDigest, ChunkKey]


@dataclass(slots=True, eq=False)
class Kept:
    """A chunk in the index. `number` grows with every chunk that comes."""

    layout: LayoutDigest
    chunk: ChunkId
    writer: str
    num_bytes: int
    number: int = 0
    num_pins: int = 0


class File(NamedTuple):
    """A file in hand. Other writers' files have no bytes that count."""

    path: str
    num_bytes: int


class Change(NamedTuple):
    """Chunks that can be read from now on, and chunks that cannot any more."""

    layout: LayoutDigest
    added: tuple[ChunkId, ...]
    removed: tuple[ChunkId, ...]


@dataclass(slots=True)
class Room:
    """Room for one chunk, in the hand of who writes it.

    It is real once `recycled` was renamed away, to be overwritten, and each of `removed` was removed. `num_bytes` is
    what counts for all of it: nothing is written before the last of them is gone, so the larger of both is enough.
    """

    layout: LayoutDigest
    chunk: ChunkId
    chunk_bytes: int
    recycled: File | None = None
    removed: list[File] = field(default_factory=list)
    evicted: list[Kept] = field(default_factory=list)
    num_bytes: int = 0


_NO_CHUNKS: Mapping[ChunkKey, Kept] = MappingProxyType({})


class ChunkIndex:
    """Thread-safe; every method is one step that others see whole or not at all."""

    def __init__(self, root: str, writer: str, capacity_bytes: int, retention: EvictionPolicy) -> None:
        self.capacity_bytes = capacity_bytes
        self._root = root
        self._writer = writer
        self._retention = retention
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._layout_to_chunks: dict[LayoutDigest, dict[ChunkKey, Kept]] = {}
        self._num_chunks = 0
        self._abandoned: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}  # oldest first
        self._kept_bytes = 0
        self._abandoned_bytes = 0
        self._quarantined_bytes = 0
        self._bytes_in_hand = 0
        # What a write of a claimed name is answered.
        self._claims: dict[_Name, Outcome] = {}
        # Abandoned files in hand stand under names of chunks that others may want to write.
        self._abandoned_in_hand: set[str] = set()
        self._changes: deque[Change] | None = None
        self._is_told = False
        self._num_evicted = 0

    def __repr__(self) -> str:
        return (
            f"<Books: {self._num_chunks} pages; {self._kept_bytes} bytes kept, {self._quarantined_bytes} quarantined, "
            f"{self._abandoned_bytes} abandoned, {self._bytes_in_hand} in hand, of {self.capacity_bytes}>"
        )

    def path_of(self, kept: Kept) -> str:
        return f"{self._root}/{paths.chunk_path(kept.writer, kept.layout, kept.chunk)}"

    # Looking

    @property
    def num_chunks(self) -> int:
        return self._num_chunks

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def bytes_used(self) -> int:
        with self._lock:
            return self._bytes_used()

    def next_number(self) -> int:
        """Larger than that of every chunk that is kept by now."""
        return next(self._numbers)

    def contains(self, layout: LayoutDigest, key: ChunkKey) -> bool:
        # One look-up after another in dictionaries is safe without the lock, and callers are in a hurry.
        return key in self._layout_to_chunks.get(layout, _NO_CHUNKS)

    def layouts(self) -> list[LayoutDigest]:
        with self._lock:
            return [layout for layout, chunks in self._layout_to_chunks.items() if chunks]

    def chunks(self, layout: LayoutDigest) -> list[ChunkId]:
        with self._lock:
            return [kept.chunk for kept in self._layout_to_chunks.get(layout, _NO_CHUNKS).values()]

    def all_kept(self) -> list[Kept]:
        with self._lock:
            return [kept for chunks in self._layout_to_chunks.values() for kept in chunks.values()]

    # Using

    def pin(self, layout: LayoutDigest, key: ChunkKey) -> Kept | None:
        """Whoever gets a chunk gives it back with `unpin`."""
        with self._lock:
            kept = self._find(layout, key)
            if kept is not None:
                kept.num_pins += 1
            return kept

    def unpin(self, kept: Kept) -> None:
        with self._lock:
            kept.num_pins -= 1

    def touch(self, layout: LayoutDigest, keys: Iterable[ChunkKey], now_s: float) -> None:
        with self._lock:
            chunks = self._layout_to_chunks.get(layout, _NO_CHUNKS)
            for key in keys:
                kept = chunks.get(key)
                if kept is not None:
                    self._retention.touch(kept, now_s)

    # Coming

    def add(self, kept_chunks: Iterable[Kept], now_s: float) -> list[Kept]:
        """Files that are there already, oldest first; returns those whose name the index has, or that come or go."""
        refused: list[Kept] = []
        with self._lock:
            for kept in kept_chunks:
                layout, key = kept.layout, kept.chunk.key
                if self._find(layout, key) is not None or (self._claims and (layout, key) in self._claims):
                    refused.append(kept)
                else:
                    self._keep(kept, now_s)
        return refused

    def add_quarantined(self, file: File) -> None:
        """A file that is there already."""
        with self._lock:
            self._quarantined[file.path] = file.num_bytes
            self._quarantined_bytes += file.num_bytes

    def begin_write(self, layout: LayoutDigest, chunk: ChunkId, chunk_bytes: int, now_s: float) -> Room | Outcome:
        """Room for a chunk, to be ended with `commit` or `give_up`; or why there is none: EXISTS or REFUSED."""
        name = (layout, chunk.key)
        with self._lock:
            if name in self._claims:
                return self._claims[name]
            before = self._find(layout, chunk.key)
            if before is not None and before.chunk.namespace == chunk.namespace:
                return Outcome.EXISTS
            path = self.path_of(Kept(layout, chunk, self._writer, chunk_bytes))
            if path in self._abandoned_in_hand:
                return Outcome.REFUSED
            if chunk_bytes > self.capacity_bytes or not self._retention.admits(chunk.namespace, chunk_bytes, now_s):
                return Outcome.REFUSED
            # The same key for another tenant or epoch: the older one can only be in the way. So is what stands there.
            evicted = [] if before is None or before.writer != self._writer else [before]
            files = [self._file_of(kept) for kept in evicted]
            if path in self._abandoned:
                files.append(File(path, self._abandoned[path]))
            num_missing = self._bytes_used() + chunk_bytes - self.capacity_bytes - sum(file.num_bytes for file in files)
            if num_missing > 0:
                for file, kept in self._candidates(chunk.namespace, now_s):
                    if file in files:
                        continue
                    if kept is not None:
                        evicted.append(kept)
                    files.append(file)
                    num_missing -= file.num_bytes
                    if num_missing <= 0:
                        break
                else:
                    return Outcome.REFUSED
            if before is not None and before.writer != self._writer:
                self._drop(before)
            room = Room(layout, chunk, chunk_bytes)
            self._claims[name] = Outcome.EXISTS
            self._take(room, files, evicted)
            return room

    def recycle_instead(self, room: Room, now_s: float) -> bool:
        """Fill a room that was emptied with one file of the right size, for a drive on which no other fits."""
        with self._lock:
            assert not room.num_bytes, "a room is filled twice"
            for file, kept in self._candidates(room.chunk.namespace, now_s):
                if file.num_bytes == room.chunk_bytes:
                    self._take(room, [file], [] if kept is None else [kept])
                    return True
            return False

    def clear(self, room: Room, left: list[File]) -> None:
        """The files of the room are moved and removed, but for those `left`, which are abandoned."""
        with self._lock:
            for kept in room.evicted:
                # Not if it had the name that is written.
                if self._claims.get((kept.layout, kept.chunk.key)) is Outcome.REFUSED:
                    del self._claims[kept.layout, kept.chunk.key]
            for file in (*room.removed, *([] if room.recycled is None else [room.recycled])):
                self._abandoned_in_hand.discard(file.path)
            for file in left:
                self._abandon(file)
                room.num_bytes -= file.num_bytes
            room.recycled, room.removed, room.evicted = None, [], []
            self._resize(room, room.num_bytes if left else room.chunk_bytes)

    def empty(self, room: Room, left: File | None = None) -> None:
        """Nothing is there of what was begun, but for `left`, which is abandoned."""
        with self._lock:
            if left is not None:
                self._abandon(left)
                room.num_bytes -= left.num_bytes
            self._resize(room, 0)

    def commit(self, room: Room, now_s: float) -> None:
        """The chunk is there."""
        name = (room.layout, room.chunk.key)
        kept = Kept(room.layout, room.chunk, self._writer, room.chunk_bytes, next(self._numbers))
        with self._lock:
            assert room.num_bytes == room.chunk_bytes, "a page that was given no room"
            assert self.path_of(kept) not in self._abandoned, "a page was put where another file stands"
            self._resize(room, 0)
            others = self._find(*name)
            if others is not None:
                self._drop(others)
            self._keep(kept, now_s)
            del self._claims[name]

    def give_up(self, room: Room) -> None:
        """The chunk does not come; the room is empty."""
        with self._lock:
            assert not room.num_bytes, "a room is given up with something in it"
            del self._claims[room.layout, room.chunk.key]

    # Going

    def begin_remove(self, layout: LayoutDigest, chunk: ChunkId) -> File | None:
        """The file of a chunk that is kept no more; ended with `end_remove`. None where there is no such chunk."""
        with self._lock:
            kept = self._find(layout, chunk.key)
            if kept is None or kept.chunk.namespace != chunk.namespace:
                return None
            return self._pick_up(kept)

    def end_remove(self, layout: LayoutDigest, chunk: ChunkId, file: File, *, is_removed: bool) -> None:
        with self._lock:
            self._put_down(file, is_removed=is_removed)
            del self._claims[layout, chunk.key]

    def all_of(self, namespace: Namespace) -> list[Kept]:
        with self._lock:
            chunks = [kept for chunks in self._layout_to_chunks.values() for kept in chunks.values()]
        return [kept for kept in chunks if kept.chunk.namespace == namespace]

    def take_quarantined(self, namespace: Namespace) -> list[File]:
        """Of a namespace; in hand until `put_down`."""
        part = f"/{namespace}/"
        with self._lock:
            files = [File(path, size) for path, size in self._quarantined.items() if part in path]
            for file in files:
                self._quarantined_bytes -= self._quarantined.pop(file.path)
                self._bytes_in_hand += file.num_bytes
            return files

    def take_abandoned(self) -> list[File]:
        """In hand until `put_down`."""
        with self._lock:
            files = [File(path, size) for path, size in self._abandoned.items()]
            self._abandoned.clear()
            self._abandoned_in_hand.update(file.path for file in files)
            self._bytes_in_hand += self._abandoned_bytes
            self._abandoned_bytes = 0
            return files

    def take_surplus(self) -> list[File]:
        """What the quarantine holds beyond its share; in hand until `put_down`."""
        with self._lock:
            return self._surplus(next(reversed(self._quarantined), ""))

    def take_excess(self, now_s: float) -> File | None:
        """What goes first while a capacity is smaller than it was; in hand until `put_down`."""
        with self._lock:
            if self._bytes_used() <= self.capacity_bytes:
                return None
            for file, kept in self._candidates(Namespace(), now_s):
                if kept is None:
                    self._abandoned_bytes -= self._abandoned.pop(file.path, 0)
                    self._quarantined_bytes -= self._quarantined.pop(file.path, 0)
                else:
                    self._drop(kept)
                self._bytes_in_hand += file.num_bytes
                return file
            return None

    def put_down(self, file: File, *, is_removed: bool) -> None:
        """Out of the hand: it is gone, or it is abandoned."""
        with self._lock:
            self._put_down(file, is_removed=is_removed)

    def forget(self, kept: Kept) -> None:
        """Its file is not there any more. May be repeated."""
        with self._lock:
            if self._find(kept.layout, kept.chunk.key) is kept:
                self._drop(kept)

    def begin_quarantine(self, kept: Kept) -> File | None:
        """The file of a bad chunk, to be moved away; ended with `end_quarantine`. None where it is kept no more.

        Another writer's file becomes ours by being moved, if there is room for it; `num_bytes` says so.
        """
        with self._lock:
            if self._find(kept.layout, kept.chunk.key) is not kept:
                return None
            file = self._pick_up(kept)
            if kept.writer != self._writer and self._bytes_used() + kept.num_bytes <= self.capacity_bytes:
                file = File(file.path, kept.num_bytes)
                self._bytes_in_hand += kept.num_bytes
            return file

    def end_quarantine(self, kept: Kept, file: File, moved: File | None, *, is_removed: bool = False) -> list[File]:
        """It is `moved` now, and no larger; or gone, or abandoned. Returns older ones that are too many, in hand."""
        with self._lock:
            del self._claims[kept.layout, kept.chunk.key]
            if moved is None:
                self._put_down(file, is_removed=is_removed)
                return []
            self._bytes_in_hand -= file.num_bytes
            self._quarantined_bytes += moved.num_bytes - self._quarantined.pop(moved.path, 0)
            self._quarantined[moved.path] = moved.num_bytes
            return self._surplus(moved.path)

    # Telling

    def begin_telling(self) -> None:
        """Whatever changes from now on is told; what was found at the start is not."""
        with self._lock:
            self._changes = deque()

    def next_change(self) -> Change | None:
        """The oldest that nobody was told of, to be ended with `told`. None where there is none, or somebody tells."""
        with self._lock:
            if self._is_told or not self._changes:
                return None
            self._is_told = True
            return self._changes.popleft()

    def told(self) -> None:
        with self._lock:
            self._is_told = False

    # With the lock held

    def _bytes_used(self) -> int:
        return self._kept_bytes + self._quarantined_bytes + self._abandoned_bytes + self._bytes_in_hand

    def _find(self, layout: LayoutDigest, key: ChunkKey) -> Kept | None:
        return self._layout_to_chunks.get(layout, _NO_CHUNKS).get(key)

    def _file_of(self, kept: Kept) -> File:
        return File(self.path_of(kept), kept.num_bytes if kept.writer == self._writer else 0)

    def _keep(self, kept: Kept, now_s: float) -> None:
        self._layout_to_chunks.setdefault(kept.layout, {})[kept.chunk.key] = kept
        self._num_chunks += 1
        if kept.writer == self._writer:
            self._kept_bytes += kept.num_bytes
            self._retention.add(kept, now_s)
        if self._changes is not None:
            self._changes.append(Change(kept.layout, (kept.chunk,), ()))

    def _drop(self, kept: Kept) -> None:
        del self._layout_to_chunks[kept.layout][kept.chunk.key]
        self._num_chunks -= 1
        if kept.writer == self._writer:
            self._kept_bytes -= kept.num_bytes
            self._retention.discard(kept)
        if self._changes is not None:
            self._changes.append(Change(kept.layout, (), (kept.chunk,)))

    def _pick_up(self, kept: Kept) -> File:
        file = self._file_of(kept)
        self._drop(kept)
        self._claims[kept.layout, kept.chunk.key] = Outcome.REFUSED
        self._bytes_in_hand += file.num_bytes
        return file

    def _put_down(self, file: File, *, is_removed: bool) -> None:
        self._bytes_in_hand -= file.num_bytes
        self._abandoned_in_hand.discard(file.path)
        if not is_removed and file.num_bytes:
            self._abandoned_bytes += file.num_bytes - self._abandoned.pop(file.path, 0)
            self._abandoned[file.path] = file.num_bytes

    def _candidates(self, namespace: Namespace, now_s: float) -> Iterator[tuple[File, Kept | None]]:
        """What may go, first to last. Nothing may be changed while it is read."""
        for path, size in self._abandoned.items():
            yield File(path, size), None
        for victim in self._retention.victims(namespace, now_s):
            assert isinstance(victim, Kept), "the retention made a page up"
            if not victim.num_pins:
                yield self._file_of(victim), victim
        for path, size in self._quarantined.items():
            yield File(path, size), None

    def _take(self, room: Room, files: list[File], evicted: list[Kept]) -> None:
        """Files of any kind out of their places and into the room's hand."""
        for file in files:
            if file.path in self._abandoned:
                self._abandoned_bytes -= self._abandoned.pop(file.path)
                self._abandoned_in_hand.add(file.path)
            self._quarantined_bytes -= self._quarantined.pop(file.path, 0)
        for kept in evicted:
            self._drop(kept)
            self._claims.setdefault((kept.layout, kept.chunk.key), Outcome.REFUSED)
        self._num_evicted += len(evicted)
        num_freed = sum(file.num_bytes for file in files)
        if len(files) == 1 and num_freed == room.chunk_bytes and not any(kept.num_pins for kept in evicted):
            room.recycled = files.pop()
        room.removed, room.evicted = files, evicted
        self._resize(room, max(num_freed, room.chunk_bytes))

    def _resize(self, room: Room, num_bytes: int) -> None:
        self._bytes_in_hand += num_bytes - room.num_bytes
        room.num_bytes = num_bytes

    def _abandon(self, file: File) -> None:
        """Out of a room, which counts it no more."""
        self._put_down(file, is_removed=False)

    def _surplus(self, newest: str) -> list[File]:
        files: list[File] = []
        for path, size in self._quarantined.items():
            left = self._quarantined_bytes - sum(file.num_bytes for file in files)
            if path == newest or left * QUARANTINE_SHARE <= self.capacity_bytes:
                break
            files.append(File(path, size))
        for file in files:
            self._quarantined_bytes -= self._quarantined.pop(file.path)
            self._bytes_in_hand += file.num_bytes
        return files

    # Laws

    def check(self, now_s: float) -> dict[str, int]:
        """The laws of this class while nobody has anything in hand: returns path -> size of every file of ours.

        Raises AssertionError naming the broken law.
        """
        kept_chunks = self.all_kept()
        ours = [kept for kept in kept_chunks if kept.writer == self._writer]
        assert len(kept_chunks) == self._num_chunks, (
            f"{self._num_chunks} pages counted, {len(kept_chunks)} in the index"
        )
        assert not any(kept.num_pins for kept in kept_chunks), "pages are pinned by nobody"
        assert not self._claims, f"nobody is at work on {self._claims}"
        assert not self._abandoned_in_hand, "abandoned files in nobody's hand"
        assert not self._bytes_in_hand, f"{self._bytes_in_hand} bytes in nobody's hand"
        assert not self._changes, "changes that nobody was told of"
        assert not self._is_told, "nobody is telling"
        assert self._kept_bytes == sum(kept.num_bytes for kept in ours), "bytes of pages"
        assert self._abandoned_bytes == sum(self._abandoned.values()), "bytes of abandoned files"
        assert self._quarantined_bytes == sum(self._quarantined.values()), "bytes of quarantined files"
        assert self._bytes_used() <= self.capacity_bytes, f"{self._bytes_used()} bytes are over the capacity"
        victims = set(self._retention.victims(Namespace(), now_s))
        assert victims == set(ours), "what may be evicted is not what is kept"
        sizes = {self.path_of(kept): kept.num_bytes for kept in ours}
        assert len(sizes) == len(ours), "two pages in one file"
        assert not sizes.keys() & (self._abandoned.keys() | self._quarantined.keys()), "a file in two places"
        return sizes | self._abandoned | self._quarantined
