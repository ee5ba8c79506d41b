"""A way past ASGI for the body of a stream; the only file that knows uvicorn's internals.

uvicorn still handles everything but a stream's tokens. tests/unit/gateway/test_connection.py fails for a uvicorn that
works differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "kvferry.exchange"  # the key of `scope["extensions"]` under which a request finds its Exchange

Headers = Sequence[tuple[bytes, bytes]]


class HttpProtocol(HttpToolsProtocol):
    on_lost: Callable[[], None] | None = None  # of the request that is served now; others wait in uvicorn's pipeline
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
        if self.on_lost is not None:
            self.on_lost()


class Exchange:
    __slots__ = ("_cycle", "_flow", "_head", "_protocol", "_transport")

    def __init__(self, protocol: HttpProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport
        self._flow = protocol.flow
        self._head = b""  # of a chunked answer, to go out with the first piece

    @property
    def is_ready(self) -> bool:
        """Whether earlier pipelined responses have been sent. Stays true until something is written."""
        return not self._flow.write_paused

    @property
    def client_name(self) -> str | None:
        """Common name of the client's certificate; None without a certificate, "" without a name."""
        certificate = self._transport.get_extra_info("peercert")
        if not certificate:
            return None
        names = (value for part in certificate.get("subject", ()) for name, value in part if name == "commonName")
        return next(names, "")

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the connection is lost, at once if it already was."""
        self._protocol.on_lost = on_lost
        if self._protocol.lost:
            on_lost()

    def unwatch(self, on_lost: Callable[[], None]) -> None:
        """Undo `watch`; the connection may be serving its next request already."""
        if self._protocol.on_lost == on_lost:
            self._protocol.on_lost = None

    def whole_body(self) -> bytes | None:
        """Return the body if all arrived and no `100 Continue` was promised; else None: use `receive`."""
        cycle = self._cycle
        if cycle.more_body or cycle.waiting_for_100_continue or cycle.disconnected:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        self._flow.resume_reading()  # as `receive` does: else a client that leaves goes unnoticed
        return body

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        cycle = self._cycle
        cycle.transport = cast(asyncio.Transport, _HeadBuffer(self._transport))
        await cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        await cycle.send({"type": "http.response.body", "body": body, "more_body": False})

    def start(self, status: int, headers: Headers) -> None:
        """Begin a chunked response, sent with its first piece. Never waits. Requires `is_ready`."""
        held = _HeadBuffer(self._transport)
        self._cycle.transport = cast(asyncio.Transport, held)
        sending = self._cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            # It waits for nothing but a client that does not read.
            sending.send(None)
        except StopIteration:
            self._cycle.transport = self._transport
            self._head = held.head
            return
        sending.close()
        raise RuntimeError("uvicorn waits before it sends headers; kvferry counts on it not to")

    def write(self, body: bytes) -> None:
        """Send a non-empty piece. Never waits; does nothing on a lost connection."""
        if not self._protocol.lost:
            head, self._head = self._head, b""
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(body), body))

    def writer(self, before: bytes, after: bytes) -> Callable[[bytes], None]:
        """Return a faster `write` for pieces between constant bytes. Call `write` once first."""
        protocol, write = self._protocol, self._transport.write
        num_around, after = len(before) + len(after), after + b"\r\n"

        def write_between(middle: bytes) -> None:
            if not protocol.lost:
                write(b"%x\r\n%b%b%b" % (num_around + len(middle), before, middle, after))

        return write_between

    @property
    def may_have_unread(self) -> bool:
        return self._flow.write_paused

    def num_unread_bytes(self) -> int:
        """Bytes waiting here for the client; 0 below 64 KiB."""
        return self._transport.get_write_buffer_size() if self._flow.write_paused else 0

    def abort(self) -> None:
        self._cycle.disconnected = True  # nothing more to complain of when the application returns
        self._transport.abort()


class _HeadBuffer:
    """A transport that sends the first two writes in one packet."""

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
    """Return a request's Exchange, or None under a plain ASGI server."""
    found: Exchange | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found
