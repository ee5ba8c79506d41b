"""A lean HTTP/1.1 client for load: no task and no wake-up per request, arrival times measured where bytes are read.

httptools parses; what is here keeps connections. One request at a time on each, so that none waits behind another in
this process; a connection is opened when no idle one is left.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from kvferry_loadtest.errors import TargetError

CONNECT_TIMEOUT_S = 10.0
# Idle connections beyond it are closed: a burst must not leave thousands open.
MAX_IDLE = 4096


class Receiver(Protocol):
    """Who hears of one exchange. Calls come in this order, `ended` last and once."""

    def status(self, status: int) -> None: ...
    def body(self, data: bytes) -> None: ...
    def ended(self, error: str) -> None:
        """`error` is empty when the answer came to its end."""


class Endpoint:
    """Where requests go: scheme, host, port and a path before all paths."""

    def __init__(self, url: str) -> None:
        """Raises TargetError for what is no http(s) URL."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise TargetError(f"{url}: its port is no number from 1 to 65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise TargetError(f"{url}: not a URL like http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.host = parts.hostname
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.authority = parts.netloc.rpartition("@")[2]
        self.path = parts.path.rstrip("/")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"


class HttpClient:
    """Connections to one endpoint. `close` ends them all."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.num_connects = 0
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<HttpClient {self.endpoint.url} busy={len(self._busy)} idle={len(self._idle)}>"

    def request_head(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        """All of a head but its Content-Length; for `send`. Made once for many requests."""
        lines = [f"{method} {self.endpoint.path}{path} HTTP/1.1", f"host: {self.endpoint.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")

    def send(self, head: bytes, body: bytes, receiver: Receiver) -> Exchange:
        """Begin an exchange now; on an idle connection its bytes are written before this returns."""
        data = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        exchange = Exchange(self, data, receiver)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                self._busy.add(connection)
                connection.begin(exchange)
                return exchange
        task = asyncio.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return exchange

    async def fetch(self, path: str, headers: dict[str, str], *, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """GET; status and body. Raises OSError (ConnectionError, TimeoutError) with a text that names the reason."""
        collected = _Collected()
        exchange = self.send(self.request_head("GET", path, headers), b"", collected)
        try:
            async with asyncio.timeout(timeout_s):
                error = await collected.done
        except TimeoutError:
            exchange.abort()
            raise TimeoutError(f"no answer within {timeout_s:g} s") from None
        if error:
            raise ConnectionError(error)
        return collected.code, b"".join(collected.pieces)

    async def close(self) -> None:
        self._closed = True
        connections = [*self._idle, *self._busy]
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in connections:
            connection.abort()
        for connection in connections:
            await connection.lost.wait()

    async def _connect(self, exchange: Exchange) -> None:
        loop = asyncio.get_running_loop()
        endpoint = self.endpoint
        self.num_connects += 1
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), endpoint.host, endpoint.port, ssl=endpoint.tls
                )
        except TimeoutError:
            exchange.end(f"no connection within {CONNECT_TIMEOUT_S:g} s")
            return
        except OSError as error:
            exchange.end(_describe(error))
            return
        except asyncio.CancelledError:
            exchange.end("the client was closed")
            raise
        if exchange.is_over:
            self.released(connection)
        else:
            self._busy.add(connection)
            connection.begin(exchange)

    # What connections call.

    def released(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
        else:
            self._idle.append(connection)

    def gone(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class Exchange:
    """One request and its answer."""

    def __init__(self, client: HttpClient, data: bytes, receiver: Receiver) -> None:
        self.data = data
        self.receiver = receiver
        self.connection: _Connection | None = None
        self.is_over = False
        self._client = client

    def abort(self) -> None:
        """Give up; the connection is closed, and `ended` is not called."""
        self.is_over = True
        if self.connection is not None:
            self.connection.abort()

    def end(self, error: str) -> None:
        if not self.is_over:
            self.is_over = True
            self.receiver.ended(error)


class _Connection(asyncio.Protocol):
    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._keep_alive = True
        self.lost = asyncio.Event()

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        if self._transport is None:
            exchange.end("the connection broke before anything was sent")
            return
        self._exchange = exchange
        exchange.connection = self
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(exchange.data)
        exchange.data = b""

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"its answer is not HTTP: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._client.gone(self)
        self._finish(f"the connection broke: {_describe(error)}" if error else "the connection ended before the answer")
        self.lost.set()

    # What the parser calls.

    def on_headers_complete(self) -> None:
        if self._parser is not None and self._exchange is not None and not self._exchange.is_over:
            self._keep_alive = self._parser.should_keep_alive()
            self._exchange.receiver.status(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None and not self._exchange.is_over:
            self._exchange.receiver.body(data)

    def on_message_complete(self) -> None:
        exchange, self._exchange, self._parser = self._exchange, None, None
        if exchange is None:
            return
        # Before the receiver hears of it: what it sends next goes out on this connection.
        if self._keep_alive and self.usable:
            self._client.released(self)
        else:
            self.abort()
        exchange.end("")

    def _finish(self, error: str) -> None:
        exchange, self._exchange, self._parser = self._exchange, None, None
        if exchange is not None:
            exchange.end(error)


class _Collected:
    def __init__(self) -> None:
        self.code = 0
        self.pieces: list[bytes] = []
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def status(self, status: int) -> None:
        self.code = status

    def body(self, data: bytes) -> None:
        self.pieces.append(data)

    def ended(self, error: str) -> None:
        if not self.done.done():
            self.done.set_result(error)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        # The system's own words: event loops each add their own.
        return os.strerror(error.errno).lower()
    return " ".join(str(error).split()) or type(error).__name__
