"""When an engine is hung: its process lives and says it is well, requests wait, and nothing moves. Pure.

What counts as moving is whatever an engine counts: steps, tokens, pages, requests that came to an end. A long prompt is
many steps, so it moves; a single step that takes longer than the timeout does not, and is taken for a hang. On a CPU
one chunk of a prefill was seen to take 30 s.
"""

from __future__ import annotations

from collections.abc import Hashable

# Longer gaps between two looks count as this much: a worker that was itself stopped says nothing about its engine.
MAX_GAP_S = 2.0


class HangDetector:
    """Sees `progress` every second or so, and says when it has stood still for `timeout_s` while work waited."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._still_s = 0.0
        self._last_s: float | None = None
        self._progress: Hashable = None

    def __repr__(self) -> str:
        return f"<HangDetector still for {self._still_s:.1f} of {self._timeout_s:g} s>"

    def is_hung(self, now_s: float, progress: Hashable, *, busy: bool) -> bool:
        """True once nothing changed for the whole timeout. `progress` is compared, never ordered."""
        gap_s = 0.0 if self._last_s is None else min(now_s - self._last_s, MAX_GAP_S)
        self._last_s = now_s
        if not busy or progress != self._progress:
            self._progress = progress
            self._still_s = 0.0
        else:
            self._still_s += gap_s
        return busy and self._still_s >= self._timeout_s
