from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from kvferry_sim.block_pool import PageHash, PageId
from kvferry_sim.kv_transfer import (
    MAX_REQUEST_BYTES,
    KvTransferError,
    KvTransferServer,
    PageMemory,
    PullFault,
    Release,
    Ticket,
    frame,
    layout_digest,
    pull_pages,
    read_payload,
    release_offer,
)
from support.waiting import SOON_S

PAGE_BYTES = 128
LAYOUT = layout_digest("tiny", 4, PAGE_BYTES)


class PrefillPeer:
    """A KV transfer server with eight pages to offer, and a record of the freed ones."""

    def __init__(self, lease_s: float = 60.0) -> None:
        self.memory = PageMemory(PAGE_BYTES, LAYOUT)
        for page in range(8):
            self.memory.write(PageId(page), self.memory.expected(PageHash(page)))
        self.freed: list[PageId] = []
        self.before_read: Callable[[], None] = lambda: None
        self.server = KvTransferServer(
            "engine",
            LAYOUT,
            host="127.0.0.1",
            lease_s=lease_s,
            read_page=self.read,
            free_pages=self.freed.extend,
        )

    def read(self, page: PageId) -> bytes:
        self.before_read()
        return self.memory.read(page)

    def offer(self, pages: Sequence[int] = (2, 3, 5)) -> Ticket:
        return self.server.offer([PageId(page) for page in pages], num_tokens=4 * len(pages))


@contextlib.asynccontextmanager
async def running_peer(lease_s: float = 60.0) -> AsyncIterator[PrefillPeer]:
    peer = PrefillPeer(lease_s)
    await peer.server.start()
    try:
        yield peer
    finally:
        peer.server.close()
        await peer.server.wait_closed()


@pytest.fixture
async def peer() -> AsyncIterator[PrefillPeer]:
    async with running_peer() as peer:
        yield peer


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def pull(ticket: Ticket, first_page: int = 0, num_pages: int = 3, layout: int = LAYOUT) -> list[bytes]:
    pages = pull_pages(ticket, layout, page_bytes=PAGE_BYTES, first_page=first_page, num_pages=num_pages)
    async with asyncio.timeout(SOON_S), contextlib.aclosing(pages):
        return [content async for content in pages]


