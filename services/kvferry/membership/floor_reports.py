"""Reports on floors (`tenancy/floor_exchange.py`) as records of a folder, one of each node."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from kvferry.errors import KvferryError
from kvferry.membership.base import Record, RecordStore
from kvferry.tenancy.floor_exchange import FloorReport
from kvferry.tenancy.records import MAX_RECORD_BYTES

log = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
FORGET_S: Final = 3600.0  # after which a record of a node that is gone is removed


class FloorReports:
    """Reads and writes the reports of `folder`. Calls never raise for the registry."""

    def __init__(
        self,
        records: RecordStore,
        folder: str,
        now_s: Callable[[], float] = time.monotonic,
        forget_s: float = FORGET_S,
    ) -> None:
        self._store = records
        self._folder = folder
        self._now_s = now_s
        self._forget_s = forget_s
        self._revisions: dict[str, tuple[int, float]] = {}  # of records, and since when

    def __repr__(self) -> str:
        return f"<FloorReports {self._folder}: {len(self._revisions)} known>"

    async def read(self) -> Mapping[str, Record] | None:
        """Return all records by name, None if they cannot be read."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await self._store.read_all(self._folder)
        except (KvferryError, TimeoutError) as error:
            log.debug("reports on floors cannot be read: %s", error)
            return None

    async def publish(self, name: str, report: FloorReport, records: Mapping[str, Record]) -> None:
        # `records` are those that were read before it.
        own = records.get(name)
        await self._write(name, msgspec.json.encode(report), own.revision if own is not None else 0)

    async def withdraw(self, name: str) -> None:
        records = await self.read()
        if records is not None and (own := records.get(name)) is not None:
            await self._write(name, None, own.revision)

    async def _write(self, name: str, value: bytes | None, revision: int) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._store.write(f"{self._folder}/{name}", value, revision)
        except (KvferryError, TimeoutError) as error:
            log.debug("a report on floors cannot be written: %s", error)

    async def forget_old(self, records: Mapping[str, Record], own: str) -> None:
        """Remove a record of another node that has not changed for long."""
        now_s, before, has_removed = self._now_s(), self._revisions, False
        self._revisions = {}
        for name, record in records.items():
            revision, since_s = before.get(name, (0, now_s))
            if revision != record.revision:
                since_s = now_s
            self._revisions[name] = record.revision, since_s
            if name != own and since_s + self._forget_s <= now_s and not has_removed:
                # One in each step, which may wait for its time limit.
                has_removed = True
                await self._write(name, None, record.revision)


def reports_in(records: Mapping[str, Record]) -> Iterator[FloorReport]:
    for name, record in records.items():
        if len(record.value) > MAX_RECORD_BYTES:
            log.warning("the report %.100r on floors has %d bytes: it is passed over", name, len(record.value))
            continue
        try:
            report = msgspec.json.decode(record.value, type=FloorReport)
            report.check()
        except (ValueError, RecursionError) as error:
            log.warning("the report %.100r on floors cannot be read: %.200s", name, error)
            continue
        yield report
