"""An in-memory test double for etcd.

It changes only on command, so that a test determines the order. One event loop, no threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvferry.errors import UnavailableError
from kvferry.membership.base import (
    Joined,
    Left,
    Member,
    MemberChange,
    MemberId,
    MemberKind,
    Record,
    RecordChange,
    RecordChanged,
    Records,
    Snapshot,
)

C = TypeVar("C")

_Key = tuple[MemberKind, MemberId]


@dataclass(frozen=True, slots=True)
class _Record:
    member: Member
    owner: MemoryRegistration
    renewed_at_s: float | None  # None: its owner lives and the registry answers


class MemoryRegistry:
    """The registry of one process's memberships.

    A lease ages, by `clock`, during an outage or once its owner closed. After `lease_ttl_s` it ends at `expire_due`, or
    with the outage.
    """

    def __init__(
        self,
        *,
        lease_ttl_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.lease_ttl_s = lease_ttl_s
        self.delay_s = 0.0  # before every answer
        self._clock = clock
        self._sleep = sleep
        self._key_to_record: dict[_Key, _Record] = {}
        self._registrations: list[MemoryRegistration] = []
        self._watches: list[MemoryWatch[MemberChange]] = []
        self._records: dict[str, Record] = {}
        self._record_watches: list[tuple[str, MemoryWatch[RecordChange]]] = []
        self._revision = 0
        self._num_outages = 0  # nested ones; it answers at zero

    def __repr__(self) -> str:
        state = "out" if self.out else "answering"
        return f"<MemoryRegistry {state}, {len(self._key_to_record)} members, {len(self._watches)} watches>"

    @property
    def out(self) -> bool:
        return self._num_outages > 0

    def members(self) -> tuple[Member, ...]:
        return tuple(self._key_to_record[key].member for key in sorted(self._key_to_record))

    @contextmanager
    def outage(self) -> Iterator[None]:
        """All calls raise UnavailableError; watches yield nothing.

        At the end: expired leases end, watches get a Snapshot, living owners register again.
        """
        self.begin_outage()
        try:
            yield
        finally:
            self.end_outage()

    def begin_outage(self) -> None:
        self._num_outages += 1
        if self._num_outages == 1:
            now_s = self._clock()
            for key, record in self._key_to_record.items():
                if record.renewed_at_s is None:
                    self._key_to_record[key] = _Record(record.member, record.owner, now_s)

    def end_outage(self) -> None:
        if not self._num_outages:
            raise ValueError("there is no outage to end")
        self._num_outages -= 1
        if self.out:
            return
        for key in self._due():
            del self._key_to_record[key]
        for watch in self._watches:
            watch._offer(Snapshot(self.members()))
        for folder, records in self._record_watches:
            records._offer(self._records_of(folder))
        for registration in self._registrations:
            self._write(registration)

    def expire_due(self) -> None:
        """End the leases that are due. During an outage none ends."""
        if not self.out:
            for key in self._due():
                self._drop(key)

    def expire(self, member_id: MemberId) -> None:
        """End one lease, after an outage if in one. A living owner registers again."""
        for key in list(self._key_to_record):
            if key[1] == member_id:
                self._drop(key)

    def check(self) -> None:
        """Raise AssertionError if, without an outage, a living owner's record is outdated."""
        if self.out:
            return
        for registration in self._registrations:
            record = self._key_to_record.get(registration._key)
            assert record is not None, f"{registration!r} has no record"
            assert record.owner is not registration or record.member == registration._member, registration
        for key, record in self._key_to_record.items():
            living = record.owner in self._registrations
            assert living == (record.renewed_at_s is None), f"{key} is not renewed by its owner"

    def _records_of(self, folder: str) -> Records:
        prefix = f"{folder}/"
        found = {name: record.value for name, record in self._records.items() if name.startswith(prefix)}
        return Records({name.removeprefix(prefix): value for name, value in found.items()})

    def _write_record(self, name: str, value: bytes | None, revision: int) -> bool:
        before = self._records.get(name)
        if revision != (0 if before is None else before.revision):
            return False
        self._revision += 1
        if value is None:
            self._records.pop(name, None)
        else:
            self._records[name] = Record(value, self._revision)
        for folder, watch in self._record_watches:
            if name.startswith(f"{folder}/"):
                watch._offer(RecordChanged(name.removeprefix(f"{folder}/"), value))
        return True

    async def _lag(self) -> None:
        if self.delay_s:
            await self._sleep(self.delay_s)

    async def _answer(self) -> None:
        await self._lag()
        if self.out:
            raise UnavailableError("the registry cannot be reached")

    def _due(self) -> list[_Key]:
        now_s = self._clock()
        return [
            key
            for key, record in self._key_to_record.items()
            if record.renewed_at_s is not None and now_s - record.renewed_at_s > self.lease_ttl_s
        ]

    def _write(self, registration: MemoryRegistration) -> None:
        old = self._key_to_record.get(registration._key)
        self._key_to_record[registration._key] = _Record(registration._member, registration, None)
        if old is None or old.member != registration._member:
            self._notify(Joined(registration._member))

    def _drop(self, key: _Key) -> None:
        del self._key_to_record[key]
        self._notify(Left(*key))
        if not self.out:  # living owners register again
            for registration in self._registrations:
                if registration._key == key:
                    self._write(registration)

    def _notify(self, change: MemberChange) -> None:
        if not self.out:  # after the outage, a Snapshot replaces the missed changes
            for watch in self._watches:
                watch._offer(change)

    def _abandon(self, registration: MemoryRegistration) -> None:
        if registration not in self._registrations:
            return
        self._registrations.remove(registration)
        record = self._key_to_record.get(registration._key)
        if record is not None and record.owner is registration and record.renewed_at_s is None:
            self._key_to_record[registration._key] = _Record(record.member, registration, self._clock())

    def _fenced(self, registration: MemoryRegistration) -> bool:
        record = self._key_to_record.get(registration._key)
        if record is None or record.owner is not registration:
            return True
        return record.renewed_at_s is not None and self._clock() - record.renewed_at_s > self.lease_ttl_s


