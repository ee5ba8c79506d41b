"""Writers of streamed answers, past ASGI or for any ASGI server.

Writing never waits, so that no slow client delays others; a client with too many unread bytes is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from kvferry.gateway.http.uvicorn_connection import Exchange

Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

# A comment of server-sent events, which clients skip.
KEEP_ALIVE = b": keep-alive\n\n"
MAX_SILENCE_S = 15.0  # of a stream, which then gets a comment


class StreamWriter(Protocol):
    """A streamed answer. The first write sends the head; before it, errors have a status.

    Writes after the end, or after the client left, do nothing.
    """

    @property
    def started(self) -> bool: ...

    @property
    def num_writes(self) -> int:
        """Changes with every write."""
        ...

    def write(self, events: bytes) -> None:
        """Never waits, and never raises for a client's fault."""
        ...

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """Return a faster `write` for events between `before` and `after`."""
        ...

    async def close(self, events: bytes) -> None:
        """Write, end the answer, and wait until nearly all is sent."""
        ...

    def abandon(self) -> None:
        """Break off an answer. Does nothing if it was closed or never started."""
        ...


def open_stream_writer(
    exchange: Exchange | None, send: Send, headers: Headers, max_unread_bytes: int, on_slow: Callable[[], None]
) -> StreamWriter:
    """Return a writer. `on_slow` is called once a client with more than `max_unread_bytes` unread is cut."""
    if exchange is not None and exchange.is_ready:
        return TransportStreamWriter(exchange, send, headers, max_unread_bytes, on_slow)
    return AsgiStreamWriter(send, headers, max_unread_bytes, on_slow)


@contextlib.contextmanager
def keep_alive(writer: StreamWriter, max_silence_s: float) -> Iterator[None]:
    """Write comments while the block writes nothing, so that no proxy takes the connection for idle.

    The first one sends the head: later errors are events.
    """
    loop = asyncio.get_running_loop()
    num_writes = writer.num_writes
    timer: asyncio.TimerHandle

    def look() -> None:
        nonlocal num_writes, timer
        if writer.num_writes == num_writes:
            writer.write(KEEP_ALIVE)
        num_writes = writer.num_writes
        timer = loop.call_later(max_silence_s / 2, look)

    # A write just after one look is followed by a comment two looks later.
    timer = loop.call_later(max_silence_s / 2, look)
    try:
        yield
    finally:
        timer.cancel()


class TransportStreamWriter:
    __slots__ = (
        "_closing",
        "_ended",
        "_exchange",
        "_headers",
        "_max_unread_bytes",
        "_on_slow",
        "_send",
        "num_writes",
        "started",
    )

    def __init__(
        self,
        exchange: Exchange,
        send: Send,
        headers: Headers,
        max_unread_bytes: int,
        on_slow: Callable[[], None],
    ) -> None:
        self.started = False
        self.num_writes = 0
        self._closing = False  # the end is being sent
        self._ended = False
        self._exchange = exchange
        self._send = send
        self._headers = headers
        self._max_unread_bytes = max_unread_bytes
        self._on_slow = on_slow

    def write(self, events: bytes) -> None:
        if self._closing or self._ended:
            return
        self.num_writes += 1
        exchange = self._exchange
        if not self.started:
            self.started = True
            exchange.start(200, self._headers)
        exchange.write(events)
        if exchange.may_have_unread:
            self._cut_if_slow()

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        exchange = self._exchange
        write = exchange.writer(before, after)

        def write_between(middle: bytes) -> None:
            if not self.started or self._closing or self._ended:
                self.write(before + middle + after)
                return
            self.num_writes += 1
            write(middle)
            if exchange.may_have_unread:
                self._cut_if_slow()

        return write_between

    def _cut_if_slow(self) -> None:
        if self._exchange.num_unread_bytes() > self._max_unread_bytes:
            self.abandon()
            self._on_slow()

    async def close(self, events: bytes) -> None:
        if self._closing or self._ended:
            return
        if not self.started:
            self.write(events)
            events = b""
        self._closing = True
        await self._send({"type": "http.response.body", "body": events, "more_body": False})
        self._ended = True

    def abandon(self) -> None:
        if self.started and not self._ended:
            self._ended = True
            self._exchange.abort()


class AsgiStreamWriter:
    """A StreamWriter for ASGI; a task sends what gathered since its last send."""

    def __init__(self, send: Send, headers: Headers, max_unread_bytes: int, on_slow: Callable[[], None]) -> None:
        self._send = send
        self._headers = headers
        self._max_unread_bytes = max_unread_bytes
        self._on_slow = on_slow
        self._pending = bytearray()
        self._written = asyncio.Event()
        self._ended = False  # nothing more is written
        self.num_writes = 0
        self._pump: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._pump is not None

    def write(self, events: bytes) -> None:
        if self._ended:
            return
        self.num_writes += 1
        self._pending += events
        self._written.set()
        if self._pump is None:
            self._pump = asyncio.create_task(self._send_all())
        if len(self._pending) > self._max_unread_bytes:
            self.abandon()
            self._on_slow()

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        return lambda middle: self.write(before + middle + after)

    async def close(self, events: bytes) -> None:
        self.write(events)
        assert self._pump is not None
        self._ended = True
        self._written.set()
        await self._pump

    def abandon(self) -> None:
        self._ended = True
        if self._pump is not None:
            self._pump.cancel()

    async def _send_all(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        while True:
            await self._written.wait()
            self._written.clear()
            ended = self._ended
            events, self._pending = bytes(self._pending), bytearray()
            await self._send({"type": "http.response.body", "body": events, "more_body": not ended})
            if ended:
                return
