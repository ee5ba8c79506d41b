"""How gateway/uvicorn_connection.py expects uvicorn to work. A failure means that uvicorn changed: look there first."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.gateway.uvicorn_connection import Exchange, HttpProtocol, exchange_of

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[int]:
    """The port of a server on loopback."""
    config = uvicorn.Config(app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, access_log=False)
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
    assert list(inspect.signature(RequestResponseCycle.send).parameters) == ["self", "message"]
    source = inspect.getsource(RequestResponseCycle.send)
    # One wait, for a client that does not read: `Exchange.start` runs it without waiting.
    assert source.count("await ") == 1
    assert "if self.flow.write_paused and not self.disconnected:\n            await self.flow.drain()" in source
    assert r'b"%x\r\n" % len(body), body, b"\r\n"' in source  # as Exchange.write frames a piece
    # One write of the head, then one of the body: `_HeadBuffer` joins them, and stands for nothing else but `close`.
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
        await exchange.respond(200, [(b"content-length", b"3")], b"one")

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


async def test_a_body_on_its_way_or_promised_an_interim_answer_is_left_to_receive() -> None:
    taken: list[bytes | None] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        taken.append(exchange.whole_body())
        body = b""
        while len(body) < 4:
            body += (await receive())["body"]
        await exchange.respond(200, [(b"content-length", b"4")], body)

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
        writer.write(head + b"\r\nbo")
        await asyncio.sleep(0.05)
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
        async with asyncio.timeout(10):
            await lost.wait()


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
        async with asyncio.timeout(20):
            await lost.wait()
        assert exchanges[0].num_unread_bytes() >= 0
        writer.transport.abort()


def test_no_exchange_under_another_server() -> None:
    assert exchange_of({"type": "http"}) is None
    assert exchange_of({"type": "http", "extensions": None}) is None
    assert exchange_of({"type": "http", "extensions": {"http.response.trailers": {}}}) is None
