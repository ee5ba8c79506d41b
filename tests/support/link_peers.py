"""Gateways spoken by hand, over frames, and engines that push a link to its limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvferry import __version__
from kvferry.engine.base import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    RequestId,
    Sampling,
    TransferParams,
)
from kvferry.link import codec
from kvferry.link.flow_control import AckCounter
from kvferry.link.frames import PREAMBLE, encode_frames
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker.server import WorkerServer
from kvferry_sim import SimEngine
from kvferry_sim.settings import SimConfig

SIM = SimConfig(step_ms=1.0, prefill_tokens_per_s=200_000.0, transfer_lease_s=60.0)


def request(name: str = "r", *, max_tokens: int = 5, num_prompt: int = 20, **values: Any) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=values.pop("logprobs", None))
    return EngineRequest(RequestId(name), list(range(10, 10 + num_prompt)), sampling, **values)


@asynccontextmanager
async def serving(engine: Any, **values: Any) -> AsyncIterator[WorkerServer]:
    options: dict[str, Any] = {"max_requests": 64, "heartbeat_s": 0.2, **values}
    worker = WorkerServer(engine, worker_id="w", role="decode", host="127.0.0.1", **options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(0.2)


def member_of(worker: WorkerServer) -> Member:
    """Return what the worker `w` of `serving` would register."""
    return Member(
        kind=MemberKind.DECODE,
        member_id=MemberId("w"),
        address=f"127.0.0.1:{worker.port}",
        link_address=f"127.0.0.1:{worker.frame_port}",
        model="m",
        version="0",
    )


@asynccontextmanager
async def simulated(**values: Any) -> AsyncIterator[SimEngine]:
    engine = SimEngine("m", SIM.model_copy(update=values), block_size=16, max_num_seqs=256)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def quiet(engine: SimEngine) -> bool:
    load = engine.stats()
    return not (load.num_running or load.num_waiting or load.num_pages_used or engine.num_offers)


class LinkEnded(Exception):
    """The worker ended the link; `args[0]` says how the transport put it."""


class FrameWire:
    def __init__(self, worker: WorkerServer) -> None:
        self._port = worker.frame_port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._greeted = False

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
            self._writer.write(PREAMBLE)
        return self._reader, self._writer

    async def send(self, payload: bytes) -> None:
        _, writer = await self._open()
        writer.write(encode_frames((payload,)))
        await writer.drain()

    async def receive(self) -> bytes:
        reader, _ = await self._open()
        try:
            if not self._greeted:
                assert await reader.readexactly(len(PREAMBLE)) == PREAMBLE
                self._greeted = True
            length = int.from_bytes(await reader.readexactly(4), "little")
            return await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise LinkEnded(str(error)) from None

    async def half_close(self) -> None:
        _, writer = await self._open()
        writer.write_eof()

    async def reset(self) -> None:
        """Reset the connection; return before the event loop looks for what other sockets have received."""
        _, writer = await self._open()
        # Without lingering, closing sends a reset.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # The transport closes its socket in the loop's next turn, before this task goes on.
        writer.transport.abort()
        await asyncio.sleep(0)

    async def leave(self) -> None:
        _, writer = await self._open()
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Gateway:
    """One end of a link. It acknowledges what it reads, and reads only when told to."""

    def __init__(self, worker: WorkerServer) -> None:
        self.wire = FrameWire(worker)
        self.num_messages = 0
        self.num_tokens: dict[int, int] = {}
        self.ended: dict[int, Any] = {}
        self._ack_counter = AckCounter()

    async def write(self, message: pb.Downward) -> None:
        await self.wire.send(message.SerializeToString())

    async def hello(self) -> pb.Welcome:
        await self.write(pb.Downward(hello=pb.Hello(gateway_id="g", version=__version__)))
        message = await self.read()
        assert message.HasField("welcome")
        return message.welcome

    async def submit(self, number: int, request: EngineRequest) -> None:
        await self.write(codec.submit_to_wire(number, request))

    async def cancel(self, number: int) -> None:
        await self.write(pb.Downward(cancel=pb.Cancel(number=number)))

    async def read(self) -> pb.Upward:
        """Raises LinkEnded."""
        payload = await self.wire.receive()
        if self._ack_counter.count(len(payload)):
            self._ack_counter.acknowledged()
            ack = pb.Ack(num_messages=self._ack_counter.num_messages, num_bytes=self._ack_counter.num_bytes)
            await self.write(pb.Downward(ack=ack))
        return pb.Upward.FromString(payload)

    async def read_step(self) -> pb.Step:
        step = (await self.read()).step
        if step.numbers or step.finished:
            self.num_messages += 1
        for number, item in codec.outputs_of(step):
            if isinstance(item, EngineOutput):
                self.num_tokens[number] = self.num_tokens.get(number, 0) + len(item.token_ids)
                if item.finish_reason is None:
                    continue
            self.ended[number] = item
        return step

    async def read_ends(self, *numbers: int, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not self.ended.keys() >= set(numbers):
                await self.read_step()

    async def leave(self) -> None:
        await self.wire.leave()


class Firehose:
    """An engine that puts out as fast as the event loop turns, or every `pause_s`, once `open` is set."""

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        self._text = text
        self._pause_s = pause_s
        self.open = asyncio.Event()
        self.open.set()
        self.num_outputs = 0
        self.num_begun = 0
        self.num_running = 0
        self.info = EngineInfo("e", "m", 8192, 16, 64, 64, "sim")  # type: ignore[arg-type]

    async def generate(self, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        self.num_begun += 1
        self.num_running += 1
        try:
            await self.open.wait()
            while True:
                self.num_outputs += 1
                yield EngineOutput((1,), self._text)
                await asyncio.sleep(self._pause_s)
        finally:
            self.num_running -= 1

    async def release(self, transfer_params: TransferParams) -> None:
        pass

    async def decline(self, request: EngineRequest) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats()


class Slow(Firehose):
    """Takes a while to let go of a request, as an engine in another process does."""

    num_let_go = 0

    async def generate(self, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        self.num_running += 1
        try:
            yield EngineOutput((1,), "x")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            self.num_let_go += 1
            self.num_running -= 1
