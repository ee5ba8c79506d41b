"""Limits on the time to the first token of a choice, and on that between its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

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

    def watch(self, choices: Sequence[Choice]) -> _Watch:
        """Return a context that cancels its block once a choice has waited too long.

        It raises DeadlineExceeded then, which names the limit.
        """
        return _Watch(self, choices)


class _Watch:
    def __init__(self, timeouts: TokenTimeouts, choices: Sequence[Choice]) -> None:
        self._timeouts = timeouts
        self._choices = choices
        self._loop = asyncio.get_running_loop()
        self._period_s = min(timeouts.first_token_s, timeouts.inter_token_s) / _LOOKS
        self._seen = [(0, self._loop.time())] * len(choices)  # tokens of a choice, and since when it has them
        self._limit = asyncio.timeout(None)
        self._reason = ""  # why it has expired
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._period_s, self._look)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise DeadlineExceeded(self._reason) from None

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
        self._reason = reason
        self._limit.reschedule(self._loop.time())
