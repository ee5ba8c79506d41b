"""How http/uvicorn_connection.py expects uvicorn to work. A failure means that uvicorn changed: look there first."""

from __future__ import annotations

import asyncio
import errno
import inspect
import re
from asyncio.selector_events import _SelectorSocketTransport  # type: ignore[attr-defined]
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.gateway.http import uvicorn_connection
from kvferry.gateway.http.connection_limits import ConnectionLimits
from kvferry.gateway.http.uvicorn_connection import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_URL_BYTES,
    Exchange,
    HttpProtocol,
    exchange_of,
)
from support.waiting import SOON_S, until

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """The port of a server on loopback."""
    config = uvicorn.Config(
        app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: HttpProtocol(config, server.server_state, {}), "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


def test_what_is_overridden_and_read_is_there() -> None:
    assert list(inspect.signature(HttpToolsProtocol.on_headers_complete).parameters) == ["self"]
    assert list(inspect.signature(HttpToolsProtocol.connection_lost).parameters) == ["self", "exc"]
    assert list(inspect.signature(HttpToolsProtocol.on_response_complete).parameters) == ["self"]
    assert list(inspect.signature(HttpToolsProtocol.pause_writing).parameters) == ["self"]
    assert list(inspect.signature(RequestResponseCycle.send).parameters) == ["self", "message"]
    source = inspect.getsource(RequestResponseCycle.send)
    # One wait, for a client that does not read: `Exchange.start` runs it without waiting.
    assert source.count("await ") == 1
    assert "if self.flow.write_paused and not self.disconnected:\n            await self.flow.drain()" in source
    assert r'b"%x\r\n" % len(body), body, b"\r\n"' in source  # as Exchange.write frames a piece
    # One write of the head, which `_HeadBuffer` keeps, then one of the body.
    assert source.count("self.transport.write(") == 3
    assert set(re.findall(r"self\.transport\.(\w+)", source)) == {"write", "close"}
    assert "self.flow.resume_reading()" in inspect.getsource(
        RequestResponseCycle.receive
    )  # as Exchange.whole_body does
    assert "self.disconnected" in inspect.getsource(RequestResponseCycle.run_asgi)
    assert inspect.getsource(FlowControl.pause_writing).count("self.write_paused = True") == 1
    assert HIGH_WATER_LIMIT == 64 << 10


@pytest.mark.parametrize("uses", ["exchange", "asgi"])
async def test_both_ways_send_the_same_bytes(uses: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"date", b"now"), (b"server", b"x")]
    pieces = [b"one", b"t\r\nwo", b"x" * 1000]

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        if uses == "exchange":
            assert exchange.is_ready
            exchange.start(200, headers)
            exchange.write(pieces[0])
            exchange.writer(b"t\r\n", b"o")(b"w")
            exchange.writer(b"", b"")(pieces[2])
        else:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST * 2)  # pipelined
        answer = await reader.readuntil(b"0\r\n\r\n")
        again = await reader.readuntil(b"0\r\n\r\n")
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head
    assert body == b"3\r\none\r\n5\r\nt\r\nwo\r\n3e8\r\n" + b"x" * 1000 + b"\r\n0\r\n\r\n"
    assert again == answer


async def test_a_whole_answer_goes_out_in_one_write_and_ends_as_uvicorn_ends_it() -> None:
    bodies: list[bytes | None] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        bodies.append(exchange.whole_body())
        await exchange.respond([], b"one")

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
        writer.write(head + b"\r\nbody" + head + b"connection: close\r\n\r\nlast")
        answers = await reader.read()
        writer.close()
    assert bodies == [b"body", b"last"]
    held, _, closed = answers.partition(b"one")
    assert held == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"
    assert closed == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\none"