class MemoryMembership:
    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        self._registrations: list[MemoryRegistration] = []
        self._watches: list[MemoryWatch[MemberChange]] = []
        self._record_watches: list[MemoryWatch[RecordChange]] = []
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryMembership {len(self._registrations)} registrations, {len(self._watches)} watches>"

    async def register(self, member: Member) -> MemoryRegistration:
        await self._registry._answer()
        if self._closed:
            raise UnavailableError("membership is closed")
        registration = MemoryRegistration(self._registry, member)
        self._registrations.append(registration)
        self._registry._registrations.append(registration)
        self._registry._write(registration)
        return registration

    async def members(self) -> tuple[Member, ...]:
        await self._registry._answer()
        return self._registry.members()

    @property
    def records(self) -> MemoryRecords:
        return MemoryRecords(self, self._registry)

    def watch(self) -> MemoryWatch[MemberChange]:
        registry = self._registry
        watch = MemoryWatch(
            registry, registry._watches.append, registry._watches.remove, lambda: Snapshot(registry.members())
        )
        if self._closed:
            watch._end()
        else:
            self._watches.append(watch)
        return watch

    async def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch._end()
        for records in self._record_watches:
            records._end()
        for registration in self._registrations:
            self._registry._abandon(registration)


class MemoryRegistration:
    def __init__(self, registry: MemoryRegistry, member: Member) -> None:
        self._registry = registry
        self._member = member
        self._key = (member.kind, member.member_id)

    def __repr__(self) -> str:
        return f"<MemoryRegistration {self._key[0]}/{self._key[1]}{' fenced' if self.fenced else ''}>"

    @property
    def fenced(self) -> bool:
        return self._registry._fenced(self)

    async def update(self, member: Member) -> None:
        if (member.kind, member.member_id) != self._key:
            raise ValueError(f"an update keeps kind and id: {self._key[0]}/{self._key[1]}")
        if self not in self._registry._registrations:
            return
        self._member = member
        await self._registry._lag()
        if not self._registry.out and self in self._registry._registrations:
            self._registry._write(self)

    async def revoke(self) -> None:
        self._registry._abandon(self)
        await self._registry._lag()
        record = self._registry._key_to_record.get(self._key)
        if record is not None and record.owner is self and not self._registry.out:
            self._registry._drop(self._key)


class MemoryRecords:
    def __init__(self, membership: MemoryMembership, registry: MemoryRegistry) -> None:
        self._membership = membership
        self._registry = registry

    async def read(self, name: str) -> Record | None:
        await self._registry._answer()
        return self._registry._records.get(name)

    async def read_all(self, folder: str) -> Mapping[str, Record]:
        await self._registry._answer()
        names = self._registry._records_of(folder).by_name
        return {name: self._registry._records[f"{folder}/{name}"] for name in names}

    async def write(self, name: str, value: bytes | None, revision: int) -> bool:
        await self._registry._answer()
        return self._registry._write_record(name, value, revision)

    def watch(self, folder: str) -> MemoryWatch[RecordChange]:
        registry, membership = self._registry, self._membership
        watch: MemoryWatch[RecordChange] = MemoryWatch(
            registry,
            lambda begun: registry._record_watches.append((folder, begun)),
            lambda ended: registry._record_watches.remove((folder, ended)),
            lambda: registry._records_of(folder),
        )
        if membership._closed:
            watch._end()
        else:
            membership._record_watches.append(watch)
        return watch


class MemoryWatch(AsyncIterator[C], Generic[C]):
    """Starts at the first `__anext__`. A cancelled wait loses no change."""

    def __init__(
        self,
        registry: MemoryRegistry,
        begin: Callable[[MemoryWatch[C]], None],
        end: Callable[[MemoryWatch[C]], None],
        snapshot: Callable[[], C],
    ) -> None:
        self._registry = registry
        self._begin = begin
        self._end_of = end
        self._snapshot = snapshot
        self._changes: asyncio.Queue[C | None] = asyncio.Queue()  # None: the end
        self._started = False
        self._ended = False

    async def __anext__(self) -> C:
        if self._ended:
            raise StopAsyncIteration
        if not self._started:
            self._started = True
            self._begin(self)
            if not self._registry.out:
                self._offer(self._snapshot())
        await self._registry._lag()
        change = await self._changes.get()
        if change is None:
            self._changes.put_nowait(None)  # other waiting readers end too
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """Idempotent."""
        self._end()

    def _offer(self, change: C) -> None:
        self._changes.put_nowait(change)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._changes.put_nowait(None)
            if self._started:
                self._end_of(self)
