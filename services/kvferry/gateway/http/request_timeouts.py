"""The limit on the time of a whole request, `gateway.request_timeout_s`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from kvferry.gateway.token_timeouts import OwnCancel


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


class RequestTimeout(OwnCancel):
    """One request's limit; `expire` ends it before its time."""

    __slots__ = ("_timeouts",)

    def __init__(self, timeouts: RequestTimeouts) -> None:
        self._timeouts = timeouts

    def __enter__(self) -> Self:
        self._enter()
        self._timeouts._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeouts._end(self)
        if self._takes_back(kind):
            raise TimeoutError from error

    def expire(self) -> None:
        """Cancel the block, once."""
        self._timeouts._end(self)
        if not self._has_cancelled:
            self._cancel()