@pytest.mark.parametrize("size", [0, 3, 1 << 20])
async def test_a_whole_answer_is_byte_for_byte_that_of_uvicorn(size: int) -> None:
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"cmpl-1")]
    body = b"x" * size

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchange._cycle.default_headers = [(b"date", b"today"), (b"server", b"uvicorn")]
        if scope["path"] == "/own":
            await exchange.respond(headers, body)
        else:
            length = (b"content-length", str(size).encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": body})

    answers = []
    async with serving(app) as port:
        for path in ("/own", "/uvicorn"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for last in ("", "connection: close\r\n"):
                writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n{last}content-length: 0\r\n\r\n".encode())
            answers.append(await reader.read())
            writer.close()
    assert answers[0] == answers[1]
    assert answers[0].count(b"server: uvicorn\r\n") == 2


async def test_a_body_on_its_way_or_promised_an_interim_answer_is_left_to_receive() -> None:
    taken: list[bytes | None] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        taken.append(exchange.whole_body())
        body = b""
        while len(body) < 4:
            body += (await receive())["body"]
        await exchange.respond([], body)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
        writer.write(head + b"\r\nbo")
        await until(lambda: bool(taken))
        writer.write(b"dy")
        await reader.readuntil(b"body")
        writer.write(head + b"expect: 100-continue\r\n\r\nbody")
        answer = await reader.readuntil(b"body")
        writer.close()
    assert taken == [None, None]
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


async def test_the_request_in_service_hears_of_a_lost_connection_though_another_one_waits_behind_it() -> None:
    began, lost = asyncio.Event(), asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchange.watch(lost.set)
        await receive()  # as whoever serves a request does; uvicorn reads on for it
        began.set()
        await lost.wait()
        exchange.unwatch(lost.set)
        told_late = asyncio.Event()
        exchange.watch(told_late.set)  # at once
        assert told_late.is_set()
        exchange.write(b"to nobody")

    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST * 2)
        await began.wait()
        writer.transport.abort()
        async with asyncio.timeout(SOON_S):
            await lost.wait()


@pytest.mark.parametrize("num_bytes", [1, 60_000, 1_000_000])
async def test_a_client_that_leaves_within_its_next_request_is_noticed(
    num_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    protocols: list[HttpProtocol] = []
    lost = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        assert exchange.whole_body() == b""
        exchange.watch(lost.set)
        protocols.append(exchange._protocol)
        await lost.wait()

    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await until(lambda: bool(protocols))
        first = protocols[0].cycle
        writer.write(head(b"content-length: 2000000", line=b"POST / HTTP/1.1") + b"x" * num_bytes)
        await until(lambda: protocols[0].cycle is not first or protocols[0]._is_refused)
        writer.transport.abort()
        try:
            async with asyncio.timeout(SOON_S):
                await lost.wait()
        finally:
            lost.set()
    assert not caplog.records


async def test_requests_that_wait_count_their_bytes_until_their_turn() -> None:
    app = Held()
    large = head(b"x: " + b"a" * 40_000)
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for num_answered in range(1, 4):
            app.released.clear()
            app.protocol = None
            writer.write(head() + large)
            await until(lambda: app.protocol is not None and bool(app.protocol.pipeline))
            app.released.set()
            await until(lambda num=2 * num_answered: len(app.scopes) == num)
        app.released.clear()
        writer.write(head() + large * 2)
        await until(lambda: app.is_refused)
        app.released.set()
        async with asyncio.timeout(SOON_S):
            answers = await reader.read()
        writer.transport.abort()
    assert answers.count(b"HTTP/1.1 200") == len(app.scopes) == 8


async def test_a_client_that_does_not_read_is_seen_and_can_be_cut() -> None:
    exchanges: list[Exchange] = []
    lost = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        exchanges.append(exchange)
        exchange.watch(lost.set)
        exchange.start(200, [])
        while not exchange.num_unread_bytes():
            exchange.write(b"x" * 65536)
            await asyncio.sleep(0)
        assert not exchange.is_ready
        exchange.abort()
        await lost.wait()

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(REQUEST)
        async with asyncio.timeout(SOON_S):
            await lost.wait()
        assert exchanges[0].num_unread_bytes() >= 0
        writer.transport.abort()


def test_no_exchange_under_another_server() -> None:
    assert exchange_of({"type": "http"}) is None
    assert exchange_of({"type": "http", "extensions": None}) is None
    assert exchange_of({"type": "http", "extensions": {"http.response.trailers": {}}}) is None


class Echo:
    """Answers with the headers' names, and keeps the scopes and bodies that it was given."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.connection_limits = limits
        self.scopes: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.scopes.append(scope)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Held(Echo):
    """Answers once it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = asyncio.Event()
        self.protocol: HttpProtocol | None = None

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        self.protocol = exchange._protocol
        await self.released.wait()
        await super().__call__(scope, receive, send)

    @property
    def is_refused(self) -> bool:
        """Whether the connection reads no more."""
        return self.protocol is not None and self.protocol._is_refused


async def exchanged(port: int, *pieces: bytes) -> bytes:
    """Send the pieces one by one; return all that comes until the server ends the connection, or 2 s without end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)
        async with asyncio.timeout(SOON_S):
            while data := await reader.read(1 << 16):
                answer += data
                if answer.endswith((b"ok", b"}}")):
                    break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return answer


def head(*lines: bytes, line: bytes = b"GET / HTTP/1.1") -> bytes:
    return b"\r\n".join([line, b"host: x", *lines, b"", b""])


@pytest.mark.parametrize(
    ("fits", "over", "status"),
    [
        (
            [head(b"x: " + b"a" * (MAX_HEAD_BYTES - 100))],
            [b"GET / HTTP/1.1\r\nx: ", *[b"a" * 4096] * (MAX_HEAD_BYTES // 4096 + 1)],
            b"431",
        ),
        # In one read, with the head's end.
        ([head(b"x: " + b"a" * (MAX_HEAD_BYTES - 14))], [head(b"x: " + b"a" * (MAX_HEAD_BYTES - 13))], b"431"),
        ([head(line=b"GET / HTTP/1.0")], [head(line=b"GET / HTTP/2.0")], b"400"),
        ([head(line=b"GET / HTTP/1.1")], [head(line=b"GET / HTTP/0.9")], b"400"),
        ([head()], [head(line=b"GET /")], b"400"),
        ([head(*[b"x: y"] * (MAX_HEADERS - 1))], [head(*[b"x: y"] * MAX_HEADERS)], b"431"),
        (
            [head(line=b"GET /" + b"a" * (MAX_URL_BYTES - 1) + b" HTTP/1.1")],
            [head(line=b"GET /" + b"a" * MAX_URL_BYTES + b" HTTP/1.1")],
            b"414",
        ),
        ([head()], [b"NONSENSE\r\n\r\n"], b"400"),
    ],
    ids=["bytes", "bytes in one read", "HTTP/2.0", "HTTP/0.9", "no version", "count", "url", "nonsense"],
)
async def test_heads_have_limits(fits: list[bytes], over: list[bytes], status: bytes) -> None:
    app = Echo()
    async with serving(app) as port:
        assert (await exchanged(port, *fits)).startswith(b"HTTP/1.1 200")
        assert len(app.scopes) == 1
        refused = await exchanged(port, *over)
        assert refused.startswith(b"HTTP/1.1 " + status), refused
        assert b"content-type: application/json" in refused
        assert b'"code"' in refused
        assert len(app.scopes) == 1


async def test_a_head_of_many_megabytes_is_read_no_further_than_its_limit() -> None:
    app = Echo()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"a" * (24 << 20))
        async with asyncio.timeout(SOON_S):
            assert (await reader.read(1 << 16)).startswith(b"HTTP/1.1 431")
        writer.transport.abort()
    assert not app.scopes


async def test_a_head_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_connection, "HEAD_TIMEOUT_S", 0.2)
    app = Echo()
    async with serving(app) as port:
        assert await exchanged(port) == b""
        assert (await exchanged(port, b"GET / HT")).startswith(b"HTTP/1.1 408")
        after_another = await exchanged_after_one(port, b"GET / HT")
        assert after_another.startswith(b"HTTP/1.1 408")
    assert len(app.scopes) == 1


async def exchanged_after_one(port: int, piece: bytes) -> bytes:
    """Send a whole request, read its answer, then send `piece` on the same connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head())
        async with asyncio.timeout(SOON_S):
            while not (await reader.read(1 << 16)).endswith(b"ok"):
                pass
            writer.write(piece)
            return await reader.read(1 << 16)
    finally:
        writer.transport.abort()


async def test_the_path_is_the_last_requests_while_the_next_head_is_read() -> None:
    app = Held()
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(line=b"GET /a HTTP/1.1") + b"GET / HT")
        await until(lambda: app.protocol is not None and "path" not in app.protocol.scope)
        assert app.protocol is not None
        assert app.protocol.path == "/a"
        app.released.set()
        writer.transport.abort()


