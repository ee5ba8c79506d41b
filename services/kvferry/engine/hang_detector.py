"""Detects a hung process, such as an engine's: it lives, has work, and nothing progresses. Pure."""

from __future__ import annotations

from collections.abc import Hashable

# Limits the gap between two calls: a process that was itself stopped knows nothing about the other one.
MAX_GAP_S = 2.0


class HangDetector:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._still_s = 0.0
        self._last_s: float | None = None
        self._progress: Hashable = None

    def __repr__(self) -> str:
        return f"<HangDetector still for {self._still_s:.1f} of {self._timeout_s:g} s>"

    def is_hung(self, now_s: float, progress: Hashable, *, busy: bool) -> bool:
        """True if `progress` has not changed for `timeout_s` while busy."""
        gap_s = 0.0 if self._last_s is None else min(now_s - self._last_s, MAX_GAP_S)
        self._last_s = now_s
        if not busy or progress != self._progress:
            self._progress = progress
            self._still_s = 0.0
        else:
            self._still_s += gap_s
        return busy and self._still_s >= self._timeout_s
