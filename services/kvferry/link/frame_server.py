"""The worker's end of TCP links: one connection per gateway, one write per step."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from kvferry.link.frames import (
    GREETING_TIMEOUT_S,
    MAX_FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    PREAMBLE,
    FrameDecoder,
    FrameError,
    FrameProtocol,
    encode_frames,
    send_at_once,
)
from kvferry.link.gateway_session import GatewaySession, SessionTransport
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# Called after Hello.
Attach = Callable[[SessionTransport, pb.Hello], GatewaySession]
Detach = Callable[[GatewaySession], object]


class FrameServer:
    def __init__(self, attach: Attach, detach: Detach) -> None:
        self._attach = attach
        self._detach = detach
        self._server: asyncio.Server | None = None
        self._connections: set[_FrameTransport] = set()
        self._removed = asyncio.Event()
        self._stopping = False
        self.port = 0

    async def start(self, host: str, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        timeout_s = GREETING_TIMEOUT_S if context is not None else None
        self._server = await loop.create_server(
            lambda: _FrameTransport(self), host, 0, ssl=context, ssl_handshake_timeout=timeout_s
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for pending messages to leave."""
        if self._server is None:
            return
        self._stopping = True
        self._server.close()
        for connection in list(self._connections):
            connection.close()
        try:
            async with asyncio.timeout(grace_s):
                await self._until_empty()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
            await self._until_empty()
        self._server = None

    async def _until_empty(self) -> None:
        while self._connections:
            self._removed.clear()
            await self._removed.wait()

    # Called by transports

    def add(self, connection: _FrameTransport) -> None:
        self._connections.add(connection)
        if self._stopping:  # accepted before `stop`, and reported only now
            connection.abort()

    def remove(self, connection: _FrameTransport) -> None:
        self._connections.discard(connection)
        self._removed.set()

    def attach(self, transport: SessionTransport, hello: pb.Hello) -> GatewaySession:
        return self._attach(transport, hello)

    def detach(self, session: GatewaySession) -> None:
        self._detach(session)


class _FrameTransport(FrameProtocol):
    def __init__(self, server: FrameServer) -> None:
        super().__init__(FrameDecoder(MAX_FIRST_FRAME_BYTES))
        self._server = server
        self._peer = ""
        self._session: GatewaySession | None = None
        self._greeting: asyncio.TimerHandle | None = None
        self._finishing = False  # no more is written

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._peer = _describe(transport.get_extra_info("peername"))
        send_at_once(transport)
        self._greeting = asyncio.get_running_loop().call_later(GREETING_TIMEOUT_S, self._not_greeted)
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        began_s = time.perf_counter()
        try:
            for payload in self.decoder.feed(data):
                if self.transport is None:
                    return
                if self._session is None:
                    self._greet(payload)
                else:
                    self._session.receive(payload)
                if self.must_wait(began_s):
                    return
        except ValueError as error:
            self._refuse(str(error))
        except Exception:
            # Perhaps not this connection's fault, but the connection cannot go on.
            log.exception("reading from %s failed", self._peer)
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        if self._greeting is not None:
            self._greeting.cancel()
        if self._session is not None:
            self._server.detach(self._session)
        self._server.remove(self)

    # Methods of SessionTransport

    def messages_pending(self) -> None:
        transport, session = self.transport, self._session
        if transport is None or session is None or transport.is_closing() or self._finishing:
            return
        if payloads := session.pop_messages():
            transport.write(encode_frames(payloads))

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def close(self) -> None:
        transport = self.transport
        if transport is None:
            return
        if self._session is None:
            transport.close()
            return
        self._session.close()
        if transport.can_write_eof():
            # Closing with unread data resets the connection, and the gateway may lose messages that it has not read.
            # The gateway closes when it has read to the end; until then its messages are read.
            try:
                transport.write_eof()
            except OSError:  # the gateway has left, which the transport does not know yet
                transport.abort()
            else:
                self._finishing = True
        else:
            transport.close()

    def _greet(self, payload: bytes) -> None:
        assert self.transport is not None
        try:
            message = pb.Downward.FromString(payload)
        except DecodeError:
            raise FrameError("its first message cannot be read") from None
        if message.WhichOneof("kind") != "hello":
            raise FrameError("its first message is not Hello")
        if self._greeting is not None:
            self._greeting.cancel()
        self.decoder.max_frame_bytes = MAX_FRAME_BYTES
        # Only now: a peer with another protocol learns nothing of this server.
        self.transport.write(PREAMBLE)
        self._session = self._server.attach(self, message.hello)
        self.messages_pending()

    def _refuse(self, reason: str) -> None:
        log.warning("the connection from %s ends: %s", self._peer, reason)
        self.abort()

    def _not_greeted(self) -> None:
        self._refuse(f"it did not say who it is within {GREETING_TIMEOUT_S:g} s")


def _describe(peername: object) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        return f"{peername[0]}:{peername[1]}"
    return str(peername)
