"""One engine's part in floors that follow demand from engine to engine (`tenancy/floor_exchange.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from kvferry.membership.base import Record, RecordStore
from kvferry.membership.floor_reports import FloorReports, reports_in
from kvferry.membership.tenant_follower import TenantFollower
from kvferry.tenancy.floor_exchange import FloorDemand, FloorExchange, FloorReport, Parts
from kvferry.tenancy.records import ENGINE_FLOORS, TenantRecord
from kvferry.tenancy.terms import CPU_TIER, DEVICE_TIER, MAX_FLOORS, TierTerms, floor_parts

log = logging.getLogger(__name__)

PERIOD_S: Final = 10.0
PAUSE_S: Final = 0.5  # at least, where records change one after another: an engine has a change within a second
WITHDRAWAL_S: Final = 1.0  # at most, at the end of a worker
FORGET_S: Final = 600.0  # as `FloorReports`: workers have new names after each start
# Reports have a part for each worker, and each worker reads all. Those of 64 are 1 MB/s for etcd.
MAX_MOVING: Final = 64  # workers of a role whose floors move: the first by name; others keep the even shares
MAX_ENDED: Final = 1024  # tenants that are known to have had a floor
_TIERS: Final = (CPU_TIER, DEVICE_TIER)
_LEAST: Final = 1.0  # token


class EngineFloors:
    # Engines of one role exchange floors, also those of several pools.

    def __init__(
        self,
        records: RecordStore,
        *,
        role: str,
        worker_id: str,
        capacities: Mapping[str, int],
        prompt_tokens: Callable[[], Mapping[str, int]],
        apply: Callable[[Mapping[str, Mapping[str, float]]], Awaitable[None]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacities`: bytes by tier. `prompt_tokens`: of ended requests, by tenant. `apply`: `Engine.set_floors`."""
        self._records = records
        self._worker_id = worker_id
        self._prompt_tokens = prompt_tokens
        self._apply = apply
        self._now_s = now_s
        self.follower = TenantFollower(
            records,
            on_record=self._take,
            on_gone=lambda name: self._set_terms(name, {}),
            on_unreadable=lambda name, error: log.debug("the record of %.64r cannot be read: %.200s", name, error),
            on_change=self._finish_change,
        )
        # Terms by tier, of tenants with a floor in an engine: with what is read of a change so far, and after a whole
        # one. Floors of half of one may exceed what there is.
        self._draft: dict[str, Mapping[str, TierTerms]] = {}
        self._differs = False  # `_draft` from `_tenants`
        self._tenants: Mapping[str, Mapping[str, TierTerms]] = {}
        self._demand = FloorDemand(now_s, _LEAST)
        self._num_counted: Mapping[str, int] = {}  # prompt tokens by tenant, at the last step
        self._tiers = [
            _Tier(tier, capacity, worker_id, FloorReports(records, f"{ENGINE_FLOORS}/{role}-{tier}", now_s, FORGET_S))
            for tier, capacity in capacities.items()
            if tier in _TIERS and capacity
        ]
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<EngineFloors of {self._worker_id}: {len(self._tenants)} tenants, {self._tiers}>"

    def start(self) -> None:
        if self._tiers:
            self.follower.start()
            self._tasks = [asyncio.create_task(self._move_for_ever())]

    async def close(self) -> None:
        await self.follower.close()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Others remove what is left behind by a worker that could not.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_S):
                await asyncio.gather(*(tier.withdraw() for tier in self._tiers), return_exceptions=True)

    async def step(self) -> None:
        """Read others' reports, move floors, apply them, and publish. Never raises for the registry."""
        floors: dict[str, Mapping[str, float]] = {}
        parts = {tier.name: floor_parts(tier.name, self._tenants) for tier in self._tiers}
        demand = self._demand.count(self._new_tokens({tenant for each in parts.values() for tenant in each}))
        for tier in self._tiers:
            moved = await tier.step(parts[tier.name], demand, self._now_s)
            floors[tier.name] = {**tier.ended(parts[tier.name]), **moved}
        # Before others hear of it: they may count on what is offered.
        await self._apply(floors)
        for tier in self._tiers:
            await tier.publish()

    def _new_tokens(self, tenants: Collection[str]) -> dict[str, int]:
        totals, before = self._prompt_tokens(), self._num_counted
        self._num_counted = counted = {tenant: totals.get(tenant, 0) for tenant in tenants}
        # A total that fell was forgotten, and begun again.
        return {
            tenant: total if total < before.get(tenant, 0) else total - before.get(tenant, 0)
            for tenant, total in counted.items()
        }

    def _take(self, record: TenantRecord) -> None:
        tiers = record.tiers
        terms = {} if record.is_deleted else {tier: tiers[tier] for tier in _TIERS}
        self._set_terms(record.name, terms if any(each.floor for each in terms.values()) else {})

    def _set_terms(self, name: str, terms: Mapping[str, TierTerms]) -> None:
        if terms == self._draft.get(name, {}):
            return
        self._differs = True
        if terms:
            self._draft[name] = terms
        else:
            del self._draft[name]

    def _finish_change(self) -> None:
        if self._differs:
            self._differs = False
            self._tenants = dict(self._draft)
            self._changed.set()

    async def _move_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.step()
            except Exception:
                log.exception("floors do not move; trying again")
            await asyncio.sleep(PAUSE_S)


