"""Tells each worker what its waiting tenants got from the other workers, so that shares hold over all of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final

from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import WORKER_KINDS, MemberId, MemberKind
from kvferry.router.worker_pool import WorkerPool

log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
# Totals that arrive so soon after a link came up may be of work long done.
SETTLING_S: Final = 10.0


class UsageExchange:
    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._seen: dict[MemberId, tuple[int, dict[str, float]]] = {}  # generation of the link, totals by tenant
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
        """Work of prompts and of streams is exchanged apart: one is not paid with the other."""
        for kind in WORKER_KINDS:
            self._exchange(kind)
        known = {link.member.member_id for kind in WORKER_KINDS for link in self._workers.links(kind)}
        self._seen = {member_id: seen for member_id, seen in self._seen.items() if member_id in known}

    def _exchange(self, kind: MemberKind) -> None:
        links = self._workers.usable(kind)
        new = {link.member.member_id: self._new_ms(link) for link in links}
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

    def _new_ms(self, link: WorkerLink) -> Mapping[str, float]:
        """Return what the worker did for each tenant since the last call."""
        generation, before = self._seen.get(link.member.member_id, (-1, {}))
        totals = dict(link.tenants.served_ms)
        self._seen[link.member.member_id] = link.generation, totals
        if generation != link.generation:
            return {}
        is_settling = asyncio.get_running_loop().time() - link.tenants.attached_s < SETTLING_S
        return {
            tenant: max(0.0, ms - before.get(tenant, ms if is_settling else 0.0))
            for tenant, ms in totals.items()
            if before.get(tenant) != ms
        }
