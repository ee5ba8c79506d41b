"""A way past ASGI for the body of a stream, and limits of connections; the only file that knows uvicorn's protocols.

uvicorn still handles everything else. tests/unit/gateway/test_uvicorn_connection.py fails for a uvicorn that works
differently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from kvferry.errors import HeadersTimeout, HeadersTooLarge, InvalidRequest, KvferryError, Overloaded, UrlTooLong
from kvferry.gateway.http.browser_requests import require_host
from kvferry.gateway.http.connection_limits import ConnectionLimits
from kvferry.gateway.http.openai_responses import error_body
from kvferry.gateway.tls import common_name
from kvferry.gateway.unread_answers import UnreadAnswers
from kvferry.util.addresses import describe_client

EXTENSION = "kvferry.exchange"  # the key of `scope["extensions"]` under which a request finds its Exchange

# Limits of a request's line and headers. httptools itself keeps heads of any size, in quadratic time.
MAX_HEAD_BYTES = 64 << 10
MAX_URL_BYTES = 8 << 10
MAX_HEADERS = 128
MAX_PIPELINED = 16  # requests of a connection that wait behind the one in service
MAX_PIPELINED_BYTES = 64 << 10  # of these together, from where uvicorn would pause reading for a body
# From a connection, or a request's first byte, to the end of its headers.
HEAD_TIMEOUT_S = 30.0
# How long a refused client may go on sending: closing at once could overtake the answer.
LINGER_S = 2.0

_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")

Headers = Sequence[tuple[bytes, bytes]]


class HttpProtocol(HttpToolsProtocol):
    on_lost: Callable[[], None] | None = None  # of the request that is served now; others wait in uvicorn's pipeline
    lost = False
    was_cut = False  # because its client does not read
    tls_socket: asyncio.Transport | None = None  # below `transport`, which does not know what waits there

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits: ConnectionLimits | None = getattr(self.app, "connection_limits", None)
        self._unread: UnreadAnswers | None = getattr(self.app, "unread_answers", None)
        self._reads_head = True
        self._num_head_bytes = 0  # at least 1 if any has come
        self._num_line_bytes = 0  # of headers that are parsed
        self._num_tail_bytes = 0  # after the last of a body: chunk sizes and trailers
        self._is_counted = False
        self._is_upgrade = False
        self._fault: KvferryError | None = None  # why a callback has stopped the parser
        self._is_refused = False
        self._waiting: deque[int] = deque()  # bytes of each request in the pipeline
        self._served: RequestResponseCycle | None = None  # uvicorn's `cycle` is the one that is read
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        refusal = self._limits.open(self._peer) if self._limits is not None else None
        if refusal is None:
            self._is_counted = self._limits is not None
            self._begin_timer()
        elif len(self.connections) > self._limits.max_with_refused:  # type: ignore[union-attr]
            transport.abort()  # too many refused clients linger
        else:
            self._refuse(refusal)

    @property
    def _peer(self) -> str:
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while data and not self._is_refused:
            if self._reads_head:
                self._num_head_bytes += len(data)
            else:
                self._num_tail_bytes += len(data)
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_upgrade:
                    return  # CONNECT, which the application has refused
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                continue
            except httptools.HttpParserError:
                self._refuse(self._fault or InvalidRequest("this is not a valid HTTP request"))
                return
            break
        if self._is_refused:
            return
        if (self._num_head_bytes if self._reads_head else self._num_tail_bytes) > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
        elif self._timer is None and (self._reads_head or self.cycle is None or self.cycle.response_complete):
            self._begin_timer()

    def _begin_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_timed_out)

    def _head_without_upgrade(self) -> bytes:
        """Return the request's head without its upgrade, which HTTP lets a server ignore, and begin to parse anew.

        The parser takes everything after the head for another protocol's, a body too.
        """
        pieces = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token for token in value.split(b",") if token.strip().lower() not in _UPGRADE_HEADERS]
                value = b",".join(tokens)
            if name not in _UPGRADE_HEADERS and (value or name != b"connection"):
                pieces.append(b"%b: %b\r\n" % (name, value))
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return b"".join([*pieces, b"\r\n"])

    def _refuse(self, error: KvferryError) -> None:
        """Answer outside any request and end the connection, after the answers to requests that came whole."""
        self._is_refused = True
        self._end_timer()
        if self.transport.is_closing():
            return
        if (note_refusal := getattr(self.app, "note_refusal", None)) is not None:
            note_refusal(error)
        if self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # the fault is in its body
            self._waiting.pop()
            self.cycle = self.pipeline[0][0] if self.pipeline else cast(RequestResponseCycle, self._served)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            cycle.transport = cast(asyncio.Transport, _LingeringTransport(cycle.transport, self._close_later))
            return
        is_answering = False
        if cycle is not None and not cycle.response_complete:
            # The fault is in its body.
            is_answering = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
        if not is_answering:
            status, body = HTTPStatus(error.http_status), error_body(error)
            again = f"retry-after: {error.retry_after_s}\r\n" if error.retry_after_s is not None else ""
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n{again}connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self._close_later()
        else:
            self.transport.close()

    def _close_later(self) -> None:
        """End what is sent now, and the connection after `LINGER_S`: until then the client may send and read."""
        if self.transport.can_write_eof() and not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # the client has left, which the transport does not know yet
                self.transport.abort()
            else:
                self._timer = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _head_timed_out(self) -> None:
        self._timer = None
        if self._num_head_bytes:
            self._refuse(HeadersTimeout(f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s"))
        else:
            self._is_refused = True
            self.transport.close()

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._num_head_bytes = max(1, self._num_head_bytes)
        self._num_line_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._stop_parser(UrlTooLong(f"the URL is over {MAX_URL_BYTES} bytes, the limit"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._reads_head:
            return  # a trailer: its sender may be another one than the headers'
        super().on_header(name, value)
        # The count of bytes in `data_received` looks once a read, which may have a whole head in it.
        self._num_line_bytes += len(name) + len(value) + 4
        if len(self.headers) > MAX_HEADERS or self._num_line_bytes > MAX_HEAD_BYTES:
            self._stop_parser(_head_too_large())

    def _check_waiting(self) -> None:
        if sum(self._waiting) > MAX_PIPELINED_BYTES:
            self._stop_parser(Overloaded(f"requests of over {MAX_PIPELINED_BYTES} bytes wait on this connection"))

    def _stop_parser(self, fault: KvferryError) -> None:
        self._fault = fault
        raise fault

    def on_body(self, body: bytes) -> None:
        self._num_tail_bytes = 0
        if self.pipeline:
            self._waiting[-1] += len(body)
            self._check_waiting()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._reads_head = False
        self._num_head_bytes = self._num_tail_bytes = 0
        self._end_timer()
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            self._stop_parser(InvalidRequest("only HTTP/1.1 and HTTP/1.0 are spoken here"))
        try:
            require_host(self.headers, self.url, is_needed=self.parser.get_http_version() == "1.1")
        except InvalidRequest as fault:
            self._stop_parser(fault)
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parser(Overloaded(f"over {MAX_PIPELINED} requests wait on this connection"))
        self._is_upgrade = self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)
        if self._is_upgrade:
            return  # the head comes again, without the upgrade
        super().on_headers_complete()
        # uvicorn has made a task of the application, which has not run yet, or paused reading until the request's turn:
        # then nobody would see the client leave.
        if self.pipeline:
            self.flow.resume_reading()
            self._waiting.append(self._num_line_bytes + len(self.url))
            self._check_waiting()
        scope = cast("dict[str, Any]", self.scope)
        scope["extensions"] = {EXTENSION: Exchange(self, self.cycle)}
        if getattr(self.app, "is_leaving", False):
            # The answer says `connection: close`, so that the client's next request goes to another gateway.
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        if self._waiting:
            self._waiting.popleft()
        super()._start_asgi_task(cycle, app)

    # Bytes that the client has not read

    stalls = True

    @property
    def peer(self) -> str:
        return describe_client(self.client)

    @property
    def path(self) -> str:
        # The cycle's path: the protocol's scope may belong to a head that is still being read, which has no path yet.
        return self.cycle.scope["path"] if self.cycle is not None else ""

    def num_unread_bytes(self) -> int:
        num_bytes = self.transport.get_write_buffer_size()
        return num_bytes if self.tls_socket is None else num_bytes + self.tls_socket.get_write_buffer_size()

    def cut(self) -> None:
        self.was_cut = True
        self.transport.abort()

    def shutdown(self) -> None:
        # A transport of asyncio's TLS that is closed twice knows nothing any more: neither what is unread, nor how to
        # abort.
        if not self.transport.is_closing():
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is not None:
            self._unread.add(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unread is not None and not self.lost and self.num_unread_bytes():
            self._unread.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._end_timer()
        if self._unread is not None:
            self._unread.remove(self)
        if self._is_counted and self._limits is not None:
            self._limits.close(self._peer)
        super().connection_lost(exc)
        if self._served is not None:
            self._served.disconnected = True  # uvicorn tells the last one only, and complains of others without answers
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
    def may_answer(self) -> bool:
        """Whether a status can be sent, without waiting for the client."""
        cycle = self._cycle
        return not (cycle.response_started or cycle.disconnected or self._transport.get_write_buffer_size())

    @property
    def client_name(self) -> str | None:
        """Common name of the client's certificate; None without a certificate, "" without a name."""
        secure = self._transport.get_extra_info("ssl_object")
        certificate = secure.getpeercert(binary_form=True) if secure is not None else None
        return common_name(certificate) if certificate is not None else None

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost` when the connection is lost, at once if it already was."""
        self._protocol.on_lost = on_lost
        if self._protocol.lost:
            on_lost()

    @property
    def was_cut(self) -> bool:
        return self._protocol.was_cut

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
        self.resume_reading()
        return body

    def resume_reading(self) -> None:
        """Read on after a body: uvicorn pauses while much of it waits, and then misses that a client leaves."""
        self._flow.resume_reading()

    async def respond(self, headers: Headers, body: bytes) -> None:
        """Send a whole answer with status 200. `headers` are not checked, and get the length."""
        # As `cycle.send` does, which takes several times as long.
        cycle = self._cycle
        if self._flow.write_paused:
            await self._flow.drain()
        if cycle.disconnected:
            return
        if cycle.response_started:
            raise RuntimeError("a response was already started")
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        head = b"%b%b%bcontent-length: %d\r\n%b\r\n" % (
            _STATUS_LINE_OK,
            _default_lines(cycle.default_headers),
            _lines(headers),
            len(body),
            b"" if cycle.keep_alive else b"connection: close\r\n",
        )
        if len(body) < _LARGE_WRITE_BYTES:
            cycle.transport.write(head + body)
        else:
            cycle.transport.write(head)
            cycle.transport.write(body)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def start(self, status: int, headers: Headers) -> None:
        """Begin a chunked response, sent with its first piece. Never waits. Requires `is_ready`."""
        transport = self._cycle.transport
        held = _HeadBuffer(transport)
        self._cycle.transport = cast(asyncio.Transport, held)
        sending = self._cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        try:
            # It waits for nothing but a client that does not read.
            sending.send(None)
        except StopIteration:
            self._cycle.transport = transport
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


_LARGE_WRITE_BYTES = 1 << 20  # whose copy is slower than a write
_STATUS_LINE_OK = STATUS_LINE[200]


def _lines(headers: Headers) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_last_defaults: tuple[Headers, bytes] = ((), b"")


def _default_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of the headers of every answer, of which uvicorn makes a new list every second."""
    global _last_defaults
    last, lines = _last_defaults
    if last is not headers:
        lines = _lines(headers)
        _last_defaults = headers, lines
    return lines


class _HeadBuffer:
    """A transport that keeps the head of an answer, to be sent with its first piece."""

    __slots__ = ("_transport", "head")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.head += data


class _LingeringTransport:
    """Transport of the answer before a refused request: closes with `close`."""

    __slots__ = ("_transport", "close", "write")

    def __init__(self, transport: Any, close: Callable[[], None]) -> None:
        self._transport = transport
        self.write = transport.write
        self.close = close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the headers are over {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} lines, the limits")


def drop_exchange(scope: dict[str, Any]) -> None:
    """End the cycle of references through a request's scope, which the garbage collector would have to find."""
    if (extensions := scope.get("extensions")) is not None:
        extensions.pop(EXTENSION, None)


def exchange_of(scope: dict[str, Any]) -> Exchange | None:
    """Return a request's Exchange, or None under a plain ASGI server."""
    found: Exchange | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found
