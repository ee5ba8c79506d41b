"""A TCP connection that a test can hold up or cut: between a gateway and a worker, say."""

from __future__ import annotations

import asyncio
import contextlib


class TcpRelay:
    """Passes bytes on to `host:port`. `backward` carries what the target answers; cleared, it is held up."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.forward = asyncio.Event()
        self.backward = asyncio.Event()
        self.forward.set()
        self.backward.set()
        self.num_accepted = 0
        self.address = ""

    async def start(self) -> TcpRelay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def cut(self) -> None:
        """Break every connection that there is; new ones are taken."""
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        try:
            target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        for way in (
            self._pump(reader, target_writer, self.forward),
            self._pump(target_reader, writer, self.backward),
        ):
            task = asyncio.create_task(way)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                while piece := await reader.read(1 << 16):
                    await gate.wait()
                    writer.write(piece)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