async def test_pulled_pages_are_the_offered_ones(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    assert peer.server.num_offers == 1
    assert await pull(ticket) == [peer.memory.expected(PageHash(page)) for page in (2, 3, 5)]


async def test_a_pull_releases_what_it_pulled(peer: PrefillPeer) -> None:
    await pull(peer.offer())
    await eventually(lambda: peer.freed == [2, 3, 5])
    assert peer.server.num_offers == 0


async def test_a_part_can_be_pulled(peer: PrefillPeer) -> None:
    assert await pull(peer.offer(), first_page=2, num_pages=1) == [peer.memory.expected(PageHash(5))]
    await eventually(lambda: peer.freed == [2, 3, 5])


async def test_a_closed_pull_releases(peer: PrefillPeer) -> None:
    pages = pull_pages(peer.offer(), LAYOUT, page_bytes=PAGE_BYTES, first_page=0, num_pages=3)
    await anext(pages)
    await pages.aclose()
    await eventually(lambda: peer.freed == [2, 3, 5])


async def test_a_cancelled_pull_releases(peer: PrefillPeer) -> None:
    peer.server.fault = PullFault.HANG
    reader = asyncio.create_task(pull(peer.offer()))
    await eventually(lambda: "connections=1" in repr(peer.server))
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    await eventually(lambda: peer.freed == [2, 3, 5])


async def test_an_offer_can_be_released_without_a_pull(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    await release_offer(ticket)
    await eventually(lambda: peer.freed == [2, 3, 5])
    await release_offer(ticket)
    await pull(peer.offer([1]), num_pages=1)
    assert peer.freed.count(PageId(2)) == 1


async def test_a_lease_ends_an_offer_nobody_pulls() -> None:
    async with running_peer(lease_s=0.02) as peer:
        ticket = peer.offer()
        await eventually(lambda: peer.freed == [2, 3, 5])
        with pytest.raises(KvTransferError, match="no such offer"):
            await pull(ticket)


async def test_an_offer_that_ends_under_a_pull_keeps_its_pages_until_they_are_read(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    freed_early: list[bool] = []

    def end_the_offer() -> None:
        peer.server.release(ticket.offer_id)
        freed_early.append(bool(peer.freed))

    peer.before_read = end_the_offer
    assert len(await pull(ticket)) == 3
    assert freed_early == [False, False, False]
    await eventually(lambda: peer.freed == [2, 3, 5])


async def test_pulled_twice_is_refused(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    await pull(ticket)
    await eventually(lambda: bool(peer.freed))
    with pytest.raises(KvTransferError, match="no such offer"):
        await pull(ticket)


async def test_another_layout_is_refused(peer: PrefillPeer) -> None:
    with pytest.raises(KvTransferError, match="another layout"):
        await pull(peer.offer(), layout=LAYOUT + 1)


async def test_a_restarted_engine_is_not_the_one_that_offered(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    stale = Ticket(ticket.host, ticket.port, "engine before", ticket.offer_id, ticket.num_tokens)
    with pytest.raises(KvTransferError, match="another engine"):
        await pull(stale)
    await release_offer(stale)
    assert len(await pull(ticket)) == 3  # a stranger's release did nothing


@pytest.mark.parametrize(("first_page", "num_pages"), [(0, 4), (3, 1), (-1, 1)])
async def test_pages_beyond_the_offer_are_refused(peer: PrefillPeer, first_page: int, num_pages: int) -> None:
    with pytest.raises(KvTransferError, match="only 3 pages"):
        await pull(peer.offer(), first_page=first_page, num_pages=num_pages)


@pytest.mark.parametrize(
    ("fault", "reason"), [(PullFault.REFUSE, "refused"), (PullFault.BREAK_OFF, "closed|broke off|reset")]
)
async def test_faults_reach_the_puller(peer: PrefillPeer, fault: PullFault, reason: str) -> None:
    peer.server.fault = fault
    with pytest.raises((KvTransferError, OSError), match=reason):
        await pull(peer.offer())


async def test_corrupt_pages_differ_from_what_they_must_be(peer: PrefillPeer) -> None:
    peer.server.fault = PullFault.CORRUPT
    for page, content in zip((2, 3, 5), await pull(peer.offer()), strict=True):
        assert content != peer.memory.expected(PageHash(page))


async def test_nobody_answers(peer: PrefillPeer) -> None:
    ticket = peer.offer()
    peer.server.close()
    await peer.server.wait_closed()
    with pytest.raises(OSError):
        await pull(ticket)
    await release_offer(ticket)  # best effort: no error


@pytest.mark.parametrize("host", ["127.0.0.1\x00", "." * 300, "not a host"])
async def test_a_host_that_is_none_is_an_error_like_others(peer: PrefillPeer, host: str) -> None:
    ticket = peer.offer()
    elsewhere = Ticket(host, ticket.port, ticket.engine_id, ticket.offer_id, ticket.num_tokens)
    with pytest.raises((KvTransferError, OSError)):
        await pull(elsewhere)
    await release_offer(elsewhere)


async def test_closing_breaks_connections_off(peer: PrefillPeer) -> None:
    peer.server.fault = PullFault.HANG
    reader = asyncio.create_task(pull(peer.offer()))
    await eventually(lambda: "connections=1" in repr(peer.server))
    peer.server.close()
    with pytest.raises((KvTransferError, OSError)):
        await reader


async def test_an_oversized_request_ends_the_connection(peer: PrefillPeer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.server.port)
    try:
        writer.write((MAX_REQUEST_BYTES + 1).to_bytes(4, "big"))
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", b"\x93abc"])
async def test_garbage_ends_the_connection_and_nothing_else(peer: PrefillPeer, payload: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.server.port)
    try:
        writer.write(len(payload).to_bytes(4, "big") + payload)
        async with asyncio.timeout(SOON_S):
            assert await reader.read() == b""
    finally:
        writer.close()
        await writer.wait_closed()
    assert len(await pull(peer.offer())) == 3


async def test_a_page_of_the_wrong_size_is_refused(peer: PrefillPeer) -> None:
    pages = pull_pages(peer.offer(), LAYOUT, page_bytes=PAGE_BYTES * 2, first_page=0, num_pages=1)
    async with contextlib.aclosing(pages):
        with pytest.raises(KvTransferError, match="128 bytes; ours have 256"):
            await anext(pages)


async def test_frames_are_read_whole_or_not_at_all() -> None:
    whole = frame(Release("engine", "offer"))
    reader = asyncio.StreamReader()
    reader.feed_data(whole + whole[:7])
    reader.feed_eof()
    assert await read_payload(reader, 100) == whole[4:]
    with pytest.raises(KvTransferError, match="within a frame"):
        await read_payload(reader, 100)
    ended = asyncio.StreamReader()
    ended.feed_eof()
    assert await read_payload(ended, 100) is None


def test_tickets_survive_their_journey() -> None:
    ticket = Ticket("127.0.0.1", 4711, "engine", "offer", 33)
    assert Ticket.from_params(ticket.to_params()) == ticket


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"remote_engine_id": "x"},
        {"host": "127.0.0.1", "port": 70_000, "engine_id": "e", "offer_id": "o", "num_tokens": 1},
        {"host": "127.0.0.1", "port": 7000, "engine_id": "e", "offer_id": "o", "num_tokens": -1},
        {"host": 1, "port": 7000, "engine_id": "e", "offer_id": "o", "num_tokens": 1},
    ],
)
def test_foreign_transfer_parameters_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(KvTransferError, match="not a sim engine's"):
        Ticket.from_params(params)
