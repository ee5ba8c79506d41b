"""Requests that wait for room on workers, before anything of them is computed."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import Overloaded

# The first in line asks again after this without news of room: a worker of an older release does not tell.
ASK_AGAIN_S = 0.1
MAX_RETRY_AFTER_S = 60

_NUM_ENDS = 64  # completions that the rate is measured by
_MIN_ENDS = 8  # fewer say little
_FORGET_ENDS_S = 60.0  # older completions say nothing of now


class Waiter:
    """A request in line. `turn` may be awaited again until `leave`."""

    __slots__ = ("_queue", "_turn", "ends_s", "is_resumed")

    def __init__(self, queue: RoomQueue, ends_s: float, *, is_resumed: bool) -> None:
        self._queue = queue
        self._turn = asyncio.Event()
        self.ends_s = ends_s
        self.is_resumed = is_resumed

    async def turn(self) -> None:
        """Wait to be first, and for news of room. Raises TimeoutError at `ends_s`."""
        async with asyncio.timeout(max(0.0, self.ends_s - self._queue.now_s())):
            while True:
                timeout_s = ASK_AGAIN_S if self._queue.is_first(self) else None
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


class Order(Protocol):
    """Which waiter comes first."""

    def __len__(self) -> int: ...
    def add(self, waiter: Waiter) -> None: ...
    def remove(self, waiter: Waiter) -> bool:
        """Return whether it was there."""
        ...

    def first(self) -> Waiter | None: ...


class FirstComeFirstServed:
    """Answers that lost their worker before new requests, each in order of arrival."""

    def __init__(self) -> None:
        # Insertion order. A dictionary, because waiters leave from anywhere.
        self._resumed: dict[Waiter, None] = {}
        self._new: dict[Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)

    def add(self, waiter: Waiter) -> None:
        (self._resumed if waiter.is_resumed else self._new)[waiter] = None

    def remove(self, waiter: Waiter) -> bool:
        line = self._resumed if waiter.is_resumed else self._new
        if waiter not in line:
            return False
        del line[waiter]
        return True

    def first(self) -> Waiter | None:
        return next(itertools.chain(self._resumed, self._new), None)


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

    def __init__(self, max_requests: int, clock: Callable[[], float], order: Order | None = None) -> None:
        self.now_s = clock
        self.completions = Completions()
        self._max_requests = max_requests
        self._order: Order = FirstComeFirstServed() if order is None else order

    def __repr__(self) -> str:
        return f"<RoomQueue {len(self._order)}/{self._max_requests}>"

    def __len__(self) -> int:
        return len(self._order)

    def enter(self, ends_s: float, *, is_resumed: bool) -> Waiter:
        """Join the line until `leave`, for no longer than `ends_s`.

        Raises Overloaded when the line is full, or longer than the time left. An answer that has begun is not refused.
        """
        now_s = self.now_s()
        if not is_resumed:
            if len(self._order) >= self._max_requests:
                raise self.refusal(
                    f"all workers are full, and the line for room has no place left: {len(self._order)} choices wait; "
                    f"gateway.max_queued_requests is {self._max_requests}. If they are this request's, send fewer"
                )
            wait_s = self.completions.wait_s(len(self._order) + 1, now_s)
            if wait_s is not None and wait_s > ends_s - now_s:
                raise self.refusal(
                    f"room on a worker is expected in {wait_s:.1f} s, and this request may wait for "
                    f"{max(0.0, ends_s - now_s):.1f} s"
                )
        if not len(self._order):
            self.completions.restart(now_s)
        waiter = Waiter(self, ends_s, is_resumed=is_resumed)
        self._order.add(waiter)
        return waiter

    def refusal(self, why: str, retry_after_s: int | None = None) -> Overloaded:
        """Return the error of a request that finds no room; `retry_after_s` is used where nothing was measured."""
        wait_s = self.completions.wait_s(len(self._order) + 1, self.now_s())
        if wait_s is not None:
            retry_after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
        return Overloaded(why, retry_after_s=1 if retry_after_s is None else retry_after_s)

    def is_first(self, waiter: Waiter) -> bool:
        return self._order.first() is waiter

    def note_room(self) -> None:
        """A worker has room, or came: the first in line tries again."""
        first = self._order.first()
        if first is not None:
            first.wake()

    def remove(self, waiter: Waiter) -> None:
        if self._order.remove(waiter):
            # There may be more room than one place.
            self.note_room()
