"""How a gateway follows keepers: a script stands in for their streams."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvferry.keeper.volume_state import VolumeState
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.residency.feed import Delta, SnapshotPart
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry.router import keeper_volumes
from kvferry.router.keeper_volumes import KeeperVolumes, VolumeUpdate, volume_of
from kvferry.router.prices.rates import CostDefaults
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import until

STATE = VolumeState(chunk_bytes=1_000_000, read_bytes_per_s=1e9, queue_bytes=5_000_000)


def keeper(name: str, *volumes: str, node: str = "n1") -> Member:
    return Member(
        kind=MemberKind.KEEPER,
        member_id=MemberId(name),
        address="127.0.0.1:1",
        model="",
        version="",
        node=node,
        volumes=volumes,
    )


class Streams:
    """What keepers say, by keeper and volume; None ends a stream."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], asyncio.Queue[VolumeUpdate | None]] = {}
        self.num_dialled = 0
        self.num_open = 0

    def of(self, member_id: str, volume_id: str) -> asyncio.Queue[VolumeUpdate | None]:
        return self.queues.setdefault((member_id, volume_id), asyncio.Queue())

    async def follow(self, member: Member, volume_id: str) -> AsyncIterator[VolumeUpdate]:
        self.num_dialled += 1
        self.num_open += 1
        queue = self.of(member.member_id, volume_id)
        try:
            while (update := await queue.get()) is not None:
                yield update
        finally:
            self.num_open -= 1
        raise ConnectionError("it ended")


@asynccontextmanager
async def following(
    *members: Member, monkeypatch: pytest.MonkeyPatch | None = None
) -> AsyncIterator[tuple[KeeperVolumes, ResidencyIndex, Streams, MemoryMembership]]:
    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    for member in members:
        await membership.register(member)
    index, streams = ResidencyIndex(), Streams()
    followed = KeeperVolumes(MemoryMembership(registry), index, streams.follow)
    followed.start()
    try:
        yield followed, index, streams, membership
    finally:
        await followed.close()
        assert streams.num_open == 0


def volume(name: str) -> Holder:
    return Holder(name, Tier.VOLUME)


async def test_what_volumes_hold_goes_into_the_index_and_their_speed_into_views() -> None:
    async with following(keeper("k", "v1", "v2")) as (followed, index, streams, _):
        first = streams.of("k", "v1")
        first.put_nowait(STATE)
        first.put_nowait(SnapshotPart(3, 0, 1, Tier.VOLUME, [1, 2, 3]))
        first.put_nowait(Delta(4, {Tier.VOLUME: [4]}, {Tier.VOLUME: [1]}))
        streams.of("k", "v2").put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [9]))
        await until(lambda: index.num_pages == 4)
        assert index.keys_of(volume("v1@k")) == {2, 3, 4}
        assert volume_of("v1@k") == "v1"
        view = followed.costs()["v1@k"]
        assert view.nodes == {"n1"}
        assert (view.page_ms, view.queue_ms) == (1.0, 5.0)
        assert "v2@k" not in followed.costs()  # has not said yet how it is


async def test_a_volume_whose_pages_stand_for_several_of_an_engine() -> None:
    async with following(keeper("k", "v")) as (followed, index, streams, _):
        stream = streams.of("k", "v")
        for update in (dataclasses.replace(STATE, blocks_per_chunk=4), SnapshotPart(1, 0, 1, Tier.VOLUME, [14, 18])):
            stream.put_nowait(update)
        await until(lambda: index.num_pages == 2)
        assert index.find(range(11, 24)).volumes == {"v@k": 8}
        assert followed.costs()["v@k"].page_ms == 0.25
        stream.put_nowait(None)
        await until(lambda: index.num_pages == 0)
        # Another keeper's pages under the same name may be of another kind.
        stream.put_nowait(STATE)
        stream.put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [11, 12]))
        await until(lambda: index.num_pages == 2)
        assert index.find(range(11, 24)).volumes == {"v@k": 2}


async def test_an_unmeasured_volume_has_the_prior_rate_and_an_unreadable_one_no_view() -> None:
    async with following(keeper("k", "v")) as (followed, _, streams, _):
        stream = streams.of("k", "v")
        stream.put_nowait(VolumeState(chunk_bytes=0, read_bytes_per_s=0.0, queue_bytes=0))
        await until(lambda: "v@k" in followed.costs())
        assert followed.costs()["v@k"].page_ms == CostDefaults().volume_page_ms
        stream.put_nowait(VolumeState(chunk_bytes=1, read_bytes_per_s=1.0, breaker_open=True))
        await until(lambda: not followed.costs())