async def test_no_timer_runs_while_a_request_is_answered() -> None:
    app = Held()
    async with serving(app) as port:
        answering = asyncio.create_task(exchanged(port, head()))
        await until(lambda: app.protocol is not None)
        assert app.protocol is not None
        assert app.protocol._timer is None
        app.released.set()
        assert (await answering).startswith(b"HTTP/1.1 200")


async def test_trailers_are_no_headers() -> None:
    app = Echo()
    async with serving(app) as port:
        chunked = head(b"transfer-encoding: chunked", b"authorization: mine", line=b"POST / HTTP/1.1")
        answer = await exchanged(port, chunked + b"2\r\nhi\r\n0\r\nauthorization: other\r\nx: y\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert app.bodies == [b"hi"]
    assert [value for name, value in app.scopes[0]["headers"] if name == b"authorization"] == [b"mine"]
    assert not any(name == b"x" for name, _ in app.scopes[0]["headers"])


@pytest.mark.parametrize("split", [1, 7, 1000])
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_upgrade_is_ignored_and_the_body_is_kept(split: int, framing: str) -> None:
    """As the JDK's client asks for h2c with every first request."""
    app = Echo()
    length = b"content-length: 5" if framing == "length" else b"transfer-encoding: chunked"
    body = b"hello" if framing == "length" else b"5\r\nhello\r\n0\r\n\r\n"
    request = (
        head(
            b"connection: Upgrade, HTTP2-Settings",
            b"upgrade: h2c",
            b"http2-settings: AAA",
            length,
            line=b"POST /a HTTP/1.1",
        )
        + body
    )
    async with serving(app) as port:
        pieces = [request[i : i + split] for i in range(0, len(request), split)]
        assert (await exchanged(port, *pieces)).startswith(b"HTTP/1.1 200")
    assert app.bodies == [b"hello"]
    (scope,) = app.scopes
    assert (scope["method"], scope["path"]) == ("POST", "/a")
    assert not any(name in (b"upgrade", b"connection", b"http2-settings") for name, _ in scope["headers"])


@pytest.mark.parametrize("num_whole", [1, 3])
@pytest.mark.parametrize(
    "behind",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /" + b"u" * 9000,
        b"GET / HTTP/1.1\r\nx: " + b"a" * (32 << 20),
        head(b"transfer-encoding: chunked", line=b"POST / HTTP/1.1") + b"nonsense\r\n",
        head(b"content-length: 1000000", line=b"POST / HTTP/1.1") + b"x" * uvicorn_connection.MAX_PIPELINED_BYTES,
    ],
    ids=["nonsense", "url", "bytes", "chunk", "body"],
)
async def test_a_bad_request_does_not_cut_the_answers_before_it(behind: bytes, num_whole: int) -> None:
    app = Held()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head() * num_whole + behind)
        await until(lambda: app.is_refused)
        app.released.set()
        async with asyncio.timeout(SOON_S):
            answer = await reader.read()
        writer.transport.abort()
    assert answer.count(b"HTTP/1.1 200") == len(app.scopes) == num_whole
    assert answer.endswith(b"ok")


