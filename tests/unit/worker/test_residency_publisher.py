"""What gateways hear of a worker's pages: large snapshots, and events that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvferry.config import WorkerConfig
from kvferry.engine.base import KvEventBatch, PagesStored
from kvferry.link.worker_link import WorkerLink
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry.router.residency_subscriber import ResidencySubscriber
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker import residency_publisher
from kvferry.worker.residency_publisher import ResidencyPublisher
from kvferry.worker.server import WorkerServer
from support.link_peers import member_of, serving, simulated
from support.waiting import until


class Events:
    """Batches as a test gives them; an exception among them is raised."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[KvEventBatch | Exception] = asyncio.Queue()
        self.num_listens = 0

    async def listen(self) -> AsyncIterator[KvEventBatch]:
        self.num_listens += 1
        while True:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            yield item


def stored(sequence: int, first: int, count: int) -> KvEventBatch:
    keys = range(first, first + count)
    return KvEventBatch(sequence, [PagesStored(list(keys), None, (), 16, route_keys=list(keys))])


class Peers:
    """A worker with the publisher under test, and a gateway's link and index."""

    def __init__(self, worker: WorkerServer, events: Events, publisher: ResidencyPublisher) -> None:
        self.events = events
        self.publisher = publisher
        self.index = ResidencyIndex()
        self.subscriber = ResidencySubscriber(self.index)
        self.link = WorkerLink(
            member_of(worker), "g", self._changed, WorkerConfig(), on_residency=self.subscriber.received
        )

    def _changed(self) -> None:
        if self.link.connected:
            self.subscriber.linked(self.link)

    @property
    def num_keys(self) -> int:
        return len(self.index.keys_of(Holder("w", Tier.GPU)))


@pytest.fixture
async def peers(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    monkeypatch.setattr(residency_publisher, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(residency_publisher, "_PAGES_PER_ENGINE_PAGE", 1 << 12)
    events = Events()
    async with simulated() as engine:
        engine.kv_events = events.listen  # type: ignore[method-assign]
        publisher = ResidencyPublisher(engine, lambda: worker.sessions)
        async with serving(engine, on_snapshot_wanted=publisher.send_snapshot) as worker:
            publisher.start()
            made = Peers(worker, events, publisher)
            try:
                yield made
            finally:
                await made.link.close()
                await publisher.stop()


async def test_a_snapshot_larger_than_may_wait_for_a_gateway_arrives(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency_publisher, "MAX_SNAPSHOT_KEYS", 1 << 10)
    monkeypatch.setattr(residency_publisher, "MAX_WAITING_BYTES", 1 << 14)
    monkeypatch.setattr("kvferry.link.outgoing_queue.MAX_PENDING_BYTES", 1 << 17)
    assert peers.publisher.mirror is not None
    count = 1 << 17  # keys: 1 MiB, eight times what may wait
    peers.publisher.mirror.apply(stored(0, 0, count))
    peers.publisher.mirror.next_delta()
    peers.link.want_snapshot()
    await until(lambda: peers.num_keys == count, what="the whole snapshot is there")
    assert peers.subscriber.num_gaps == 0
    peers.events.queue.put_nowait(stored(1, count, 5))
    await until(lambda: peers.num_keys == count + 5, what="changes follow it")


async def test_events_that_cannot_be_read_end_the_claim(peers: Peers) -> None:
    peers.events.queue.put_nowait(stored(0, 0, 8))
    await until(lambda: peers.num_keys == 8)
    peers.events.queue.put_nowait(ValueError("an event of another version"))
    await until(lambda: peers.num_keys == 0, what="nothing is claimed any more")
    await until(lambda: peers.events.num_listens == 2, what="events are read anew")
    peers.events.queue.put_nowait(stored(77, 100, 3))
    await until(lambda: peers.num_keys == 3, what="new events count again")


async def test_messages_of_a_worker_that_was_dropped_add_no_pages(peers: Peers) -> None:
    peers.events.queue.put_nowait(stored(0, 0, 8))
    await until(lambda: peers.num_keys == 8)
    peers.subscriber.gone(peers.link)
    peers.subscriber.received(peers.link, pb.Residency(sequence=1, stored=[pb.TierKeys(tier="gpu", keys=bytes(8))]))
    assert peers.num_keys == 0