class _Tier:
    def __init__(self, name: str, capacity: int, worker_id: str, reports: FloorReports) -> None:
        self.name = name
        self._capacity = capacity
        # All floors together may have a part of some tiers: for the exchange that part is the whole.
        self._most = MAX_FLOORS[name]
        self._worker_id = worker_id
        self._reports = reports
        self._exchange = FloorExchange(worker_id)
        self._records: Mapping[str, Record] = {}  # of others and of this worker, as they were read last
        self._report: FloorReport | None = None  # to publish
        self._is_published = False
        self._had_floor: dict[str, None] = {}  # tenants, first those that had one for longest

    def __repr__(self) -> str:
        return f"{self.name}: {self._exchange!r}"

    async def step(self, parts: Parts, demand: Mapping[str, float], now_s: Callable[[], float]) -> dict[str, float]:
        self._report = None
        if not parts:
            self._records = {}
            await self.withdraw()
            return {}
        self._records = await self._reports.read() or {}
        # With 64 workers and tenants it takes 0.1 s, through which tokens pass the event loop.
        return await asyncio.to_thread(self._move, parts, demand, now_s)

    def _move(self, parts: Parts, demand: Mapping[str, float], now_s: Callable[[], float]) -> dict[str, float]:
        moving = sorted({*self._records, self._worker_id})[:MAX_MOVING]
        others = {name: self._records[name] for name in moving if name != self._worker_id}
        if self._worker_id in moving:
            for report in reports_in(others):
                self._exchange.see(report, now_s())
        report = self._exchange.step(
            now_s(), {tenant: part / self._most for tenant, part in parts.items()}, self._num_units, demand
        )
        # Without a report others count on nothing of this worker, in time.
        self._report = report if self._worker_id in moving else None
        floors = self._exchange.floors(now_s())
        return {tenant: units / self._capacity for tenant, units in floors.items()}

    def ended(self, parts: Parts) -> dict[str, float]:
        # An engine knows the terms of a tenant's last request, and would bring such a floor back.
        for tenant in parts:
            self._had_floor.pop(tenant, None)
        self._had_floor.update(dict.fromkeys(parts))
        while len(self._had_floor) > MAX_ENDED and (first := next(iter(self._had_floor))) not in parts:
            del self._had_floor[first]
        return {tenant: 0.0 for tenant in self._had_floor if tenant not in parts}

    async def publish(self) -> None:
        if self._report is not None:
            self._is_published = True
            await self._reports.publish(self._worker_id, self._report, self._records)
        # Also where this worker's floors do not move: the names of dead ones may be all that come before it.
        await self._reports.forget_old(self._records, self._worker_id)

    async def withdraw(self) -> None:
        if self._is_published:
            self._is_published = False
            await self._reports.withdraw(self._worker_id)

    @property
    def _num_units(self) -> int:
        return int(self._capacity * self._most)