async def test_a_bad_head_does_not_cut_a_request_that_was_promised_an_interim_answer() -> None:
    app = Held()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            head(b"expect: 100-continue", b"content-length: 2", line=b"POST / HTTP/1.1") + b"hiNONSENSE\r\n\r\n"
        )
        await until(lambda: app.is_refused)
        app.released.set()
        async with asyncio.timeout(SOON_S):
            answer = await reader.read()
        writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert app.bodies == [b"hi"]


async def test_a_client_that_has_left_is_not_lingered_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOTCONN, "not connected")

    monkeypatch.setattr(_SelectorSocketTransport, "write_eof", fail)
    app = Held()
    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head() + b"NONSENSE\r\n\r\n")
        await until(lambda: app.is_refused)
        app.released.set()
        await until(lambda: app.protocol is not None and app.protocol.lost)
        writer.transport.abort()
    assert not caplog.records


async def test_requests_that_wait_on_one_connection_have_a_limit() -> None:
    app = Held()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head() * 1000)
        await until(lambda: app.is_refused)
        app.released.set()
        async with asyncio.timeout(SOON_S):
            answer = await reader.read()
        writer.transport.abort()
    assert answer.count(b"HTTP/1.1 200") == len(app.scopes) == 1 + uvicorn_connection.MAX_PIPELINED


