"""Gives an engine the terms of tenants' records. Floors follow demand between engines (`tenancy/floor_exchange.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

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
_TIERS: Final = (CPU_TIER, DEVICE_TIER)
MAX_AT_ONCE: Final = 512  # tenants whose terms an engine takes between two steps: 12 ms a tier where it has seen 2,048
_LEAST: Final = 1.0  # token

T = TypeVar("T")
TierToTerms = Mapping[str, TierTerms]


class EngineTerms:
    # Engines of one role exchange floors, also those of several pools.

    def __init__(
        self,
        records: RecordStore,
        *,
        role: str,
        worker_id: str,
        capacities: Mapping[str, int],
        prompt_tokens: Callable[[], Mapping[str, int]],
        apply: Callable[[Mapping[str, Mapping[str, TierTerms | None]]], Awaitable[None]],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacities`: bytes by tier. `prompt_tokens`: of ended requests, by tenant. `apply`: `Engine.set_terms`."""
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
        # What is read of a change so far. It counts once it is whole: floors of half of one may exceed what there is.
        self._draft: dict[str, TierToTerms] = {}
        self._tenants: dict[str, TierToTerms] = {}
        self._with_floor: dict[str, TierToTerms] = {}  # those with a floor in an engine
        self._unapplied: set[str] = set()  # tenants whose terms have changed
        self._demand = FloorDemand(now_s, _LEAST)
        self._num_counted: Mapping[str, int] = {}  # prompt tokens by tenant, at the last step
        self._tiers = [
            _Tier(tier, capacity, worker_id, FloorReports(records, f"{ENGINE_FLOORS}/{role}-{tier}", now_s, FORGET_S))
            for tier, capacity in capacities.items()
            if tier in _TIERS and capacity
        ]
        # What the engine has, by tier and tenant.
        self._applied: dict[str, dict[str, TierTerms]] = {tier.name: {} for tier in self._tiers}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<EngineTerms of {self._worker_id}: {len(self._tenants)} tenants, {self._tiers}>"

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
        """Read others' reports, move floors, apply terms that changed, and publish. Never raises for the registry."""
        names, self._unapplied = self._unapplied, set()
        try:
            await self._apply_changed(names)
        except BaseException:
            self._unapplied |= names
            raise
        for tier in self._tiers:
            await tier.publish()

    async def _apply_changed(self, names: Collection[str]) -> None:
        tenants = [*self._with_floor.items(), *((name, self._tenants.get(name, {})) for name in names)]
        parts = {tier.name: floor_parts(tier.name, self._with_floor) for tier in self._tiers}
        demand = self._demand.count(self._new_tokens({tenant for each in parts.values() for tenant in each}))
        floors = {tier.name: await tier.step(parts[tier.name], demand, self._now_s) for tier in self._tiers}
        # Before others hear of it: they may count on what is offered.
        for at in range(0, len(tenants), MAX_AT_ONCE):
            some = tenants[at : at + MAX_AT_ONCE]
            changes = {tier: self._changed_terms(tier, some, moved) for tier, moved in floors.items()}
            if any(changes.values()):
                await self._apply(changes)
                for tier, changed in changes.items():
                    for name, each in changed.items():
                        _replace(self._applied[tier], name, each)

    def _changed_terms(
        self, tier: str, tenants: Iterable[tuple[str, TierToTerms]], floors: Mapping[str, float]
    ) -> dict[str, TierTerms | None]:
        terms = {name: tiers[tier].with_floor(floors.get(name)) if tiers else None for name, tiers in tenants}
        applied = self._applied[tier]
        return {name: each for name, each in terms.items() if each != applied.get(name)}

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
        self._set_terms(record.name, {} if record.is_deleted else {tier.name: tiers[tier.name] for tier in self._tiers})

    def _set_terms(self, name: str, terms: TierToTerms) -> None:
        if terms == self._tenants.get(name, {}):
            self._draft.pop(name, None)
        else:
            self._draft[name] = terms

    def _finish_change(self) -> None:
        draft, self._draft = self._draft, {}
        for name, terms in draft.items():
            _replace(self._tenants, name, terms)
            _replace(self._with_floor, name, terms if any(each.floor for each in terms.values()) else {})
        if draft:
            self._unapplied |= draft.keys()
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


def _replace(tenants: dict[str, T], name: str, terms: T | None) -> None:
    if terms:
        tenants[name] = terms
    else:
        tenants.pop(name, None)


class _Tier:
    def __init__(self, name: str, capacity: int, worker_id: str, reports: FloorReports) -> None:
        self.name = name
        self._capacity = capacity
        # All floors together may have a part of some tiers: for the exchange that part is the whole.
        self._most = MAX_FLOORS[name]
        self._num_units = int(capacity * self._most)
        self._worker_id = worker_id
        self._reports = reports
        self._exchange = FloorExchange(worker_id)
        self._records: Mapping[str, Record] = {}  # of others and of this worker, as they were read last
        self._report: FloorReport | None = None  # to publish
        self._is_published = False

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
