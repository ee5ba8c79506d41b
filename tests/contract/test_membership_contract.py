"""What every Membership owes its callers, proved on the twin and on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec
import pytest

from bench.etcd_server import EtcdServer, find_binary
from kvferry.config import MembershipConfig
from kvferry.errors import UnavailableError
from kvferry.membership.base import (
    Joined,
    Left,
    Member,
    MemberChange,
    MemberId,
    MemberKind,
    Membership,
    RetryPolicy,
    Snapshot,
)
from kvferry.membership.etcd import EtcdMembership
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S


def member(name: str = "one", *, kind: MemberKind = MemberKind.PREFILL, version: str = "1") -> Member:
    return Member(
        kind=kind, member_id=MemberId(name), address="127.0.0.1:1", model="tiny", version=version, block_size=32
    )


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(SOON_S):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _only_the_test_runs() -> bool:
    return len(asyncio.all_tasks()) == 1  # gRPC ends its own a moment after the call they belong to


class Follower:
    """Reads a watch the way a router does: keeps who is there, and every change for the record."""

    def __init__(self, watch: AsyncIterator[MemberChange]) -> None:
        self.watch = watch
        self.changes: list[MemberChange] = []
        self.members: dict[tuple[MemberKind, MemberId], Member] = {}

    async def next(self) -> MemberChange:
        async with asyncio.timeout(SOON_S):
            change = await anext(self.watch)
        self.take(change)
        return change

    def take(self, change: MemberChange) -> None:
        self.changes.append(change)
        match change:
            case Snapshot(members):
                self.members = {(each.kind, each.member_id): each for each in members}
            case Joined(each):
                self.members[each.kind, each.member_id] = each
            case Left(kind, member_id):
                self.members.pop((kind, member_id), None)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self.next()

    async def until_members(self, *expected: Member) -> None:
        await self.until(lambda: sorted(self.members.values(), key=repr) == sorted(expected, key=repr))


class Site(Protocol):
    """One registry and what a test may do to it."""

    def membership(self) -> Membership: ...

    def outage(self) -> contextlib.AbstractAsyncContextManager[None]: ...

    async def let_leases_end(self) -> None:
        """Time passes, as much as a lease lives."""
        ...

    async def close(self) -> None: ...


class MemorySite:
    def __init__(self) -> None:
        self._now_s = 1000.0
        self._registry = MemoryRegistry(lease_ttl_s=2.0, clock=lambda: self._now_s)
        self._memberships: list[MemoryMembership] = []

    def membership(self) -> Membership:
        self._memberships.append(MemoryMembership(self._registry))
        return self._memberships[-1]

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        with self._registry.outage():
            yield

    async def let_leases_end(self) -> None:
        self._now_s += 2.5
        self._registry.expire_due()

    async def close(self) -> None:
        self._registry.check()
        for each in self._memberships:
            await each.close()
        self._registry.check()


class EtcdSite:
    def __init__(self, server: EtcdServer, lease_ttl_s: int) -> None:
        self._server = server
        self._config = MembershipConfig(
            endpoints=(server.endpoint,), prefix=f"/test/{uuid.uuid4().hex}", lease_ttl_s=lease_ttl_s
        )
        self._memberships: list[EtcdMembership] = []

    def membership(self) -> Membership:
        retry = RetryPolicy(first_s=0.05, max_s=0.3)
        self._memberships.append(EtcdMembership(self._config, retry=retry, rng=random.Random(1)))
        return self._memberships[-1]

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        self._server.kill()
        try:
            yield
        finally:
            await self._server.start()

    async def let_leases_end(self) -> None:
        """They end by themselves; whoever waits for it has a deadline."""

    async def close(self) -> None:
        for each in self._memberships:
            await each.close()
        await eventually(_only_the_test_runs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if find_binary() is None:
        pytest.skip("no etcd binary")
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def _site(request: pytest.FixtureRequest, lease_ttl_s: int) -> Site:
    if request.param == "memory":
        return MemorySite()
    return EtcdSite(request.getfixturevalue("server"), lease_ttl_s)


@pytest.fixture(params=["memory", "etcd"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Leases outlive every test, also on a busy machine: changes are exactly what the test causes."""
    made = _site(request, lease_ttl_s=15)
    yield made
    await made.close()