async def test_a_body_that_cannot_be_read_is_400() -> None:
    async with serving(Echo()) as port:
        chunked = head(b"transfer-encoding: chunked", line=b"POST / HTTP/1.1")
        assert (await exchanged(port, chunked, b"nonsense\r\n")).startswith(b"HTTP/1.1 400")


async def test_trailers_have_a_limit() -> None:
    async with serving(Echo()) as port:
        chunked = head(b"transfer-encoding: chunked", line=b"POST / HTTP/1.1")
        trailer = [b"0\r\nx: ", *[b"a" * 4096] * (MAX_HEAD_BYTES // 4096 + 1)]
        assert (await exchanged(port, chunked, *trailer)).startswith(b"HTTP/1.1 431")


async def test_nothing_keeps_a_connection_for_ever_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_connection, "HEAD_TIMEOUT_S", 0.2)
    async with serving(Echo()) as port:
        assert await exchanged_after_one(port, b"\r\n") == b""


async def test_one_address_does_not_use_up_the_connections_of_all() -> None:
    limits = ConnectionLimits(4, 2)
    async with serving(Echo(limits)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        await until(lambda: limits.num_open == 2)
        other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        other[1].write(head())
        async with asyncio.timeout(SOON_S):
            assert (await other[0].read(1 << 16)).startswith(b"HTTP/1.1 200")
        for _, writer in [*held, other]:
            writer.transport.abort()
        await until(lambda: limits.num_open == 0)
    assert repr(limits) == "<ConnectionLimits 0/4 of 0 peers>"


async def test_connections_have_limits() -> None:
    for limits in (ConnectionLimits(2, 0), ConnectionLimits(100, 2)):
        app = Echo(limits)
        async with serving(app) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda limits=limits: limits.num_open == 2)
            refused = await exchanged(port, head())
            assert refused.startswith(b"HTTP/1.1 429")
            assert b"retry-after: 1" in refused
            assert b"2 connections" in refused
            held[0][1].transport.abort()
            await until(lambda limits=limits: limits.num_open == 1)
            assert (await exchanged(port, head())).startswith(b"HTTP/1.1 200")
            held[1][1].transport.abort()
            await until(lambda limits=limits: limits.num_open == 0)
        assert len(app.scopes) == 1
