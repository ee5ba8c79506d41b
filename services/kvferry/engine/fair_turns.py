"""Turns for work of which little runs at a time, shared between tenants."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from itertools import takewhile
from typing import Any, TypeVar

from kvferry.engine.base import TenantName
from kvferry.errors import Overloaded

R = TypeVar("R")

_SEEN_S = 30.0  # how long the last turn stays free for a tenant that came
# What a turn costs at least. It is charged when a turn begins, so that a tenant without any goes before others.
_LEAST_TURN_S = 0.001


class _Tenant:
    __slots__ = ("had_s", "line", "num_running", "seen_s")

    def __init__(self) -> None:
        self.line: deque[asyncio.Future[None]] = deque()
        self.num_running = 0
        self.had_s = 0.0  # of turns, those of its absence included
        self.seen_s = 0.0


class FairTurns:
    """The next turn is for the tenant whose turns took the least time; a tenant's line keeps its order.

    While others came within _SEEN_S, a tenant has all turns but one at most.
    """

    # A single line would be one tenant's who fills it again and again. Turns by number would give one whose work takes
    # long nearly all the time. One that was away has as much behind it as the last that had a turn (start-time fair
    # queueing).

    def __init__(self, num_turns: int, max_waiting: int, complaint: str) -> None:
        """`complaint` is Overloaded's."""
        self.num_free = num_turns
        self.num_waiting = 0
        self._num_turns = num_turns
        self._max_waiting = max_waiting
        self._complaint = complaint
        self._clock_s = 0.0  # what the tenant of the last turn had before it
        self._tenants: OrderedDict[TenantName, _Tenant] = OrderedDict()  # the one that came last at the end
        self._waiting: dict[TenantName, _Tenant] = {}  # those with a line; the one that had a turn last at the end

    def __repr__(self) -> str:
        return f"<FairTurns free={self.num_free} waiting={self.num_waiting} of {len(self._waiting)} tenants>"

    async def run(self, tenant: TenantName, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Wait for a turn and return what `work` returns; it keeps its turn until it ends, also after a cancellation.

        Raises Overloaded, and what `work` raises.
        """
        await self.begin(tenant)
        begun_s = time.monotonic()
        running = asyncio.create_task(work())

        def end_turn(ended: asyncio.Task[R]) -> None:
            self.end(tenant, time.monotonic() - begun_s)
            if not ended.cancelled():
                ended.exception()  # its client may have left

        running.add_done_callback(end_turn)
        return await asyncio.shield(running)

    async def begin(self, tenant: TenantName) -> None:
        """Wait for a turn, to be given back by `end`.

        Where too many wait, the last one of the longest line has to leave. Raises Overloaded.
        """
        known = self._seen(tenant)
        may_begin = self._may_begin(known) and not known.line
        if not may_begin and self.num_waiting >= self._max_waiting:
            self._shorten_longest_line(tenant)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        known.line.append(turn)
        self._waiting.setdefault(tenant, known)
        self.num_waiting += 1
        self._give_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.end(tenant, 0.0)  # it came just now
            else:
                self._leave_line(tenant, turn)
            raise

    def end(self, tenant: TenantName, took_s: float) -> None:
        """Give a turn back."""
        known = self._tenants[tenant]
        known.num_running -= 1
        known.had_s += max(0.0, took_s - _LEAST_TURN_S)
        self.num_free += 1
        self._forget_unseen()
        self._give_turns()

    def _give_turns(self) -> None:
        while names := [name for name, each in self._waiting.items() if self._may_begin(each)]:
            name = min(names, key=lambda each: self._waiting[each].had_s)
            tenant = self._waiting[name]
            turn = tenant.line[0]
            self._leave_line(name, turn)
            if not turn.done():
                self._begin(tenant)
                turn.set_result(None)
            if tenant.line:
                self._waiting[name] = self._waiting.pop(name)

    def _begin(self, tenant: _Tenant) -> None:
        self.num_free -= 1
        tenant.num_running += 1
        self._clock_s = max(self._clock_s, tenant.had_s)
        tenant.had_s += _LEAST_TURN_S

    def _may_begin(self, tenant: _Tenant) -> bool:
        most = self._num_turns if len(self._tenants) == 1 else max(1, self._num_turns - 1)
        return self.num_free > 0 and tenant.num_running < most

    def _seen(self, tenant: TenantName) -> _Tenant:
        self._forget_unseen()
        known = self._tenants.setdefault(tenant, _Tenant())
        if not known.line:
            known.had_s = max(known.had_s, self._clock_s)
        known.seen_s = time.monotonic()
        self._tenants.move_to_end(tenant)
        return known

    def _forget_unseen(self) -> None:
        latest_s = time.monotonic() - _SEEN_S
        unseen = takewhile(lambda item: item[1].seen_s <= latest_s, self._tenants.items())
        for name in [name for name, known in unseen if not (known.line or known.num_running)]:
            del self._tenants[name]

    def _shorten_longest_line(self, newest: TenantName) -> None:
        longest = max(self._waiting, key=lambda name: len(self._waiting[name].line), default=newest)
        if len(self._tenants[longest].line) <= len(self._tenants[newest].line) + 1:
            raise Overloaded(self._complaint)
        turn = self._tenants[longest].line[-1]
        self._leave_line(longest, turn)
        if not turn.done():
            turn.set_exception(Overloaded(self._complaint))

    def _leave_line(self, name: TenantName, turn: asyncio.Future[None]) -> None:
        tenant = self._waiting.get(name)
        if tenant is None or turn not in tenant.line:
            return
        tenant.line.remove(turn)
        self.num_waiting -= 1
        if not tenant.line:
            del self._waiting[name]
