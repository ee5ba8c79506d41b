"""link/frame_connection.py: payloads that come at once are handled in short turns, in order."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvferry.config import TlsConfig
from kvferry.link import frames
from kvferry.link.frame_connection import FrameConnection
from kvferry.link.frames import PREAMBLE, encode_frames
from support.waiting import SOON_S

PAYLOADS = [b"%d" % number for number in range(50)]


class Turns:
    """Payloads, and beside them "." for each turn of the loop."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._loop = asyncio.get_running_loop()
        self._note_turn()

    def _note_turn(self) -> None:
        self.seen.append(b".")
        self._loop.call_soon(self._note_turn)

    def receive(self, payload: bytes) -> None:
        self.seen.append(payload)

    def payloads(self) -> list[bytes]:
        return [each for each in self.seen if each != b"."]


async def received_of(payloads: list[bytes]) -> Turns:
    """Dial a server that sends all payloads in one write and ends."""

    async def send_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREAMBLE))
        writer.write(PREAMBLE + encode_frames(payloads))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(send_all, "127.0.0.1", 0)
    turns = Turns()
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = await FrameConnection.dial(f"127.0.0.1:{port}", TlsConfig(), turns.receive)
        async with asyncio.timeout(SOON_S):
            assert "ended" in await connection.ended
        await connection.close()
    return turns


async def test_other_callbacks_run_between_payloads_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "TURN_S", 0.0)
    turns = await received_of(PAYLOADS)
    assert turns.payloads() == PAYLOADS
    numbers = [turns.seen.index(payload) for payload in PAYLOADS]
    # The end of the connection comes between, and what was received before it is handled then.
    assert all(b"." in turns.seen[first:second] for first, second in itertools.pairwise(numbers[:6]))


async def test_payloads_that_take_no_time_are_one_turn() -> None:
    turns = await received_of(PAYLOADS)
    assert turns.payloads() == PAYLOADS
    first = turns.seen.index(PAYLOADS[0])
    assert turns.seen[first : first + len(PAYLOADS)] == PAYLOADS


class Writes(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.written.append(b"closed")

    def abort(self) -> None:
        pass


async def test_payloads_of_one_turn_leave_in_one_write_and_in_order() -> None:
    connection, writes = FrameConnection(lambda payload: None), Writes()
    connection.connection_made(writes)
    for payload in PAYLOADS[:3]:
        connection.send(payload)
    await asyncio.sleep(0)
    connection.send(PAYLOADS[3])
    await asyncio.sleep(0)
    assert writes.written == [PREAMBLE, encode_frames(PAYLOADS[:3]), encode_frames([PAYLOADS[3]])]


async def test_payloads_leave_before_the_connection_closes() -> None:
    connection, writes = FrameConnection(lambda payload: None), Writes()
    connection.connection_made(writes)
    connection.send(b"cancel")
    closing = asyncio.ensure_future(connection.close())
    await asyncio.sleep(0)
    connection.connection_lost(None)
    await closing
    assert writes.written == [PREAMBLE, encode_frames([b"cancel"]), b"closed"]


async def test_payloads_of_a_connection_that_broke_in_the_same_turn_are_dropped() -> None:
    connection, writes = FrameConnection(lambda payload: None), Writes()
    connection.connection_made(writes)
    connection.send(b"late")
    connection.connection_lost(ConnectionResetError())
    await asyncio.sleep(0)
    assert writes.written == [PREAMBLE]
