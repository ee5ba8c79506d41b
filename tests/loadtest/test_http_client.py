"""Connections: kept, broken, refused, and answers that are none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvferry_loadtest.errors import TargetError
from kvferry_loadtest.fake_server import Answering, FakeServer
from kvferry_loadtest.http_client import Endpoint, HttpClient
from support.waiting import until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://h:81/base/", ("http://h:81/base", "h", 81, "/base")),
        ("h:81", ("http://h:81", "h", 81, "")),
        ("https://h", ("https://h", "h", 443, "")),
        ("http://[::1]:8000", ("http://[::1]:8000", "::1", 8000, "")),
    ],
)
def test_endpoints(url: str, seen: tuple[str, str, int, str]) -> None:
    endpoint = Endpoint(url)
    assert (endpoint.url, endpoint.host, endpoint.port, endpoint.path) == seen
    assert (endpoint.tls is not None) == url.startswith("https")


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h/?a=b", ""])
def test_what_is_no_endpoint_is_named(url: str) -> None:
    with pytest.raises(TargetError) as caught:
        Endpoint(url)
    assert str(caught.value).startswith(f"{url}: ")


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[HttpClient]:
    """A client of a server that does as told with each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await script(reader, writer)
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = HttpClient(Endpoint(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        yield client
    finally:
        await client.close()
        server.close()


async def test_a_connection_is_used_again() -> None:
    server = await FakeServer(Answering()).start()
    client = HttpClient(Endpoint(f"127.0.0.1:{server.port}"))
    for _ in range(5):
        status, body = await client.fetch("/v1/models", {})
        assert (status, b'"fake"' in body) == (200, True)
    assert client.num_connects == 1
    await client.close()
    await server.stop()


async def test_an_idle_connection_that_the_server_ended_is_not_used() -> None:
    num_connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with scripted(once) as client:
        for _ in range(3):
            assert await client.fetch("/", {}) == (200, b"ok")
            await until(lambda: not client._idle)
    assert num_connections == 3


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "the connection ended before the answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort", "the connection ended before the answer"),
        (b"SSH-2.0-OpenSSH\r\n", "its answer is not HTTP"),
    ],
)
async def test_answers_that_are_none(answer: bytes, error: str) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with scripted(script) as client:
        with pytest.raises(ConnectionError, match=error):
            await client.fetch("/", {})


async def test_connection_close_is_kept_to() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
        await reader.read()

    async with scripted(script) as client:
        assert await client.fetch("/", {}) == (200, b"ok")
        assert not client._idle


async def test_silence_ends_in_time() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with scripted(script) as client:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
            await client.fetch("/", {}, timeout_s=0.1)


async def test_nobody_listens() -> None:
    client = HttpClient(Endpoint("127.0.0.1:1"))
    with pytest.raises(ConnectionError, match="connection refused"):
        await client.fetch("/", {})
    await client.close()
