"""One folder of verified chunks.

On a shared volume each writer has its own folders, capacity and eviction order. It never recycles others' files.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import TierError
from kvferry.keeper.layout import ALIGNMENT, ChunkId, ChunkKey, ChunkLayout, LayoutDigest, validate_payload_bytes
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.terms import TierContract
from kvferry_keeper.store import chunk_file, folder, paths
from kvferry_keeper.store.adoption import Adopter
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Keyring
from kvferry_keeper.store.chunk_quarantine import Quarantine
from kvferry_keeper.store.chunk_reader import ChunkReader
from kvferry_keeper.store.chunk_writer import ChunkWriter
from kvferry_keeper.store.direct_io import DirectIo
from kvferry_keeper.store.folder import ForeignFile, FoundChunk
from kvferry_keeper.store.index.chunk_index import ChunkIndex
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.index.eviction import EvictionPolicy, Lru
from kvferry_keeper.store.index.space_ledger import File
from kvferry_keeper.store.outcome import Outcome as Outcome
from kvferry_keeper.store.seal_counts import SealCounts
from kvferry_keeper.store.volume_files import NO_INODE, VolumeFiles

logger = logging.getLogger(__name__)

CLOCK_SKEW_S = 2.0
RECENT_S = 90.0  # several rescans: uses that other writers recorded
LOCK_PATIENCE_S = 5.0
EXPIRED_AT_ONCE = 64  # under the index's lock

Listener = Callable[[LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None]


@dataclass(frozen=True, slots=True)
class VolumeStats:
    num_chunks: int  # of all writers
    bytes_used: int  # by this writer's files
    capacity_bytes: int
    is_direct: bool
    reads: Mapping[Outcome, int]
    writes: Mapping[Outcome, int]
    evicted: int
    quarantined: int
    bytes_read: int
    bytes_written: int


class Volume:
    """After `open`, methods are thread-safe; `read` and `write` block on I/O.

    `capacity_bytes` always bounds this writer's files. `on_change(layout, added, removed)` is called in order, by one
    thread at a time, without a lock. Set it before calling `keys`: then no change is missed, and some may come twice.
    """

    def __init__(
        self,
        path: Path,
        *,
        capacity_bytes: int,
        cluster: str = "",
        shared: bool = False,
        writer: str = "local",
        eviction: EvictionPolicy | None = None,
        keyring: Keyring | None = None,
        io: DirectIo | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        lock_patience_s: float = LOCK_PATIENCE_S,
    ) -> None:
        """`cluster`: the one that owns the folder. `shared`: other `writer` names use it too. Raises ValueError."""
        if capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes")
        self.path = path
        self.volume_id = ""
        self.is_open = False
        self.on_change: Listener = _ignore_change
        self._purge_mark: tuple[int, int] | None = None
        self._cluster = cluster
        self._writer = paths.validate_writer(writer)
        self._shared = shared
        self._clock = clock
        self._monotonic = monotonic
        self._lock_patience_s = lock_patience_s if shared else 0.0
        self._layout_to_payload_bytes: dict[LayoutDigest, int] = {}
        self._files = VolumeFiles(path, writer, DirectIo() if io is None else io)
        self._locks = self._files.locks
        self._index = ChunkIndex(str(path), writer, capacity_bytes, Lru() if eviction is None else eviction)
        self._quarantine = Quarantine(self._index, self._files)
        self._chunk_reader = ChunkReader(
            self._index, self._files, self._quarantine, keyring, shared=shared, clock=clock
        )
        self._seal_counts = SealCounts(path, writer)
        self._adopter = Adopter(
            self._index, self._files, self._has_right_size, self._chunk_reader.is_whole, self._seal_counts.absorb
        )
        self._chunk_writer = ChunkWriter(
            self._index, self._files, keyring, self._seal_counts, notify=self._notify, clock=clock
        )

    def __repr__(self) -> str:
        return f"<Volume {self.volume_id or '(not open)'} at {self.path}: {self._index!r}>"

    def open(self) -> None:
        """Lock the folder and index its chunks by names and sizes. Call once.

        Raises TierError for a folder that is unusable, of another cluster, or locked (if shared: by the same `writer`).
        """
        try:
            self._lock_folder()
            self._files.io.probe(Path(self._files.temporary))
            self._seal_counts.load()
            self._purge_mark = folder.purge_mark(self.path)
            with _no_garbage_collection():
                self._scan()
            self._index.changes.begin()
            _warn_if_larger_than_drive(self.path, self._index.capacity_bytes)
        except TierError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise _unusable(self.path, error) from error
        self.is_open = True

    def close(self) -> None:
        """Idempotent. No other method may be running."""
        self.is_open = False
        if self._locks:
            self.record()
        if len(self._locks) > 1:  # the writer's, too
            self._files.say_gone()
        while self._locks:
            os.close(self._locks.pop())

    # Queries

    @property
    def last_error(self) -> str:
        return self._files.last_error

    @property
    def writer(self) -> str:
        return self._writer

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    def layouts(self) -> list[LayoutDigest]:
        return self._index.layouts()

    def keys(self, layout: LayoutDigest) -> list[ChunkId]:
        return self._index.chunks(layout)

    def contains(self, layout: LayoutDigest, key: ChunkKey) -> bool:
        """Without I/O. A read may still fail."""
        return self._index.contains(layout, key)

    @property
    def stats(self) -> VolumeStats:
        return VolumeStats(
            num_chunks=self._index.num_chunks,
            bytes_used=self._index.bytes_used,
            capacity_bytes=self._index.capacity_bytes,
            is_direct=self._files.io.is_direct,
            reads=dict(self._chunk_reader.outcomes),
            writes=dict(self._chunk_writer.outcomes),
            evicted=self._index.num_evicted,
            quarantined=self._quarantine.num_files,
            bytes_read=self._chunk_reader.bytes_read,
            bytes_written=self._chunk_writer.bytes_written,
        )

    def add_layout(self, layout: ChunkLayout) -> None:
        """Optional: describe a layout, to validate its payloads. Raises OSError."""
        self._layout_to_payload_bytes[layout.digest] = layout.payload_bytes
        folder.save_layout(self.path, layout)

    def touch(self, layout: LayoutDigest, keys: Sequence[ChunkKey], wanted_s: float | None = None) -> None:
        """With `wanted_s` the keys are in the order of the prompt."""
        now_s = self._clock()
        self._index.touch(layout, keys, now_s)
        if wanted_s is not None:
            self._index.hint(layout, keys, wanted_s, now_s)

    def hint(self, layout: LayoutDigest, keys: Sequence[ChunkKey], wanted_s: float) -> None:
        self._index.hint(layout, keys, wanted_s, self._clock())

    # Reading and writing

    def read(self, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview | None = None) -> Outcome:
        """Read and verify a chunk. `into` is undefined unless the outcome is OK.

        Align `into` to ALIGNMENT for speed. `chunk.route_key` may be unknown. With `header` (HEADER_BYTES) both receive
        the chunk as it lies on the drive, perhaps sealed. Raises only ValueError, for a wrong length.
        """
        self._validate_payload(layout, into)
        outcome = self._chunk_reader.read(layout, chunk, into, header)
        self._notify()
        return outcome

    def write(self, layout: LayoutDigest, chunk: ChunkId, payload: memoryview) -> Outcome:
        """Write a chunk; evict as needed. OK and EXISTS mean success.

        Align `payload` to ALIGNMENT for speed, and leave it unchanged meanwhile. Raises only ValueError, for a wrong
        length.
        """
        self._validate_payload(layout, payload)
        outcome = self._chunk_writer.write(layout, chunk, payload)
        self._notify()
        return outcome

    # Maintenance

    def remove(self, layout: LayoutDigest, chunk: ChunkId, *, only_ours: bool = False) -> bool:
        """Return whether there was a file to remove. With `only_ours` another writer's stays until a rescan."""
        file = self._index.begin_remove(layout, chunk, only_ours=only_ours)
        if file is not None:
            self._index.end_remove(layout, chunk, file, is_removed=self._files.remove(file.path))
        self._notify()
        return file is not None

    def purge(self, namespace: Namespace) -> int:
        """Remove a namespace's chunks of all writers, from quarantine too. Return their number.

        Stop its writes before. Raises TierError if the folder is unreadable, or its chunks are moved meanwhile.
        """
        num_chunks = sum(self.remove(entry.layout, entry.chunk) for entry in self._index.entries(namespace))
        self._remove_files(self._index.leftovers.withdraw_quarantined(namespace))
        try:
            return num_chunks + folder.remove_namespaces(self.path, lambda each: each == namespace)
        except OSError as error:
            raise _unusable(self.path, error) from error

    def configure(self, contracts: Mapping[str, TierContract]) -> None:
        """Replace tenants' contracts, in bytes. Raises ValueError for floors beyond the capacity."""
        self._index.configure(contracts)

    def usages(self, names: Collection[str] | None = None) -> Mapping[str, TenantUsage]:
        """Return what tenants hold, all or those of these names; nothing without a policy for tenants."""
        return self._index.usages(names)

    def expire(self) -> int:
        """Remove chunks whose tenants' time to live is over, and return their number."""
        num_removed = 0
        while expired := self._index.withdraw_expired(self._clock(), EXPIRED_AT_ONCE):
            num_removed += len(expired)
            self._remove_files(expired)
            self._notify()
        return num_removed

    def purge_before(self, lowest_epochs: Mapping[str, int]) -> dict[str, int]:
        """Remove chunks of tenants before their lowest epochs, as `purge` does; return their numbers by tenant."""
        try:
            found = folder.namespaces(self.path)
        except OSError as error:
            raise _unusable(self.path, error) from error
        removed: dict[str, int] = {}
        for namespace in found:
            if namespace.epoch < lowest_epochs.get(namespace.tenant, 0):
                removed[namespace.tenant] = removed.get(namespace.tenant, 0) + self.purge(namespace)
        return removed

    def record(self) -> None:
        """Write down for the next start which chunks were used, and how many each key has sealed."""
        # Uses become files' access times, which order evictions by other writers too.
        self._seal_counts.save()
        self._files.say_alive()
        now_ns = time.time_ns()
        for i, entry in enumerate(self._index.take_uses()):
            self._files.record_use(self._index.path_of(entry), now_ns + i)

    def say_alive(self) -> None:
        """Tell other nodes, which may not see this writer's lock. `record` does too."""
        self._files.say_alive()

    def was_purged(self) -> bool:
        """Return whether a purge has removed files since the last call: `rescan` then. Raises OSError."""
        mark = folder.purge_mark(self.path)
        if mark in (None, self._purge_mark):
            return False
        self._purge_mark = mark
        return True

    def rescan(self) -> None:
        """Index changes by others. Raises TierError, changing nothing, for an unreadable folder."""
        before = self._index.next_number()
        now_s = self._clock()
        used: list[FoundChunk] = []  # of ours, of late, perhaps by others
        seen: set[str] = set()
        added: list[FoundChunk] = []
        try:
            self._load_layouts()
            for writer in folder.writers(self.path):
                for found in _chunks(folder.walk(self.path, writer)):
                    seen.add(found.path)
                    # Not by a clock that was ahead: such uses would be the latest until it catches up.
                    is_recent = now_s - RECENT_S < found.used_s <= now_s + CLOCK_SKEW_S
                    if self._shared and writer == self._writer and is_recent:
                        used.append(found)
                    # A file of ours that is not in the index is being written or removed at this moment.
                    if (
                        writer != self._writer
                        and not self.contains(found.layout, found.chunk.key)
                        and not self._chunk_reader.is_foreign(found.path)
                    ):
                        added.append(found)
        except OSError as error:
            raise _unusable(self.path, error) from error
        for entry in self._index.entries():
            path = self._index.path_of(entry)
            if path not in seen and entry.number < before and self._files.inode_at(path) == NO_INODE:
                self._index.forget(entry)
        for file in self._index.leftovers.quarantined:
            if self._files.inode_at(file.path) == NO_INODE:
                self._index.leftovers.forget_quarantined(file)
        self._index.add(map(self._entry_of, added), now_s)
        for found in sorted(used, key=_used_s):
            self._index.touch(found.layout, [found.chunk.key], now_s, is_recorded=True)
        self._remove_files(self._index.leftovers.withdraw_abandoned())
        try:
            if self._shared:
                self._adopt()
        finally:
            if self._shared:
                self._seal_counts.load_others()
            self._notify()

    def _adopt(self) -> None:
        try:
            self._adopter.run(self._monotonic())
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _remove_files(self, withdrawn: Iterable[File]) -> None:
        for file in withdrawn:
            self._index.leftovers.end_removal(file, is_removed=self._files.remove(file.path))

    def _validate_payload(self, layout: LayoutDigest, payload: memoryview) -> None:
        num_bytes = self._layout_to_payload_bytes.get(layout)
        if payload.nbytes != len(payload) or not payload.c_contiguous:
            raise ValueError("a payload is a view of adjacent bytes")
        if num_bytes is None:
            validate_payload_bytes(len(payload))
        elif num_bytes != len(payload):
            raise ValueError(f"a payload of {len(payload)} bytes; chunks of this layout have {num_bytes}")

    def _notify(self) -> None:
        """Deliver recorded changes. If another thread is delivering, it delivers these too."""
        while (change := self._index.changes.next()) is not None:
            try:
                self.on_change(*change)
            except Exception:
                logger.exception("volume %s: the listener to changes failed", self.path)
            finally:
                self._index.changes.end_delivery()

    # Opening

    def _lock_folder(self) -> None:
        for name in (paths.LAYOUTS, paths.CHUNKS, paths.QUARANTINE, paths.TEMPORARY, paths.KEYS):
            (self.path / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.volume_id = folder.make_description(self.path, self._clock(), self._cluster).volume_id
        self._files.volume_id = self.volume_id
        # Another keeper may be taking over files of ours, from before a restart.
        for file, shared in ((self.path / paths.LOCK, self._shared), (self._files.writer_lock, False)):
            fd = _lock_within(self._lock_patience_s, file, shared=shared)
            if fd is None:
                hint = "" if self._shared else "; several keepers of a volume each need `shared: true`"
                raise TierError(f"volume {self.path} is in use: another process holds {file.name}{hint}")
            self._locks.append(fd)
        folder.note_holder(self._locks[-1])
        # Before the scan: nodes that do not see the lock may be about to take over what it finds.
        self._files.say_alive()
        for name in paths.OF_WRITERS:
            folder.unlink_link(self.path / name / self._writer)
            (self.path / name / self._writer).mkdir(mode=0o700, exist_ok=True)

    def _scan(self) -> None:
        for temporary in list(Path(self._files.temporary).iterdir()):
            # A killed keeper left it: a chunk half written, or one without its final name.
            if not temporary.is_dir() or temporary.is_symlink():
                temporary.unlink()
        self._load_layouts()
        max_bytes = self._largest_chunk_bytes()
        for bad in sorted(folder.walk_quarantine(self.path, self._writer), key=_used_s):
            if not self._is_removed_as_too_large(bad, max_bytes):
                self._index.leftovers.add_quarantined(File(bad.path, bad.num_bytes))
        self._remove_files(self._index.leftovers.withdraw_quarantine_excess())
        now_s = self._clock()
        latest_s = time.time() + CLOCK_SKEW_S  # of uses; later ones are by a clock that was ahead
        found_ours = sorted(_chunks(folder.walk(self.path, self._writer)), key=lambda each: min(each.used_s, latest_s))
        found_ours = [found for found in found_ours if not self._is_removed_as_too_large(found, max_bytes)]
        ours = [self._entry_of(found) for found in found_ours]
        for newer in self._index.add(ours, now_s, [min(found.used_s, now_s) for found in found_ours]):
            # Two files have the same chunk key, but another tenant or route key. Keep the newer one.
            older = self._index.pin(newer.layout, newer.chunk.key)
            assert older is not None
            self._index.unpin(older)
            self.remove(older.layout, older.chunk)
            self._index.add([newer], now_s)
        for entry in ours:
            if not self._has_right_size(entry):
                self._quarantine.add(entry, Outcome.TRUNCATED)
        for writer in folder.writers(self.path):
            if writer != self._writer:
                self._index.add(map(self._entry_of, _chunks(folder.walk(self.path, writer))), now_s)
        for file in self._index.withdraw_over_capacity(now_s):
            is_removed = self._files.remove(file.path)
            self._index.leftovers.end_removal(file, is_removed=is_removed)
            if not is_removed:
                raise TierError(f"volume {self.path} is over its capacity and {file.path} cannot be removed")

    def _largest_chunk_bytes(self) -> int:
        """Return the size up to which files may be damaged chunks of a known layout, or the capacity."""
        sizes = map(chunk_file.chunk_file_bytes, self._layout_to_payload_bytes.values())
        return min(4 * max(sizes, default=self._index.capacity_bytes), self._index.capacity_bytes)

    def _is_removed_as_too_large(self, found: FoundChunk, max_bytes: int) -> bool:
        # It is no chunk. Counted, it would drive good ones out.
        if found.num_bytes <= max_bytes:
            return False
        logger.warning("volume %s: %s has %d bytes and is removed", self.path, found.path, found.num_bytes)
        if not self._files.remove(found.path):
            raise TierError(f"volume {self.path}: {found.path} is too large and cannot be removed")
        return True

    def _entry_of(self, found: FoundChunk) -> IndexEntry:
        return IndexEntry(found.layout, found.chunk, found.writer, found.num_bytes, self._index.next_number())

    def _has_right_size(self, entry: IndexEntry | FoundChunk) -> bool:
        payload_bytes = self._layout_to_payload_bytes.get(entry.layout)
        if payload_bytes is not None:
            return entry.num_bytes == chunk_file.chunk_file_bytes(payload_bytes)
        # Without a description of the layout, any size that a chunk can have is accepted.
        return entry.num_bytes > HEADER_BYTES and entry.num_bytes % ALIGNMENT == 0

    def _load_layouts(self) -> None:
        for digest, layout in folder.load_layouts(self.path).items():
            self._layout_to_payload_bytes[digest] = layout.payload_bytes

    # Invariants

    def check(self) -> None:
        in_index = self._index.check(self._clock())
        on_drive = {str(file): file.lstat().st_size for file in folder.files_of(self.path, self._writer)}
        assert on_drive == in_index, f"in the index or on the drive only: {on_drive.items() ^ in_index.items()}"


def _chunks(files: Iterable[FoundChunk | ForeignFile]) -> Iterator[FoundChunk]:
    return (file for file in files if isinstance(file, FoundChunk))


def _warn_if_larger_than_drive(path: Path, capacity_bytes: int) -> None:
    drive = os.statvfs(path)
    if 0 < (drive_bytes := drive.f_blocks * drive.f_frsize) < capacity_bytes:
        capacity_gib, drive_gib = capacity_bytes / (1 << 30), drive_bytes / (1 << 30)
        logger.warning("volume %s: capacity_gib is %.4g, its drive has %.4g GiB", path, capacity_gib, drive_gib)


def _unusable(path: Path, error: OSError) -> TierError:
    return TierError(f"volume {path}: {error.filename or ''}: {error.strerror}")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collections would triple a scan's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _lock_within(patience_s: float, file: Path, *, shared: bool) -> int | None:
    ends_s = time.monotonic() + patience_s
    while (fd := folder.lock(file, shared=shared)) is None and time.monotonic() < ends_s:
        time.sleep(0.05)
    return fd


def _used_s(found: FoundChunk) -> float:
    return found.used_s


def _ignore_change(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
    pass
