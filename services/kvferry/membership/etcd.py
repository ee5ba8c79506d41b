"""Members in etcd: JSON under `{prefix}/members/{kind}/{member_id}` and the owner's lease.

Each task owns one connection. A fault discards it, so that certificates and passwords are read again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar

from kvferry.config import MembershipConfig
from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import DEFAULT_RETRY, Member, MemberChange, Record, RecordChange, RetryPolicy
from kvferry.membership.etcd_link import EtcdConnector, EtcdLink, Interrupted, log_fault, wait_for_cancelled
from kvferry.membership.etcd_records import Listing, MemberView, RecordView
from kvferry.membership.etcd_registration import EtcdRegistration

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


class EtcdMembership:
    """Connects at the first call."""

    def __init__(
        self,
        config: MembershipConfig,
        *,
        retry: RetryPolicy = DEFAULT_RETRY,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ConfigError without endpoints or for unreadable certificate and password files."""
        if not config.endpoints:
            raise ConfigError(
                "membership.endpoints: at least one host:port of etcd is needed; `kvferry status` shows that of a "
                "cluster on this machine"
            )
        self._config = config
        self._retry = retry
        self._clock = clock
        self._rng = rng or random.Random()
        self._connector = EtcdConnector(config, self._rng)
        self._closed = False
        self._watches: list[EtcdWatch[Any]] = []
        self._registrations: list[EtcdRegistration] = []

    def __repr__(self) -> str:
        counts = f"{len(self._registrations)} registrations, {len(self._watches)} watches"
        return f"<EtcdMembership {','.join(self._config.endpoints)}, {counts}>"

    async def register(self, member: Member) -> EtcdRegistration:
        """Also raises ConfigError if etcd refuses the user or the prefix."""
        if self._closed:
            raise UnavailableError("membership is closed")
        registration = EtcdRegistration(
            member,
            self._config,
            self._connector,
            self._retry,
            clock=self._clock,
            rng=self._rng,
            on_ended=self._discard_registration,
        )
        await self._connector.call(registration.renew)
        if self._closed:  # during the call; the lease ends the record
            raise UnavailableError("membership is closed")
        registration.start()
        self._registrations.append(registration)
        return registration

    async def members(self) -> tuple[Member, ...]:
        view = MemberView(self._config.prefix)
        return view.replace(await self._connector.call(lambda link: self._list(link, view.prefix))).members

    @property
    def records(self) -> EtcdRecords:
        return EtcdRecords(self, self._config.prefix, self._connector)

    def watch(self) -> EtcdWatch[MemberChange]:
        return self.watch_view(MemberView(self._config.prefix))

    def watch_view(self, view: View[C]) -> EtcdWatch[C]:
        watch = EtcdWatch(
            view,
            self._connector,
            lambda link: self._list(link, view.prefix),
            pause_s=lambda num_failures: self._retry.pause_s(num_failures, self._rng),
            on_ended=self._discard_watch,
        )
        if self._closed:
            watch.cancel()
        else:
            self._watches.append(watch)
        return watch

    async def close(self) -> None:
        self._closed = True
        tasks = [watch.cancel() for watch in self._watches]
        tasks += [registration.cancel() for registration in self._registrations]
        await wait_for_cancelled(tasks)

    async def _list(self, link: EtcdLink, prefix: str) -> Listing:
        return await link.list(prefix)

    def _discard_registration(self, registration: EtcdRegistration) -> None:
        if registration in self._registrations and not self._closed:
            self._registrations.remove(registration)

    def _discard_watch(self, watch: EtcdWatch[Any]) -> None:
        if watch in self._watches and not self._closed:
            self._watches.remove(watch)


class EtcdRecords:
    def __init__(self, membership: EtcdMembership, prefix: str, connector: EtcdConnector) -> None:
        self._membership = membership
        self._prefix = prefix
        self._connector = connector

    async def read(self, name: str) -> Record | None:
        found = await self._connector.call(lambda link: link.read(self._key(name)))
        return None if found is None else Record(*found)

    async def read_all(self, folder: str) -> Mapping[str, Record]:
        prefix = self._key(folder) + "/"
        found = await self._connector.call(lambda link: link.read_all(prefix))
        return {key.removeprefix(prefix): Record(*each) for key, each in found.items()}

    async def write(self, name: str, value: bytes | None, revision: int) -> bool:
        return await self._connector.call(lambda link: link.write(self._key(name), value, revision))

    def watch(self, folder: str) -> EtcdWatch[RecordChange]:
        return self._membership.watch_view(RecordView(self._prefix, folder))

    def _key(self, name: str) -> str:
        return f"{self._prefix.rstrip('/')}/{name}"
