"""One folder of verified chunks.

A chunk is a file (chunk_file.py) whose name says what it should be; nothing is delivered before its bytes prove that.
Evicted files are recycled: renamed away, overwritten in place, renamed to their new name, since allocating fresh blocks
costs several times the processor time of writing them. Nothing is ever synced: whatever a crash leaves is whole, or
shows that it is not, or has the wrong size.

On a volume that many nodes mount, every writer has folders, a capacity and an order of eviction of its own. It reads
the others' chunks, may remove them, and never recycles them.

books.py decides, this file does.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import TierError
from kvferry.store import chunk_file, folder, paths
from kvferry.store.chunk_file import HEADER_BYTES, Keyring
from kvferry.store.chunk_index import ChunkIndex, File, Kept, Room
from kvferry.store.direct_io import DirectIo, aligned_buffer
from kvferry.store.eviction import EvictionPolicy, Lru
from kvferry.store.folder import ForeignFile, FoundChunk
from kvferry.store.layout import ALIGNMENT, ChunkId, ChunkKey, ChunkLayout, LayoutDigest, check_payload_bytes
from kvferry.store.outcome import Outcome as Outcome
from kvferry.tenancy.namespace import Namespace

logger = logging.getLogger(__name__)

Listener = Callable[[LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

_Inode = tuple[int, int]
_NOTHING_THERE: _Inode = (0, 0)


@dataclass(frozen=True, slots=True)
class VolumeStats:
    """Counts since `open`. `bytes_used` is what this writer's files take, `num_chunks` all chunks that can be read."""

    num_chunks: int
    bytes_used: int
    capacity_bytes: int
    is_direct: bool
    reads: Mapping[Outcome, int]
    writes: Mapping[Outcome, int]
    evicted: int
    quarantined: int
    bytes_read: int
    bytes_written: int


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


