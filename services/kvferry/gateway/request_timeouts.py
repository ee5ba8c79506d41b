"""The limit on the time of a whole request, `gateway.request_timeout_s`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class RequestTimeouts:
    """Equal limits of all requests, with one timer: that of the oldest request."""

    # An asyncio.timeout of each request's own, with a timer that hardly ever fires, took 5 us.

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open: dict[RequestTimeout, float] = {}  # and when it ends; the first to end comes first
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<RequestTimeouts of {len(self._open)} requests>"

    def limit(self) -> RequestTimeout:
        """Return a context that cancels its block at the end of the time, and raises TimeoutError then."""
        return RequestTimeout(self)

    def _begin(self, limit: RequestTimeout) -> None:
        loop = asyncio.get_running_loop()
        ends_s = self._open[limit] = loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = loop.call_at(ends_s, self._look)

    def _end(self, limit: RequestTimeout) -> None:
        self._open.pop(limit, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._timer = None
        while self._open:
            limit, ends_s = next(iter(self._open.items()))
            if ends_s > now_s:
                self._timer = loop.call_at(ends_s, self._look)
                return
            limit.expire()


class RequestTimeout:
    """One request's limit; `expire` ends it before its time."""

    __slots__ = ("_has_expired", "_num_cancels", "_task", "_timeouts")

    def __init__(self, timeouts: RequestTimeouts) -> None:
        self._timeouts = timeouts
        self._has_expired = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels = task, task.cancelling()
        self._timeouts._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeouts._end(self)
        # As asyncio.Timeout does: a cancel from elsewhere stays one.
        if self._has_expired and self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the block, once."""
        self._timeouts._end(self)
        if not self._has_expired:
            self._has_expired = True
            self._task.cancel()
