"""Files of a writer that are no chunks of its index: quarantined, or to be removed."""

from __future__ import annotations

import threading

from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store.index.space_ledger import File, SpaceLedger


class Leftovers:
    """End each file that is withdrawn with `end_removal`."""

    def __init__(self, space: SpaceLedger, lock: threading.Lock) -> None:
        self._space = space
        self._lock = lock

    def add_quarantined(self, file: File) -> None:
        with self._lock:
            self._space.add_quarantined(file)

    @property
    def quarantined(self) -> list[File]:
        with self._lock:
            return self._space.quarantined

    def forget_quarantined(self, file: File) -> None:
        """Idempotent; the file is gone."""
        with self._lock:
            self._space.forget_quarantined(file)

    def withdraw_quarantined(self, namespace: Namespace) -> list[File]:
        part = f"/{namespace}/"
        with self._lock:
            return [self._space.begin_transit(file) for file in self._space.quarantined if part in file.path]

    def withdraw_quarantine_excess(self) -> list[File]:
        with self._lock:
            quarantined = self._space.quarantined
            return self._space.withdraw_quarantine_excess(quarantined[-1].path if quarantined else "")

    def withdraw_abandoned(self) -> list[File]:
        with self._lock:
            return [self._space.begin_transit(file) for file in self._space.abandoned]

    def end_removal(self, file: File, *, is_removed: bool) -> None:
        with self._lock:
            self._space.end_transit(file, is_removed=is_removed)