class _Counts:
    """What `VolumeStats` tells, beside the books."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reads: Counter[Outcome] = Counter()
        self.writes: Counter[Outcome] = Counter()
        self.num_quarantined = 0
        self.bytes_read = 0
        self.bytes_written = 0

    def read(self, outcome: Outcome, num_bytes: int) -> None:
        with self._lock:
            self.reads[outcome] += 1
            if outcome is Outcome.OK:
                self.bytes_read += num_bytes

    def wrote(self, outcome: Outcome, num_bytes: int) -> None:
        with self._lock:
            self.writes[outcome] += 1
            if outcome is Outcome.OK:
                self.bytes_written += num_bytes

    def quarantined(self) -> None:
        with self._lock:
            self.num_quarantined += 1


class Volume:
    """Chunks under a path. After `open`, all methods may be called from any thread; `read` and `write` block on I/O.

    `capacity_bytes` bounds all files of this writer, at every moment. `on_change(layout, added, removed)` tells of
    every chunk that can be read from now on, or no more, in the order in which it became so; it is called with no lock
    held, from whichever thread changed something, by one thread at a time. A listener that is set before it takes
    `keys` misses nothing; it may be told what `keys` shows already.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        shared: bool = False,
        writer: str = "local",
        retention: EvictionPolicy | None = None,
        keyring: Keyring | None = None,
        io: DirectIo | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`shared`: other processes, with other `writer` names, use the same folder. Raises ValueError."""
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
        self.path = path
        self.volume_id = ""
        self.on_change: Listener = _tell_nobody
        self._writer = paths.check_writer(writer)
        self._shared = shared
        self._keyring = keyring
        self._io = DirectIo() if io is None else io
        self._clock = clock
        self._root = str(path)
        self._temporary = f"{self._root}/{paths.TEMPORARY}/{writer}"
        self._temporary_numbers = itertools.count()
        self._locks: list[int] = []
        self._buffers = _Buffers()
        self._layout_to_payload_bytes: dict[LayoutDigest, int] = {}
        self._books = ChunkIndex(self._root, writer, capacity_bytes, Lru() if retention is None else retention)
        self._counts = _Counts()

    def __repr__(self) -> str:
        return f"<Volume {self.volume_id or '(not open)'} at {self._root}: {self._books!r}>"

    def open(self) -> None:
        """Take the folder, find out how to do I/O in it, and find its chunks by names and sizes. Once.

        About a second per 100,000 chunks. Raises TierError where the folder cannot be used, or a keeper has it already:
        any other one if it is not shared, one of the same `writer` if it is.
        """
        try:
            self._take()
            self._io.probe(Path(self._temporary))
            with _no_collection():
                self._scan()
            self._books.begin_telling()
        except TierError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise self._unusable(error) from error

    def close(self) -> None:
        """Give the folder back. Nothing may be running; may be repeated."""
        while self._locks:
            os.close(self._locks.pop())

    # What is kept

    def layouts(self) -> list[LayoutDigest]:
        """Those with at least one chunk."""
        return self._books.layouts()

    def keys(self, layout: LayoutDigest) -> list[ChunkId]:
        """A copy."""
        return self._books.chunks(layout)

    def contains(self, layout: LayoutDigest, key: ChunkKey) -> bool:
        """By the index alone: no I/O, no waiting. The chunk may still turn out to be none."""
        return self._books.contains(layout, key)

    @property
    def stats(self) -> VolumeStats:
        counts = self._counts
        return VolumeStats(
            num_chunks=self._books.num_chunks,
            bytes_used=self._books.bytes_used,
            capacity_bytes=self._books.capacity_bytes,
            is_direct=self._io.is_direct,
            reads=dict(counts.reads),
            writes=dict(counts.writes),
            evicted=self._books.num_evicted,
            quarantined=counts.num_quarantined,
            bytes_read=counts.bytes_read,
            bytes_written=counts.bytes_written,
        )

    def add_layout(self, layout: ChunkLayout) -> None:
        """Say what a digest stands for: for whoever looks at the folder, and so that sizes can be checked by it.

        Not needed before reading and writing. Raises OSError.
        """
        self._layout_to_payload_bytes[layout.digest] = layout.payload_bytes
        folder.save_layout(self.path, layout)

    def touch(self, layout: LayoutDigest, keys: Sequence[ChunkKey]) -> None:
        """They were used, though not read here. Unknown ones are no matter."""
        self._books.touch(layout, keys, self._clock())

    # Reading

    def read(self, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview | None = None) -> Outcome:
        """Deliver a chunk, verified, or say why not; on anything but OK `into` holds anything at all.

        `into` is writable, as long as the payload, and starts at a multiple of ALIGNMENT in memory (elsewhere it works,
        slowly). `page.route_key` need not be known. A chunk whose bytes are not what its name says is quarantined,
        unless the name leads elsewhere by now. Raises ValueError for an `into` of the wrong length, else nothing.

        `header` (HEADER_BYTES), for a chunk that is delivered, is filled with that of a plain chunk file, so whoever
        gets both can verify them again.
        """
        self._check_payload(layout, into)
        outcome = self._read(layout, chunk, into)
        if header is not None and outcome is Outcome.OK:
            if self._keyring is None:
                header[:] = self._buffers.header  # as it was read, by this thread
            else:
                chunk_file.write_plain_header(header, into, layout, chunk, self._clock())
        self._counts.read(outcome, len(into))
        self._tell()
        return outcome

    def _read(self, layout: LayoutDigest, chunk: ChunkId, into: memoryview) -> Outcome:
        kept = self._books.pin(layout, chunk.key)
        if kept is None and self._shared and self._find_elsewhere(layout, chunk):
            kept = self._books.pin(layout, chunk.key)
        if kept is None:
            return Outcome.MISSING
        try:
            if kept.chunk.namespace != chunk.namespace:
                return Outcome.WRONG_NAMESPACE
            key = None
            if self._keyring is not None:
                key = self._keyring.key(chunk.namespace)
                if key is None:
                    return Outcome.UNDECRYPTABLE
            outcome = self._read_kept(kept, into, key)
        finally:
            self._books.unpin(kept)
        if outcome is Outcome.OK:
            self._books.touch(layout, [chunk.key], self._clock())
        return outcome

    def _read_kept(self, kept: Kept, into: memoryview, key: bytes | None) -> Outcome:
        path = self._books.path_of(kept)
        # Another process may overwrite its file while we read it, even with the chunk it held before: only what
        # is wrong twice, under the same name, is wrong.
        for _ in range(2):
            outcome, inode = self._read_file(path, kept, into, key)
            if outcome in (Outcome.OK, Outcome.IO_ERROR):
                return outcome
            now = self._inode_at(path)
            if now is None:
                return Outcome.IO_ERROR
            if now == _NOTHING_THERE:
                self._books.forget(kept)
                return Outcome.GONE
            if now != inode:
                return Outcome.GONE
        return outcome if self._quarantine(kept, outcome) else Outcome.GONE

    def _read_file(self, path: str, kept: Kept, into: memoryview, key: bytes | None) -> tuple[Outcome, _Inode]:
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
        except OSError as error:
            if error.errno == errno.ELOOP:
                # A symbolic link is no chunk's file, wherever it leads.
                return Outcome.TRUNCATED, self._inode_at(path) or inode
            return (Outcome.GONE if error.errno == errno.ENOENT else Outcome.IO_ERROR), inode
        return self._verify(header, payload, kept, into, key), inode

    def _verify(
        self, raw_header: memoryview, payload: memoryview, kept: Kept, into: memoryview, key: bytes | None
    ) -> Outcome:
        """Whether these bytes are that chunk; what is sealed comes out in `into`."""
        header = chunk_file.parse_header(raw_header)
        if header is None:
            return Outcome.CORRUPT_HEADER
        outcome = chunk_file.check_identity(header, kept.layout, kept.chunk, len(payload))
        if outcome is not Outcome.OK:
            return outcome
        if key is None:
            return chunk_file.check_plain(header, payload)
        return chunk_file.unseal(header, raw_header, payload, into, key)

    def _find_elsewhere(self, layout: LayoutDigest, chunk: ChunkId) -> bool:
        """Whether another writer has put the chunk here since the last scan; it is in the index then."""
        start = f"{chunk.key.hex()}-"
        with contextlib.suppress(OSError):
            for writer in folder.writers(self.path):
                if writer == self._writer:
                    continue
                with (
                    contextlib.suppress(FileNotFoundError),
                    os.scandir(f"{self._root}/{paths.chunk_folder(writer, layout, chunk)}") as entries,
                ):
                    for entry in entries:
                        found = paths.parse_chunk_name(entry.name, chunk.namespace)
                        if entry.name.startswith(start) and found is not None:
                            num_bytes = entry.stat(follow_symlinks=False).st_size
                            kept = Kept(layout, found, writer, num_bytes, self._books.next_number())
                            self._books.add([kept], self._clock())
                            return True
        return False

    # Writing

    def write(self, layout: LayoutDigest, chunk: ChunkId, payload: memoryview) -> Outcome:
        """Keep a chunk; evicts as needed. Anything but OK and EXISTS leaves it unkept.

        `payload` is a multiple of ALIGNMENT long, starts at one in memory (elsewhere it works, slowly), and must not
        change meanwhile. Raises ValueError for a payload of the wrong length, else nothing.
        """
        self._check_payload(layout, payload)
        outcome = self._write(layout, chunk, payload)
        self._counts.wrote(outcome, len(payload))
        self._tell()
        return outcome

    def _write(self, layout: LayoutDigest, chunk: ChunkId, payload: memoryview) -> Outcome:
        key = None
        if self._keyring is not None:
            key = self._keyring.key(chunk.namespace)
            if key is None:
                return Outcome.REFUSED
        now_s = self._clock()
        room = self._books.begin_write(layout, chunk, chunk_file.chunk_file_bytes(len(payload)), now_s)
        if isinstance(room, Outcome):
            return room
        self._tell()
        header = self._buffers.header
        if key is None:
            chunk_file.write_plain_header(header, payload, layout, chunk, now_s)
        else:
            sealed = self._buffers.bounce(len(payload))
            chunk_file.seal(header, payload, sealed, layout, chunk, now_s, key)
            payload = sealed
        parts = [header, payload]
        outcome = self._fill(room, parts)
        # A drive may be full before we are. A file that is overwritten needs no more of it.
        if outcome is Outcome.NO_SPACE and self._books.recycle_instead(room, now_s):
            self._tell()
            outcome = self._fill(room, parts)
        if outcome is not Outcome.OK:
            self._books.give_up(room)
        return outcome

    def _fill(self, room: Room, parts: list[memoryview]) -> Outcome:
        """Put the chunk there and commit it, or leave the room empty."""
        temporary = f"{self._temporary}/{next(self._temporary_numbers):x}.page"
        is_begun = False
        try:
            is_recycled = self._clear(room, temporary)
            is_begun = True
            self._write_file(temporary, parts, room.chunk_bytes, is_recycled)
            self._rename(temporary, f"{self._root}/{paths.chunk_path(self._writer, room.layout, room.chunk)}")
        except OSError as error:
            is_left = is_begun and not self._is_removed(temporary)
            self._books.empty(room, File(temporary, room.chunk_bytes) if is_left else None)
            return Outcome.NO_SPACE if error.errno in _FULL else Outcome.IO_ERROR
        self._books.commit(room, self._clock())
        return Outcome.OK

    def _clear(self, room: Room, temporary: str) -> bool:
        """Make the room real. True where a file stands at `temporary` now, to be overwritten.

        Raises OSError where not all of it went; what is still there is abandoned.
        """
        is_recycled = False
        failure: OSError | None = None
        left: list[File] = []
        for file in room.removed:
            if not self._is_removed(file.path):
                failure = OSError(errno.EIO, "not removed", file.path)
                left.append(file)
        if room.recycled is not None:
            try:
                self._io.rename(room.recycled.path, temporary)
                is_recycled = True
            except OSError as error:
                if not self._is_absent(error):
                    failure = error
                    left.append(room.recycled)
        self._books.clear(room, left)
        if failure is not None:
            raise failure
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
        return self._io.rename(source, target)

    def _make_folder_of(self, path: str) -> None:
        # The folders of a writer are there since `open`. Were the volume's mount gone they would not be, and making
        # them would fill the drive below the mount point.
        *folders, _ = path.removeprefix(f"{self._root}/").split("/")
        for depth in range(3, len(folders) + 1):
            with contextlib.suppress(FileExistsError):
                Path(self._root, *folders[:depth]).mkdir(0o700)

    # Removing

    def remove(self, layout: LayoutDigest, chunk: ChunkId) -> bool:
        """Forget a chunk and remove its file, whoever wrote it. False where it was not kept."""
        file = self._books.begin_remove(layout, chunk)
        if file is None:
            return False
        self._books.end_remove(layout, chunk, file, is_removed=self._is_removed(file.path))
        self._tell()
        return True

    def purge(self, namespace: Namespace) -> int:
        """Remove everything of a tenant's epoch, of all writers, from quarantine too. Returns the number of chunks.

        Chunks that are written meanwhile may stay: nobody may be writing for it any more. Raises TierError where the
        folder cannot be read.
        """
        num_chunks = sum(self.remove(kept.layout, kept.chunk) for kept in self._books.all_of(namespace))
        for file in self._books.take_quarantined(namespace):
            self._books.put_down(file, is_removed=self._is_removed(file.path))
        try:
            return num_chunks + folder.remove_namespace(self.path, namespace)
        except OSError as error:
            raise self._unusable(error) from error

    def rescan(self) -> None:
        """See what others wrote and removed. Raises TierError where the folder cannot be read; nothing changes then."""
        before = self._books.next_number()
        seen: set[str] = set()
        added: list[FoundChunk] = []
        try:
            self._learn_layouts()
            for writer in folder.writers(self.path):
                for found in _chunks(folder.walk(self.path, writer)):
                    seen.add(found.path)
                    # A file of ours that is not in the index is one that is just coming or going.
                    if writer != self._writer and not self.contains(found.layout, found.chunk.key):
                        added.append(found)
        except OSError as error:
            raise self._unusable(error) from error
        for kept in self._books.all_kept():
            path = self._books.path_of(kept)
            if path not in seen and kept.number < before and self._inode_at(path) == _NOTHING_THERE:
                self._books.forget(kept)
        self._books.add(map(self._kept, added), self._clock())
        for file in self._books.take_abandoned():
            self._books.put_down(file, is_removed=self._is_removed(file.path))
        self._tell()

    def _quarantine(self, kept: Kept, outcome: Outcome) -> bool:
        """Move a bad chunk out of everybody's way. False where it was not there any more."""
        file = self._books.begin_quarantine(kept)
        if file is None:
            return False
        logger.warning("%s: %s", file.path, outcome.value)
        moved: File | None = None
        if file.num_bytes or kept.writer == self._writer:
            target = f"{self._root}/{paths.quarantine_path(self._writer, kept.layout, kept.chunk, outcome.value)}"
            with contextlib.suppress(OSError):
                self._rename(file.path, target)
                moved = File(target, _cut(target, file.num_bytes))
                self._counts.quarantined()
        is_removed = moved is None and self._is_removed(file.path)
        for surplus in self._books.end_quarantine(kept, file, moved, is_removed=is_removed):
            self._books.put_down(surplus, is_removed=self._is_removed(surplus.path))
        return True

    # Files

    def _is_removed(self, path: str) -> bool:
        """Remove it; whether it is gone for certain."""
        try:
            self._io.unlink(path)
        except OSError as error:
            return self._is_absent(error)
        return True

    def _is_absent(self, error: OSError) -> bool:
        """Whether it says that a file is not there, on a volume that is."""
        return error.errno == errno.ENOENT and self._is_here()

    def _is_here(self) -> bool:
        """False while the drive is unmounted: every chunk seems to be gone then, and none is."""
        return Path(f"{self._temporary}.lock").exists()

    def _inode_at(self, path: str) -> _Inode | None:
        """Which file a name leads to, _NOTHING_THERE, or None where that cannot be said."""
        try:
            facts = os.lstat(path)
        except OSError as error:
            return _NOTHING_THERE if self._is_absent(error) else None
        return (facts.st_dev, facts.st_ino)

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
        while (change := self._books.next_change()) is not None:
            try:
                self.on_change(*change)
            except Exception:
                logger.exception("volume %s: whoever is told of changes failed", self._root)
            finally:
                self._books.told()

    def _unusable(self, error: OSError) -> TierError:
        return TierError(f"volume {self._root}: {error.filename or ''}: {error.strerror}")

    # Opening

    def _take(self) -> None:
        for name in (paths.LAYOUTS, paths.CHUNKS, paths.QUARANTINE, paths.TEMPORARY):
            (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.volume_id = folder.make_description(self.path, self._clock()).volume_id
        for file, shared in ((self.path / paths.LOCK, self._shared), (Path(f"{self._temporary}.lock"), False)):
            held = folder.lock(file, shared=shared)
            if held is None:
                raise TierError(f"volume {self._root} is in use: another process holds {file.name}")
            self._locks.append(held)
        for name in (paths.CHUNKS, paths.QUARANTINE, paths.TEMPORARY):
            (self.path / name / self._writer).mkdir(mode=0o700, exist_ok=True)

    def _scan(self) -> None:
        for left_over in list(Path(self._temporary).iterdir()):
            # Of a keeper that was killed: half a chunk, or one that is under no name.
            left_over.unlink()
        self._learn_layouts()
        for bad in sorted(folder.walk_quarantine(self.path, self._writer), key=_age):
            self._books.add_quarantined(File(bad.path, bad.num_bytes))
        for surplus in self._books.take_surplus():
            self._books.put_down(surplus, is_removed=self._is_removed(surplus.path))
        now_s = self._clock()
        ours = [self._kept(found) for found in sorted(_chunks(folder.walk(self.path, self._writer)), key=_age)]
        for newer in self._books.add(ours, now_s):
            # Two files of one chunk, of two tenants or with two route keys: only other hands can have put them there.
            older = self._books.pin(newer.layout, newer.chunk.key)
            assert older is not None
            self._books.unpin(older)
            self.remove(older.layout, older.chunk)
            self._books.add([newer], now_s)
        for kept in ours:
            if not self._has_right_size(kept):
                self._quarantine(kept, Outcome.TRUNCATED)
        for writer in folder.writers(self.path):
            if writer != self._writer:
                self._books.add(map(self._kept, _chunks(folder.walk(self.path, writer))), now_s)
        while (file := self._books.take_excess(now_s)) is not None:
            is_removed = self._is_removed(file.path)
            self._books.put_down(file, is_removed=is_removed)
            if not is_removed:
                raise TierError(f"volume {self._root} is over its capacity and {file.path} cannot be removed")

    def _kept(self, found: FoundChunk) -> Kept:
        return Kept(found.layout, found.chunk, found.writer, found.num_bytes, self._books.next_number())

    def _has_right_size(self, kept: Kept) -> bool:
        payload_bytes = self._layout_to_payload_bytes.get(kept.layout)
        if payload_bytes is not None:
            return kept.num_bytes == chunk_file.chunk_file_bytes(payload_bytes)
        # Of a layout that nobody described, any size will do that a chunk can have.
        return kept.num_bytes > HEADER_BYTES and kept.num_bytes % ALIGNMENT == 0

    def _learn_layouts(self) -> None:
        for digest, layout in folder.load_layouts(self.path).items():
            self._layout_to_payload_bytes[digest] = layout.payload_bytes

    # Laws

    def check(self) -> None:
        """The laws of this class, while nothing runs; a stat per chunk. Raises AssertionError naming the broken one."""
        in_books = self._books.check(self._clock())
        on_drive = {str(file): file.lstat().st_size for file in folder.files_of(self.path, self._writer)}
        assert on_drive == in_books, f"in the books or on the drive only: {on_drive.items() ^ in_books.items()}"


def _chunks(files: Iterable[FoundChunk | ForeignFile]) -> Iterator[FoundChunk]:
    return (file for file in files if isinstance(file, FoundChunk))


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector would look at all chunks again and again while they are found, and triple the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _cut(path: str, num_bytes: int) -> int:
    """The size of a file after cutting what somebody wrote behind its end."""
    facts = os.lstat(path)
    if facts.st_size <= num_bytes or not stat.S_ISREG(facts.st_mode):
        return facts.st_size
    os.truncate(path, num_bytes)
    return num_bytes


def _age(found: FoundChunk) -> float:
    return found.modified_s


def _tell_nobody(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
    pass
