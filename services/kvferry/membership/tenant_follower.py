"""Follows the records of tenants, and gives the event loop a turn after every few of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvferry.errors import KvferryError
from kvferry.membership.base import RecordChange, Records, RecordStore
from kvferry.tenancy import records
from kvferry.tenancy.records import TenantRecord

log = logging.getLogger(__name__)

REWATCH_S: Final = 1.0
# What is read between two turns of the loop, which take about 3 ms: a key of a record has some 110 bytes, and takes a
# gateway 4 to 8 us. The other figures are the cost of the rest in such bytes.
TURN_BYTES: Final = 48 << 10
RECORD_BYTES: Final = 256
GONE_BYTES: Final = 4 << 10  # the record is not at hand: it may have had all the keys that are allowed
CHANGE_BYTES: Final = 4 << 10  # for `on_change`, which may copy a dictionary of all tenants


class TenantFollower:
    # Other tasks run between callbacks of one change, which is whole at `on_change`.

    def __init__(
        self,
        store: RecordStore,
        *,
        on_record: Callable[[TenantRecord], None],
        on_gone: Callable[[str], None],
        on_unreadable: Callable[[str, ValueError], None],
        on_change: Callable[[], None],
    ) -> None:
        """`on_record` is called again for known tenants in every snapshot, `on_gone` with names without a record.

        `on_change` is called after the other callbacks of each change. An exception from a callback restarts the watch.
        """
        self._store = store
        self._on_record = on_record
        self._on_gone = on_gone
        self._on_unreadable = on_unreadable
        self._on_change = on_change
        self._names: set[str] = set()  # of records, and of those that are gone and not yet reported so
        self._spent_bytes = 0  # since the loop's last turn
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<TenantFollower of {len(self._names)} records>"

    def start(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="follow tenants")

    async def close(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def take(self, change: RecordChange) -> None:
        """Read a change. Not to be called again before it returns."""
        if isinstance(change, Records):
            # The names first: where this ends in the middle, the next snapshot still knows which are gone.
            self._names.update(change.by_name)
            for name in self._names - change.by_name.keys():
                await self._spend(GONE_BYTES)
                self._drop(name)
            for name, value in change.by_name.items():
                await self._spend(RECORD_BYTES + len(value))
                self._read(name, value)
        elif change.value is None:
            await self._spend(GONE_BYTES)
            self._drop(change.name)
        else:
            await self._spend(RECORD_BYTES + len(change.value))
            self._names.add(change.name)
            self._read(change.name, change.value)
        await self._spend(CHANGE_BYTES)
        self._on_change()

    async def _follow(self) -> None:
        while True:
            try:
                async for change in self._store.watch(records.TENANTS):
                    await self.take(change)
            except KvferryError as error:
                log.warning("the tenants cannot be followed: %s", error.message)
            except Exception:
                log.exception("following the tenants failed; trying again")
            await asyncio.sleep(REWATCH_S)

    async def _spend(self, num_bytes: int) -> None:
        # Also from change to change: a watch with a backlog gives them without a turn of the loop between them.
        if self._spent_bytes + num_bytes > TURN_BYTES:
            self._spent_bytes = 0
            await asyncio.sleep(0)
        self._spent_bytes += num_bytes

    def _drop(self, name: str) -> None:
        self._on_gone(name)
        self._names.discard(name)

    def _read(self, name: str, value: bytes) -> None:
        try:
            record = records.decode(name, value)
        except ValueError as error:
            self._on_unreadable(name, error)
        else:
            self._on_record(record)
