"""The links to all workers.

Membership gives addresses; links show which workers are alive. Outages end leases, so a worker that left the registry
is kept while its link lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvferry.config import WorkerConfig
from kvferry.link.identity import GatewayIdentity
from kvferry.link.quarantine import Quarantine
from kvferry.link.worker_link import OnResidency, WorkerLink
from kvferry.membership.base import WORKER_KINDS, Member, MemberId, MemberKind, Membership
from kvferry.membership.follower import MemberFollower
from kvferry.router.engine_losses import EngineLosses
from kvferry.router.placement import Candidate, unpaired
from kvferry.router.room_queue import RoomQueues
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

QUARANTINE_TIMEOUT_S = 2.0  # how long the client of a request that ends engines waits for its 500


class WorkerPool:
    def __init__(
        self,
        membership: Membership,
        gateway_id: str,
        worker: WorkerConfig = WorkerConfig(),  # noqa: B008 - frozen
        *,
        identity_of: Callable[[str], GatewayIdentity | None] | None = None,
        max_queued_requests: int = 0,
        on_up: Callable[[WorkerLink], None] = lambda link: None,
        on_down: Callable[[WorkerLink], None] = lambda link: None,
        on_residency: OnResidency = lambda link, message: None,
        on_gone: Callable[[MemberId], None] = lambda member_id: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_up` and `on_down` report links, `on_gone` forgotten workers, `on_change` all these and draining.

        `identity_of` returns what this gateway says of itself to workers of a pool. None: it does not serve their model
        now, so they are not dialled before `models_changed`. `max_queued_requests` is of each pool.
        """
        self.queues = RoomQueues(max_queued_requests, time.monotonic)
        self.losses, self.quarantined = EngineLosses(self.queues.note_room), Quarantine()
        unknown = GatewayIdentity()
        self._identity_of = identity_of or (lambda pool: unknown)
        self._not_served: dict[MemberId, Member] = {}
        self._on_up = on_up
        self._on_down = on_down
        self._on_residency = on_residency
        self._up: dict[MemberId, int] = {}  # generation of the links that are up
        self._on_gone = on_gone
        self._notify_change = on_change
        self._follower = MemberFollower(membership, WORKER_KINDS, on_joined=self._joined, on_left=self._left)
        self._gateway_id = gateway_id
        self._worker = worker
        self._links: dict[MemberId, WorkerLink] = {}
        self._candidates: dict[MemberId, Candidate] = {}
        self._adapter_keys: dict[tuple[str, str], str | None] = {}  # by name and pool, until a link changes
        self._gone: set[MemberId] = set()  # left the registry, link still up
        self._changed = asyncio.Event()
        self._waiters: set[asyncio.Future[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None
        self._closing = TaskSet()

    def __repr__(self) -> str:
        return f"<WorkerPool {list(self._links.values())}>"

    def start(self) -> None:
        self._follower.start()
        self._sweeping = asyncio.create_task(self._sweep())

    def links(self, kind: MemberKind) -> list[WorkerLink]:
        return [link for _, link in sorted(self._links.items()) if link.member.kind is kind]

    def usable(self, kind: MemberKind, pool: str | None = None) -> list[WorkerLink]:
        """Return a kind's usable links, of one pool or of all."""
        return [link for link in self.links(kind) if link.usable and pool in (None, link.member.pool)]

    def adapter_key(self, name: str, pool: str) -> str | None:
        """Return the adapter of that name that most usable workers have, or None."""
        if (name, pool) not in self._adapter_keys:
            self._adapter_keys[name, pool] = self._find_adapter(name, pool)
        return self._adapter_keys[name, pool]

    def _find_adapter(self, name: str, pool: str) -> str | None:
        # While its files change, workers have different ones.
        counts: Counter[str] = Counter()
        on_decode: set[str] = set()
        for link in self._links.values():
            if link.adapters and link.usable and link.member.pool == pool:
                found = [each for each in link.adapters if each.rpartition("@")[0] == name]
                counts.update(found)
                if link.member.kind is MemberKind.DECODE:
                    on_decode.update(found)
        # Gateways choose the same one where they see the same workers.
        return max(sorted(on_decode), key=lambda each: counts[each], default=None)

    def incompatible(self) -> list[WorkerLink]:
        """Return links to workers that this gateway must not work with."""
        return [link for kind in WORKER_KINDS for link in self.links(kind) if link.why_incompatible]

    def unpaired(self) -> Iterator[tuple[Member, Member]]:
        """Yield each usable worker without a partner, and a worker of the other role."""
        for pool in sorted({link.member.pool for link in self._links.values()}):
            members = {kind: [link.member for link in self.usable(kind, pool)] for kind in WORKER_KINDS}
            yield from unpaired(members[MemberKind.PREFILL], members[MemberKind.DECODE])

    async def quarantine(self, message: pb.Quarantined) -> None:
        """Send to all workers, and return when their gateways have confirmed or QUARANTINE_TIMEOUT_S is over."""
        telling = [link.quarantine.tell_and_wait(message) for link in self._links.values()]
        try:
            async with asyncio.timeout(QUARANTINE_TIMEOUT_S):
                await asyncio.gather(*telling)
        except TimeoutError:
            log.warning("not every gateway has confirmed a quarantine within %g s", QUARANTINE_TIMEOUT_S)

    def link(self, member_id: MemberId) -> WorkerLink | None:
        link = self._links.get(member_id)
        return link if link is not None and link.usable else None

    def candidates(self, kind: MemberKind, pool: str) -> list[tuple[WorkerLink, Candidate]]:
        """Return a kind's usable links of a pool, as the same objects until the next report."""
        candidates = []
        for member_id, link in self._links.items():
            if link.member.kind is not kind or link.member.pool != pool or not link.usable:
                continue
            candidate = self._candidates.get(member_id)
            if candidate is None or candidate.stats is not link.stats:
                candidate = self._candidates[member_id] = Candidate(link.member, link.stats, time.monotonic())
            candidates.append((link, candidate))
        return candidates

    async def change(self) -> None:
        """Wait until a link comes up, goes down or starts draining."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def models_changed(self) -> None:
        """Dial the workers of models that are served now."""
        waiting, self._not_served = self._not_served, {}
        for member in waiting.values():
            self._joined(member)

    async def close(self) -> None:
        await self._follower.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self._closing.wait()
        links, self._links = self._links, {}
        await asyncio.gather(*(link.close() for link in links.values()))

    def _joined(self, member: Member) -> None:
        self._gone.discard(member.member_id)
        known = self._links.get(member.member_id)
        if known is not None and _fixed(known.member) == _fixed(member):
            known.member = member
            self._candidates.pop(member.member_id, None)
            return
        if known is not None:
            self._drop(member.member_id)
        identity = self._identity_of(member.pool)
        if identity is None:
            self._not_served[member.member_id] = member
            return
        self._links[member.member_id] = WorkerLink(
            *(member, self._gateway_id, self._on_change, self._worker),
            identity=identity,
            on_residency=self._on_residency,
            on_room=lambda: self.queues.note_room(member.pool),
            on_survived=lambda: self.losses.forgive(member.member_id),
            on_vanished=lambda: self.losses.note_vanished(member.member_id, time.monotonic()),
            on_quarantined=self._learn_quarantined,
        )

    def _learn_quarantined(self, message: pb.Quarantined) -> None:
        new = self.quarantined.add_from_wire(message, time.monotonic())
        if new is not None:
            log.warning("%d requests are in quarantine, as another gateway says", len(new.requests))

    def _left(self, member_id: MemberId) -> None:
        self._not_served.pop(member_id, None)
        if member_id in self._links:
            self._gone.add(member_id)
            self._on_change()

    def _on_change(self) -> None:
        self._adapter_keys.clear()
        self._changed.set()
        for member_id, link in self._links.items():
            if link.connected and self._up.get(member_id) != link.generation:
                self._up[member_id] = link.generation
                self._on_up(link)
                if known := self.quarantined.to_wire(time.monotonic()):
                    link.quarantine.tell(known)
            elif not link.connected and self._up.pop(member_id, None) is not None:
                self._on_down(link)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self.queues.note_room()
        self._notify_change()

    async def _sweep(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            for member_id in list(self._gone):
                link = self._links.get(member_id)
                if link is None or not link.connected:
                    self._drop(member_id)

    def _drop(self, member_id: MemberId) -> None:
        self._gone.discard(member_id)
        self._adapter_keys.clear()
        self._candidates.pop(member_id, None)
        link = self._links.pop(member_id, None)
        if link is not None:
            link.identity.left(member_id)
            if self._up.pop(member_id, None) is not None:
                self._on_down(link)
            self._on_gone(member_id)
            self._closing.spawn(link.close())


def _fixed(member: Member) -> tuple[str, str, str]:
    return member.address, member.link_address, member.pool
