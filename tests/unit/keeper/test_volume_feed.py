"""Updates of a volume for gateways."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from kvferry.keeper.layout import ChunkId
from kvferry.residency.feed import Delta, ResidencyFollower, SnapshotPart
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry_keeper.volumes import volume_feed
from kvferry_keeper.volumes.volume_feed import VolumeFeed
from support.tier_rows import key_of
from support.waiting import until


class Gateway:
    """Follows a feed as a gateway would."""

    def __init__(self, feed: VolumeFeed) -> None:
        self.index = ResidencyIndex()
        self.follower = ResidencyFollower(self.index, "v")
        self.states: list[Any] = []
        self.num_parts = 0
        self._task = asyncio.create_task(self._follow(feed))

    async def _follow(self, feed: VolumeFeed) -> None:
        async for update in feed.follow():
            if isinstance(update, SnapshotPart):
                self.num_parts += 1
                self.follower.apply_part(update)
            elif isinstance(update, Delta):
                self.follower.apply_delta(update)
            else:
                self.states.append(update)

    @property
    def keys(self) -> set[int]:
        return set(self.index._volumes.get("v", set()))

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def chunk(i: int, route_key: int | None = None) -> ChunkId:
    return ChunkId(key_of(i), i if route_key is None else route_key)


async def test_a_snapshot_then_changes() -> None:
    states = iter(range(100))
    feed = VolumeFeed(lambda: next(states))  # type: ignore[arg-type, return-value]
    feed.load([chunk(1), chunk(2), chunk(7, 0)])
    gateway = Gateway(feed)
    await until(lambda: gateway.keys == {1, 2})
    feed.change([chunk(3)], [chunk(1)])
    await until(lambda: gateway.keys == {2, 3})
    assert gateway.follower.num_gaps == 0
    assert gateway.states == [0]
    feed.send_state()
    await until(lambda: gateway.states == [0, 1])
    await gateway.leave()
    assert not feed.num_followers


async def test_a_key_is_held_while_one_chunk_has_it() -> None:
    feed = VolumeFeed(lambda: None)  # type: ignore[arg-type, return-value]
    gateway = Gateway(feed)
    feed.change([chunk(1, 5), chunk(2, 5)], [])
    await until(lambda: gateway.keys == {5})
    feed.change([], [chunk(1, 5)])
    feed.change([chunk(3, 6)], [])
    await until(lambda: gateway.keys == {5, 6})
    feed.change([], [chunk(2, 5)])
    await until(lambda: gateway.keys == {6})
    await gateway.leave()


async def test_a_volume_that_is_left_alone_holds_nothing() -> None:
    feed = VolumeFeed(lambda: None)  # type: ignore[arg-type, return-value]
    feed.load([chunk(1), chunk(2)])
    gateway = Gateway(feed)
    await until(lambda: gateway.keys == {1, 2})
    feed.set_readable(False)
    feed.set_readable(False)
    await until(lambda: not gateway.keys)
    feed.change([chunk(3)], [chunk(1)])
    late = Gateway(feed)
    await until(lambda: late.num_parts == 1)
    feed.set_readable(True)
    await until(lambda: gateway.keys == late.keys == {2, 3})
    assert gateway.follower.num_gaps == late.follower.num_gaps == 0
    await gateway.leave()
    await late.leave()


async def test_followers_agree_with_the_chunks_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_feed, "FLUSH_AFTER_S", 0.0)
    monkeypatch.setattr(volume_feed, "MAX_SNAPSHOT_KEYS", 7)
    monkeypatch.setattr(volume_feed, "_MAX_WAITING", 3)
    rng = random.Random(5)
    feed = VolumeFeed(lambda: None)  # type: ignore[arg-type, return-value]
    held: Counter[int] = Counter()
    is_readable = True
    gateways: list[Gateway] = []
    for step in range(3000):
        i = rng.randrange(40)
        if held[i] and rng.random() < 0.5:
            held[i] -= 1
            feed.change([], [chunk(i + 1)])
        elif held[i] < 3:
            held[i] += 1
            feed.change([chunk(i + 1)], [])
        if rng.random() < 0.01:
            is_readable = not is_readable
            feed.set_readable(is_readable)
        if rng.random() < 0.01 and len(gateways) < 5:
            gateways.append(Gateway(feed))
        if rng.random() < 0.3:
            await asyncio.sleep(0)
        if step % 500 == 499:
            expected = {i + 1 for i, count in held.items() if count} if is_readable else set()
            await until(lambda expected=expected: all(gateway.keys == expected for gateway in gateways))
    assert gateways
    assert all(gateway.follower.num_gaps == 0 for gateway in gateways)
    for gateway in gateways:
        await gateway.leave()
    feed.close()


def test_the_owner_of_a_volumes_chunks_is_the_volume() -> None:
    index = ResidencyIndex()
    ResidencyFollower(index, "v").apply_part(SnapshotPart(0, 0, 1, Tier.VOLUME, [1]))
    assert Holder("v", Tier.VOLUME).owner in index._volumes
