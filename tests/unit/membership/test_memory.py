"""The switches of the test double, and watches that always end with the registry's content."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import UnavailableError
from kvferry.membership.base import Joined, Left, Member, MemberId, MemberKind, Snapshot
from kvferry_sim.membership import MemoryMembership, MemoryRegistration, MemoryRegistry, MemoryWatch


def member(name: str = "one", *, version: str = "1") -> Member:
    return Member(
        kind=MemberKind.DECODE, member_id=MemberId(name), address="127.0.0.1:1", model="tiny", version=version
    )


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def read_all(watch: MemoryWatch) -> list[object]:
    changes: list[object] = []
    while not watch._changes.empty():
        changes.append(watch._changes.get_nowait())
    return changes


async def test_a_forced_expiry_is_seen_and_a_living_owner_returns() -> None:
    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    await membership.register(member())
    watch = membership.watch()
    assert await anext(watch) == Snapshot((member(),))
    registry.expire(MemberId("one"))
    assert read_all(watch) == [Left(MemberKind.DECODE, MemberId("one")), Joined(member())]
    registry.check()


async def test_a_forced_expiry_ends_a_member_whose_owner_closed() -> None:
    registry = MemoryRegistry()
    owner = MemoryMembership(registry)
    await owner.register(member())
    await owner.close()
    assert registry.members() == (member(),)
    registry.expire(MemberId("one"))
    assert registry.members() == ()


async def test_after_a_long_outage_the_snapshot_lacks_who_returns_behind_it() -> None:
    clock = Clock()
    registry = MemoryRegistry(lease_ttl_s=10, clock=clock)
    membership = MemoryMembership(registry)
    registration = await membership.register(member())
    watch = membership.watch()
    await anext(watch)
    with registry.outage():
        clock.now_s += 10
        assert not registration.fenced
        clock.now_s += 0.1
        assert registration.fenced
        registry.expire_due()
        assert read_all(watch) == []
    assert read_all(watch) == [Snapshot(()), Joined(member())]
    assert not registration.fenced


async def test_after_a_short_outage_nobody_was_away() -> None:
    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    await membership.register(member())
    watch = membership.watch()
    await anext(watch)
    with registry.outage():
        pass
    assert read_all(watch) == [Snapshot((member(),))]


async def test_outages_nest() -> None:
    registry = MemoryRegistry()
    with registry.outage():
        with registry.outage():
            pass
        assert registry.out
        with pytest.raises(UnavailableError):
            await MemoryMembership(registry).members()
    assert await MemoryMembership(registry).members() == ()
    with pytest.raises(ValueError, match="no outage"):
        registry.end_outage()


async def test_a_delay_is_slept_before_every_answer() -> None:
    slept_s: list[float] = []

    async def sleep(pause_s: float) -> None:
        slept_s.append(pause_s)

    registry = MemoryRegistry(sleep=sleep)
    registry.delay_s = 3.5
    membership = MemoryMembership(registry)
    registration = await membership.register(member())
    await registration.update(member(version="2"))
    await membership.members()
    await anext(membership.watch())
    await registration.revoke()
    assert slept_s == [3.5] * 5


async def test_an_outage_that_begins_during_the_delay_refuses_the_call() -> None:
    registry = MemoryRegistry()
    registry.delay_s = 0.001
    call = asyncio.create_task(MemoryMembership(registry).members())
    await asyncio.sleep(0)
    with registry.outage(), pytest.raises(UnavailableError):
        await call


async def test_a_second_owner_of_an_id_fences_the_first() -> None:
    registry = MemoryRegistry()
    first = await MemoryMembership(registry).register(member())
    second = await MemoryMembership(registry).register(member(version="2"))
    assert first.fenced
    assert not second.fenced
    await first.revoke()
    assert registry.members() == (member(version="2"),)


async def test_the_first_owner_of_an_id_returns_when_the_second_goes() -> None:
    registry = MemoryRegistry()
    first = await MemoryMembership(registry).register(member())
    second = await MemoryMembership(registry).register(member(version="2"))
    await second.revoke()
    assert registry.members() == (member(),)
    assert not first.fenced
    registry.check()


async def test_state_is_in_the_repr() -> None:
    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    registration = await membership.register(member())
    watch = membership.watch()
    await anext(watch)
    assert repr(registry) == "<MemoryRegistry answering, 1 members, 1 watches>"
    assert repr(membership) == "<MemoryMembership 1 registrations, 1 watches>"
    await registration.revoke()
    assert repr(registration) == "<MemoryRegistration decode/one fenced>"
    await watch.aclose()
    await watch.aclose()
    assert repr(registry) == "<MemoryRegistry answering, 0 members, 0 watches>"


STEPS = st.sampled_from(["register", "update", "revoke", "close", "expire", "wait", "out", "back", "watch"])


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(st.tuples(STEPS, st.integers(0, 3)), max_size=40))
def test_a_watch_always_leads_to_what_the_registry_holds(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    registry = MemoryRegistry(lease_ttl_s=2, clock=clock)
    memberships = [MemoryMembership(registry) for _ in range(4)]
    registrations: dict[int, MemoryRegistration] = {}
    observer = MemoryMembership(registry)
    watches = [observer.watch()]
    await anext(watches[0])
    views: list[dict[tuple[MemberKind, MemberId], Member]] = [{}]
    for turn, (step, index) in enumerate(steps):
        match step:
            case "register":
                try:
                    registrations[index] = await memberships[index].register(member(f"m{index}"))
                except UnavailableError:
                    assert registry.out or memberships[index]._closed
            case "update" if index in registrations:
                await registrations[index].update(member(f"m{index}", version=str(turn)))
            case "revoke" if index in registrations:
                await registrations[index].revoke()
            case "close":
                await memberships[index].close()
            case "expire":
                registry.expire(MemberId(f"m{index}"))
            case "wait":
                clock.now_s += index
                registry.expire_due()
            case "out" if not registry.out:
                registry.begin_outage()
            case "back" if registry.out:
                registry.end_outage()
            case "watch" if not registry.out:
                watches.append(observer.watch())
                snapshot = await anext(watches[-1])
                assert isinstance(snapshot, Snapshot)
                views.append({(each.kind, each.member_id): each for each in snapshot.members})
        registry.check()
        for watch, view in zip(watches, views, strict=True):
            _apply(watch, view)
            if not registry.out:
                assert tuple(view[key] for key in sorted(view)) == registry.members()
    await observer.close()


def _apply(watch: MemoryWatch, view: dict[tuple[MemberKind, MemberId], Member]) -> None:
    for change in read_all(watch):
        match change:
            case Snapshot(members):
                view.clear()
                view.update({(each.kind, each.member_id): each for each in members})
            case Joined(each):
                assert view.get((each.kind, each.member_id)) != each, "a change without news"
                view[each.kind, each.member_id] = each
            case Left(kind, member_id):
                del view[kind, member_id]
