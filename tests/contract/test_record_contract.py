"""RecordStore on the twin and on a real etcd."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from bench.etcd_server import EtcdServer, find_binary
from kvferry.config import MembershipConfig
from kvferry.errors import UnavailableError
from kvferry.membership.base import Membership, RecordChange, RecordChanged, Records, RetryPolicy
from kvferry.membership.etcd import EtcdMembership
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S


class Site:
    """Memberships of one registry, and its outage."""

    def __init__(
        self, connect: Callable[[], Membership], outage: Callable[[], AbstractAsyncContextManager[None]]
    ) -> None:
        self._connect = connect
        self.outage = outage
        self.made: list[Membership] = []

    def membership(self) -> Membership:
        self.made.append(self._connect())
        return self.made[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if find_binary() is None:
        pytest.skip("no etcd binary")
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(params=["memory", "etcd"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    if request.param == "memory":
        registry = MemoryRegistry()

        @asynccontextmanager
        async def outage() -> AsyncIterator[None]:
            with registry.outage():
                yield

        made = Site(lambda: MemoryMembership(registry), outage)
    else:
        running: EtcdServer = request.getfixturevalue("server")
        config = MembershipConfig(endpoints=(running.endpoint,), prefix=f"/test/{uuid.uuid4().hex}", lease_ttl_s=6)

        @asynccontextmanager
        async def outage() -> AsyncIterator[None]:
            running.kill()
            try:
                yield
            finally:
                await running.start()

        retry = RetryPolicy(first_s=0.05, max_s=0.3)
        made = Site(lambda: EtcdMembership(config, retry=retry, rng=random.Random(1)), outage)
    yield made
    for each in made.made:
        await each.close()


async def following(watch: AsyncIterator[RecordChange]) -> RecordChange:
    async with asyncio.timeout(SOON_S):
        return await anext(watch)


async def test_a_record_is_written_only_over_the_one_that_was_read(site: Site) -> None:
    mine, other = site.membership().records, site.membership().records
    assert await mine.read("tenants/acme") is None
    assert await mine.write("tenants/acme", b"1", 0)
    assert not await other.write("tenants/acme", b"2", 0), "it is there already"
    first = await other.read("tenants/acme")
    assert first is not None
    assert first.value == b"1"
    assert await other.write("tenants/acme", b"2", first.revision)
    assert not await mine.write("tenants/acme", b"3", first.revision), "another writer changed it"
    assert not await mine.write("tenants/acme", None, first.revision)
    second = await mine.read("tenants/acme")
    assert second is not None
    assert second.value == b"2"
    assert await mine.write("tenants/acme", None, second.revision)
    assert await mine.read("tenants/acme") is None
    assert await mine.write("tenants/acme", b"4", 0)


async def test_of_many_writers_at_once_one_succeeds(site: Site) -> None:
    stores = [site.membership().records for _ in range(8)]
    results = await asyncio.gather(*(store.write("salt-secret", str(i).encode(), 0) for i, store in enumerate(stores)))
    assert results.count(True) == 1
    found = await stores[0].read("salt-secret")
    assert found is not None
    assert found.value == str(results.index(True)).encode()


async def test_a_watcher_sees_its_folder_and_every_change(site: Site) -> None:
    store = site.membership().records
    await store.write("tenants/a", b"1", 0)
    await store.write("tenants-of-others/b", b"1", 0)
    watch = site.membership().records.watch("tenants")
    assert await following(watch) == Records({"a": b"1"})
    await store.write("tenants/b", b"2", 0)
    assert await following(watch) == RecordChanged("b", b"2")
    found = await store.read("tenants/b")
    assert found is not None
    await store.write("tenants/b", None, found.revision)
    assert await following(watch) == RecordChanged("b", None)
    assert list(await store.read_all("tenants")) == ["a"]


async def test_all_of_a_large_folder_are_read(site: Site) -> None:
    """More than one answer of gRPC may hold (64 MiB), and more keys than one read of etcd asks for."""
    store = site.membership().records
    value = b"x" * (64 << 10)
    names = [f"t{number:04}" for number in range(1100)]
    for first in range(0, len(names), 100):
        written = await asyncio.gather(
            *(store.write(f"tenants/{name}", value, 0) for name in names[first : first + 100])
        )
        assert all(written)
    found = await store.read_all("tenants")
    assert sorted(found) == names
    assert all(record.value == value for record in found.values())
    known = await following(site.membership().records.watch("tenants"))
    assert isinstance(known, Records)
    assert sorted(known.by_name) == names


async def test_an_outage_refuses_calls_and_a_watch_goes_on_after_it(site: Site) -> None:
    store = site.membership().records
    await store.write("tenants/a", b"1", 0)
    watch = site.membership().records.watch("tenants")
    assert await following(watch) == Records({"a": b"1"})
    async with site.outage():
        with pytest.raises(UnavailableError):
            await store.read("tenants/a")
        with pytest.raises(UnavailableError):
            await store.write("tenants/a", b"2", 0)
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                assert await store.write("tenants/b", b"1", 0)
                break
            except UnavailableError:
                await asyncio.sleep(0.05)
    seen: dict[str, bytes] = {"a": b"1"}
    while "b" not in seen:
        match await following(watch):
            case Records(by_name):
                seen = dict(by_name)
            case RecordChanged(name, value):
                assert value is not None
                seen[name] = value
    assert seen == {"a": b"1", "b": b"1"}


async def test_watches_end_with_the_membership(site: Site) -> None:
    membership = site.membership()
    watch = membership.records.watch("tenants")
    assert await following(watch) == Records({})
    await membership.close()
    with pytest.raises(StopAsyncIteration):
        await following(watch)
