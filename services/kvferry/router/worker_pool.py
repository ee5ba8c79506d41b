"""The workers this gateway knows, and its links to them.

Membership says where to dial; the links say who is alive. A member that left the registry but whose stream still lives
is kept: the registry may have lost its lease in an outage, and a worker that really leaves ends its stream itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from kvferry.config import WorkerConfig
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import (
    WORKER_KINDS,
    Joined,
    Left,
    Member,
    MemberChange,
    MemberId,
    MemberKind,
    Membership,
    Snapshot,
)
from kvferry.router.placement import Candidate
from kvferry.router.pricing import WorkerView
from kvferry.task_set import TaskSet

log = logging.getLogger(__name__)

REWATCH_S = 1.0


class WorkerPool:
    """Owns one WorkerLink per known worker, from `start` to `close`."""

    def __init__(
        self,
        membership: Membership,
        gateway_id: str,
        worker: WorkerConfig = WorkerConfig(),  # noqa: B008 - frozen
        *,
        on_up: Callable[[WorkerLink], None] = lambda link: None,
        on_down: Callable[[MemberId], None] = lambda member_id: None,
        on_gone: Callable[[MemberId], None] = lambda member_id: None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker` says how workers are dialled.

        `on_up` and `on_down` are told of every link that came up or went down, `on_gone` of every worker that is
        forgotten, `on_change` of everything that `change` waits for. `clock` stamps views, in seconds.
        """
        self._on_up = on_up
        self._on_down = on_down
        self._up: dict[MemberId, int] = {}  # generation of the links that are up
        self._on_gone = on_gone
        self._tell_change = on_change
        self._clock = clock
        self._membership = membership
        self._gateway_id = gateway_id
        self._worker = worker
        self._links: dict[MemberId, WorkerLink] = {}
        self._views: dict[MemberId, WorkerView] = {}
        self._gone: set[MemberId] = set()  # left the registry, stream still alive
        self._changed = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = TaskSet()

    def __repr__(self) -> str:
        return f"<Roster {list(self._links.values())}>"

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._sweep())]

    def links(self, kind: MemberKind) -> list[WorkerLink]:
        """Every link of a kind, in a steady order, usable or not."""
        return [link for _, link in sorted(self._links.items()) if link.member.kind is kind]

    def usable(self, kind: MemberKind) -> list[WorkerLink]:
        return [link for link in self.links(kind) if link.usable]

    def link(self, member_id: MemberId) -> WorkerLink | None:
        """The link to a worker, if it is known and may be given requests now."""
        link = self._links.get(member_id)
        return link if link is not None and link.usable else None

    def views(self, kind: MemberKind) -> list[tuple[WorkerLink, WorkerView]]:
        """Every usable link of a kind with what its worker last said; a view is the same object until it says more."""
        views = []
        for member_id, link in self._links.items():
            if link.member.kind is not kind or not link.usable:
                continue
            view = self._views.get(member_id)
            if view is None or view.stats is not link.stats:
                view = self._views[member_id] = WorkerView(candidate_of(link.member), link.stats, self._clock())
            views.append((link, view))
        return views

    async def change(self) -> None:
        """Return when a link came up, went down or started draining after this call."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._closing.wait()
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    async def _follow(self) -> None:
        """For ever: a watch that fails is a fault of ours, and must not leave this gateway with yesterday's members."""
        while True:
            try:
                async for change in self._membership.watch():
                    self._apply(change)
            except Exception:
                log.exception("following the members failed; trying again")
            await asyncio.sleep(REWATCH_S)

    def _apply(self, change: MemberChange) -> None:
        match change:
            case Snapshot(members):
                present = {member.member_id for member in members}
                for member_id in self._links.keys() - present:
                    self._left(member_id)
                for member in members:
                    self._joined(member)
            case Joined(member):
                self._joined(member)
            case Left(_, member_id):
                self._left(member_id)

    def _joined(self, member: Member) -> None:
        if member.kind not in WORKER_KINDS:
            return
        self._gone.discard(member.member_id)
        known = self._links.get(member.member_id)
        if known is not None and _addresses(known.member) == _addresses(member):
            known.member = member
            return
        if known is not None:
            self._drop(member.member_id)
        self._links[member.member_id] = WorkerLink(member, self._gateway_id, self._on_change, self._worker)

    def _left(self, member_id: MemberId) -> None:
        if member_id in self._links:
            self._gone.add(member_id)
            self._on_change()

    def _on_change(self) -> None:
        self._changed.set()
        for member_id, link in self._links.items():
            if link.connected and self._up.get(member_id) != link.generation:
                self._up[member_id] = link.generation
                self._on_up(link)
            elif not link.connected and self._up.pop(member_id, None) is not None:
                self._on_down(member_id)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._tell_change()

    async def _sweep(self) -> None:
        """Drop links of members that left once their streams ended too."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            for member_id in list(self._gone):
                link = self._links.get(member_id)
                if link is None or not link.connected:
                    self._drop(member_id)

    def _drop(self, member_id: MemberId) -> None:
        self._gone.discard(member_id)
        self._views.pop(member_id, None)
        link = self._links.pop(member_id, None)
        if link is not None:
            if self._up.pop(member_id, None) is not None:
                self._on_down(member_id)
            self._on_gone(member_id)
            self._closing.spawn(link.close())


def candidate_of(member: Member) -> Candidate:
    return Candidate(member.member_id, member.model, member.block_size, member.kv_cache_dtype, member.node)


def _addresses(member: Member) -> tuple[str, str]:
    return member.address, member.link_address