async def test_a_broken_stream_is_dialled_again_and_its_pages_count_no_more_meanwhile() -> None:
    async with following(keeper("k", "v")) as (followed, index, streams, _):
        stream = streams.of("k", "v")
        for update in (STATE, SnapshotPart(1, 0, 1, Tier.VOLUME, [1])):
            stream.put_nowait(update)
        await until(lambda: index.num_pages == 1)
        stream.put_nowait(None)
        await until(lambda: index.num_pages == 0 and not followed.costs())
        for update in (STATE, SnapshotPart(7, 0, 1, Tier.VOLUME, [2, 3])):
            stream.put_nowait(update)
        await until(lambda: index.num_pages == 2 and bool(followed.costs()))
        assert streams.num_dialled == 2


async def test_a_gap_asks_for_everything_again() -> None:
    async with following(keeper("k", "v")) as (followed, index, streams, _):
        stream = streams.of("k", "v")
        stream.put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [1]))
        stream.put_nowait(Delta(3, {Tier.VOLUME: [3]}))
        stream.put_nowait(SnapshotPart(3, 0, 1, Tier.VOLUME, [1, 2, 3]))
        await until(lambda: index.num_pages == 3)
        assert (followed.num_gaps, streams.num_dialled) == (1, 2)


async def test_one_volume_at_two_keepers_is_two_ways_to_its_pages() -> None:
    async with following(keeper("a", "v"), keeper("b", "v", node="n2")) as (followed, index, streams, _):
        for name in ("a", "b"):
            streams.of(name, "v").put_nowait(STATE)
            streams.of(name, "v").put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [1]))
        await until(lambda: index.num_pages == 2 and len(followed.costs()) == 2)
        assert {name: set(view.nodes) for name, view in followed.costs().items()} == {"v@a": {"n1"}, "v@b": {"n2"}}
        assert {volume_of(name) for name in index.find([1]).volumes} == {"v"}


async def test_a_keeper_that_left_the_registry_counts_for_as_long_as_its_stream_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_volumes, "REDIAL_FIRST_S", 0.01)
    async with following() as (followed, index, streams, membership):
        registration = await membership.register(keeper("k", "v"))
        stream = streams.of("k", "v")
        for update in (STATE, SnapshotPart(1, 0, 1, Tier.VOLUME, [1])):
            stream.put_nowait(update)
        await until(lambda: index.num_pages == 1 and bool(followed.costs()))
        await registration.revoke()
        stream.put_nowait(Delta(2, {Tier.VOLUME: [2]}))
        await until(lambda: index.num_pages == 2)
        stream.put_nowait(None)
        await until(lambda: index.num_pages == 0)
        await until(lambda: streams.num_open == 0)
        await membership.register(keeper("k", "v"))
        stream.put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [5]))
        await until(lambda: index.keys_of(volume("v@k")) == {5})


async def test_a_keeper_with_another_address_is_dialled_there() -> None:
    async with following() as (_, index, streams, membership):
        registration = await membership.register(keeper("k", "v"))
        streams.of("k", "v").put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [1]))
        await until(lambda: index.num_pages == 1)
        await registration.update(keeper("k", "v", "w"))
        await until(lambda: streams.num_dialled == 3)
        streams.of("k", "w").put_nowait(SnapshotPart(1, 0, 1, Tier.VOLUME, [2]))
        await until(lambda: index.holders() == [volume("w@k")])


async def test_a_pools_volumes_are_priced_for_its_requests_only() -> None:
    async with following(keeper("k", "v1", "v2")) as (followed, _, streams, _membership):
        streams.of("k", "v1").put_nowait(STATE)
        own = dataclasses.replace(STATE, pool="finance")
        streams.of("k", "v2").put_nowait(VolumeState.from_wire(own.to_wire()))
        await until(lambda: len(followed.states()) == 2)
        assert set(followed.costs()) == {"v1@k"}
        assert set(followed.costs("finance")) == {"v2@k"}
        assert not followed.costs("other")
        assert not followed.costs(None), "of a pool that uses no volumes"
        streams.of("k", "v2").put_nowait(dataclasses.replace(own, breaker_open=True))
        await until(lambda: not followed.costs("finance"))
        assert set(followed.costs()) == {"v1@k"}
