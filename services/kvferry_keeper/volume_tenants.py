"""Applies the records of tenants to volumes: what each may keep, and chunks of epochs that are over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvferry.errors import KvferryError, TierError
from kvferry.membership.base import Membership
from kvferry.membership.tenant_follower import TenantFollower
from kvferry.tenancy.records import PURGES, Purge, TenantRecord
from kvferry.tenancy.terms import VOLUME_TIER, TenantToTiers, TierContract, TierTerms, contracts_in, floor_parts
from kvferry_keeper import cluster_floors
from kvferry_keeper.cluster_floors import ClusterFloors
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.store.volume import Volume

log = logging.getLogger(__name__)

# Between looks for files of earlier epochs: another keeper of a shared volume may not have known of the new epoch yet.
REPEAT_S: Final = 60.0
EXPIRY_PERIOD_S: Final = 10.0
RETRY_S: Final = 1.0
CONFIGURE_PAUSE_S: Final = 0.2  # contracts of 10,000 tenants take some 10 ms


class VolumeTenants:
    def __init__(self, membership: Membership, keeper: Keeper, volumes: Sequence[Volume]) -> None:
        self._records = membership.records
        self._keeper = keeper
        self._volumes = volumes
        self._floors = ClusterFloors(membership.records, keeper.keeper_id)
        self._follower = TenantFollower(
            membership.records,
            on_record=self._take,
            on_gone=self._forget,
            on_unreadable=self._pass_over,
            on_change=self._finish_change,
        )
        self._draft: dict[str, Mapping[str, TierTerms]] = {}  # terms by tier, with what is read of a change so far
        self._tiers: TenantToTiers = {}  # the same after a whole change: floors of half of one may not fit
        self._lowest: dict[str, int] = {}
        keeper.lowest_epochs = self._lowest
        self._to_report: dict[str, int] = {}
        self._epochs_rose = False  # with what is read of a change so far
        self._wanted = asyncio.Event()
        self._changed = asyncio.Event()
        self._parts: dict[str, float] = {}  # floors, as parts of each volume
        self._parts_changed = asyncio.Event()
        self._waiting: list[asyncio.Event] = []  # for the next contracts to be applied
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._follower.start()
        duties = (
            *(self._configure_for_ever(), self._purge_for_ever(), self._expire_for_ever()),
            self._move_floors_for_ever(),
        )
        self._tasks = [asyncio.create_task(duty) for duty in duties]

    def begin_anew(self) -> None:
        """Call for a volume that is opened late."""
        self._to_report = {**self._lowest}
        self._changed.set()
        self._wanted.set()

    async def close(self) -> None:
        await self._follower.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, record: TenantRecord) -> None:
        if record.is_deleted:
            self._forget(record.name)
        else:
            self._draft[record.name] = record.tiers
        # An epoch that is over stays over: a record that was lost with etcd's data brings no page back.
        if record.epoch > self._lowest.get(record.name, 0):
            self._lowest[record.name] = self._to_report[record.name] = record.epoch
            self._epochs_rose = True

    def _forget(self, name: str) -> None:
        self._draft.pop(name, None)

    def _pass_over(self, name: str, error: ValueError) -> None:
        log.error("the record of tenant %.64r cannot be read: %.200s", name, error)

    def _finish_change(self) -> None:
        self._tiers = dict(self._draft)
        if self._epochs_rose:
            self._epochs_rose = False
            self._wanted.set()
        self._changed.set()

    async def _configure_for_ever(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            waiting, self._waiting = self._waiting, []
            try:
                have_all = await self._configure_volumes()
            except Exception:
                log.exception("volumes do not have the contracts of now; trying again")
                have_all = False
            if not have_all:
                # Floors move on only when volumes have what was given up.
                self._waiting += waiting
                self._changed.set()
                await asyncio.sleep(RETRY_S)
                continue
            for each in waiting:
                each.set()
            await asyncio.sleep(CONFIGURE_PAUSE_S)

    async def _configure_volumes(self) -> bool:
        tiers = self._tiers
        parts = await asyncio.to_thread(floor_parts, VOLUME_TIER, tiers)
        if parts != self._parts:
            self._parts = parts
            self._parts_changed.set()
        floors = {volume.volume_id: self._floors.floors_of(volume, parts) for volume in self._open_volumes()}
        return await asyncio.to_thread(self._configure_each, tiers, floors)

    def _configure_each(self, tiers: TenantToTiers, floors: Mapping[str, Mapping[str, int]]) -> bool:
        num_failed = 0
        for volume in self._volumes:
            try:
                self._configure(volume, tiers, floors.get(volume.volume_id, {}) if volume.is_open else {})
            except Exception:
                log.exception("volume %s does not have the contracts of now; trying again", volume.path)
                num_failed += 1
        return not num_failed

    def _configure(self, volume: Volume, tiers: TenantToTiers, moved: Mapping[str, int]) -> None:
        even = contracts_in(VOLUME_TIER, tiers, volume.capacity_bytes)
        try:
            volume.configure({**even, **_with_floors(even, moved, volume.capacity_bytes)})
        except ValueError:
            log.exception("floors that moved do not fit into volume %s: it has the even ones", volume.path)
            volume.configure(even)

    async def _apply_floors(self) -> None:
        applied = asyncio.Event()
        self._waiting.append(applied)
        self._changed.set()
        await applied.wait()

    async def _move_floors_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(cluster_floors.PERIOD_S):
                    await self._parts_changed.wait()
            self._parts_changed.clear()
            try:
                await self._floors.step(self._parts, self._open_volumes(), self._apply_floors)
            except Exception:
                log.exception("floors do not move; trying again")

    def _open_volumes(self) -> list[Volume]:
        return [volume for volume in self._volumes if volume.is_open]

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_PERIOD_S)
            for volume in self._open_volumes():
                try:
                    await asyncio.to_thread(volume.expire)
                except Exception:
                    log.exception("chunks of volume %s do not expire; trying again", volume.path)

    async def _purge_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REPEAT_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            reports, self._to_report = self._to_report, {}
            for volume in self._open_volumes() if self._lowest else ():
                await self._purge(volume, reports)

    async def _purge(self, volume: Volume, reports: Mapping[str, int]) -> None:
        lowest = dict(self._lowest)
        try:
            removed = await asyncio.to_thread(volume.purge_before, lowest)
        except Exception as error:
            if isinstance(error, TierError):
                log.error("chunks of epochs that are over stay for now: %s", error.message)
            else:
                log.exception("chunks of epochs that are over stay for now")
            self._to_report = {**reports, **self._to_report}
            return
        for tenant, num_chunks in removed.items():
            log.info("removed %d chunks of the tenant %s before epoch %d", num_chunks, tenant, lowest[tenant])
        for tenant, epoch in reports.items():
            purge = Purge(self._keeper.keeper_id, volume.volume_id, epoch, removed.get(tenant, 0), round(time.time()))
            await self._report(f"{PURGES}/{tenant}/{volume.volume_id}-{volume.writer}", purge)

    async def _report(self, name: str, purge: Purge) -> None:
        try:
            before = await self._records.read(name)
            await self._records.write(name, msgspec.json.encode(purge), before.revision if before is not None else 0)
        except KvferryError as error:
            log.warning("the removal of chunks cannot be reported: %s", error.message)


def _with_floors(
    contracts: Mapping[str, TierContract], floors: Mapping[str, int], capacity: int
) -> dict[str, TierContract]:
    return {
        tenant: dataclasses.replace(contracts[tenant], floor=floor, cap=max(floor, contracts[tenant].cap_in(capacity)))
        for tenant, floor in floors.items()
        if tenant in contracts
    }
