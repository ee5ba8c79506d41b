"""Turns for work of which little runs at a time, shared between tenants."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvferry.engine.base import TenantName
from kvferry.errors import Overloaded

R = TypeVar("R")


class FairTurns:
    """Tenants' lines take turns one after the other, each in its order."""

    # A single line would be one tenant's who fills it again and again.

    def __init__(self, num_turns: int, max_waiting: int, complaint: str) -> None:
        """`complaint` is Overloaded's."""
        self.num_free = num_turns
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._complaint = complaint
        self._lines: OrderedDict[TenantName, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    def __repr__(self) -> str:
        return f"<FairTurns free={self.num_free} waiting={self.num_waiting} of {len(self._lines)} tenants>"

    async def run(self, tenant: TenantName, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Wait for a turn and return what `work` returns; it keeps its turn until it ends, also after a cancellation.

        Raises Overloaded, and what `work` raises.
        """
        await self.begin(tenant)
        running = asyncio.create_task(work())
        running.add_done_callback(self._end_turn)
        return await asyncio.shield(running)

    def _end_turn(self, running: asyncio.Task[Any]) -> None:
        self.end()
        if not running.cancelled():
            running.exception()  # its client may have left

    async def begin(self, tenant: TenantName) -> None:
        """Wait for a turn, to be given back by `end`.

        Where too many wait, the last one of the longest line has to leave. Raises Overloaded.
        """
        if self.num_free:
            self.num_free -= 1
            return
        if self.num_waiting >= self._max_waiting:
            self._shorten_longest_line(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        self.num_waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.end()  # it came just now
            else:
                self._leave_line(tenant, turn)
            raise

    def end(self) -> None:
        """Give a turn back, for the first of the next line."""
        while self._lines:
            tenant, line = self._lines.popitem(last=False)
            turn = line.popleft()
            self.num_waiting -= 1
            if line:
                self._lines[tenant] = line
            if not turn.done():
                turn.set_result(None)
                return
        self.num_free += 1

    def _shorten_longest_line(self, newest: TenantName) -> None:
        longest = max(self._lines, key=lambda tenant: len(self._lines[tenant]), default=newest)
        if len(self._lines.get(longest, ())) <= len(self._lines.get(newest, ())) + 1:
            raise Overloaded(self._complaint)
        turn = self._lines[longest][-1]
        self._leave_line(longest, turn)
        if not turn.done():
            turn.set_exception(Overloaded(self._complaint))

    def _leave_line(self, tenant: TenantName, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant)
        if line is None or turn not in line:
            return
        line.remove(turn)
        self.num_waiting -= 1
        if not line:
            del self._lines[tenant]
