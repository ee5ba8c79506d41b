"""Connections whose clients do not read, on a clock of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvferry.gateway import unread_answers
from kvferry.gateway.unread_answers import UnreadAnswers
from support.waiting import until


class Client:
    """A connection with `num_unread` bytes."""

    stalls = True
    peer = "127.0.0.1:1"
    path = "/"

    def __init__(self, num_unread: int) -> None:
        self.num_unread = num_unread
        self.is_cut = False

    def num_unread_bytes(self) -> int:
        return self.num_unread

    def cut(self) -> None:
        self.is_cut = True


class Watched(UnreadAnswers):
    def __init__(self, max_bytes: int = 100, stall_s: float = 30.0) -> None:
        self.time_s = 0.0
        self.cuts: list[int] = []
        super().__init__(max_bytes, lambda _, num_bytes: self.cuts.append(num_bytes), lambda: self.time_s)
        self.stall_s = stall_s

    def added(self, num_unread: int) -> Client:
        client = Client(num_unread)
        self.add(client)
        self.check()
        return client

    def look_after(self, seconds: float) -> None:
        self.time_s += seconds
        self.look()
        self.check()


@pytest_asyncio.fixture
async def unread() -> AsyncIterator[Watched]:
    """100 bytes at most, 30 s without progress."""
    unread = Watched()
    yield unread
    unread.check()
    for connection in list(unread._connections):
        unread.remove(connection)
    unread.check()
    assert unread.num_bytes == 0


async def test_a_client_that_reads_nothing_is_cut_and_gives_its_bytes_back(unread: Watched) -> None:
    client = unread.added(40)
    unread.look_after(29.0)
    assert not client.is_cut
    assert unread.num_bytes == 40
    unread.look_after(1.0)
    assert client.is_cut
    assert unread.cuts == [40]
    assert unread.num_bytes == 0


async def test_a_client_that_reads_slowly_is_not_cut(unread: Watched) -> None:
    client = unread.added(40)
    for _ in range(39):
        client.num_unread -= 1
        unread.look_after(29.0)
    assert unread.num_bytes == 40, "the event loop holds a write until its last byte"
    client.num_unread = 0
    unread.look_after(29.0)
    assert unread.num_bytes == 0
    assert not client.is_cut


async def test_a_connection_that_tells_no_progress_is_cut_for_its_bytes_only(unread: Watched) -> None:
    client = unread.added(40)
    client.stalls = False
    unread.look_after(3600.0)
    assert not client.is_cut
    unread.added(61)
    assert client.is_cut


async def test_a_stream_that_is_written_is_not_stalled(unread: Watched) -> None:
    client = unread.added(40)
    for _ in range(3):
        client.num_unread += 1
        unread.look_after(29.0)
    assert unread.num_bytes == 43
    unread.look_after(30.0)
    assert client.is_cut


async def test_nothing_is_cut_at_the_limit_and_the_longest_stalled_one_above(unread: Watched) -> None:
    reads, stalls, newer = unread.added(40), unread.added(30), unread.added(30)
    assert unread.num_bytes == 100
    reads.num_unread -= 1
    unread.look_after(2.0)
    newest = unread.added(1)
    assert stalls.is_cut
    assert unread.cuts == [30]
    assert [client.is_cut for client in (reads, newer, newest)] == [False, False, False]
    assert unread.num_bytes == 71


async def test_a_client_that_read_since_the_last_look_is_cut_after_those_that_did_not(unread: Watched) -> None:
    reads, stalls = unread.added(50), unread.added(50)
    reads.num_unread -= 1
    unread.added(50)
    assert stalls.is_cut
    assert not reads.is_cut


async def test_a_client_that_has_read_all_is_not_cut(unread: Watched) -> None:
    done, other = unread.added(50), unread.added(50)
    done.num_unread = 0
    unread.added(50)
    assert [done.is_cut, other.is_cut] == [False, False]


async def test_where_all_read_the_newest_one_stays(unread: Watched) -> None:
    clients = [unread.added(50), unread.added(50)]
    for client in clients:
        client.num_unread -= 1
    newest = unread.added(100)
    assert [client.is_cut for client in clients] == [True, True]
    assert not newest.is_cut


async def test_an_answer_above_the_limit_is_sent(unread: Watched) -> None:
    large = unread.added(101)
    assert not large.is_cut
    next_one = unread.added(10)
    assert large.is_cut
    assert not next_one.is_cut


async def test_more_of_a_known_connection_counts(unread: Watched) -> None:
    first, second = unread.added(50), unread.added(40)
    second.num_unread = 50
    unread.add(second)
    assert unread.num_bytes == 100
    assert not first.is_cut
    second.num_unread = 51
    unread.add(second)
    assert first.is_cut
    assert unread.num_bytes == 51


async def test_a_connection_without_unread_bytes_is_not_watched(unread: Watched) -> None:
    unread.added(0)
    assert unread._timer is None


async def test_a_timer_looks_while_there_are_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "LOOK_S", 0.001)
    unread = Watched()
    reads, stalls = unread.added(10), unread.added(10)
    reads.num_unread = 0
    await until(lambda: unread.num_bytes == 10, what="the first one has read all")
    unread.time_s = 30.0
    await until(lambda: stalls.is_cut, what="the other one was cut")
    await asyncio.sleep(0)
    unread.check()
    assert unread._timer is None


async def test_a_cut_that_fails_keeps_no_other_client_from_being_cut(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise KeyError("path")

    unread = Watched()
    unread._on_cut = fail
    first, second = unread.added(60), unread.added(10)
    newest = unread.added(50)  # is not the one to hear of it
    assert first.is_cut
    unread.look_after(30.0)
    assert second.is_cut
    assert newest.is_cut
    assert len(caplog.records) == 3
