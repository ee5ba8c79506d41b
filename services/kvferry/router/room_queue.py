"""Requests that wait for room on workers, before anything of them is computed."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable

from kvferry.engine.base import Turn
from kvferry.errors import Overloaded

# The first of a line asks again after this without news of room, for a worker of an older release does not tell. Those
# of many lines ask more rarely.
ASK_AGAIN_S = 0.1
# Lines whose first requests are tried on one news of room, in turns: each try is a placement.
WOKEN_AT_ONCE = 16
MAX_RETRY_AFTER_S = 60

_NUM_ENDS = 64  # completions that the rate is measured by
_MIN_ENDS = 8  # fewer say little
_FORGET_ENDS_S = 60.0  # older completions say nothing of now


class Waiter:
    """A request in line. `turn` may be awaited again until `leave`."""

    __slots__ = ("_queue", "_turn", "ends_s", "is_resumed", "share", "tenant")

    def __init__(self, queue: RoomQueue, ends_s: float, turn: Turn | None, *, is_resumed: bool) -> None:
        self.tenant = _tenant_of(turn)
        self.share = 1.0 if turn is None else turn.share
        self._queue = queue
        self._turn = asyncio.Event()
        self.ends_s = ends_s
        self.is_resumed = is_resumed

    async def turn(self) -> None:
        """Wait to be first, and for news of room. Raises TimeoutError at `ends_s`."""
        async with asyncio.timeout(max(0.0, self.ends_s - self._queue.now_s())):
            while True:
                timeout_s = self._queue.ask_again_s if self._queue.is_first(self) else None
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._turn.wait()
                except TimeoutError:
                    if not self._queue.is_first(self):
                        continue
                self._turn.clear()
                return

    def wake(self) -> None:
        self._turn.set()

    def leave(self) -> None:
        """Idempotent."""
        self._queue.remove(self)


class Completions:
    """The rate at which a gateway's requests end while others wait: without any in line it says nothing of room."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=_NUM_ENDS)

    def restart(self, now_s: float) -> None:
        self._ends_s.clear()
        self._ends_s.append(now_s)

    def add(self, now_s: float) -> None:
        self._ends_s.append(now_s)

    def wait_s(self, num_before: int, now_s: float) -> float | None:
        """Return the time until `num_before` more have ended; None while too little is known."""
        while self._ends_s and now_s - self._ends_s[0] > _FORGET_ENDS_S:
            self._ends_s.popleft()
        if len(self._ends_s) < _MIN_ENDS:
            return None
        return num_before * (now_s - self._ends_s[0]) / len(self._ends_s)


