"""Passes on what workers tell of tenants: to other workers, for shares over all of them, and to limits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import WORKER_KINDS, MemberId, MemberKind
from kvferry.router.worker_pool import WorkerPool

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0

_Work = Mapping[str, tuple[float, int, int]]  # ms, requests and tokens by tenant


class UsageSink(Protocol):
    def used(self, tenant: str, num_requests: int, num_tokens: int) -> None: ...

    def set_running(self, elsewhere: Mapping[str, int]) -> None: ...


class UsageExchange:
    def __init__(self, workers: WorkerPool, limits: UsageSink) -> None:
        self._workers = workers
        self._limits = limits
        # Generation of the link; ms, requests and tokens by tenant.
        self._seen: dict[MemberId, tuple[int, dict[str, tuple[float, int, int]]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="exchange usage")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                self.exchange()
            except Exception:
                log.exception("usage was not exchanged; trying again")

    def exchange(self) -> None:
        """Work of prompts and of streams, and that of each pool, is exchanged apart: one does not pay for the other."""
        for kind in WORKER_KINDS:
            links = self._workers.usable(kind)
            work = {link.member.member_id: self._new_work(link) for link in links}
            if kind is MemberKind.DECODE:
                self._tell_limits(links, work.values())
            for pool in {link.member.pool for link in links}:
                self._exchange([link for link in links if link.member.pool == pool], work)
        known = {link.member.member_id for kind in WORKER_KINDS for link in self._workers.links(kind)}
        self._seen = {member_id: seen for member_id, seen in self._seen.items() if member_id in known}

    def _exchange(self, links: Sequence[WorkerLink], work: Mapping[MemberId, _Work]) -> None:
        new = {
            link.member.member_id: {tenant: ms for tenant, (ms, _, _) in work[link.member.member_id].items()}
            for link in links
        }
        total: Counter[str] = Counter()
        for got in new.values():
            total.update(got)
        for link in links:
            backlogs = link.stats.backlogs
            if backlogs is None or len(links) == 1:
                continue
            own = new[link.member.member_id]
            elsewhere = {tenant: total[tenant] - own.get(tenant, 0.0) for tenant in backlogs.by_tenant}
            link.send_elsewhere(elsewhere, len(links))

    def _tell_limits(self, links: Sequence[WorkerLink], work: Iterable[_Work]) -> None:
        for by_tenant in work:
            for tenant, (_, num_requests, num_tokens) in by_tenant.items():
                if num_requests or num_tokens:
                    self._limits.used(tenant, num_requests, num_tokens)
        running: Counter[str] = Counter()
        for link in links:
            running.update(link.tenants.running)
        self._limits.set_running(running)

    def _new_work(self, link: WorkerLink) -> _Work:
        """Return ms, requests and tokens of each tenant since the last call."""
        generation, before = self._seen.get(link.member.member_id, (-1, {}))
        used = link.tenants.used
        totals = {tenant: (ms, *used[tenant]) for tenant, ms in link.tenants.served_ms.items()}
        self._seen[link.member.member_id] = link.generation, totals
        if generation != link.generation:
            before = {}
        new = {}
        for tenant, now in totals.items():
            # The ms of a tenant that is told of for the first time may be of work long done; the rest is of this link.
            was = before.get(tenant, (now[0], 0, 0))
            if was != now:
                new[tenant] = max(0.0, now[0] - was[0]), max(0, now[1] - was[1]), max(0, now[2] - was[2])
        return new
