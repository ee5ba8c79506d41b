"""Verify, list and measure a volume's chunks without a keeper.

A keeper may run meanwhile, but not with `--mend`: changed chunks are read again.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkLayout, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_file, folder, paths, seal_counts
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Algorithm, Keyring
from kvferry_keeper.store.direct_io import DirectIo, aligned_buffer
from kvferry_keeper.store.folder import ForeignFile, FoundChunk
from kvferry_keeper.store.outcome import Outcome

# Causes of faults that are no Outcome.
FOREIGN = "foreign"
LEFT_OVER = "left_over"

MAX_NAMED = 10  # writers in an error
_NUM_THREADS = 4
_BATCH = 256


@dataclass(frozen=True, slots=True)
class Fault:
    path: str
    cause: str
    num_bytes: int
    mended_to: str | None = None


@dataclass(slots=True)
class Report:
    volume_id: str
    num_chunks: int = 0
    num_bytes: int = 0
    num_unchecked: int = 0  # sealed chunks without a key at hand: only their header was verified
    faults: list[Fault] = field(default_factory=list)

    @property
    def by_cause(self) -> dict[str, int]:
        return dict(sorted(Counter(fault.cause for fault in self.faults).items()))

    def as_json(self) -> dict[str, Any]:
        return {
            "volume_id": self.volume_id,
            "pages": self.num_chunks,
            "bytes": self.num_bytes,
            "unchecked": self.num_unchecked,
            "faults": len(self.faults),
            "by_cause": self.by_cause,
            "files": [
                {"path": fault.path, "cause": fault.cause, "bytes": fault.num_bytes, "mended_to": fault.mended_to}
                for fault in self.faults
            ],
        }


@dataclass(frozen=True, slots=True)
class Usage:
    writer: str
    layout: LayoutDigest
    namespace: Namespace
    num_chunks: int
    num_bytes: int


def count_files(path: Path) -> int:
    """Estimate `verify_volume`'s files. Raises TierError if `path` is no volume."""
    folder.read_description(path)
    return sum(1 for writer in _writers(path) for _ in folder.walk(path, writer))


