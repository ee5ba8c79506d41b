"""Limit of the bytes that a keeper writes to a volume."""

from __future__ import annotations


class WriteBudget:
    """Bytes per day, as a token bucket of an hour's share.

    In any period, writes exceed the period's share by at most an hour's share and one chunk.
    """

    DAY_S = 86_400.0
    BURST_S = 3_600.0

    def __init__(self, bytes_per_day: float | None, now_s: float) -> None:
        """None: no limit."""
        self._bytes_per_s = None if bytes_per_day is None else bytes_per_day / self.DAY_S
        self._level = 0.0 if self._bytes_per_s is None else self._bytes_per_s * self.BURST_S
        self._at_s = now_s

    def __repr__(self) -> str:
        return "<WriteBudget without limit>" if self._bytes_per_s is None else f"<WriteBudget {self._level:.0f} bytes>"

    def allows(self, now_s: float) -> bool:
        """Return whether a chunk may be written. It may overdraw the budget: it may be larger than an hour's share."""
        if self._bytes_per_s is None:
            return True
        self._level = min(
            self._level + (now_s - self._at_s) * self._bytes_per_s, max(self._level, self._bytes_per_s * self.BURST_S)
        )
        self._at_s = now_s
        return self._level > 0

    def spend(self, num_bytes: int) -> None:
        if self._bytes_per_s is not None:
            self._level -= num_bytes

    def refund(self, num_bytes: int) -> None:
        self.spend(-num_bytes)
