"""TLS handshakes of HTTP clients: counted as connections, and limited in time."""

# uvicorn's own come before a connection is known to the application, take up to a minute each, and are not counted.

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

from kvferry.gateway.http.connection_limits import ConnectionLimits
from kvferry.gateway.http.uvicorn_connection import HttpProtocol

HANDSHAKE_TIMEOUT_S = 15.0


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake has ended; then an HttpProtocol takes it."""

    # The application has `tls_context`, and `connection_limits` as for HttpProtocol.

    def __init__(
        self, config: Any, server_state: Any, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._http = HttpProtocol(config, server_state, app_state, _loop)
        self._limits: ConnectionLimits = self._http.app.connection_limits
        self._context: ssl.SSLContext = self._http.app.tls_context
        self._shaking: asyncio.Task[None] | None = None
        self._early = b""  # of the handshake before TLS takes the transport, and requests that came with its last bytes
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._shaking is not None:
            return
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        address = transport.get_extra_info("peername")
        peer = str(address[0]) if address else ""
        if self._limits.open(peer) is not None:
            transport.abort()  # an answer would take a handshake
            return
        self._shaking = self._http.loop.create_task(self._shake_hands(transport, peer))

    async def _shake_hands(self, transport: asyncio.Transport, peer: str) -> None:
        loop = self._http.loop
        try:
            starting = loop.create_task(self._start_tls(transport))
            await asyncio.sleep(0)
            # uvloop reads before the first step of a task. Now reading is paused, and the callbacks that connect TLS to
            # the transport and read on are before this one.
            if self._early:
                loop.call_soon(self._feed_early, transport)
            secure = await starting
        except (OSError, asyncio.CancelledError):
            # No TLS, a certificate that is refused, a client that left, or the time is over.
            transport.abort()
            return
        finally:
            self._limits.close(peer)
        if secure is None or self._is_lost:
            return
        # HttpProtocol counts it from here on.
        self._http.tls_socket = transport
        secure.set_protocol(self._http)
        self._http.connection_made(secure)
        if self._early:
            self._http.data_received(self._early)

    async def _start_tls(self, transport: asyncio.Transport) -> asyncio.Transport | None:
        return await self._http.loop.start_tls(
            transport, self, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )

    def _feed_early(self, transport: asyncio.Transport) -> None:
        early, self._early = self._early, b""
        tls = cast(asyncio.BufferedProtocol, transport.get_protocol())
        while early and not transport.is_closing():
            buffer = memoryview(tls.get_buffer(len(early)))
            piece, early = early[: len(buffer)], early[len(buffer) :]
            buffer[: len(piece)] = piece
            tls.buffer_updated(len(piece))

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
