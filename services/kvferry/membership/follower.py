"""Follows members of some kinds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from kvferry.errors import KvferryError
from kvferry.membership.base import Joined, Left, Member, MemberChange, MemberId, MemberKind, Membership, Snapshot

log = logging.getLogger(__name__)

REWATCH_S = 1.0


class MemberFollower:
    def __init__(
        self,
        membership: Membership,
        kinds: Collection[MemberKind],
        *,
        on_joined: Callable[[Member], None] = lambda member: None,
        on_left: Callable[[MemberId], None] = lambda member_id: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_joined` is called again for known members in every snapshot and at each registration.

        `on_left` is called once for each member that left, `on_change` after the callbacks of each change. An exception
        from a callback restarts the watch.
        """
        self._membership = membership
        self._kinds = frozenset(kinds)
        self._on_joined = on_joined
        self._on_left = on_left
        self._on_change = on_change
        self._members: dict[MemberId, Member] = {}
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<MemberFollower of {sorted(self._members)}>"

    @property
    def members(self) -> Collection[Member]:
        return self._members.values()

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        # For ever: a watch that fails is a fault of this process, which must not be left with yesterday's members.
        while True:
            try:
                async for change in self._membership.watch():
                    self._apply(change)
            except KvferryError as error:
                log.warning("the members cannot be followed: %s", error.message)
            except Exception:
                log.exception("following the members failed; trying again")
            await asyncio.sleep(REWATCH_S)

    def _apply(self, change: MemberChange) -> None:
        match change:
            case Snapshot(members):
                present = {member.member_id: member for member in members if member.kind in self._kinds}
                for member_id in self._members.keys() - present.keys():
                    self._leave(member_id)
                for member in present.values():
                    self._join(member)
            case Joined(member) if member.kind in self._kinds:
                self._join(member)
            case Left(_, member_id) if member_id in self._members:
                self._leave(member_id)
        self._on_change()

    def _join(self, member: Member) -> None:
        self._members[member.member_id] = member
        self._on_joined(member)

    def _leave(self, member_id: MemberId) -> None:
        del self._members[member_id]
        self._on_left(member_id)