def verify_volume(
    path: Path,
    *,
    keyring: Keyring | None = None,
    mend: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Report:
    """Verify every chunk. With `mend`, quarantine bad files.

    `advance` is called for every file. Raises TierError for no volume, or for `mend` while a keeper serves it.
    """
    report = Report(folder.read_description(path).volume_id)
    lock_fd = folder.lock(path / paths.LOCK, shared=False) if mend else None
    if mend and lock_fd is None:
        raise TierError(f"volume {path} is served by a keeper; use --mend when that has stopped")
    reader = _Reader(path, keyring)
    try:
        if mend:
            _refuse_beside_keepers(path)
        with ThreadPoolExecutor(max_workers=_NUM_THREADS) as threads:
            for writer in _writers(path):
                files = folder.walk(path, writer)
                while batch := list(itertools.islice(files, _BATCH)):
                    for found, (outcome, is_checked) in zip(batch, threads.map(reader.verify, batch), strict=True):
                        _record(path, writer, found, outcome, report, is_checked=is_checked, mend=mend)
                        advance()
        if mend:
            _refuse_beside_keepers(path)  # that started meanwhile
            _remove_left_overs(path, report)
    except OSError as error:
        raise TierError(f"volume {path}: {error.filename or ''}: {error.strerror}") from error
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
    return report


def list_chunks(path: Path) -> Iterator[FoundChunk]:
    """Raises TierError if `path` is no volume."""
    folder.read_description(path)
    for writer in _writers(path):
        for found in folder.walk(path, writer):
            if isinstance(found, FoundChunk):
                yield found


def disk_usage(path: Path) -> tuple[list[Usage], dict[LayoutDigest, ChunkLayout], int]:
    """Return usages (largest first), described layouts, and quarantined bytes. Raises TierError if `path` is no
    volume.
    """
    counts: defaultdict[tuple[str, LayoutDigest, Namespace], list[int]] = defaultdict(lambda: [0, 0])
    for found in list_chunks(path):
        count = counts[found.writer, found.layout, found.chunk.namespace]
        count[0] += 1
        count[1] += found.num_bytes
    quarantined = sum(bad.num_bytes for writer in _writers(path) for bad in folder.walk_quarantine(path, writer))
    usages = [Usage(*group, num_chunks, num_bytes) for group, (num_chunks, num_bytes) in counts.items()]
    return sorted(usages, key=lambda usage: -usage.num_bytes), folder.load_layouts(path), quarantined


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """`fingerprint` in hexadecimal digits, empty for chunks that are not sealed."""

    fingerprint: str
    namespaces: tuple[Namespace, ...]
    num_chunks: int
    num_bytes: int
    num_sealed: int  # ever, by all writers that said so
    secret: int | None  # number of the secret in the key file: 1 seals, others only open; None: not there


def key_usage(path: Path, keyring: Keyring | None) -> list[KeyUsage]:
    """Return what each sealing key has sealed, most chunks first. Reads all headers.

    Raises TierError if `path` is no volume.
    """
    volume_id = folder.read_description(path).volume_id
    chunks: defaultdict[str, list[FoundChunk]] = defaultdict(list)
    with ThreadPoolExecutor(max_workers=_NUM_THREADS) as threads:
        found = list_chunks(path)
        while batch := list(itertools.islice(found, _BATCH)):
            for one, fingerprint in zip(batch, threads.map(_fingerprint_of, batch), strict=True):
                if fingerprint is not None:
                    chunks[fingerprint].append(one)
    num_sealed = seal_counts.read_all(path)
    usages = []
    for fingerprint in chunks.keys() | num_sealed.keys():
        ours = chunks[fingerprint]
        namespaces = tuple(sorted({one.chunk.namespace for one in ours}, key=str))
        usages.append(
            KeyUsage(
                fingerprint,
                namespaces,
                len(ours),
                sum(one.num_bytes for one in ours),
                num_sealed[fingerprint],
                _number_of_secret(fingerprint, namespaces, keyring, volume_id),
            )
        )
    return sorted(usages, key=lambda usage: -usage.num_chunks)


def _fingerprint_of(found: FoundChunk) -> str | None:
    try:
        fd = DirectIo().open(found.path, os.O_RDONLY)
        try:
            header = chunk_file.parse_header(memoryview(os.pread(fd, HEADER_BYTES, 0)))
        finally:
            os.close(fd)
    except OSError:
        return None
    if header is None:
        return None
    return header.fingerprint.hex() if header.algorithm is Algorithm.SEALED else ""


def _number_of_secret(
    fingerprint: str, namespaces: tuple[Namespace, ...], keyring: Keyring | None, volume_id: str
) -> int | None:
    if keyring is None:
        return None
    for namespace in namespaces:
        for number, key in enumerate(keyring.keys(namespace, volume_id), 1):
            if chunk_file.fingerprint(key).hex() == fingerprint:
                return number
    return None


def purge(path: Path, tenant: str, epoch: int | None = None) -> int:
    """Remove a tenant's chunks, of one epoch or all, by all writers and from quarantine. Return their number.

    Raises TierError if `path` is no volume, for a file that cannot be removed, or if chunks are moved meanwhile.
    """
    folder.read_description(path)
    try:
        Namespace(tenant)
    except ValueError as error:
        raise TierError(str(error)) from None
    try:
        return folder.remove_namespaces(
            path, lambda namespace: namespace.tenant == tenant and epoch in (None, namespace.epoch)
        )
    except OSError as error:
        raise TierError(f"volume {path}: {error.filename or ''}: {error.strerror}") from error


class _Reader:
    def __init__(self, path: Path, keyring: Keyring | None) -> None:
        self._keyring = keyring
        self._volume_id = folder.read_description(path).volume_id
        self._io = DirectIo()
        self._io.is_direct = _can_read_direct(path / paths.DESCRIPTION)
        self._buffers = _ThreadBuffers()
        self._layout_to_payload_bytes = {
            digest: layout.payload_bytes for digest, layout in folder.load_layouts(path).items()
        }

    def verify(self, found: FoundChunk | ForeignFile) -> tuple[Outcome | None, bool]:
        """Return the outcome, None for a foreign file, and whether it covers the payload."""
        if isinstance(found, ForeignFile):
            return None, False
        outcome, is_checked, inode = self._read(found)
        if outcome in (Outcome.OK, Outcome.GONE):
            return outcome, is_checked
        # A keeper may have replaced the file meanwhile.
        again, is_checked, inode_again = self._read(found)
        return (again, is_checked) if inode == inode_again else (Outcome.GONE, False)

    def _read(self, found: FoundChunk) -> tuple[Outcome, bool, int]:
        try:
            fd = self._io.open(found.path, os.O_RDONLY)
        except FileNotFoundError:
            return Outcome.GONE, False, 0
        except OSError:
            return Outcome.IO_ERROR, False, 0
        try:
            status = os.fstat(fd)
            payload_bytes = self._layout_to_payload_bytes.get(found.layout, status.st_size - HEADER_BYTES)
            if status.st_size != chunk_file.chunk_file_bytes(payload_bytes) or payload_bytes <= 0:
                return Outcome.TRUNCATED, False, status.st_ino
            whole, spare = self._buffers.pair(status.st_size)
            if self._io.read(fd, [whole]) != status.st_size:
                return Outcome.TRUNCATED, False, status.st_ino
        except OSError:
            return Outcome.IO_ERROR, False, 0
        finally:
            os.close(fd)
        outcome, is_checked = self._verify(whole, spare, found)
        return outcome, is_checked, status.st_ino

    def _verify(self, whole: memoryview, spare: memoryview, found: FoundChunk) -> tuple[Outcome, bool]:
        raw_header, payload = whole[:HEADER_BYTES], whole[HEADER_BYTES:]
        header = chunk_file.parse_header(raw_header)
        if header is None:
            return Outcome.CORRUPT_HEADER, False
        outcome = chunk_file.verify_identity(header, found.layout, found.chunk, len(payload))
        if outcome is not Outcome.OK:
            return outcome, False
        if self._keyring is None:
            is_plain = header.algorithm is Algorithm.PLAIN
            return (chunk_file.verify_plain(header, payload) if is_plain else Outcome.OK), is_plain
        keys = self._keyring.keys(found.chunk.namespace, self._volume_id)
        if not keys:
            return Outcome.OK, False
        outcome = chunk_file.unseal(header, raw_header, payload, spare[: len(payload)], keys)
        return outcome, outcome is not Outcome.UNDECRYPTABLE or header.algorithm is Algorithm.PLAIN


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self._both = memoryview(b"")

    def pair(self, num_bytes: int) -> tuple[memoryview, memoryview]:
        if len(self._both) < 2 * num_bytes:
            self._both = aligned_buffer(2 * num_bytes)
        return self._both[:num_bytes], self._both[num_bytes : 2 * num_bytes]


def _can_read_direct(file: Path) -> bool:
    io = DirectIo()
    io.is_direct = True
    try:
        os.close(io.open(str(file), os.O_RDONLY))
    except OSError:
        return False
    return True


def _record(
    path: Path,
    writer: str,
    found: FoundChunk | ForeignFile,
    outcome: Outcome | None,
    report: Report,
    *,
    is_checked: bool,
    mend: bool,
) -> None:
    if isinstance(found, ForeignFile):
        cause, num_bytes = FOREIGN, _size_of(found.path)
        target = path / paths.QUARANTINE / f".{FOREIGN}" / Path(found.path).relative_to(path)
    else:
        assert outcome is not None
        if outcome is Outcome.GONE:
            return
        report.num_chunks += 1
        report.num_bytes += found.num_bytes
        if outcome is Outcome.OK:
            report.num_unchecked += not is_checked
            return
        cause, num_bytes = outcome.value, found.num_bytes
        target = path / paths.quarantine_path(writer, found.layout, found.chunk, cause)
    mended_to = None
    # A failing drive says nothing about the chunk, and neither does another node's key file.
    is_good_perhaps = outcome is Outcome.IO_ERROR or (outcome is Outcome.UNDECRYPTABLE and not is_checked)
    if mend and not is_good_perhaps:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(found.path).rename(target)
        mended_to = str(target)
    report.faults.append(Fault(found.path, cause, num_bytes, mended_to))


def _refuse_beside_keepers(path: Path) -> None:
    # Some network file systems keep locks on one node only.
    if living := sorted(folder.living_writers(path)):
        more = f" and {len(living) - MAX_NAMED} more" if len(living) > MAX_NAMED else ""
        raise TierError(
            f"volume {path}: the keeper of {', '.join(living[:MAX_NAMED])}{more} lived less than "
            f"{folder.ALIVE_FOR_S:.0f} s ago, perhaps on another node; wait that long after its end, then use --mend"
        )


def _remove_left_overs(path: Path, report: Report) -> None:
    for entry in sorted((path / paths.TEMPORARY).glob("*/*")):
        if entry.parent.is_symlink():
            continue
        report.faults.append(Fault(str(entry), LEFT_OVER, _size_of(str(entry)), "removed"))
        entry.unlink()


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _writers(path: Path) -> list[str]:
    try:
        return folder.writers(path)
    except OSError as error:
        raise TierError(f"volume {path}: {error.filename or ''}: {error.strerror}") from error
