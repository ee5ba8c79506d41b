"""Which calls' messages are read while more calls wait than may be read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest

from kvferry.errors import BodyTimeout, InvalidRequest, Overloaded
from kvferry.gateway.grpc import grpc_messages
from kvferry.gateway.grpc.grpc_messages import MessageReads
from support.waiting import until


class Call:
    """One of a connection, silent until `message` is set."""

    def __init__(self, reads: MessageReads, connection: str) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_read = False
        self._connection = connection
        self.task = asyncio.create_task(reads.read(cast(Any, self)))

    def peer(self) -> str:
        return self._connection

    async def read(self) -> Any:
        self.is_read = True
        return await self.message


async def calls_of(reads: MessageReads, connection: str, num: int) -> list[Call]:
    calls = [Call(reads, connection) for _ in range(num)]
    await asyncio.sleep(0)
    reads.check()
    return calls


async def end(reads: MessageReads, calls: list[Call]) -> None:
    for call in calls:
        call.task.cancel()
    await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    reads.check()
    assert "0 wait" in repr(reads)
    assert reads._num_reads == 0


def failures(calls: list[Call]) -> list[BaseException | None]:
    return [call.task.exception() for call in calls if call.task.done()]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_messages, "PATIENCE_S", 0.02)


@pytest.mark.usefixtures("patience")
async def test_a_connection_with_many_silent_calls_keeps_no_other_waiting() -> None:
    """With 200 calls in line before it, each other one is read at the second turn."""
    reads = MessageReads(4)
    silent = await calls_of(reads, "silent", 204)
    for _ in range(5):
        num_read = sum(call.is_read for call in silent)
        (other,) = await calls_of(reads, "other", 1)
        other.message.set_result(b"x")
        assert await other.task == b"x"
        assert sum(call.is_read for call in silent) <= num_read + 8
    cut = failures(silent)
    assert cut
    assert all(isinstance(error, Overloaded) and "others waited" in str(error) for error in cut)
    await end(reads, silent)


@pytest.mark.usefixtures("patience")
async def test_a_slow_message_is_not_cut_for_a_connection_that_has_more() -> None:
    reads = MessageReads(4)
    (slow,) = await calls_of(reads, "slow", 1)
    silent = await calls_of(reads, "silent", 12)
    await until(lambda: len(failures(silent)) == 9, what="they cut each other, until none waits")
    assert not slow.task.done()
    slow.message.set_result(b"x")
    assert await slow.task == b"x"
    await end(reads, silent)


@pytest.mark.usefixtures("patience")
async def test_one_of_many_slow_connections_makes_room_for_a_newer_one() -> None:
    reads = MessageReads(2)
    slow = [*await calls_of(reads, "a", 1), *await calls_of(reads, "b", 1)]
    (other,) = await calls_of(reads, "c", 1)
    other.message.set_result(b"x")
    assert await other.task == b"x"
    assert [call.task.done() for call in slow] == [True, False], "the oldest one"
    await end(reads, slow)


async def test_calls_keep_their_place_in_line() -> None:
    reads = MessageReads(1)
    (first,) = await calls_of(reads, "a", 1)
    line = await calls_of(reads, "b", 3)
    line[0].task.cancel()
    await asyncio.gather(line[0].task, return_exceptions=True)
    first.message.set_result(b"x")
    await until(lambda: line[1].is_read)
    assert not line[2].is_read
    line[1].message.set_result(b"")
    assert await line[1].task == b""
    await until(lambda: line[2].is_read)
    line[2].message.set_result(grpc.aio.EOF)
    with pytest.raises(InvalidRequest):
        await line[2].task
    reads.check()
    assert reads._num_reads == 0


async def test_a_call_that_is_cancelled_when_its_turn_comes_passes_it_on() -> None:
    reads = MessageReads(1)
    first, second, third = await calls_of(reads, "a", 3)
    first.message.set_result(b"x")
    await asyncio.sleep(0)
    assert reads._num_waiting == 1, "the turn of the second one has come"
    second.task.cancel()
    await until(lambda: third.is_read)
    assert not second.is_read
    await end(reads, [third])


async def test_a_call_whose_turn_does_not_come_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time for its message begins with its turn."""
    monkeypatch.setattr(grpc_messages, "MESSAGE_TIMEOUT_S", 0.05)
    reads = MessageReads(1)
    (first,) = await calls_of(reads, "a", 1)
    monkeypatch.setattr(grpc_messages, "MESSAGE_TIMEOUT_S", 0.02)
    (second,) = await calls_of(reads, "b", 1)
    with pytest.raises(Overloaded, match="1 other calls"):
        await second.task
    with pytest.raises(BodyTimeout):
        await first.task
    reads.check()
    assert reads._num_reads == 0


async def test_a_full_line_takes_a_call_of_a_connection_that_has_fewer() -> None:
    """The one that has most loses its last."""
    reads = MessageReads(1, 4)
    most = await calls_of(reads, "most", 4)
    (one,) = await calls_of(reads, "one", 1)
    (refused,) = await calls_of(reads, "most", 1)
    (other,) = await calls_of(reads, "other", 1)
    await until(lambda: refused.task.done() and most[3].task.done(), what="the first for itself, the other for another")
    for call in (refused, most[3]):
        with pytest.raises(Overloaded, match="4 calls wait"):
            await call.task
    rest = [*most[:3], one, other]
    assert not any(call.task.done() for call in rest)
    await end(reads, rest)
