"""Circuit breaker and write budget of a volume, and causes of failures that are not the volume's fault. Pure."""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Metric labels, beside those of Outcome."""

    TIMEOUT = "timeout"  # waited or ran for longer than the deadline
    UNAVAILABLE = "unavailable"  # the volume's breaker is open, or the volume is unknown
    QUEUE_FULL = "queue_full"
    BUDGET = "budget"
    ENGINE_GONE = "engine_gone"
    EPOCH_OVER = "epoch_over"  # the tenant was deleted, or its pages were reset
    FAULT = "fault"  # a bug of ours, with a traceback in the log


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


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # in use
    OPEN = "open"  # not used
    HALF_OPEN = "half_open"  # one operation is on trial


class Breaker:
    """Opens after `max_failures` in a row, or at once. A trial every `retry_s` may close it."""

    def __init__(self, max_failures: int, retry_s: float) -> None:
        self._max_failures = max_failures
        self._retry_s = retry_s
        self._num_failures = 0
        self._retry_at_s = 0.0
        self.state = BreakerState.CLOSED
        self.num_trips = 0

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value}, {self._num_failures} failures in a row, {self.num_trips} trips>"

    @property
    def is_closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def is_retry_due(self, now_s: float) -> bool:
        return self.state is BreakerState.OPEN and now_s >= self._retry_at_s

    def begin_trial(self) -> None:
        """Call only when ripe."""
        self.state = BreakerState.HALF_OPEN

    def succeeded(self) -> bool:
        """Return whether that closed it. Operations begun before the trial do not."""
        self._num_failures = 0
        if self.state is not BreakerState.HALF_OPEN:
            return False
        self.state = BreakerState.CLOSED
        return True

    def failed(self, now_s: float) -> bool:
        """Return whether that opened it."""
        self._num_failures += 1
        if self.state is BreakerState.CLOSED and self._num_failures < self._max_failures:
            return False
        return self.trip(now_s)

    def trip(self, now_s: float) -> bool:
        """Open, or stay open for longer. Returns whether it was closed."""
        was_closed = self.is_closed
        if was_closed:
            self.num_trips += 1
        self.state = BreakerState.OPEN
        self._retry_at_s = now_s + self._retry_s
        return was_closed
