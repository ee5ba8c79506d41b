"""One folder of verified pages.

A page is a file (page_file.py) whose name says what it should be; nothing is delivered before its bytes prove that.
Evicted files are recycled: renamed away, overwritten in place, renamed to their new name, since allocating fresh blocks
costs several times the processor time of writing them. Nothing is ever synced: whatever a crash leaves is whole, or
shows that it is not, or has the wrong size.

There are three kinds of files of ours: pages (in the index), quarantined ones, and *abandoned* ones, which are in
nobody's way but could not be removed. All count: what `_num_bytes_used` says is never less than what lies on the
drive, and never more than the capacity.

On a volume that many nodes mount, every writer has folders, a capacity and an order of eviction of its own. It reads
the others' pages, may remove them, and never recycles them.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvferry.errors import TierError
from kvferry.tier import folder, naming, page_file
from kvferry.tier.direct_io import DirectIo, aligned_buffer
from kvferry.tier.folder import FoundPage
from kvferry.tier.layout import LayoutDigest, Namespace, PageId, PageKey, PageLayout, check_payload_bytes
from kvferry.tier.outcome import Outcome as Outcome
from kvferry.tier.page_file import HEADER_BYTES, Header, Keyring
from kvferry.tier.retention import Lru, Retention

logger = logging.getLogger(__name__)

Change = Callable[[LayoutDigest, Sequence[PageId], Sequence[PageId]], None]

# Evidence is kept, but a drive that rots must not fill itself with it.
_QUARANTINE_SHARE = 16

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOTHING_THERE = (0, 0)
_NO_PAGES: Mapping[PageKey, _Kept] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """Counters since `open`. `num_bytes_used` counts this writer's files, `num_pages` all pages that can be read."""

    num_pages: int
    bytes_used: int
    capacity_bytes: int
    is_direct: bool
    reads: Mapping[Outcome, int]
    writes: Mapping[Outcome, int]
    evicted: int
    quarantined: int
    bytes_read: int
    bytes_written: int


@dataclass(slots=True, eq=False)
class _Kept:
    """A page in the index. Whoever reads it holds a pin, which keeps its file from being overwritten."""

    layout: LayoutDigest
    page: PageId
    writer: str
    num_bytes: int
    number: int
    num_pins: int = 0


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    num_bytes: int


@dataclass(slots=True)
class _Room:
    """What a writer was given: bytes that count as used, and files to recycle or remove before they are there."""

    recycled: _File | None
    removed: list[_File]
    evicted: list[_Kept]
    num_bytes: int


class _Buffers(threading.local):
    """Aligned memory of one thread."""

    def __init__(self) -> None:
        self.header = aligned_buffer(HEADER_BYTES)
        self._bounce = memoryview(b"")

    def bounce(self, num_bytes: int) -> memoryview:
        """For what is sealed; holds anything at all."""
        if len(self._bounce) < num_bytes:
            self._bounce = aligned_buffer(num_bytes)
        return self._bounce[:num_bytes]


