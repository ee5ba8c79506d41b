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
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection
        self._transports: set[asyncio.WriteTransport] = set()
        self._stopped = False
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
        """Break every connection that there is; new ones are accepted."""
        for transport in self._transports:
            transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._stopped = True
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        if self._stopped:  # accepted before, and scheduled only now
            writer.transport.abort()
            return
        self._transports.add(writer.transport)
        task = asyncio.create_task(self._relay(reader, writer))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            # Here, not in the task: one that is cancelled before its first step runs no `finally`.
            writer.transport.abort()
            self._transports.discard(writer.transport)
            self._tasks.discard(task)

        task.add_done_callback(end)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            target_reader, target_writer = await asyncio.open_connection(self._host, self._port)
            self._transports.add(target_writer.transport)
            ways = (
                asyncio.create_task(self._pump(reader, target_writer, self.forward)),
                asyncio.create_task(self._pump(target_reader, writer, self.backward)),
            )
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                target_writer.transport.abort()
                self._transports.discard(target_writer.transport)
                await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        while piece := await reader.read(1 << 16):
            await gate.wait()
            writer.write(piece)
            await writer.drain()
