"""Circuit breaker and write budget of a volume. Pure."""

from __future__ import annotations

import enum


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
