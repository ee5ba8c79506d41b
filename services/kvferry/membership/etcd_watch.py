"""Watches members and records in etcd."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

from kvferry.membership.etcd_link import EtcdConnector, EtcdLink, Interrupted, log_fault, wait_for_cancelled
from kvferry.membership.etcd_records import Listing

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)

log = logging.getLogger(__name__)

_MAX_BACKLOG: Final = 4096  # changes; a slower reader gets a Snapshot instead


class View(Protocol[C_co]):
    """State of a watcher for the keys below one prefix; its changes are `C_co`."""

    prefix: str
    name: str  # of what lies there, in the log

    def replace(self, listing: Listing) -> C_co: ...

    def put(self, key: str, value: bytes) -> C_co | None: ...

    def delete(self, key: str) -> C_co | None: ...


class EtcdWatch(AsyncIterator[C], Generic[C]):
    """Has a reading task, so that a cancelled wait loses no change."""

    def __init__(
        self,
        view: View[C],
        connector: EtcdConnector,
        list_records: Callable[[EtcdLink], Awaitable[Listing]],
        *,
        pause_s: Callable[[int], float],
        on_ended: Callable[[EtcdWatch[C]], None],
    ) -> None:
        self._connector = connector
        self._list_records = list_records
        self._pause_s = pause_s
        self._on_ended = on_ended
        self._view = view
        self._changes: asyncio.Queue[C | None] = asyncio.Queue()  # None: the end
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def __anext__(self) -> C:
        if self._ended:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=f"watch {self._view.name}")
        change = await self._changes.get()
        if change is None:
            self._changes.put_nowait(None)  # other waiting readers end too
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """Idempotent."""
        await wait_for_cancelled([self.cancel()])

    def cancel(self) -> asyncio.Task[None] | None:
        if not self._ended:
            self._ended = True
            self._changes.put_nowait(None)
        if self._task is not None:
            self._task.cancel()
        self._on_ended(self)
        return self._task

    async def _follow(self) -> None:
        num_failures = 0
        while True:
            try:
                async with self._connector.link() as link:
                    listing = await self._list_records(link)
                    self._drain()  # the Snapshot replaces unread changes
                    self._changes.put_nowait(self._view.replace(listing))
                    async with link.watch(self._view.prefix, listing.revision + 1) as stream:
                        if num_failures:
                            log.info(f"{self._view.name} are watched again")
                        num_failures = 0
                        while True:
                            self._put(await stream.events())
            except Exception as error:
                num_failures += 1
                log_fault(f"{self._view.name} cannot be watched, the last known stay", error, num_failures)
            await asyncio.sleep(self._pause_s(num_failures))

    def _put(self, events: Iterable[Any]) -> None:
        for event in events:
            key = event.kv.key.decode(errors="replace")
            change = self._view.delete(key) if event.type == event.DELETE else self._view.put(key, event.kv.value)
            if change is not None:
                if self._changes.qsize() >= _MAX_BACKLOG:
                    raise Interrupted(f"the reader is {_MAX_BACKLOG} changes behind")
                self._changes.put_nowait(change)

    def _drain(self) -> None:
        while not self._changes.empty():
            self._changes.get_nowait()
