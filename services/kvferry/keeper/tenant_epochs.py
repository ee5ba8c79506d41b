"""Removes chunks of epochs that are over: of tenants that were deleted, or whose pages were reset."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from kvferry.errors import KvferryError, TierError
from kvferry.membership.base import Membership, RecordChange, Records
from kvferry.store.volume import Volume
from kvferry.tenancy import records
from kvferry.tenancy.records import PURGES, TENANTS, Purge

log = logging.getLogger(__name__)

REWATCH_S: Final = 1.0
# Between looks for files of before: another keeper of a shared volume may not have known of the new epoch yet.
REPEAT_S: Final = 60.0


class TenantEpochs:
    """`on_change` gets the lowest epoch of each tenant that counts, before chunks of lower ones are removed."""

    def __init__(
        self,
        membership: Membership,
        volumes: Sequence[Volume],
        keeper_id: str,
        on_change: Callable[[Mapping[str, int]], None],
    ) -> None:
        self._records = membership.records
        self._volumes = volumes
        self._keeper_id = keeper_id
        self._on_change = on_change
        self._lowest: dict[str, int] = {}
        self._to_report: dict[str, int] = {}
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._purge_for_ever())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self._records.watch(TENANTS):
                    self._apply(change)
            except Exception:
                log.exception("following the tenants failed; trying again")
            await asyncio.sleep(REWATCH_S)

    def _apply(self, change: RecordChange) -> None:
        values = change.by_name if isinstance(change, Records) else {change.name: change.value}
        for name, value in values.items():
            try:
                epoch = 0 if value is None else records.decode(name, value).epoch
            except ValueError as error:
                log.error("the record of tenant %.64r cannot be read: %.200s", name, error)
                continue
            # An epoch that is over stays over: a record that was lost with etcd's data brings no page back.
            if epoch > self._lowest.get(name, 0):
                self._lowest[name] = self._to_report[name] = epoch
                self._wanted.set()
        self._on_change(self._lowest)

    async def _purge_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(REPEAT_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            reports, self._to_report = self._to_report, {}
            for volume in self._volumes if self._lowest else ():
                await self._purge(volume, reports)

    async def _purge(self, volume: Volume, reports: Mapping[str, int]) -> None:
        lowest = dict(self._lowest)
        try:
            removed = await asyncio.to_thread(volume.purge_before, lowest)
        except TierError as error:
            log.error("chunks of epochs that are over stay for now: %s", error.message)
            self._to_report = {**reports, **self._to_report}
            return
        for tenant, num_chunks in removed.items():
            log.info("removed %d chunks of the tenant %s before epoch %d", num_chunks, tenant, lowest[tenant])
        for tenant, epoch in reports.items():
            purge = Purge(self._keeper_id, volume.volume_id, epoch, removed.get(tenant, 0), round(time.time()))
            await self._report(f"{PURGES}/{tenant}/{volume.volume_id}-{volume.writer}", purge)

    async def _report(self, name: str, purge: Purge) -> None:
        try:
            before = await self._records.read(name)
            await self._records.write(name, msgspec.json.encode(purge), before.revision if before is not None else 0)
        except KvferryError as error:
            log.warning("the removal of chunks cannot be reported: %s", error.message)
