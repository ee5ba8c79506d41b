"""The gateway's end of a gRPC link, for networks that pass only gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvferry.config import TlsConfig
from kvferry.grpc_options import CHANNEL_OPTIONS
from kvferry.link.grpc_server import SERVICE
from kvferry.mutual_tls import channel_to

log = logging.getLogger(__name__)


class GrpcConnection:
    """A Connection. It dials at once, and ends when nothing answers."""

    def __init__(self, address: str, tls: TlsConfig, receive: Callable[[bytes], None]) -> None:
        """Raises ConfigError for unusable TLS files."""
        self._channel = channel_to(address, tls, CHANNEL_OPTIONS)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._address = address
        self._receive = receive
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._task = asyncio.create_task(self._read())

    def __repr__(self) -> str:
        return f"<GrpcConnection {self._address}{' ' + self.ended.result() if self.ended.done() else ''}>"

    def send(self, payload: bytes) -> None:
        if not self.ended.done():
            self._outgoing.put_nowait(payload)

    async def close(self) -> None:
        self._end("this gateway closed the connection")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async with self._channel as channel:
            # Neither serializer nor deserializer: bytes are passed on as they are.
            attach: Any = channel.stream_stream(f"/{SERVICE}/Attach")
            call = attach(self._messages())
            try:
                while (payload := await call.read()) is not grpc.aio.EOF:
                    if self.ended.done():
                        return
                    self._receive(payload)
                reason = "it ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"the stream broke ({error.code().name})"
            except asyncio.CancelledError:
                # grpc.aio cancels its own call when it cannot write a message. That must not end the link.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                reason = "this gateway could not write to it"
            except Exception:
                log.exception("reading a gRPC stream failed")
                reason = "reading its stream failed; the log says why"
            finally:
                call.cancel()
            self._end(reason)

    async def _messages(self) -> AsyncIterator[bytes]:
        while True:
            yield await self._outgoing.get()

    def _end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)
