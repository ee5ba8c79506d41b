"""The workers a gateway knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvferry.membership import follower
from kvferry.membership.base import Joined, Member, MemberChange, MemberId, MemberKind, Snapshot
from kvferry.membership.memory import MemoryMembership, MemoryRegistry
from kvferry.router.worker_pool import WorkerPool
from support.waiting import until


class Failing(MemoryMembership):
    """Its first watch fails after one change."""

    num_watches = 0

    async def watch(self) -> AsyncIterator[MemberChange]:
        self.num_watches += 1
        if self.num_watches == 1:
            yield Snapshot(())
            raise RuntimeError("of this test")
        yield Snapshot((member("w"),))
        yield Joined(member("v"))
        await asyncio.Event().wait()


def member(member_id: str) -> Member:
    return Member(kind=MemberKind.DECODE, member_id=MemberId(member_id), address="127.0.0.1:1", model="m", version="0")


async def test_a_watch_that_fails_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "REWATCH_S", 0.01)
    membership = Failing(MemoryRegistry())
    pool = WorkerPool(membership, "g")
    pool.start()
    try:
        async with asyncio.timeout(10):
            while len(pool.links(MemberKind.DECODE)) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert membership.num_watches == 2
    finally:
        await pool.close()


async def test_keepers_are_no_workers() -> None:
    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    keeper = Member(
        kind=MemberKind.KEEPER,
        member_id=MemberId("keeper-1"),
        address="127.0.0.1:1",
        model="m",
        version="0",
        volumes=("v-1",),
        socket_path="/run/keeper.sock",
    )
    registration = await membership.register(keeper)
    pool = WorkerPool(MemoryMembership(registry), "g")
    pool.start()
    try:
        await membership.register(member("w"))
        await until(lambda: bool(pool.links(MemberKind.DECODE)))
        assert not pool.links(MemberKind.KEEPER)
        await registration.revoke()
        await membership.register(member("v"))
        await until(lambda: len(pool.links(MemberKind.DECODE)) == 2)
    finally:
        await pool.close()
