"""Writes chunks into a volume, recycling evicted files to save CPU.

Nothing is synced: verification detects torn files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable

from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry_keeper.store import chunk_file, paths
from kvferry_keeper.store.chunk_file import Keyring
from kvferry_keeper.store.index.chunk_index import ChunkIndex, Reservation
from kvferry_keeper.store.index.space_ledger import File
from kvferry_keeper.store.outcome import Outcome, outcome_of
from kvferry_keeper.store.seal_counts import SealCounts
from kvferry_keeper.store.volume_files import VolumeFiles


class ChunkWriter:
    """Thread-safe. Calls `notify` after evictions, before their space is written."""

    def __init__(
        self,
        index: ChunkIndex,
        files: VolumeFiles,
        keyring: Keyring | None,
        seal_counts: SealCounts,
        *,
        notify: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._index = index
        self._files = files
        self._keyring = keyring
        self._seal_counts = seal_counts
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self.outcomes: Counter[Outcome] = Counter()
        self.bytes_written = 0

    def __repr__(self) -> str:
        return f"<ChunkWriter {dict(self.outcomes)}>"

    def write(self, layout: LayoutDigest, chunk: ChunkId, payload: memoryview) -> Outcome:
        try:
            outcome = self._write(layout, chunk, payload)
        except (OSError, MemoryError):  # of buffers; errors of files are outcomes already
            outcome = Outcome.NO_RESOURCES
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome is Outcome.OK:
                self.bytes_written += len(payload)
        return outcome

    def _write(self, layout: LayoutDigest, chunk: ChunkId, payload: memoryview) -> Outcome:
        key = fingerprint = b""
        if self._keyring is not None:
            keys = self._keyring.keys(chunk.namespace, self._files.volume_id)
            if not keys:
                return Outcome.REFUSED
            key, fingerprint = keys[0], chunk_file.fingerprint(keys[0])
            if not self._seal_counts.may_seal(fingerprint):
                return Outcome.REFUSED
        now_s = self._clock()
        # Before anything is reserved: memory may be short.
        header = self._files.buffers.header
        sealed = self._files.buffers.bounce(len(payload)) if self._keyring is not None else None
        # So may be descriptors, which would be noticed when a victim's file is gone.
        spare = self._files.spare_descriptor()
        try:
            reservation = self._index.reserve(layout, chunk, chunk_file.chunk_file_bytes(len(payload)), now_s)
            if isinstance(reservation, Outcome):
                return reservation
            self._notify()
            try:
                if sealed is None:
                    chunk_file.write_plain_header(header, payload, layout, chunk, now_s)
                else:
                    chunk_file.seal(header, payload, sealed, layout, chunk, now_s, key)
                    self._seal_counts.add(fingerprint)
                    payload = sealed
            except BaseException:
                self._give_up(reservation)
                raise
        finally:
            os.close(spare)
        parts = [header, payload]
        outcome = self._fill(reservation, parts)
        # A drive may be full below our capacity. Overwriting a file needs no more of its space.
        if outcome is Outcome.NO_SPACE and self._index.reserve_by_recycling(reservation, now_s):
            self._notify()
            outcome = self._fill(reservation, parts)
        if outcome is not Outcome.OK:
            self._index.cancel(reservation)
        return outcome

    def _give_up(self, reservation: Reservation) -> None:
        """End a reservation for which nothing is written. What it evicts is evicted all the same."""
        temporary = self._files.temporary_path()
        with contextlib.suppress(OSError):
            self._evict(reservation, temporary)
        is_left = not self._files.remove(temporary)
        self._index.roll_back(reservation, File(temporary, reservation.chunk_bytes) if is_left else None)
        self._index.cancel(reservation)

    def _fill(self, reservation: Reservation, parts: list[memoryview]) -> Outcome:
        files = self._files
        temporary = files.temporary_path()
        is_begun = False
        try:
            is_recycled = self._evict(reservation, temporary)
            is_begun = True
            files.write(temporary, parts, reservation.chunk_bytes, is_recycled=is_recycled)
            target = paths.chunk_path(files.writer, reservation.layout, reservation.chunk)
            files.rename(temporary, f"{files.root}/{target}")
        except OSError as error:
            is_left = is_begun and not files.remove(temporary)
            self._index.roll_back(reservation, File(temporary, reservation.chunk_bytes) if is_left else None)
            outcome = outcome_of(error)
            files.last_error = str(error)
            # Nothing that a write needs may be absent, but on NFS a handle may be stale.
            return Outcome.IO_ERROR if outcome is Outcome.GONE else outcome
        self._index.commit(reservation, self._clock())
        return Outcome.OK

    def _evict(self, reservation: Reservation, temporary: str) -> bool:
        """Return whether a recycled file is at `temporary`. Raises OSError after abandoning irremovable files."""
        is_recycled = False
        failure: OSError | None = None
        left: list[File] = []
        for file in reservation.removed:
            if not self._files.remove(file.path):
                failure = OSError(errno.EIO, "not removed", file.path)
                left.append(file)
        if reservation.recycled is not None:
            try:
                self._files.io.rename(reservation.recycled.path, temporary)
                is_recycled = True
            except OSError as error:
                if not self._files.is_absent(error):
                    failure = error
                    left.append(reservation.recycled)
        self._index.finish_eviction(reservation, left)
        if failure is not None:
            raise failure
        return is_recycled
