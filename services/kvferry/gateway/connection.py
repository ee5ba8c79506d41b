"""uvicorn's HTTP protocol with a way past ASGI for the body of a stream: the only file that knows uvicorn's inside.

uvicorn keeps parsing, keep-alive, pipelining, limits and TLS. Status, headers and the end of a body go through its own
`send`; what lies between, the tokens, goes straight to the transport: no coroutine, no message, no task per token.

tests/unit/gateway/test_connection.py fails when a version of uvicorn works otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "kvferry.exchange"  # the key of `scope["extensions"]` under which a request finds its Exchange

Headers = Sequence[tuple[bytes, bytes]]


class HttpProtocol(HttpToolsProtocol):
    """One client connection."""

    tell_lost: Callable[[], None] | None = None  # of the request that is served now; others wait in uvicorn's pipeline
    lost = False

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # uvicorn has made a task of the application, which has not run yet.
        scope = cast("dict[str, Any]", self.scope)
        scope["extensions"] = {EXTENSION: Exchange(self, self.cycle)}
        if getattr(self.app, "is_leaving", False):
            # The answer says `connection: close`, so that the client's next request goes to another gateway.
            self.cycle.keep_alive = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)
        if self.tell_lost is not None:
            self.tell_lost()


class Exchange:
    """One request and its answer."""

    __slots__ = ("_cycle", "_flow", "_head", "_protocol", "_transport")

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._head = b""  # of a chunked answer, to go out with the first piece

    @property
    def is_ready(self) -> bool:
        """Whether `start` may be called now.

        Not while the client has yet to read what was answered to an earlier request. Once true it stays true until
        something is written.
        """
        return not self._flow.write_paused

    @property
    def client_name(self) -> str | None:
        """The common name of the client's certificate, "" where it has none; None without a certificate."""
        certificate = self._transport.get_extra_info("peercert")
        if not certificate:
            return None
        names = (value for part in certificate.get("subject", ()) for name, value in part if name == "commonName")
        return next(names, "")

    def watch(self, tell_lost: Callable[[], None]) -> None:
        """Have `tell_lost` called when the connection is lost; at once when it was."""
        self._protocol.tell_lost = tell_lost
        if self._protocol.lost:
            tell_lost()

    def unwatch(self, tell_lost: Callable[[], None]) -> None:
        """The end of `watch`; the connection may be serving its next request already."""
        if self._protocol.tell_lost == tell_lost:
            self._protocol.tell_lost = None

    def take_body(self) -> bytes | None:
        """The request's body, if it is all here and the client was not promised an interim answer; else `receive`."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self._flow.resume_reading()  # as `receive` does: or nobody sees the client leave
        return body

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer, in one write; headers say how long it is."""
        cycle = self._cycle
        cycle.transport = cast(asyncio.Transport, _HeadFirst(self._transport))
        await cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})

    def start(self, status: int, headers: Headers) -> None:
        """Begin a chunked answer, without waiting: status and headers go out with the first piece. Needs `is_ready`."""
        kept = _HeadFirst(self._transport)
        self._cycle.transport = cast(asyncio.Transport, kept)
        sending = self._cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            # It waits for nothing but a client that does not read.
            sending.send(None)
        except StopIteration:
            self._cycle.transport = self._transport
            self._head = kept.head
            return
        sending.close()
        raise RuntimeError("uvicorn waits before it sends headers; kvferry counts on it not to")

    def write(self, body: bytes) -> None:
        """Send a piece of the body, which must not be empty; after `start`. Never waits; does nothing once lost."""
        if not self._protocol.lost:
            head, self._head = self._head, b""
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """`write` of what stands between these two, for many pieces that begin and end alike. After a first `write`."""
        protocol, write = self._protocol, self._transport.write
        num_around, after = len(before) + len(after), after + b"\r\n"

        def write_between(middle: bytes) -> None:
            if not protocol.lost:
                write(b"%x\r\n%b%b%b" % (num_around + len(middle), before, middle, after))

        return write_between

    @property
    def may_have_unread(self) -> bool:
        """False while `num_unread_bytes` is 0."""
        return self._flow.write_paused

    def num_unread_bytes(self) -> int:
        """What waits here for the client to read; 0 while that is little (64 KiB)."""
        return self._transport.get_write_buffer_size() if self._flow.write_paused else 0

    def abort(self) -> None:
        """Close the connection and drop what waits."""
        self._cycle.disconnected = True  # nothing more to complain of when the application returns
        self._transport.abort()


class _HeadFirst:
    """Stands in for a transport: the first thing written is kept, and goes out with the second in one packet."""

    __slots__ = ("_transport", "close", "head")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.close = transport.close
        self.head = b""

    def write(self, data: bytes) -> None:
        if self.head:
            self._transport.write(self.head + data)
        else:
            self.head = data


def exchange_of(scope: dict[str, Any]) -> Exchange | None:
    """None under another server, which has only ASGI."""
    found: Exchange | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found