@pytest.fixture(params=["memory", "etcd"])
async def short_site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    """Leases end while a test waits; a busy machine may miss a renewal, so only where it ends is certain."""
    made = _site(request, lease_ttl_s=2)
    yield made
    await made.close()


async def test_a_registered_member_is_listed_with_all_its_facts(site: Site) -> None:
    membership = site.membership()
    assert await membership.members() == ()
    full = Member(
        kind=MemberKind.DECODE,
        member_id=MemberId("d-1"),
        address="10.0.0.7:4100",
        model="größer/modell",
        version="9",
        node="n1",
        pid=77,
        engine_id="e",
        block_size=32,
        page_bytes=1 << 20,
        kv_cache_dtype="bfloat16",
        started_unix_s=1.5,
    )
    registration = await membership.register(full)
    assert await site.membership().members() == (full,)
    assert not registration.fenced


async def test_a_watch_tells_a_snapshot_and_then_every_change_in_order(site: Site) -> None:
    ours, theirs = site.membership(), site.membership()
    await ours.register(member("early"))
    follower = Follower(theirs.watch())
    assert await follower.next() == Snapshot((member("early"),))

    registration = await ours.register(member("late"))
    await registration.update(member("late", version="2"))
    await registration.revoke()
    await ours.register(member("last"))

    told = [await follower.next() for _ in range(4)]
    assert told == [
        Joined(member("late")),
        Joined(member("late", version="2")),
        Left(MemberKind.PREFILL, MemberId("late")),
        Joined(member("last")),
    ]


async def test_an_update_is_there_when_it_returns(site: Site) -> None:
    membership = site.membership()
    registration = await membership.register(member())
    await registration.update(member(version="2"))
    assert await membership.members() == (member(version="2"),)


async def test_an_update_that_says_nothing_new_is_not_told(site: Site) -> None:
    membership = site.membership()
    registration = await membership.register(member())
    follower = Follower(membership.watch())
    await follower.next()
    await registration.update(member())
    await registration.update(member(version="2"))
    assert await follower.next() == Joined(member(version="2"))


async def test_an_update_keeps_kind_and_id(site: Site) -> None:
    registration = await site.membership().register(member())
    with pytest.raises(ValueError, match="keeps kind and id"):
        await registration.update(member("other"))
    with pytest.raises(ValueError, match="keeps kind and id"):
        await registration.update(member(kind=MemberKind.DECODE))


async def test_members_of_two_kinds_may_share_an_id(site: Site) -> None:
    membership = site.membership()
    first = await membership.register(member())
    await membership.register(member(kind=MemberKind.GATEWAY))
    assert len(await membership.members()) == 2
    await first.revoke()
    assert await membership.members() == (member(kind=MemberKind.GATEWAY),)


async def test_revoke_may_be_repeated_and_ends_updates(site: Site) -> None:
    membership = site.membership()
    registration = await membership.register(member())
    await registration.revoke()
    await registration.revoke()
    await registration.update(member(version="2"))
    assert await membership.members() == ()
    assert registration.fenced


async def test_a_member_that_vanished_leaves_with_its_lease(short_site: Site) -> None:
    dying = short_site.membership()
    await dying.register(member("dying"))
    await short_site.membership().register(member("living"))
    follower = Follower(short_site.membership().watch())
    await follower.until_members(member("dying"), member("living"))
    await dying.close()
    await short_site.let_leases_end()
    await follower.until_members(member("living"))


async def test_close_ends_a_waiting_watch_and_may_be_repeated(site: Site) -> None:
    membership = site.membership()
    watch = membership.watch()
    assert await anext(watch) == Snapshot(())
    waiting = asyncio.create_task(anext(watch, None))
    unread, unstarted = membership.watch(), membership.watch()
    await anext(unread)
    await asyncio.sleep(0)
    await membership.close()
    assert await waiting is None
    for each in (watch, unread, unstarted, membership.watch()):
        assert await anext(each, None) is None
    await membership.close()
    with pytest.raises(UnavailableError):
        await membership.register(member())