class Volume:
    """Pages under a path. After `open`, all methods may be called from any thread; `read` and `write` block on I/O.

    `capacity_bytes` bounds all files of this writer, at every moment. `on_change(layout, added, removed)` tells of
    every page that can be read from now on, or no more, in the order in which it became so; it is called with no lock
    held, from whichever thread changed something, by one thread at a time. A listener that is set before it takes
    `keys` misses nothing; changes may be told that `keys` shows already.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        shared: bool = False,
        writer: str = "local",
        retention: Retention | None = None,
        keyring: Keyring | None = None,
        io: DirectIo | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`shared`: other processes, with other `writer` names, use the same folder. Raises ValueError."""
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
        self.path = path
        self.volume_id = ""
        self.on_change: Change = _tell_nobody
        self._writer = naming.check_writer(writer)
        self._shared = shared
        self._capacity_bytes = capacity_bytes
        self._retention = Lru() if retention is None else retention
        self._keyring = keyring
        self._io = DirectIo() if io is None else io
        self._clock = clock
        self._root = str(path)
        self._temporary = f"{self._root}/{naming.TEMPORARY}/{writer}"
        self._locks: list[int] = []
        self._numbers = itertools.count(1)
        self._buffers = _Buffers()
        self._layout_to_payload_bytes: dict[LayoutDigest, int] = {}

        # Everything below is guarded by the lock, which is never held during I/O.
        self._lock = threading.Lock()
        self._layout_to_pages: dict[LayoutDigest, dict[PageKey, _Kept]] = {}
        # Whose file is being put, moved or removed, and what a write of it is answered meanwhile.
        self._busy: dict[tuple[LayoutDigest, PageKey], Outcome] = {}
        self._num_bytes_used = 0
        self._num_bytes_reserved = 0  # of those, for pages that are being written
        self._abandoned: dict[str, int] = {}
        self._quarantined: dict[str, int] = {}  # oldest first
        self._changes: deque[tuple[LayoutDigest, list[PageId], list[PageId]]] = deque()
        self._is_telling = False
        self._reads: Counter[Outcome] = Counter()
        self._writes: Counter[Outcome] = Counter()
        self._num_evicted = 0
        self._num_quarantined = 0
        self._num_bytes_read = 0
        self._num_bytes_written = 0

    def __repr__(self) -> str:
        num_pages = sum(map(len, self._layout_to_pages.values()))
        return (
            f"<Volume {self.volume_id or 'closed'} at {self._root}: {num_pages} pages, "
            f"{self._num_bytes_used}/{self._capacity_bytes} bytes>"
        )

    def open(self) -> None:
        """Take the folder, find out how to do I/O in it, and find its pages by names and sizes.

        About a second per 100,000 pages. Raises TierError where the folder cannot be used, or a keeper has it already:
        any other one if it is not shared, one of the same `writer` if it is.
        """
        try:
            self._take()
            self._io.probe(Path(self._temporary))
            self._scan()
        except TierError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise TierError(f"volume {self._root}: {error.strerror}: {error.filename}") from error

    def close(self) -> None:
        """Give the folder back. Nothing may be running; may be repeated."""
        while self._locks:
            os.close(self._locks.pop())

    # What is kept

    def layouts(self) -> list[LayoutDigest]:
        """Those with at least one page."""
        with self._lock:
            return [layout for layout, pages in self._layout_to_pages.items() if pages]

    def keys(self, layout: LayoutDigest) -> list[PageId]:
        """A copy."""
        with self._lock:
            return [kept.page for kept in self._layout_to_pages.get(layout, _NO_PAGES).values()]

    def contains(self, layout: LayoutDigest, key: PageKey) -> bool:
        """By the index alone: no I/O, no waiting. The page may still turn out to be none."""
        return key in self._layout_to_pages.get(layout, _NO_PAGES)

    @property
    def stats(self) -> VolumeStats:
        with self._lock:
            return VolumeStats(
                num_pages=sum(map(len, self._layout_to_pages.values())),
                bytes_used=self._num_bytes_used,
                capacity_bytes=self._capacity_bytes,
                is_direct=self._io.is_direct,
                reads=dict(self._reads),
                writes=dict(self._writes),
                evicted=self._num_evicted,
                quarantined=self._num_quarantined,
                bytes_read=self._num_bytes_read,
                bytes_written=self._num_bytes_written,
            )

    def add_layout(self, layout: PageLayout) -> None:
        """Say what a digest stands for, for whoever looks at the folder, and so that sizes can be checked by it.

        Not needed before reading and writing. Raises OSError.
        """
        self._layout_to_payload_bytes[layout.digest] = layout.payload_bytes
        folder.save_layout(self.path, layout)

    def touch(self, layout: LayoutDigest, keys: Sequence[PageKey]) -> None:
        """They were used, though not read here."""
        now_s = self._clock()
        with self._lock:
            pages = self._layout_to_pages.get(layout, _NO_PAGES)
            for key in keys:
                kept = pages.get(key)
                if kept is not None:
                    self._retention.touch(kept, now_s)

    # Reading

    def read(self, layout: LayoutDigest, page: PageId, into: memoryview) -> Outcome:
        """Deliver a page, verified, or say why not; on anything but OK `into` holds anything at all.

        `into` is writable, as long as the payload, and starts at a multiple of ALIGNMENT in memory (elsewhere it works,
        slowly). `page.route_key` need not be known. A page whose bytes are not what its name says is quarantined,
        unless the name leads elsewhere by now. Raises ValueError for an `into` of the wrong length, else nothing.
        """
        self._check_payload(layout, into)
        outcome = self._read(layout, page, into)
        with self._lock:
            self._reads[outcome] += 1
            if outcome is Outcome.OK:
                self._num_bytes_read += len(into)
        self._tell()
        return outcome

    def _read(self, layout: LayoutDigest, page: PageId, into: memoryview) -> Outcome:
        kept = self._pin(layout, page.key)
        if kept is None and self._shared and self._find_elsewhere(layout, page):
            kept = self._pin(layout, page.key)
        if kept is None:
            return Outcome.MISSING
        try:
            if kept.page.namespace != page.namespace:
                return Outcome.WRONG_NAMESPACE
            key = None
            if self._keyring is not None:
                key = self._keyring.key(page.namespace)
                if key is None:
                    return Outcome.UNDECRYPTABLE
            outcome = self._read_kept(kept, into, key)
            if outcome is Outcome.OK:
                now_s = self._clock()
                with self._lock:
                    self._retention.touch(kept, now_s)
            return outcome
        finally:
            with self._lock:
                kept.num_pins -= 1

    def _pin(self, layout: LayoutDigest, key: PageKey) -> _Kept | None:
        with self._lock:
            kept = self._layout_to_pages.get(layout, _NO_PAGES).get(key)
            if kept is not None:
                kept.num_pins += 1
            return kept

    def _read_kept(self, kept: _Kept, into: memoryview, key: bytes | None) -> Outcome:
        path = self._path_of(kept)
        # Another process may overwrite a file of its own while we read it, even with the page it held before: only what
        # is wrong twice, under the same name, is wrong.
        for _ in range(2):
            outcome, inode = self._read_file(path, kept, into, key)
            if outcome in (Outcome.OK, Outcome.IO_ERROR):
                return outcome
            now = self._inode_at(path)
            if now is None:
                return Outcome.IO_ERROR
            if now == _NOTHING_THERE:
                self._forget(kept)
                return Outcome.GONE
            if now != inode:
                return Outcome.GONE
        return outcome if self._quarantine(kept, outcome) else Outcome.GONE

    def _read_file(
        self, path: str, kept: _Kept, into: memoryview, key: bytes | None
    ) -> tuple[Outcome, tuple[int, int]]:
        """How it ended, and which file it was."""
        inode = _NOTHING_THERE
        try:
            fd = self._io.open(path, os.O_RDONLY)
            try:
                facts = os.fstat(fd)
                inode = (facts.st_dev, facts.st_ino)
                if not stat.S_ISREG(facts.st_mode) or facts.st_size != HEADER_BYTES + len(into):
                    return Outcome.TRUNCATED, inode
                header = self._buffers.header
                payload = into if key is None else self._buffers.bounce(len(into))
                if self._io.read(fd, [header, payload]) != facts.st_size:
                    return Outcome.TRUNCATED, inode
            finally:
                os.close(fd)
        except FileNotFoundError:
            return Outcome.GONE, inode
        except OSError:
            return Outcome.IO_ERROR, inode
        return self._verify(header, payload, kept, into, key), inode

    def _verify(
        self, raw_header: memoryview, payload: memoryview, kept: _Kept, into: memoryview, key: bytes | None
    ) -> Outcome:
        """Whether these bytes are that page; what is sealed comes out in `into`."""
        header: Header | None = page_file.parse_header(raw_header)
        if header is None:
            return Outcome.CORRUPT_HEADER
        outcome = page_file.check_identity(header, kept.layout, kept.page, len(payload))
        if outcome is not Outcome.OK:
            return outcome
        if key is None:
            return page_file.check_plain(header, payload)
        return page_file.unseal(header, raw_header, payload, into, key)

    def _find_elsewhere(self, layout: LayoutDigest, page: PageId) -> bool:
        """Whether another writer has put the page here since the last scan; it is in the index then."""
        start = f"{page.key.hex()}-"
        with contextlib.suppress(OSError):
            for writer in folder.writers(self.path):
                if writer == self._writer:
                    continue
                with (
                    contextlib.suppress(FileNotFoundError),
                    os.scandir(f"{self._root}/{naming.page_folder(writer, layout, page)}") as entries,
                ):
                    for entry in entries:
                        found = naming.parse_page_name(entry.name, page.namespace)
                        if entry.name.startswith(start) and found is not None:
                            num_bytes = entry.stat(follow_symlinks=False).st_size
                            self._add_others(FoundPage(entry.path, writer, layout, found, num_bytes, 0.0))
                            return True
        return False

    # Writing

    def write(self, layout: LayoutDigest, page: PageId, payload: memoryview) -> Outcome:
        """Keep a page; evicts as needed. Anything but OK and EXISTS leaves it unkept.

        `payload` is a multiple of ALIGNMENT long, starts at one in memory (elsewhere it works, slowly), and must not
        change meanwhile. Raises ValueError for a payload of the wrong length, else nothing.
        """
        self._check_payload(layout, payload)
        outcome = self._write(layout, page, payload)
        with self._lock:
            self._writes[outcome] += 1
            if outcome is Outcome.OK:
                self._num_bytes_written += len(payload)
        self._tell()
        return outcome

    def _write(self, layout: LayoutDigest, page: PageId, payload: memoryview) -> Outcome:
        key = None
        if self._keyring is not None:
            key = self._keyring.key(page.namespace)
            if key is None:
                return Outcome.REFUSED
        name = (layout, page.key)
        with self._lock:
            if name in self._busy:
                return self._busy[name]
            kept = self._layout_to_pages.get(layout, _NO_PAGES).get(page.key)
            if kept is not None and kept.page.namespace == page.namespace:
                return Outcome.EXISTS
            self._busy[name] = Outcome.EXISTS
            if kept is not None:
                # The same key for another tenant or epoch: the older one can only be in the way.
                self._drop(kept)
        try:
            if kept is not None:
                self._remove_file(kept)
            return self._write_page(layout, page, payload, key)
        finally:
            with self._lock:
                del self._busy[name]

    def _write_page(self, layout: LayoutDigest, page: PageId, payload: memoryview, key: bytes | None) -> Outcome:
        num_bytes = HEADER_BYTES + len(payload)
        now_s = self._clock()
        with self._lock:
            room = self._make_room(page.namespace, num_bytes, now_s)
        if room is None:
            return Outcome.REFUSED
        self._tell()
        header = self._buffers.header
        if key is None:
            page_file.write_plain_header(header, payload, layout, page, now_s)
        else:
            sealed = self._buffers.bounce(len(payload))
            page_file.seal(header, payload, sealed, layout, page, now_s, key)
            payload = sealed
        outcome = self._fill(room, layout, page, [header, payload], num_bytes)
        if outcome is Outcome.NO_SPACE:
            # The drive is full before we are. A file that is overwritten needs no more of it.
            with self._lock:
                again = self._one_to_recycle(page.namespace, num_bytes, now_s)
            if again is not None:
                self._tell()
                outcome = self._fill(again, layout, page, [header, payload], num_bytes)
        return outcome

    def _make_room(self, namespace: Namespace, num_bytes: int, now_s: float) -> _Room | None:
        """Reserve `num_bytes`, choosing what must go for it; None where that is not enough. Needs the lock."""
        if num_bytes > self._capacity_bytes or not self._retention.admits(namespace, num_bytes, now_s):
            return None
        num_missing = self._num_bytes_used + num_bytes - self._capacity_bytes
        files: list[_File] = []
        evicted: list[_Kept] = []
        if num_missing > 0:
            for file, kept in self._candidates(namespace, now_s):
                files.append(file)
                if kept is not None:
                    evicted.append(kept)
                num_missing -= file.num_bytes
                if num_missing <= 0:
                    break
            else:
                return None
        return self._give(files, evicted, num_bytes)

    def _one_to_recycle(self, namespace: Namespace, num_bytes: int, now_s: float) -> _Room | None:
        """The first candidate of exactly this size. Needs the lock."""
        for file, kept in self._candidates(namespace, now_s):
            if file.num_bytes == num_bytes:
                return self._give([file], [] if kept is None else [kept], num_bytes)
        return None

    def _candidates(self, namespace: Namespace, now_s: float) -> Iterator[tuple[_File, _Kept | None]]:
        """What may go, first to last. Nothing may be changed while it is read. Needs the lock."""
        for path, size in self._abandoned.items():
            yield _File(path, size), None
        for victim in self._retention.victims(namespace, now_s):
            assert isinstance(victim, _Kept), "the retention invented a page"
            if not victim.num_pins:
                yield _File(self._path_of(victim), victim.num_bytes), victim
        for path, size in self._quarantined.items():
            yield _File(path, size), None

    def _give(self, files: list[_File], evicted: list[_Kept], num_bytes: int) -> _Room:
        """Take these files out of all books and into the writer's hands. Needs the lock."""
        for file in files:
            self._abandoned.pop(file.path, None)
            self._quarantined.pop(file.path, None)
        for kept in evicted:
            self._drop(kept)
            # Until its file is moved nobody may put a page of that name there: it would be moved instead.
            self._busy[kept.layout, kept.page.key] = Outcome.REFUSED
        self._num_evicted += len(evicted)
        num_freed = sum(file.num_bytes for file in files)
        recycled = files.pop() if len(files) == 1 and num_freed == num_bytes else None
        # Nothing is written before the last of them is gone, so the larger of both is enough for both.
        room = _Room(recycled, files, evicted, max(num_bytes, num_freed))
        self._num_bytes_used += room.num_bytes - num_freed
        self._num_bytes_reserved += room.num_bytes
        return room

    def _fill(
        self, room: _Room, layout: LayoutDigest, page: PageId, parts: list[memoryview], num_bytes: int
    ) -> Outcome:
        """Use the room up: for the page, or for nothing."""
        temporary = f"{self._temporary}/{next(self._numbers):x}.page"
        path = f"{self._root}/{naming.page_path(self._writer, layout, page)}"
        is_begun = False
        try:
            is_recycled = self._clear(room, temporary, num_bytes)
            is_begun = True
            self._write_file(temporary, parts, num_bytes, is_recycled)
            self._rename(temporary, path)
        except OSError as error:
            if is_begun and not self._is_removed(temporary):
                self._abandon(_File(temporary, num_bytes), room)
            self._resize(room, 0)
            return Outcome.NO_SPACE if error.errno in _FULL else Outcome.IO_ERROR
        kept = _Kept(layout, page, self._writer, num_bytes, next(self._numbers))
        with self._lock:
            self._num_bytes_reserved -= num_bytes
            self._num_bytes_used -= self._abandoned.pop(path, 0)  # which stood there, and does no more
            others = self._layout_to_pages.get(layout, _NO_PAGES).get(page.key)
            if others is not None:
                self._drop(others)
            self._keep(kept)
        return Outcome.OK

    def _clear(self, room: _Room, temporary: str, num_bytes: int) -> bool:
        """Make the room real. True where a file of the right size stands at `temporary` now, to be overwritten.

        Raises OSError where not all could be removed; what is still there is abandoned.
        """
        is_recycled = False
        failed: OSError | None = None
        try:
            for file in room.removed:
                if not self._is_removed(file.path):
                    self._abandon(file, room)
                    failed = OSError(errno.EIO, "not removed", file.path)
            if room.recycled is not None:
                try:
                    self._io.rename(room.recycled.path, temporary)
                    is_recycled = True
                except OSError as error:
                    if not self._is_absent(error):
                        self._abandon(room.recycled, room)
                        failed = error
        finally:
            with self._lock:
                for kept in room.evicted:
                    del self._busy[kept.layout, kept.page.key]
        if failed is not None:
            raise failed
        self._resize(room, num_bytes)
        return is_recycled

    def _write_file(self, path: str, parts: list[memoryview], num_bytes: int, is_recycled: bool) -> None:
        fd = self._io.open(path, os.O_WRONLY if is_recycled else os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            if is_recycled and os.fstat(fd).st_size != num_bytes:
                os.ftruncate(fd, num_bytes)
            self._io.write(fd, parts)
        finally:
            os.close(fd)

    def _rename(self, source: str, target: str) -> None:
        """Also into a folder that is not there yet, or that somebody removes at this moment because it was empty."""
        for _ in range(3):
            try:
                return self._io.rename(source, target)
            except FileNotFoundError:
                self._make_folder_of(target)
        self._io.rename(source, target)
        return None

    def _make_folder_of(self, path: str) -> None:
        # Folders of a writer are there since `open`. Were the volume's mount gone they would not be, and a path made
        # whole would fill the drive below the mount point.
        *folders, _ = path.removeprefix(f"{self._root}/").split("/")
        for depth in range(3, len(folders) + 1):
            with contextlib.suppress(FileExistsError):
                Path(self._root, *folders[:depth]).mkdir(0o700)

    # Removing

    def remove(self, layout: LayoutDigest, page: PageId) -> bool:
        """Forget a page and remove its file, whoever wrote it. False where it was not kept."""
        with self._lock:
            kept = self._layout_to_pages.get(layout, _NO_PAGES).get(page.key)
            name = (layout, page.key)
            if kept is None or kept.page.namespace != page.namespace or name in self._busy:
                return False
            self._drop(kept)
            self._busy[name] = Outcome.REFUSED
        try:
            self._remove_file(kept)
        finally:
            with self._lock:
                del self._busy[name]
        self._tell()
        return True

    def purge(self, namespace: Namespace) -> int:
        """Remove everything of a tenant's epoch, of all writers, from quarantine too. Returns the number of pages.

        Pages that are written meanwhile may stay: nobody may be writing for it any more. Raises TierError where the
        folder cannot be read.
        """
        with self._lock:
            kept_pages = [
                kept
                for pages in self._layout_to_pages.values()
                for kept in pages.values()
                if kept.page.namespace == namespace and (kept.layout, kept.page.key) not in self._busy
            ]
            for kept in kept_pages:
                self._drop(kept)
                self._busy[kept.layout, kept.page.key] = Outcome.REFUSED
            quarantined = [path for path in self._quarantined if f"/{namespace}/" in path]
            sizes = [self._quarantined.pop(path) for path in quarantined]
        for kept in kept_pages:
            try:
                self._remove_file(kept)
            finally:
                with self._lock:
                    del self._busy[kept.layout, kept.page.key]
        for path, num_bytes in zip(quarantined, sizes, strict=True):
            self._remove_bytes(_File(path, num_bytes))
        self._tell()
        try:
            return len(kept_pages) + folder.remove_namespace(self.path, namespace)
        except OSError as error:
            raise TierError(f"volume {self._root}: {error.strerror}: {error.filename}") from error

    def rescan(self) -> None:
        """See what others wrote and removed. Raises TierError where the folder cannot be read; nothing changes then."""
        before = next(self._numbers)
        seen: set[str] = set()
        added: list[FoundPage] = []
        try:
            self._learn_layouts()
            for writer in folder.writers(self.path):
                for found in folder.walk(self.path, writer):
                    if isinstance(found, FoundPage):
                        seen.add(found.path)
                        # A file of ours that is not in the index is one that is just coming or going.
                        if writer != self._writer and not self.contains(found.layout, found.page.key):
                            added.append(found)
        except OSError as error:
            raise TierError(f"volume {self._root}: {error.strerror}: {error.filename}") from error
        with self._lock:
            known = [kept for pages in self._layout_to_pages.values() for kept in pages.values()]
            abandoned = [_File(path, size) for path, size in self._abandoned.items()]
            self._abandoned.clear()
        for kept in known:
            path = self._path_of(kept)
            if path not in seen and kept.number < before and self._inode_at(path) == _NOTHING_THERE:
                self._forget(kept)
        for found in added:
            self._add_others(found)
        for file in abandoned:
            self._remove_bytes(file)
        self._tell()

    def _forget(self, kept: _Kept) -> None:
        """Its file is not there any more."""
        with self._lock:
            if self._layout_to_pages.get(kept.layout, _NO_PAGES).get(kept.page.key) is kept:
                self._drop(kept)
                if kept.writer == self._writer:
                    self._num_bytes_used -= kept.num_bytes

    def _remove_file(self, kept: _Kept) -> None:
        """The file of a page that was dropped."""
        if kept.writer == self._writer:
            self._remove_bytes(_File(self._path_of(kept), kept.num_bytes))
        else:
            self._is_removed(self._path_of(kept))

    def _remove_bytes(self, file: _File) -> None:
        """A file that counts as ours and is in no book."""
        is_removed = self._is_removed(file.path)
        with self._lock:
            if is_removed:
                self._num_bytes_used -= file.num_bytes
            else:
                self._num_bytes_used -= self._abandoned.pop(file.path, 0)
                self._abandoned[file.path] = file.num_bytes

    def _quarantine(self, kept: _Kept, outcome: Outcome) -> bool:
        """Move a bad page out of everybody's way. False where it was not there any more."""
        name = (kept.layout, kept.page.key)
        with self._lock:
            if self._layout_to_pages.get(kept.layout, _NO_PAGES).get(kept.page.key) is not kept:
                return False
            self._drop(kept)
            self._busy[name] = Outcome.REFUSED
            is_ours = kept.writer == self._writer
            if not is_ours and self._num_bytes_used + kept.num_bytes <= self._capacity_bytes:
                # By being moved it becomes ours, since there is room for it.
                self._num_bytes_used += kept.num_bytes
                is_ours = True
        try:
            path = self._path_of(kept)
            logger.warning("%s: %s", path, outcome.value)
            if not is_ours:
                self._is_removed(path)
                return True
            return self._move_to_quarantine(_File(path, kept.num_bytes), kept.layout, kept.page, outcome)
        finally:
            with self._lock:
                del self._busy[name]

    def _move_to_quarantine(self, file: _File, layout: LayoutDigest, page: PageId, outcome: Outcome) -> bool:
        """A file that counts as ours and is in no book. False where it was not there any more."""
        target = f"{self._root}/{naming.quarantine_path(self._writer, layout, page, outcome.value)}"
        try:
            self._rename(file.path, target)
        except OSError as error:
            if self._is_absent(error):
                with self._lock:
                    self._num_bytes_used -= file.num_bytes
                return False
            self._remove_bytes(file)
            return True
        too_many: list[_File] = []
        with self._lock:
            self._num_quarantined += 1
            self._num_bytes_used -= self._quarantined.pop(target, 0)
            self._quarantined[target] = file.num_bytes
            num_bytes = sum(self._quarantined.values())
            for oldest, size in self._quarantined.items():
                if oldest == target or num_bytes * _QUARANTINE_SHARE <= self._capacity_bytes:
                    break
                too_many.append(_File(oldest, size))
                num_bytes -= size
            for old in too_many:
                del self._quarantined[old.path]
        for old in too_many:
            self._remove_bytes(old)
        return True

    # Books and files

    def _keep(self, kept: _Kept) -> None:
        """Needs the lock."""
        self._layout_to_pages.setdefault(kept.layout, {})[kept.page.key] = kept
        if kept.writer == self._writer:
            self._retention.add(kept, self._clock())
        self._changes.append((kept.layout, [kept.page], []))

    def _drop(self, kept: _Kept) -> None:
        """Needs the lock."""
        del self._layout_to_pages[kept.layout][kept.page.key]
        self._retention.discard(kept)
        self._changes.append((kept.layout, [], [kept.page]))

    def _add_others(self, found: FoundPage) -> None:
        with self._lock:
            if found.page.key not in self._layout_to_pages.get(found.layout, _NO_PAGES):
                kept = _Kept(found.layout, found.page, found.writer, found.num_bytes, next(self._numbers))
                self._keep(kept)

    def _resize(self, room: _Room, num_bytes: int) -> None:
        with self._lock:
            self._num_bytes_used += num_bytes - room.num_bytes
            self._num_bytes_reserved += num_bytes - room.num_bytes
            room.num_bytes = num_bytes

    def _abandon(self, file: _File, room: _Room) -> None:
        """It counts by itself from now on, not as part of the room."""
        with self._lock:
            self._num_bytes_used -= self._abandoned.pop(file.path, 0)
            self._abandoned[file.path] = file.num_bytes
            room.num_bytes -= file.num_bytes
            self._num_bytes_reserved -= file.num_bytes

    def _is_removed(self, path: str) -> bool:
        try:
            self._io.unlink(path)
        except OSError as error:
            return self._is_absent(error)
        return True

    def _is_absent(self, error: OSError) -> bool:
        """Whether it says that a file is not there, on a volume that is."""
        return error.errno == errno.ENOENT and self._is_here()

    def _is_here(self) -> bool:
        """False while the drive is unmounted: then every page seems to be gone, and none is."""
        return Path(f"{self._temporary}.lock").exists()

    def _inode_at(self, path: str) -> tuple[int, int] | None:
        """Which file a name leads to, _NOTHING_THERE, or None where that cannot be said."""
        try:
            facts = os.lstat(path)
        except OSError as error:
            return _NOTHING_THERE if self._is_absent(error) else None
        return (facts.st_dev, facts.st_ino)

    def _path_of(self, kept: _Kept) -> str:
        return f"{self._root}/{naming.page_path(kept.writer, kept.layout, kept.page)}"

    def _check_payload(self, layout: LayoutDigest, payload: memoryview) -> None:
        num_bytes = self._layout_to_payload_bytes.get(layout)
        if payload.nbytes != len(payload) or not payload.c_contiguous:
            raise ValueError("a payload is a view of adjacent bytes")
        if num_bytes is None:
            check_payload_bytes(len(payload))
        elif num_bytes != len(payload):
            raise ValueError(f"a payload of {len(payload)} bytes; pages of this layout have {num_bytes}")

    def _tell(self) -> None:
        """Hand over what changed, in order; whoever tells already does it for all."""
        while True:
            with self._lock:
                if self._is_telling or not self._changes:
                    return
                self._is_telling = True
                change = self._changes.popleft()
            try:
                self.on_change(*change)
            except Exception:
                logger.exception("volume %s: whoever is told of changes failed", self._root)
            finally:
                with self._lock:
                    self._is_telling = False

    # Opening

    def _take(self) -> None:
        for name in (naming.LAYOUTS, naming.PAGES, naming.QUARANTINE, naming.TEMPORARY):
            (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.volume_id = folder.make_description(self.path, self._clock()).volume_id
        for file, shared in (
            (self.path / naming.LOCK, self._shared),
            (Path(f"{self._temporary}.lock"), False),
        ):
            held = folder.lock(file, shared=shared)
            if held is None:
                raise TierError(f"volume {self._root} is in use: another process holds {file.name}")
            self._locks.append(held)
        for name in (naming.PAGES, naming.QUARANTINE, naming.TEMPORARY):
            (self.path / name / self._writer).mkdir(mode=0o700, exist_ok=True)

    def _scan(self) -> None:
        for entry in os.scandir(self._temporary):
            # Of a keeper that was killed: half a page, or one that is in no folder.
            Path(entry.path).unlink()
        self._learn_layouts()
        quarantined = sorted(folder.walk_quarantine(self.path, self._writer), key=lambda found: found.modified_s)
        self._quarantined = {found.path: found.num_bytes for found in quarantined}
        self._num_bytes_used = sum(self._quarantined.values())
        self._layout_to_pages = {}
        ours = [found for found in folder.walk(self.path, self._writer) if isinstance(found, FoundPage)]
        ours.sort(key=lambda found: found.modified_s)
        for found in ours:
            self._num_bytes_used += found.num_bytes
            if found.num_bytes != self._expected_bytes(found):
                self._move_to_quarantine(
                    _File(found.path, found.num_bytes), found.layout, found.page, Outcome.TRUNCATED
                )
                continue
            older = self._layout_to_pages.get(found.layout, _NO_PAGES).get(found.page.key)
            if older is not None:
                self._drop(older)
                self._remove_file(older)
            self._keep(_Kept(found.layout, found.page, self._writer, found.num_bytes, 0))
        for writer in folder.writers(self.path):
            if writer != self._writer:
                for other in folder.walk(self.path, writer):
                    if isinstance(other, FoundPage):
                        self._add_others(other)
        self._shrink()
        self._changes.clear()

    def _expected_bytes(self, found: FoundPage) -> int:
        payload_bytes = self._layout_to_payload_bytes.get(found.layout)
        if payload_bytes is not None:
            return HEADER_BYTES + payload_bytes
        # Of a layout that nobody described any size will do that a page can have.
        return found.num_bytes if found.num_bytes > HEADER_BYTES and found.num_bytes % HEADER_BYTES == 0 else -1

    def _shrink(self) -> None:
        """To a capacity that is smaller than it was."""
        now_s = self._clock()
        while self._num_bytes_used > self._capacity_bytes:
            with self._lock:
                candidate = next(self._candidates(Namespace(), now_s), None)
                if candidate is None:
                    return
                file, kept = candidate
                self._quarantined.pop(file.path, None)
                if kept is not None:
                    self._drop(kept)
            if not self._is_removed(file.path):
                raise TierError(f"volume {self._root} is over its capacity and {file.path} cannot be removed")
            self._num_bytes_used -= file.num_bytes

    def _learn_layouts(self) -> None:
        for digest, layout in folder.load_layouts(self.path).items():
            self._layout_to_payload_bytes[digest] = layout.payload_bytes

    # Laws

    def check(self) -> None:
        """The laws of this class, while nothing runs; a stat per page. Raises AssertionError naming the broken one."""
        ours: dict[str, int] = {}
        kept_pages = [kept for pages in self._layout_to_pages.values() for kept in pages.values()]
        for kept in kept_pages:
            assert not kept.num_pins, f"{kept.page} is pinned by nobody"
            if kept.writer == self._writer:
                ours[self._path_of(kept)] = kept.num_bytes
        kept_bytes = sum(ours.values())
        counted = kept_bytes + sum(self._abandoned.values()) + sum(self._quarantined.values())
        assert not self._busy, f"nobody is at work on {self._busy}"
        assert not self._changes, "changes that nobody was told of"
        assert not self._num_bytes_reserved, f"{self._num_bytes_reserved} bytes are reserved by nobody"
        assert self._num_bytes_used == counted, f"{self._num_bytes_used} bytes in use, {counted} in the books"
        assert counted <= self._capacity_bytes, f"{counted} bytes are over the capacity"
        evictable = set(self._retention.victims(Namespace(), self._clock()))
        assert evictable == {kept for kept in kept_pages if kept.writer == self._writer}, "not what may be evicted"
        ours |= self._abandoned | self._quarantined
        on_disk = {str(file): file.lstat().st_size for file in folder.files_of(self.path, self._writer)}
        assert on_disk == ours, f"in the books and on the drive: {on_disk.items() ^ ours.items()}"
        assert sum(on_disk.values()) == counted


def _tell_nobody(layout: LayoutDigest, added: Sequence[PageId], removed: Sequence[PageId]) -> None:
    pass
