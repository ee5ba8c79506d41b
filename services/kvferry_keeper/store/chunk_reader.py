"""Reads and verifies chunks."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable

from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_file, folder, paths
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Keyring
from kvferry_keeper.store.chunk_quarantine import Quarantine
from kvferry_keeper.store.direct_io import aligned_buffer
from kvferry_keeper.store.index.chunk_index import ChunkIndex
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.outcome import Outcome, outcome_of, outcome_of_open
from kvferry_keeper.store.volume_files import NO_INODE, Inode, VolumeFiles

MAX_FOREIGN = 65_536  # files that are remembered as sealed with another key; a forgotten one is read once more


class ChunkReader:
    """Thread-safe. `shared`: also finds other writers' new chunks."""

    def __init__(
        self,
        index: ChunkIndex,
        files: VolumeFiles,
        quarantine: Quarantine,
        keyring: Keyring | None,
        *,
        shared: bool,
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._files = files
        self._quarantine = quarantine
        self._keyring = keyring
        self._shared = shared
        self._clock = clock
        self._lock = threading.Lock()
        self._foreign: dict[str, tuple[int, int]] = {}  # path -> version
        self.outcomes: Counter[Outcome] = Counter()
        self.bytes_read = 0

    def __repr__(self) -> str:
        return f"<ChunkReader {dict(self.outcomes)}>"

    def read(self, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview | None) -> Outcome:
        outcome = self._read(layout, chunk, into, is_raw=header is not None)
        if header is not None and outcome is Outcome.OK:
            header[:] = self._files.buffers.header  # as this thread has read it
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome is Outcome.OK:
                self.bytes_read += len(into)
        return outcome

    def is_whole(self, entry: IndexEntry) -> bool:
        """Return whether a file can be read and verified, changing nothing."""
        num_bytes = entry.num_bytes - HEADER_BYTES
        keys = self._keys(entry.chunk.namespace)
        if keys is None or not 0 < num_bytes <= chunk_file.MAX_PAYLOAD_BYTES:
            return False
        outcome, _ = self._read_file(self._index.path_of(entry), entry, aligned_buffer(num_bytes), keys, is_raw=False)
        return outcome is Outcome.OK

    def is_foreign(self, path: str) -> bool:
        """Return whether another writer's file was found to be sealed with another key, and was not replaced since."""
        seen = self._foreign.get(path)
        return seen is not None and _version_of(path) == seen

    def _read(self, layout: LayoutDigest, chunk: ChunkId, into: memoryview, *, is_raw: bool) -> Outcome:
        entry = self._index.pin(layout, chunk.key)
        if entry is None and self._shared and self._find_elsewhere(layout, chunk):
            entry = self._index.pin(layout, chunk.key)
        if entry is None:
            return Outcome.MISSING
        try:
            if entry.chunk.namespace != chunk.namespace:
                return Outcome.WRONG_NAMESPACE
            keys = self._keys(chunk.namespace)
            if keys is None:
                return Outcome.UNDECRYPTABLE
            outcome = self._read_entry(entry, into, keys, is_raw=is_raw)
        finally:
            self._index.unpin(entry)
        if outcome is Outcome.OK:
            self._index.touch(layout, [chunk.key], self._clock())
        return outcome

    def _keys(self, namespace: Namespace) -> tuple[bytes, ...] | None:
        """Return no keys where chunks are plain, and None where there should be some."""
        if self._keyring is None:
            return ()
        return self._keyring.keys(namespace, self._files.volume_id) or None

    def _read_entry(self, entry: IndexEntry, into: memoryview, keys: tuple[bytes, ...], *, is_raw: bool) -> Outcome:
        path = self._index.path_of(entry)
        # Another process may overwrite its file during our read, even with the same chunk as before. So a chunk counts
        # as bad only if it fails twice under the same inode.
        for _ in range(2):
            outcome, inode = self._read_file(path, entry, into, keys, is_raw=is_raw)
            if outcome in (Outcome.OK, Outcome.IO_ERROR, Outcome.NO_RESOURCES):
                return outcome
            if outcome is Outcome.UNREADABLE:
                break
            current = self._files.inode_at(path)
            if current is None:
                return Outcome.IO_ERROR
            if current == NO_INODE:
                self._index.forget(entry)
                return Outcome.GONE
            if current != inode:
                return Outcome.GONE
        if outcome is Outcome.GONE:  # a stale handle
            return outcome
        if outcome is Outcome.UNREADABLE and entry.writer == self._files.writer:
            self._index.hide(entry)
            return outcome
        if outcome in (Outcome.UNDECRYPTABLE, Outcome.UNREADABLE) and entry.writer != self._files.writer:
            # Good for its writer, perhaps.
            self._note_foreign(path)
            self._index.forget(entry)
            return outcome
        if outcome is Outcome.UNDECRYPTABLE and chunk_file.is_sealed(self._files.buffers.header):
            # Taken over from a writer whose key is not known here yet, or no more. The next start tries again.
            self._index.hide(entry)
            return outcome
        return outcome if self._quarantine.add(entry, outcome) else Outcome.GONE

    def _note_foreign(self, path: str) -> None:
        version = _version_of(path)
        if version is None:
            return
        with self._lock:
            while len(self._foreign) >= MAX_FOREIGN:
                del self._foreign[next(iter(self._foreign))]
            self._foreign[path] = version

    def _read_file(
        self, path: str, entry: IndexEntry, into: memoryview, keys: tuple[bytes, ...], *, is_raw: bool
    ) -> tuple[Outcome, Inode]:
        inode = NO_INODE
        files = self._files
        try:
            try:
                fd = files.io.open(path, os.O_RDONLY)
            except OSError as error:
                if (outcome := outcome_of_open(error)) is Outcome.UNREADABLE:
                    return outcome, inode
                raise
            try:
                status = os.fstat(fd)
                inode = (status.st_dev, status.st_ino)
                if not stat.S_ISREG(status.st_mode) or status.st_size != HEADER_BYTES + len(into):
                    return Outcome.TRUNCATED, inode
                header = files.buffers.header
                payload, opened = into, into
                if keys and is_raw:
                    opened = files.buffers.bounce(len(into))
                elif keys:
                    payload = files.buffers.bounce(len(into))
                if files.io.read(fd, [header, payload]) != status.st_size:
                    return Outcome.TRUNCATED, inode
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                # A symbolic link is never a chunk's file, wherever it leads.
                return Outcome.TRUNCATED, files.inode_at(path) or inode
            outcome = outcome_of(error)
            files.last_error = str(error)
            return (Outcome.IO_ERROR if outcome is Outcome.NO_SPACE else outcome), inode
        return self._verify(header, payload, entry, opened, keys), inode

    def _verify(
        self, raw_header: memoryview, payload: memoryview, entry: IndexEntry, into: memoryview, keys: tuple[bytes, ...]
    ) -> Outcome:
        header = chunk_file.parse_header(raw_header)
        if header is None:
            return Outcome.CORRUPT_HEADER
        outcome = chunk_file.verify_identity(header, entry.layout, entry.chunk, len(payload))
        if outcome is not Outcome.OK:
            return outcome
        if not keys:
            return chunk_file.verify_plain(header, payload)
        return chunk_file.unseal(header, raw_header, payload, into, keys)

    def _find_elsewhere(self, layout: LayoutDigest, chunk: ChunkId) -> bool:
        start = f"{chunk.key.hex()}-"
        files = self._files
        with contextlib.suppress(OSError):
            for writer in folder.writers(files.path):
                if writer == files.writer:
                    continue
                with (
                    contextlib.suppress(FileNotFoundError),
                    os.scandir(f"{files.root}/{paths.chunk_folder(writer, layout, chunk)}") as candidates,
                ):
                    for candidate in candidates:
                        found = paths.parse_chunk_name(candidate.name, chunk.namespace)
                        if not candidate.name.startswith(start) or self.is_foreign(candidate.path):
                            continue
                        if found is not None and candidate.is_file(follow_symlinks=False):
                            num_bytes = candidate.stat(follow_symlinks=False).st_size
                            entry = IndexEntry(layout, found, writer, num_bytes, self._index.next_number())
                            self._index.add([entry], self._clock())
                            return True
        return False


def _version_of(path: str) -> tuple[int, int] | None:
    """Return a file's inode and time of change: a writer's next file may get the same inode, or be written into it."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns
