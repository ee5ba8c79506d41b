"""Quarantine of chunks that failed verification."""

from __future__ import annotations

import contextlib
import logging
import threading

from kvferry_keeper.store import paths
from kvferry_keeper.store.index.chunk_index import ChunkIndex
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.index.space_ledger import File
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume_files import VolumeFiles

logger = logging.getLogger(__name__)


class Quarantine:
    """Thread-safe."""

    def __init__(self, index: ChunkIndex, files: VolumeFiles) -> None:
        self._index = index
        self._files = files
        self._lock = threading.Lock()
        self.num_files = 0  # moved here since the start

    def __repr__(self) -> str:
        return f"<Quarantine of {self._files.writer}: {self.num_files} files>"

    def add(self, entry: IndexEntry, outcome: Outcome) -> bool:
        """Return False if the chunk left the index."""
        file = self._index.begin_quarantine(entry)
        if file is None:
            return False
        files = self._files
        logger.warning("%s: %s", file.path, outcome.value)
        moved: File | None = None
        if file.num_bytes or entry.writer == files.writer:
            target = f"{files.root}/{paths.quarantine_path(files.writer, entry.layout, entry.chunk, outcome.value)}"
            with contextlib.suppress(OSError):
                files.rename(file.path, target)
                moved = File(target, files.truncate(target, file.num_bytes))
                with self._lock:
                    self.num_files += 1
        is_removed = moved is None and files.remove(file.path)
        for excess in self._index.end_quarantine(entry, file, moved, is_removed=is_removed):
            self._index.leftovers.end_removal(excess, is_removed=files.remove(excess.path))
        return True
