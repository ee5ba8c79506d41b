"""Delivers a volume's changes in order."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from kvferry.keeper.layout import ChunkId, LayoutDigest


class Change(NamedTuple):
    layout: LayoutDigest
    added: tuple[ChunkId, ...]
    removed: tuple[ChunkId, ...]


class ChangeLog:
    """Thread-safe. Records nothing before `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: deque[Change] = deque()
        self._is_recording = False
        self._is_delivering = False

    def __repr__(self) -> str:
        return f"<ChangeLog of {len(self._changes)} changes>"

    def begin(self) -> None:
        self._is_recording = True

    def record(self, change: Change) -> None:
        if self._is_recording:
            self._changes.append(change)

    def next(self) -> Change | None:
        """Return the oldest change, to be ended with `end_delivery`, or None."""
        with self._lock:
            if self._is_delivering or not self._changes:
                return None
            self._is_delivering = True
            return self._changes.popleft()

    def end_delivery(self) -> None:
        with self._lock:
            self._is_delivering = False

    def check(self) -> None:
        assert not self._changes, "changes are not delivered"
        assert not self._is_delivering, "a delivery has not ended"
