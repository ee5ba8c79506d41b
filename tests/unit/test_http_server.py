"""The server of gateways' HTTP and of metrics, and how it expects uvicorn to work."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvferry.util.http_server import HttpServer
from support.waiting import until

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class App:
    """Answers once `released` is set."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.num_running = 0
        self.num_cancelled = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.num_running += 1
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[tuple[HttpServer, int]]:
    server = HttpServer(
        uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None, proxy_headers=False)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.start([listener, listener.dup()])
    try:
        yield server, port
    finally:
        await server.stop()
        await server.stop()
    assert not server.state.connections
    assert not server.state.tasks
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def asked(app: App, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection whose request has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    await until(lambda: app.num_running == 1)
    return reader, writer


def test_what_is_used_of_uvicorn_is_there() -> None:
    assert list(inspect.signature(HttpToolsProtocol).parameters) == ["config", "server_state", "app_state", "_loop"]
    assert vars(ServerState()) == {"total_requests": 0, "connections": set(), "tasks": set(), "default_headers": []}
    # What uvicorn's own server does beside: if this changes, look whether HttpServer has to do it too.
    source = inspect.getsource(uvicorn.Server.on_tick)
    assert [line.strip() for line in source.splitlines() if "self.config." in line] == [
        "if self.config.date_header:",
        "self.server_state.default_headers = date_header + self.config.encoded_headers",
        "if self.config.callback_notify is not None:",
        "if current_time - self.last_notified > self.config.timeout_notify:  # pragma: full coverage",
        "await self.config.callback_notify()",
    ]


async def test_answers_have_the_date_which_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    app.released.set()
    async with serving(app) as (server, port):
        reader, writer = await asked(app, port)
        head = (await reader.readuntil(b"ok")).decode()
        (date,) = (line.removeprefix("date: ") for line in head.splitlines() if line.startswith("date: "))
        assert abs(parsedate_to_datetime(date).timestamp() - time.time()) < 60
        assert "server: uvicorn" in head
        first, timer = server.state.default_headers, server._date_timer
        assert timer is not None
        assert timer.when() - asyncio.get_running_loop().time() <= 1
        timer._run()  # as the loop does once its time has come
        assert server.state.default_headers is not first
        timer.cancel()
        writer.close()


async def test_draining_ends_idle_connections_at_once_and_others_after_their_answers() -> None:
    app = App()
    async with serving(app) as (server, port):
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", port)
        busy_reader, busy_writer = await asked(app, port)
        await until(lambda: len(server.state.connections) == 2)
        server.drain()
        assert await idle_reader.read() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        app.released.set()
        answer = await busy_reader.read()  # to its end
        assert answer.endswith(b"connection: close\r\n\r\nok")
        assert not app.num_cancelled
        idle_writer.close()
        busy_writer.close()


async def test_requests_that_are_cancelled_can_still_answer() -> None:
    app = App()
    async with serving(app) as (server, port):
        reader, writer = await asked(app, port)
        await server.cancel_requests()
        assert not server.state.tasks
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert app.num_cancelled == 1
        writer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_stopping_takes_turns_of_the_loop_and_no_time(run: Callable[..., None]) -> None:
    """Whoever stops a cluster of these, as tests do, waits for each."""

    async def attempt() -> None:
        app = App()
        loop = asyncio.get_running_loop()
        async with serving(app) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await until(lambda: len(server.state.connections) == 1)
            stopping = loop.create_task(server.stop())
            for _ in range(10):
                await asyncio.sleep(0)
            assert stopping.done()
            assert await reader.read() == b""
            writer.close()

    run(attempt())


@pytest.mark.parametrize("num_turns", range(4))
def test_a_connection_that_is_being_accepted_ends_with_the_server(num_turns: int) -> None:
    """Not with asyncio's own loop, which leaves such a socket to the garbage collector."""

    async def attempt() -> None:
        app = App()
        app.released.set()
        async with serving(app) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(REQUEST)
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                await server.stop()
                for _ in range(10):
                    await asyncio.sleep(0)
                    assert not server.state.connections

    uvloop.run(attempt())