class RoomQueue:
    """Bounded, and aware of deadlines: a request that would wait in vain is refused when it comes."""

    # Each tenant has a line of answers that lost their worker, and one of others. The first of every line asks workers
    # for room, the former before the latter; workers see to the shares.

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self.completions = Completions()
        self._max_requests = max_requests
        # Insertion order. Dictionaries, because waiters leave from anywhere.
        self._resumed: _Lines = {}
        self._lines: _Lines = {}
        self._num_waiting = 0

    def __repr__(self) -> str:
        return f"<RoomQueue {len(self)}/{self._max_requests} of {len(self._lines)} tenants>"

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def ask_again_s(self) -> float:
        return ASK_AGAIN_S * max(1.0, (len(self._lines) + len(self._resumed)) / WOKEN_AT_ONCE)

    def num_before(self, turn: Turn | None) -> int:
        """Return how many requests try before a new one of the tenant."""
        if not (self._resumed or self._lines):
            return 0
        tenant = _tenant_of(turn)
        return len(self._resumed.get(tenant, ())) + len(self._lines.get(tenant, ()))

    def enter(self, ends_s: float, turn: Turn | None, *, is_resumed: bool) -> Waiter:
        """Join the line until `leave`, for no longer than `ends_s`.

        Raises Overloaded when the line is full, or longer than the time left. An answer that has begun is not refused.
        """
        now_s = self.now_s()
        if not is_resumed:
            self._require_place(turn)
            wait_s = self.completions.wait_s(self._num_expected_before(turn) + 1, now_s)
            if wait_s is not None and wait_s > ends_s - now_s:
                raise self.refusal(
                    f"all workers are full, and no room is expected within the {max(0.0, ends_s - now_s):.1f} s that "
                    "this request may wait",
                    turn=turn,
                )
        if not len(self):
            self.completions.restart(now_s)
        waiter = Waiter(self, ends_s, turn, is_resumed=is_resumed)
        self._lines_of(waiter).setdefault(waiter.tenant, {})[waiter] = None
        self._num_waiting += 1
        return waiter

    def _require_place(self, turn: Turn | None) -> None:
        room = self._max_requests - len(self)
        if room <= 0:
            raise self.refusal(
                "all workers are full, and the line for room has no place left; gateway.max_queued_requests is "
                f"{self._max_requests} choices. If they are this request's, send fewer",
                turn=turn,
            )
        # So the line never fills with one tenant's requests.
        num_own = len(self._lines.get(_tenant_of(turn), ()))
        if turn is not None and num_own >= room:
            raise self.refusal(
                f"all workers are full, and {num_own} choices of this tenant wait in line, as many as places are left "
                f"for others or more; gateway.max_queued_requests is {self._max_requests}",
                turn=turn,
            )

    def _num_expected_before(self, turn: Turn | None) -> int:
        """Return how many requests are expected to get room before a new one of the tenant."""
        num_own = self.num_before(turn)
        if turn is None:
            return len(self)
        turns = (num_own + 1) / turn.share
        others = (
            min(float(len(line)), turns * next(iter(line)).share)
            for tenant, line in self._lines.items()
            if tenant != turn.tenant
        )
        return num_own + math.ceil(sum(others))

    def refusal(self, why: str, retry_after_s: int | None = None, *, turn: Turn | None = None) -> Overloaded:
        """Return the error of a request that finds no room; `retry_after_s` is used where nothing was measured."""
        wait_s = self.completions.wait_s(self._num_expected_before(turn) + 1, self.now_s())
        if wait_s is not None:
            retry_after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
        return Overloaded(why, retry_after_s=1 if retry_after_s is None else retry_after_s)

    def is_first(self, waiter: Waiter) -> bool:
        return next(iter(self._lines_of(waiter).get(waiter.tenant, ())), None) is waiter

    def note_room(self) -> None:
        """A worker has room, or came: the first of some lines try again."""
        num_left = WOKEN_AT_ONCE
        for lines in (self._resumed, self._lines):
            for tenant in list(itertools.islice(lines, num_left)):
                next(iter(lines[tenant])).wake()
                num_left -= 1
                if len(lines) > WOKEN_AT_ONCE:
                    lines[tenant] = lines.pop(tenant)  # the others are next

    def remove(self, waiter: Waiter) -> None:
        lines = self._lines_of(waiter)
        line = lines.get(waiter.tenant, {})
        if waiter not in line:
            return
        del line[waiter]
        self._num_waiting -= 1
        if not line:
            del lines[waiter.tenant]
        # There may be more room than one place.
        self.note_room()

    def _lines_of(self, waiter: Waiter) -> _Lines:
        return self._resumed if waiter.is_resumed else self._lines


class RoomQueues:
    """A line for each pool, of which none holds up another's. Each may have `max_requests`."""

    def __init__(self, max_requests: int, clock: Callable[[], float]) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._by_pool: dict[str, RoomQueue] = {}

    def __repr__(self) -> str:
        return f"<RoomQueues {self._by_pool!r}>"

    def __len__(self) -> int:
        return sum(map(len, self._by_pool.values()))

    def of(self, pool: str) -> RoomQueue:
        if pool not in self._by_pool:
            self._by_pool[pool] = RoomQueue(self._max_requests, self._clock)
        return self._by_pool[pool]

    def note_room(self, pool: str | None = None) -> None:
        """A worker of the pool, or perhaps of any, has room."""
        for queue in [*self._by_pool.values()] if pool is None else [self.of(pool)]:
            queue.note_room()


_Lines = dict[str, dict[Waiter, None]]  # by tenant; none is empty


def _tenant_of(turn: Turn | None) -> str:
    return "" if turn is None else turn.tenant
