"""The workers a gateway knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvferry.engine.base import EngineStats
from kvferry.errors import Overloaded
from kvferry.membership import follower
from kvferry.membership.base import Joined, Member, MemberChange, MemberId, MemberKind, Snapshot
from kvferry.router.worker_pool import WorkerPool
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S, until


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
        async with asyncio.timeout(SOON_S):
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


class _Link:
    """A link that is up."""

    usable, stats, features = True, EngineStats(), frozenset[str]()

    def __init__(self, member: Member) -> None:
        self.member = member


@given(
    workers=st.lists(
        st.tuples(st.sampled_from([MemberKind.PREFILL, MemberKind.DECODE]), st.sampled_from(["", "a", "b"])),
        max_size=12,
    )
)
def test_candidates_are_of_one_kind_and_one_pool(workers: list[tuple[MemberKind, str]]) -> None:
    pool = WorkerPool(MemoryMembership(MemoryRegistry()), "g")
    for i, (kind, name) in enumerate(workers):
        worker = structs.replace(member(f"w{i}"), kind=kind, pool=name)
        pool._links[worker.member_id] = _Link(worker)  # type: ignore[assignment]
    for kind in (MemberKind.PREFILL, MemberKind.DECODE):
        for name in ("", "a", "b", "unknown"):
            wanted = [f"w{i}" for i, worker in enumerate(workers) if worker == (kind, name)]
            assert [candidate.member_id for _, candidate in pool.candidates(kind, name)] == wanted
            assert sorted(link.member.member_id for link in pool.usable(kind, name)) == sorted(wanted)


async def test_a_worker_whose_record_names_another_pool_is_dialled_anew() -> None:
    pool = WorkerPool(MemoryMembership(MemoryRegistry()), "g")
    worker = member("w")
    try:
        pool._joined(worker)
        (before,) = pool.links(MemberKind.DECODE)
        pool._joined(worker)
        assert pool.links(MemberKind.DECODE) == [before]
        pool._joined(structs.replace(worker, pool="finance"))
        (after,) = pool.links(MemberKind.DECODE)
        assert after is not before
        assert after.member.pool == "finance"
    finally:
        await pool.close()


async def test_requests_are_placed_by_the_record_that_a_worker_has_now() -> None:
    pool = WorkerPool(MemoryMembership(MemoryRegistry()), "g")
    worker = structs.replace(member("w"), exchange_digest="e")
    pool._links[worker.member_id] = _Link(worker)  # type: ignore[assignment]
    ((_, before),) = pool.candidates(MemberKind.DECODE, "")
    pool._joined(structs.replace(worker, exchange_digest="f"))
    ((_, after),) = pool.candidates(MemberKind.DECODE, "")
    assert [each.engine_kind.exchange_digest for each in (before, after)] == ["e", "f"]


async def test_as_many_requests_as_allowed_wait_for_room() -> None:
    queue = WorkerPool(MemoryMembership(MemoryRegistry()), "g", max_queued_requests=1).queues.of("")
    queue.enter(10.0, None, is_resumed=False)
    with pytest.raises(Overloaded, match="max_queued_requests is 1 choices"):
        queue.enter(10.0, None, is_resumed=False)
