"""Serves HTTP with uvicorn's connection class, and without its server."""

# uvicorn.Server polls every 0.1 s, several times in a row while it stops, and handles signals.

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState

_DATE_PERIOD_S = 1.0


class HttpServer:
    """Accepts connections from `start`, which is called once, until `drain`; `stop` aborts what is left."""

    def __init__(self, config: uvicorn.Config) -> None:
        self.state = ServerState()
        self._config = config
        self._listeners: list[asyncio.Server] = []
        self._is_draining = False
        self._date_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = self.state
        return f"<HttpServer {len(self._listeners)} listeners, {len(state.connections)} connections>"

    def load(self) -> None:
        """Raises OSError and ssl.SSLError for files of TLS."""
        self._config.load()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on bound sockets, which `drain` closes."""
        config, loop = self._config, asyncio.get_running_loop()
        if not config.loaded:
            config.load()
        self._renew_date()

        server = self

        class Connection(config.http_protocol_class):  # type: ignore[misc,name-defined]
            def connection_made(self, transport: asyncio.Transport) -> None:
                if server._is_draining:  # accepted before, and perhaps long in TLS's handshake
                    transport.set_protocol(asyncio.Protocol())
                    transport.abort()
                else:
                    super().connection_made(transport)

        def connect() -> asyncio.Protocol:
            return Connection(config=config, server_state=self.state, app_state={}, _loop=loop)

        for each in sockets:
            self._listeners.append(await loop.create_server(connect, sock=each, ssl=config.ssl, backlog=config.backlog))

    def drain(self) -> None:
        """Stop listening, and end connections."""
        self._is_draining = True
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in list(self.state.connections):
            connection.shutdown()  # at once where nothing is answered, else after the answer

    async def cancel_requests(self) -> None:
        """Return when requests have ended."""
        tasks = list(self.state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Abort connections. Return when requests have ended. Idempotent."""
        self.drain()
        if self._date_timer is not None:
            self._date_timer.cancel()
        # A connection that was closed stays open while its client does not read what was written.
        for connection in list(self.state.connections):
            connection.transport.abort()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed in the next turn of the loop

    def _renew_date(self) -> None:
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *self._config.encoded_headers]
        self._date_timer = asyncio.get_running_loop().call_later(_DATE_PERIOD_S, self._renew_date)
