"""Limits of time: of whole requests, of the first token of a choice, and between its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvferry.errors import DeadlineExceeded
from kvferry.gateway.choices import Choice


class OwnCancel:
    """Base of a context that may cancel the task of its block, as asyncio.Timeout does: another cancel stays one."""

    __slots__ = ("_has_cancelled", "_num_cancels", "_task")

    def _enter(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels, self._has_cancelled = task, task.cancelling(), False

    def _cancel(self) -> None:
        self._has_cancelled = True
        self._task.cancel()

    def _takes_back(self, kind: type[BaseException] | None) -> bool:
        """Take the own cancel back, at the end of the block. Return whether the block ended by it alone."""
        if not self._has_cancelled:
            return False
        return self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError


# Choices are looked at so often in the shorter of the limits, which costs tokens nothing: a limit is exceeded by at
# most this part of it.
_LOOKS = 8


class TokenTimeouts:
    """`gateway.first_token_timeout_s` and `gateway.inter_token_timeout_s` of all answers, with one timer."""

    # A timer and an asyncio.timeout of each answer's own took 10 us.

    def __init__(self, first_token_s: float, inter_token_s: float) -> None:
        self.first_token_s = first_token_s
        self.inter_token_s = inter_token_s
        self._period_s = min(first_token_s, inter_token_s) / _LOOKS
        self._watched: dict[_Watch, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<TokenTimeouts of {len(self._watched)} answers>"

    def watch(self, choices: Sequence[Choice]) -> _Watch:
        """Return a context that cancels its block once a choice has waited too long.

        It raises DeadlineExceeded then, which names the limit.
        """
        return _Watch(self, choices)

    def _begin(self, watch: _Watch) -> None:
        self._watched[watch] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period_s, self._look)

    def _end(self, watch: _Watch) -> None:
        self._watched.pop(watch, None)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for watch in list(self._watched):
            watch.look(now_s)
        self._timer = loop.call_later(self._period_s, self._look) if self._watched else None


class _Watch(OwnCancel):
    __slots__ = ("_choices", "_reason", "_seen", "_timeouts")

    def __init__(self, timeouts: TokenTimeouts, choices: Sequence[Choice]) -> None:
        self._timeouts = timeouts
        self._choices = choices
        self._seen: list[tuple[int, float]] = []  # tokens of a choice, and since when it has them
        self._reason = ""  # why it has expired

    async def __aenter__(self) -> None:
        self._enter()
        self._seen = [(0, asyncio.get_running_loop().time())] * len(self._choices)
        self._timeouts._begin(self)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeouts._end(self)
        if self._takes_back(kind):
            raise DeadlineExceeded(self._reason) from None

    def look(self, now_s: float) -> None:
        timeouts = self._timeouts
        for i, choice in enumerate(self._choices):
            num_tokens, since_s = self._seen[i]
            if choice.finish_reason is not None:
                continue
            if choice.num_tokens != num_tokens:
                self._seen[i] = choice.num_tokens, now_s
            elif num_tokens and now_s - since_s >= timeouts.inter_token_s:
                self._expire(f"no token followed within {timeouts.inter_token_s:g} s (gateway.inter_token_timeout_s)")
                return
            elif not num_tokens and now_s - since_s >= timeouts.first_token_s:
                self._expire(f"no token came within {timeouts.first_token_s:g} s (gateway.first_token_timeout_s)")
                return

    def _expire(self, reason: str) -> None:
        self._reason = reason
        self._timeouts._end(self)  # once
        self._cancel()


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
