"""Following the members of some kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvferry.membership import follower as follower_module
from kvferry.membership.base import Joined, Left, Member, MemberChange, MemberId, MemberKind, Snapshot
from kvferry.membership.follower import MemberFollower
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import until


def member(name: str, kind: MemberKind = MemberKind.KEEPER, address: str = "a") -> Member:
    return Member(kind=kind, member_id=MemberId(name), address=address, model="m", version="0")


class Script(MemoryMembership):
    """Each watch gives the next list of changes, then fails where it ends with an exception, else stays silent."""

    def __init__(self, *watches: list[MemberChange | Exception]) -> None:
        super().__init__(MemoryRegistry())
        self._scripts = list(watches)

    async def watch(self) -> AsyncIterator[MemberChange]:  # type: ignore[override]
        script = self._scripts.pop(0)
        for change in script:
            if isinstance(change, Exception):
                raise change
            yield change
        await asyncio.Event().wait()


class Log:
    """The callbacks of a follower, in order."""

    def __init__(self, *watches: list[MemberChange | Exception]) -> None:
        self.calls: list[str] = []
        self.follower = MemberFollower(
            Script(*watches),
            (MemberKind.KEEPER,),
            on_joined=lambda member: self.calls.append(f"+{member.member_id}@{member.address}"),
            on_left=lambda member_id: self.calls.append(f"-{member_id}"),
            on_change=lambda: self.calls.append("."),
        )

    async def until(self, *calls: str) -> None:
        self.follower.start()
        try:
            await until(lambda: self.calls == list(calls), what=f"{self.calls} is {list(calls)}")
        finally:
            await self.follower.close()


async def test_members_of_other_kinds_are_passed_over() -> None:
    log = Log(
        [
            Snapshot((member("k"), member("p", MemberKind.PREFILL))),
            Joined(member("d", MemberKind.DECODE)),
            Left(MemberKind.DECODE, MemberId("d")),
            Joined(member("l")),
        ]
    )
    await log.until("+k@a", ".", ".", ".", "+l@a", ".")
    assert {member.member_id for member in log.follower.members} == {"k", "l"}


async def test_a_snapshot_replaces_the_members_and_names_those_that_left() -> None:
    log = Log([Snapshot((member("k"), member("l"))), Snapshot((member("l", address="b"), member("m")))])
    await log.until("+k@a", "+l@a", ".", "-k", "+l@b", "+m@a", ".")


async def test_a_member_leaves_once() -> None:
    gone = Left(MemberKind.KEEPER, MemberId("k"))
    log = Log([Snapshot((member("k"),)), gone, gone])
    await log.until("+k@a", ".", "-k", ".", ".")
    assert not log.follower.members


async def test_a_failed_watch_is_opened_anew_and_what_it_missed_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "REWATCH_S", 0.01)
    log = Log([Snapshot((member("k"),)), RuntimeError("of this test")], [Snapshot((member("l"),))])
    await log.until("+k@a", ".", "-k", "+l@a", ".")


async def test_a_callback_that_fails_does_not_end_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "REWATCH_S", 0.01)
    joined: list[MemberId] = []

    def fail_once(member: Member) -> None:
        joined.append(member.member_id)
        if len(joined) == 1:
            raise RuntimeError("of this test")

    follower = MemberFollower(
        Script([Snapshot((member("k"),))], [Snapshot((member("k"),))]), (MemberKind.KEEPER,), on_joined=fail_once
    )
    follower.start()
    try:
        await until(lambda: len(joined) == 2)
    finally:
        await follower.close()