async def test_revoke_works_after_close(site: Site) -> None:
    membership, other = site.membership(), site.membership()
    registration = await membership.register(member())
    await membership.close()
    await registration.revoke()
    assert await other.members() == ()


async def test_a_cancelled_wait_loses_nothing(site: Site) -> None:
    membership = site.membership()
    follower = Follower(membership.watch())
    assert await follower.next() == Snapshot(())
    for turn in range(10):
        waiting = asyncio.create_task(anext(follower.watch))
        await asyncio.sleep(0)
        await membership.register(member(f"m{turn}"))
        if waiting.done():
            follower.take(waiting.result())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    await follower.until(lambda: len(follower.members) == 10)
    names = [change.member.member_id for change in follower.changes if isinstance(change, Joined)]
    assert names == [f"m{turn}" for turn in range(10)]


async def test_every_watch_sees_everything(site: Site) -> None:
    membership = site.membership()
    followers = [Follower(membership.watch()) for _ in range(3)]
    for follower in followers:
        await follower.next()
    everyone = [member(f"m{index}") for index in range(30)]
    await asyncio.gather(*(membership.register(each) for each in everyone))
    for follower in followers:
        await follower.until_members(*everyone)
    assert sorted(await membership.members(), key=repr) == sorted(everyone, key=repr)


async def test_an_outage_refuses_calls_and_silences_watches(site: Site) -> None:
    membership = site.membership()
    await membership.register(member())
    follower = Follower(membership.watch())
    await follower.next()
    waiting = asyncio.create_task(anext(follower.watch))
    async with site.outage():
        with pytest.raises(UnavailableError):
            await membership.members()
        with pytest.raises(UnavailableError):
            await membership.register(member("new"))
        assert not waiting.done()
    async with asyncio.timeout(SOON_S):
        first = await waiting
    assert isinstance(first, Snapshot)
    follower.take(first)
    await follower.until_members(member())


async def test_an_outage_longer_than_the_lease_fences_and_heals_by_itself(short_site: Site) -> None:
    membership = short_site.membership()
    registration = await membership.register(member())
    follower = Follower(short_site.membership().watch())
    await follower.next()
    waiting = asyncio.create_task(anext(follower.watch))

    async def fenced() -> bool:
        return registration.fenced

    async def healed() -> bool:
        return not registration.fenced

    async with short_site.outage():
        await short_site.let_leases_end()
        await eventually(fenced)
        assert not waiting.done(), "the last known members stay"
    await eventually(healed)
    async with asyncio.timeout(SOON_S):
        follower.take(await waiting)
    assert isinstance(follower.changes[-1], Snapshot)
    await follower.until_members(member())


async def test_the_newest_update_of_an_outage_is_written_on_return(site: Site) -> None:
    membership = site.membership()
    registration = await membership.register(member())
    follower = Follower(site.membership().watch())
    await follower.next()
    async with site.outage():
        for version in ("2", "3", "4"):
            await registration.update(member(version=version))
    await follower.until_members(member(version="4"))


async def test_a_revoke_in_an_outage_is_left_to_the_lease(short_site: Site) -> None:
    registration = await short_site.membership().register(member())
    follower = Follower(short_site.membership().watch())
    await follower.next()
    async with short_site.outage():
        await registration.revoke()
    await short_site.let_leases_end()
    await follower.until_members()


async def test_a_watch_that_starts_in_an_outage_begins_with_a_snapshot(site: Site) -> None:
    await site.membership().register(member())
    watch = site.membership().watch()
    waiting = asyncio.create_task(anext(watch))
    async with site.outage():
        await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        assert isinstance(await waiting, Snapshot)


async def test_a_change_is_a_value(site: Site) -> None:
    membership = site.membership()
    await membership.register(member())
    (seen,) = await membership.members()
    assert msgspec.json.decode(msgspec.json.encode(seen), type=Member) == seen
