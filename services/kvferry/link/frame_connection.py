"""The gateway's end of a TCP link, without a task per payload."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import cast

from kvferry import mutual_tls
from kvferry.config import TlsConfig
from kvferry.link.frames import PREAMBLE, FrameDecoder, FrameError, FrameProtocol, encode_frames, send_at_once


class FrameConnection(FrameProtocol):
    """`ended` is done at the end, with a reason that follows 'worker X was lost:'."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        """`receive` is called with each serialized Upward message, in the event loop, in order. It must not raise."""
        super().__init__(FrameDecoder())
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._receive = receive
        self._loop = loop
        self._unsent: list[bytes] = []  # of this turn of the event loop
        self._lost = loop.create_future()

    @staticmethod
    async def dial(address: str, tls: TlsConfig, receive: Callable[[bytes], None]) -> FrameConnection:
        """Raises OSError without an answer or TLS handshake, ConfigError for unusable TLS files."""
        if not address:
            raise OSError("it accepts no links as frames")
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        context = mutual_tls.client_context(tls) if tls.enabled else None
        name = (tls.server_name or host) if context is not None else None
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: FrameConnection(receive), host, int(port), ssl=context, server_hostname=name
        )
        return connection

    def __repr__(self) -> str:
        peer = self.transport.get_extra_info("peername") if self.transport is not None else None
        return f"<FrameConnection {peer}{' ' + self.ended.result() if self.ended.done() else ''}>"

    def send(self, payload: bytes) -> None:
        """Send a payload at the end of this turn of the event loop, with the turn's others."""
        if self.transport is not None and not self.ended.done():
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent.append(payload)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self.transport is not None:
            self.transport.write(encode_frames(unsent))

    async def close(self) -> None:
        self._end("this gateway closed the connection")
        if self.transport is not None:
            # Sent messages leave first: they may be cancels.
            self._flush()
            self.transport.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(self._lost)
            if self.transport is not None:
                self.transport.abort()

    # Callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        send_at_once(transport)
        self.transport.write(PREAMBLE)

    def data_received(self, data: bytes) -> None:
        receive, ended = self._receive, self.ended
        began_s = time.perf_counter()
        try:
            for payload in self.decoder.feed(data):
                if ended.done():
                    return
                receive(payload)
                if self.must_wait(began_s):
                    return
        except FrameError as error:
            self._end(f"it does not speak our frames: {error}")
            if self.transport is not None:
                self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.transport, self.turn_s = None, float("inf")
        self.data_received(b"")
        if not self.decoder.greeted:
            self._end("it closed the connection before it greeted (does `worker.tls` fit the other end's?)")
        elif error is not None:
            self._end(f"the connection broke ({error})")
        else:
            self._end("it ended the connection")
        if not self._lost.done():
            self._lost.set_result(None)

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
