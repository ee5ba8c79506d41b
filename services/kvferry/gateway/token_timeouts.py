"""Limits on the time to the first token of a choice, and on that between its tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from kvferry.errors import DeadlineExceeded
from kvferry.gateway.choices import Choice

# Choices are looked at so often in the shorter of the limits, which costs tokens nothing: a limit is exceeded by at
# most this part of it.
_LOOKS = 8


@dataclass(frozen=True, slots=True)
class TokenTimeouts:
    """`gateway.first_token_timeout_s` and `gateway.inter_token_timeout_s`."""

    first_token_s: float
    inter_token_s: float

    @contextlib.asynccontextmanager
    async def watch(self, choices: Sequence[Choice]) -> AsyncIterator[None]:
        """Cancel the block, and raise DeadlineExceeded that names the limit, once a choice has waited too long."""
        watch = _Watch(self, choices)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                watch.begin(limit)
                yield
        except TimeoutError:
            if not watch.reason:
                raise
            raise DeadlineExceeded(watch.reason) from None
        finally:
            watch.end()


class _Watch:
    def __init__(self, timeouts: TokenTimeouts, choices: Sequence[Choice]) -> None:
        self.reason = ""  # why it has expired
        self._timeouts = timeouts
        self._choices = choices
        self._loop = asyncio.get_running_loop()
        self._period_s = min(timeouts.first_token_s, timeouts.inter_token_s) / _LOOKS
        self._seen = [(0, self._loop.time())] * len(choices)  # tokens of a choice, and since when it has them
        self._limit: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, limit: asyncio.Timeout) -> None:
        self._limit = limit
        self._timer = self._loop.call_later(self._period_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now_s, timeouts = self._loop.time(), self._timeouts
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
        self._timer = self._loop.call_later(self._period_s, self._look)

    def _expire(self, reason: str) -> None:
        assert self._limit is not None
        self.reason = reason
        self._limit.reschedule(self._loop.time())
