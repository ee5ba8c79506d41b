"""Strangers at the port that accepts links: each costs its own connection, and a line of the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
import pytest_asyncio

from kvferry.link import frame_server, frames
from kvferry.link.frame_server import FrameServer
from kvferry.link.frames import GREETING_TIMEOUT_S, MAX_FIRST_FRAME_BYTES, PREAMBLE, encode_frames
from kvferry.link.gateway_session import GatewaySession, SessionTransport
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker.server import WorkerServer
from support.link_peers import Gateway, request, serving, simulated
from support.waiting import SOON_S, until


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[WorkerServer]:
    async with simulated() as engine, serving(engine) as worker:
        yield worker


async def answer_to(worker: WorkerServer, data: bytes) -> bytes:
    """Everything the worker says before it ends the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.frame_port)
    writer.write(data)
    try:
        async with asyncio.timeout(SOON_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", "it begins with b'GET /v1/models H'"),
        (b"KVFERRY\x07", "it begins with"),
        (PREAMBLE + encode_frames([b"\xff" * 20]), "its first message cannot be read"),
        (PREAMBLE + encode_frames([b""]), "its first message is not Hello"),
        (PREAMBLE + (1 << 31).to_bytes(4, "little"), "a frame of 2147483648 bytes"),
        (PREAMBLE + (MAX_FIRST_FRAME_BYTES + 1).to_bytes(4, "little"), "at most 4096 are allowed"),
    ],
)
async def test_a_stranger_is_refused_with_a_line_and_nothing_else(
    worker: WorkerServer, caplog: pytest.LogCaptureFixture, data: bytes, reason: str
) -> None:
    gateway = Gateway(worker)
    await gateway.hello()
    with caplog.at_level(logging.WARNING):
        assert await answer_to(worker, data) == b""
    (record,) = caplog.records
    assert reason in record.getMessage()
    await gateway.submit(1, request("a"))
    await gateway.read_ends(1)
    assert gateway.num_tokens == {1: 5}
    await gateway.leave()


async def test_a_connection_that_says_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frame_server, "GREETING_TIMEOUT_S", 0.1)
    assert await answer_to(worker, PREAMBLE) == b""
    assert "did not say who it is" in caplog.text


async def test_a_frame_over_the_limit_ends_the_link(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerServer, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frame_server, "MAX_FRAME_BYTES", 10_000)
    gateway = Gateway(worker)
    await gateway.hello()
    await gateway.submit(1, request("a", num_prompt=20_000))
    await until(lambda: not worker.sessions)
    assert "at most 10000 are allowed" in caplog.text
    await gateway.leave()


async def test_no_step_waits_for_an_acknowledgement(worker: WorkerServer) -> None:
    gateway = Gateway(worker)
    await gateway.hello()
    assert worker._frames is not None
    (connection,) = worker._frames._connections
    assert connection.transport is not None
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await gateway.leave()


async def test_hello_may_come_with_what_follows_it(worker: WorkerServer) -> None:
    """One segment: the limit for strangers must not hold for it."""
    hello = pb.Downward(hello=pb.Hello(gateway_id="g", version="0")).SerializeToString()
    padded = pb.Downward(cancel=pb.Cancel(number=1)).SerializeToString()
    large = pb.Downward(release=pb.Release(transfer_params=b" " * (2 * MAX_FIRST_FRAME_BYTES))).SerializeToString()
    _, writer = await asyncio.open_connection("127.0.0.1", worker.frame_port)
    writer.write(PREAMBLE + encode_frames([hello, padded, large]))
    await until(lambda: len(worker.sessions) == 1)
    assert worker.sessions[0].gateway_id == "g"
    writer.close()
    await until(lambda: not worker.sessions)


@pytest.mark.parametrize("params", [b"[" * 200_000, b'{"a":', b"7"], ids=["nested", "cut", "number"])
async def test_a_release_that_cannot_be_read_costs_a_line(
    worker: WorkerServer, caplog: pytest.LogCaptureFixture, params: bytes
) -> None:
    gateway = Gateway(worker)
    await gateway.hello()
    await gateway.write(pb.Downward(release=pb.Release(transfer_params=params)))
    await gateway.submit(1, request("a"))
    await gateway.read_ends(1)
    assert not [record for record in caplog.records if record.exc_info]
    await gateway.leave()


async def test_a_connection_that_the_loop_tells_of_after_the_stop_is_ended() -> None:
    def attach(transport: SessionTransport, hello: pb.Hello) -> GatewaySession:
        raise AssertionError("nobody is attached")

    server = FrameServer(attach, lambda session: None)
    await server.start("127.0.0.1", None)
    await server.stop(1.0)
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: frame_server._FrameTransport(server), ours)
        theirs.settimeout(0)
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(GREETING_TIMEOUT_S / 2):
                assert await asyncio.get_running_loop().sock_recv(theirs, 1) == b""


async def test_steps_run_between_submits_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "TURN_S", 0.0)
    payloads = [b"%d" % number for number in range(50)]
    seen: list[bytes] = []

    class Session:
        def receive(self, payload: bytes) -> None:
            seen.append(payload)
            asyncio.get_running_loop().call_soon(seen.append, b".")

        def pop_messages(self) -> list[bytes]:
            return []

        def close(self) -> None: ...

    server = FrameServer(lambda transport, hello: cast(GatewaySession, Session()), lambda session: None)
    await server.start("127.0.0.1", None)
    hello = pb.Downward(hello=pb.Hello(gateway_id="g", version="0")).SerializeToString()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREAMBLE + encode_frames([hello, *payloads]))
    await until(lambda: len(seen) == 2 * len(payloads))
    assert seen[::2] == payloads
    writer.close()
    await server.stop(1.0)
