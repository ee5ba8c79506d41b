"""Limits on bytes of answers that clients have not read."""

# A whole answer goes to its connection at once and its request ends, so none of a request's limits holds these bytes.

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

STALL_S = 30.0  # without a byte read, before a connection is cut
MAX_STREAM_BYTES = 4 << 20  # unread of a stream, before its client is cut
LOOK_S = 2.0  # between two looks at the connections


class Connection(Protocol):
    # Hashed by identity.

    @property
    def stalls(self) -> bool: ...  # whether `num_unread_bytes` falls while the client reads

    @property
    def peer(self) -> str: ...  # for the log

    @property
    def path(self) -> str: ...  # of the last request

    def num_unread_bytes(self) -> int: ...

    def cut(self) -> None: ...  # end it without sending what is unread


@dataclass(slots=True)
class _Unread:
    num_bytes: int  # at the last look
    num_held: int  # counted in the sum
    changed_s: float


class UnreadAnswers:
    """Cuts connections that stall, and the longest stalled ones while the sum is over `max_bytes`."""

    # A client that reads gets its answer, however slowly, unless the sum is exceeded. What is left of an answer does
    # not say what it holds in memory: event loops free a write when all of it is sent. So the sum counts the most that
    # was unread since the connection was added.

    def __init__(
        self, max_bytes: int, on_cut: Callable[[Connection, int], None], now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_cut` gets the bytes that were unread."""
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self.max_stream_bytes = MAX_STREAM_BYTES
        self._on_cut = on_cut
        self.stall_s = STALL_S
        self._now_s = now_s
        self._connections: dict[Connection, _Unread] = {}  # longest without progress first
        self._timer: asyncio.TimerHandle | None = None
        self.none_left = asyncio.Event()  # set while no answer is unread
        self.none_left.set()

    def __repr__(self) -> str:
        return f"<UnreadAnswers {self.num_bytes}/{self.max_bytes} bytes of {len(self._connections)} connections>"

    def check(self) -> None:
        assert self.num_bytes == sum(unread.num_held for unread in self._connections.values()), self
        assert (self._timer is not None) == bool(self._connections), self
        assert self.none_left.is_set() != bool(self._connections), self

    def add(self, connection: Connection) -> None:
        """Watch a connection until all is read or it is removed. Call again when more was written."""
        if connection in self._connections:
            self._look_at(connection)
        elif num_bytes := connection.num_unread_bytes():
            self._connections[connection] = _Unread(num_bytes, num_bytes, self._now_s())
            self.num_bytes += num_bytes
            self.none_left.clear()
            if self._timer is None:
                self._begin_timer()
        if self.num_bytes > self.max_bytes:
            self._cut_others(connection)

    def remove(self, connection: Connection) -> None:
        unread = self._connections.pop(connection, None)
        if unread is None:
            return
        self.num_bytes -= unread.num_held
        if not self._connections:
            self.none_left.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def look(self) -> None:
        """Cut connections that are read no more."""
        # More that is written counts as a change: a stream has its own limit of unread bytes, and its buffer may grow
        # while its client reads.
        since_s = self._now_s() - self.stall_s
        for connection, unread in list(self._connections.items()):
            self._look_at(connection)
            if connection in self._connections and connection.stalls and unread.changed_s <= since_s:
                self._cut(connection)

    def _look_at(self, connection: Connection) -> bool:
        # Returns whether the client has read since the last look.
        unread = self._connections[connection]
        num_bytes = connection.num_unread_bytes()
        if not num_bytes:
            self.remove(connection)
            return True
        has_read = num_bytes < unread.num_bytes
        if has_read:
            self._connections[connection] = self._connections.pop(connection)
        elif num_bytes > unread.num_held:
            self.num_bytes += num_bytes - unread.num_held
            unread.num_held = num_bytes
        if num_bytes != unread.num_bytes:
            unread.num_bytes = num_bytes
            unread.changed_s = self._now_s()
        return has_read

    def _cut_others(self, newest: Connection) -> None:
        # First those that have not read since the last look, then those that have. `newest` stays: its answer may be
        # over the limit by itself.
        for connection in list(self._connections):
            if self.num_bytes <= self.max_bytes:
                return
            if connection is not newest and not self._look_at(connection):
                self._cut(connection)
        for connection in list(self._connections):
            if self.num_bytes <= self.max_bytes:
                return
            if connection is not newest:
                self._cut(connection)

    def _cut(self, connection: Connection) -> None:
        num_bytes = self._connections[connection].num_bytes
        self.remove(connection)
        # A failure must not reach the timer, which cuts all others, nor the client that has just written.
        try:
            connection.cut()
            self._on_cut(connection, num_bytes)
        except Exception:
            log.exception("cutting a connection that is not read failed")

    def _begin_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(LOOK_S, self.stall_s / 2), self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self.look()
        if self._connections and self._timer is None:
            self._begin_timer()
