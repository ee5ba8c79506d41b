"""One keeper's part in floors that follow demand from node to node (`tenancy/floor_exchange.py`)."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from kvferry.membership.base import Record, RecordStore
from kvferry.membership.floor_reports import FloorReports, reports_in
from kvferry.tenancy.floor_exchange import FloorDemand, FloorExchange, FloorReport, Parts, moving_parts
from kvferry.tenancy.pages.outcome import Cause
from kvferry.tenancy.records import FLOORS
from kvferry_keeper.store.volume import Volume

PERIOD_S: Final = 10.0
_LEAST: Final = 0.01  # uses


class ClusterFloors:
    """Floors of a node over its open volumes."""

    def __init__(self, records: RecordStore, node: str, now_s: Callable[[], float] = time.monotonic) -> None:
        self._reports = FloorReports(records, FLOORS, now_s)
        self._now_s = now_s
        self._exchange = FloorExchange(node)
        self._parts: Parts = {}
        self._capacities: dict[str, int] = {}  # of the volumes that count, by id
        self._num_counted: dict[tuple[str, str], int] = {}  # by volume and tenant, since the volume was opened
        self._demand = FloorDemand(now_s, _LEAST)
        self._is_new = True

    def __repr__(self) -> str:
        return f"<ClusterFloors {self._exchange!r}>"

    async def step(self, parts: Parts, volumes: Sequence[Volume], apply: Callable[[], Awaitable[None]]) -> None:
        """Read others' reports, move floors, `apply` them and publish a report. Never raises for the registry."""
        if not (parts and volumes):
            self._parts, self._capacities = parts, {}
            return
        name = f"{volumes[0].volume_id}-{volumes[0].writer}"  # the same after a restart
        read = await self._reports.read()
        records: Mapping[str, Record] = {} if read is None else read
        if self._is_new:
            # Records of any volume of this keeper: its first volume may be opened later than it was before.
            before = [record for other, record in records.items() if other.endswith(f"-{volumes[0].writer}")]
            if read is None or any(map(_may_have_offers, before)):
                self._exchange.hold(self._now_s())
            self._is_new = False
        for report in reports_in({other: record for other, record in records.items() if other != name}):
            self._exchange.see(report, self._now_s())
        demand = self._demand.count(self._new_uses(moving_parts(parts), volumes))
        self._parts, self._capacities = parts, {volume.volume_id: volume.capacity_bytes for volume in volumes}
        report = self._exchange.step(self._now_s(), parts, sum(self._capacities.values()), demand)
        # Before others hear of it: they may count on what is offered, and no more on what they gave back.
        await apply()
        await self._reports.publish(name, report, records)
        await self._reports.forget_old(records, name)

    def floors_of(self, volume: Volume, parts: Parts) -> dict[str, int]:
        """Return floors in bytes of tenants whose floors move, if the last step had this volume and `parts`."""
        capacity = sum(self._capacities.values())
        if parts != self._parts or self._capacities.get(volume.volume_id) != volume.capacity_bytes or not capacity:
            return {}
        floors = self._exchange.floors(self._now_s())
        return {tenant: units * volume.capacity_bytes // capacity for tenant, units in floors.items()}

    def _new_uses(self, parts: Parts, volumes: Sequence[Volume]) -> Mapping[str, float]:
        new = dict.fromkeys(parts, 0.0)
        counted: dict[tuple[str, str], int] = {}
        for volume in volumes:
            for tenant, usage in volume.usages(parts).items():
                key = volume.volume_id, tenant
                lost = usage.evicted[Cause.BORROWED] + usage.evicted[Cause.OVER_CAP]
                counted[key] = usage.num_uses + lost
                new[tenant] += max(0, counted[key] - self._num_counted.get(key, 0))
        self._num_counted = counted
        return new


def _may_have_offers(record: Record) -> bool:
    # One that cannot be read may have said anything.
    try:
        return bool(msgspec.json.decode(record.value, type=FloorReport).offers)
    except (ValueError, RecursionError):
        return True
