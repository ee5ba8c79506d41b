"""Adoption of chunks whose writers are gone and evict nothing any more."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvferry_keeper.store import folder, paths
from kvferry_keeper.store.folder import FoundChunk
from kvferry_keeper.store.index.chunk_index import ChunkIndex, Reservation
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume_files import VolumeFiles

# A keeper that restarts holds its lock again within seconds. Then its chunks go to writers with room for them; chunks
# that no writer has room for are removed, as if they had been evicted.
ADOPT_AFTER_S = folder.ALIVE_FOR_S
REMOVE_AFTER_S = 900.0
# Files of one call: meanwhile a keeper of that name cannot start.
MAX_FILES = 2_000
MAX_COMPARED = 100  # chunks that are in the index too: both files may be read

log = logging.getLogger(__name__)

_LOOK_EVERY = 64  # chunks, whether their writer is back


class Adopter:
    """Thread-safe."""

    def __init__(
        self,
        index: ChunkIndex,
        files: VolumeFiles,
        has_right_size: Callable[[FoundChunk], bool],
        is_whole: Callable[[IndexEntry], bool],
        on_removed: Callable[[str], None],
    ) -> None:
        """`is_whole` reads a file. `on_removed` gets the name of each writer whose folder was removed."""
        self._index = index
        self._files = files
        self._has_right_size = has_right_size
        self._is_whole = is_whole
        self._on_removed = on_removed
        self._num_compared = 0  # in this call
        self._running = threading.Lock()
        self._said: dict[str, tuple[int, float]] = {}  # writer -> its lock's time of writing, and since when
        self._gone_since_s: dict[str, float] = {}
        self.num_adopted = 0
        self.num_removed = 0

    def __repr__(self) -> str:
        return f"<Adopter of {self._files.writer}: {self.num_adopted} adopted, {self.num_removed} removed>"

    def run(self, now_s: float) -> None:
        """Take over chunks, unless another call does. `now_s` is monotonic. Raises OSError for an unreadable folder."""
        # A probe may rescan beside the thread of rescans: each would take the other's locks for a living writer's.
        if self._running.acquire(blocking=False):
            try:
                self._run(now_s)
            finally:
                self._running.release()

    def _run(self, now_s: float) -> None:
        others = [writer for writer in folder.writers(self._files.path) if writer != self._files.writer]
        self._gone_since_s = {writer: since for writer, since in self._gone_since_s.items() if writer in others}
        self._said = {writer: said for writer, said in self._said.items() if writer in others}
        num_left = MAX_FILES
        self._num_compared = 0
        for writer in others:
            try:
                num_left -= self._look_at(writer, now_s, num_left)
            except OSError as error:
                # One writer's odd files must keep nobody from the others'.
                log.debug("volume %s: %s is not taken over: %s", self._files.root, writer, error.strerror)

    def _look_at(self, writer: str, now_s: float, num_left: int) -> int:
        """Return how many files were taken over. Raises OSError."""
        # Some network file systems keep locks on one node only: a living writer also says so. Clocks of nodes may
        # differ, and jump, so that only a change tells.
        said_ns = self._said_ns(writer)
        if writer not in self._said or self._said[writer][0] != said_ns:
            self._said[writer] = said_ns, now_s
        is_silent = now_s - self._said[writer][1] >= ADOPT_AFTER_S
        held = folder.lock(self._lock_of(writer), shared=False) if is_silent else None
        if held is None:
            self._gone_since_s.pop(writer, None)
            return 0
        try:
            if not self._chunks_of(writer).exists():
                # Another node took over between listing and locking, which made the lock's file again.
                self._lock_of(writer).unlink(missing_ok=True)
                return 0
            gone_s = now_s - self._gone_since_s.setdefault(writer, now_s)
            if gone_s >= ADOPT_AFTER_S and num_left:
                return self._take(writer, num_left, may_remove=gone_s >= REMOVE_AFTER_S)
            return 0
        finally:
            os.close(held)

    def _take(self, writer: str, max_files: int, *, may_remove: bool) -> int:
        """Adopt or remove a writer's newest chunks. Return their number."""
        found = [file for file in folder.walk(self._files.path, writer) if isinstance(file, FoundChunk)]
        found.sort(key=lambda chunk: chunk.used_s, reverse=True)
        num_files = 0
        for number, chunk in enumerate(found[:max_files]):
            if number % _LOOK_EVERY == 0 and self._is_back(writer):
                return num_files
            outcome = self._adopt(chunk)
            if outcome is Outcome.NO_SPACE and not may_remove:
                return num_files
            if outcome is Outcome.OK:
                self.num_adopted += 1
            elif (
                outcome is Outcome.REFUSED
                or (outcome is Outcome.UNREADABLE and not may_remove)
                or not self._remove(chunk)
            ):
                continue
            num_files += 1
        if num_files == len(found) and not self._is_back(writer) and self._remove_folders(writer):
            self._on_removed(writer)
            log.info("volume %s: the chunks of %s, which is gone, are taken over", self._files.root, writer)
        return num_files

    def _is_back(self, writer: str) -> bool:
        # Where locks are seen on one node only, it may have started again meanwhile.
        return self._said_ns(writer) != self._said[writer][0]

    def _adopt(self, chunk: FoundChunk) -> Outcome:
        """Move a chunk to this writer.

        NO_SPACE without room, EXISTS for a copy or wrong size, UNREADABLE beside an unreadable copy, REFUSED if in use.
        """
        if not self._has_right_size(chunk):
            return Outcome.EXISTS
        reservation = self._reserve(chunk)
        if reservation is Outcome.EXISTS:
            reservation = self._compare(chunk)
        if isinstance(reservation, Outcome):
            return reservation
        files = self._files
        try:
            files.rename(chunk.path, f"{files.root}/{paths.chunk_path(files.writer, chunk.layout, chunk.chunk)}")
        except OSError:
            self._index.roll_back(reservation)
            self._index.cancel(reservation)
            return Outcome.REFUSED
        self._index.commit(reservation, None)  # its writer's order of uses is not comparable with ours
        return Outcome.OK

    def _reserve(self, chunk: FoundChunk) -> Reservation | Outcome:
        return self._index.reserve_adoption(chunk.layout, chunk.chunk, chunk.writer, chunk.num_bytes)

    def _compare(self, chunk: FoundChunk) -> Reservation | Outcome:
        """Return EXISTS if the copy in the index is whole; replace it if only this one is."""
        # The copy may be hidden, damaged, or sealed with another key: then this one is perhaps the last.
        if self._num_compared >= MAX_COMPARED:
            return Outcome.REFUSED
        self._num_compared += 1
        copy = self._index.pin(chunk.layout, chunk.chunk.key)
        if copy is None:
            return Outcome.REFUSED
        try:
            if self._is_whole(copy):
                return Outcome.EXISTS
        finally:
            self._index.unpin(copy)
        if not self._is_whole(IndexEntry(chunk.layout, chunk.chunk, chunk.writer, chunk.num_bytes)):
            return Outcome.UNREADABLE
        file = self._index.begin_remove(copy.layout, copy.chunk, only_ours=True)
        if file is not None:
            self._index.end_remove(copy.layout, copy.chunk, file, is_removed=self._files.remove(file.path))
        return self._reserve(chunk)

    def _remove(self, chunk: FoundChunk) -> bool:
        entry = self._index.pin(chunk.layout, chunk.chunk.key)
        if entry is not None:
            self._index.unpin(entry)
            if entry.writer == chunk.writer:
                self._index.forget(entry)
        is_removed = self._files.remove(chunk.path)
        self.num_removed += is_removed
        return is_removed

    def _remove_folders(self, writer: str) -> bool:
        # Chunks half written, the quarantine, empty folders, and the lock last. Foreign files stay, and their folders.
        temporary = self._files.path / paths.TEMPORARY / writer
        folder.unlink_link(temporary)
        half_written = [file for file in temporary.rglob("*") if not file.is_dir()]
        for file in (*half_written, *(Path(bad.path) for bad in folder.walk_quarantine(self._files.path, writer))):
            with contextlib.suppress(OSError):
                file.unlink()
        chunks = self._chunks_of(writer)
        roots = [self._files.path / name / writer for name in paths.OF_WRITERS]
        for root in roots:
            folder.unlink_link(root)
            for where, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):
                    Path(where).rmdir()
        if not any(root.exists() for root in roots):
            with contextlib.suppress(OSError):
                self._lock_of(writer).unlink()
        return not chunks.exists()

    def _chunks_of(self, writer: str) -> Path:
        return self._files.path / paths.CHUNKS / writer

    def _said_ns(self, writer: str) -> int:
        try:
            return self._lock_of(writer).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def _lock_of(self, writer: str) -> Path:
        return self._files.path / paths.TEMPORARY / f"{writer}.lock"
