"""Keeps a member's record in etcd under a lease."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable

import grpc
import msgspec

from kvferry.config import MembershipConfig
from kvferry.errors import KvferryError
from kvferry.membership.base import Member, RetryPolicy
from kvferry.membership.etcd_link import (
    EtcdConnector,
    EtcdLink,
    describe,
    is_full,
    log_fault,
    status_of,
    wait_for_cancelled,
)
from kvferry.membership.etcd_records import record_key

log = logging.getLogger(__name__)


class EtcdRegistration:
    def __init__(
        self,
        member: Member,
        config: MembershipConfig,
        connector: EtcdConnector,
        retry: RetryPolicy,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_ended: Callable[[EtcdRegistration], None],
    ) -> None:
        self._config = config
        self._connector = connector
        self._retry = retry
        self._clock = clock
        self._rng = rng
        self._on_ended = on_ended
        self._member = member
        self._key = record_key(config.prefix, member.kind, member.member_id)
        self._lease_id: int | None = None  # chosen before it is granted, so that revoke never misses one
        self._ttl_s = 0.0
        self._renewed_at_s: float | None = None  # before the last renewal was sent; None: not registered
        self._is_outdated = False  # the record in etcd, which is full
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._updates: list[asyncio.Future[None]] = []
        self._ended = False

    def __repr__(self) -> str:
        state = "ended" if self._ended else "fenced" if self.fenced else "renewed"
        return f"<EtcdRegistration {self._key} {state}>"

    @property
    def fenced(self) -> bool:
        return self._renewed_at_s is None or self._clock() - self._renewed_at_s > self._ttl_s

    async def update(self, member: Member) -> None:
        """Return after one attempt, failed or not; others follow."""
        if record_key(self._config.prefix, member.kind, member.member_id) != self._key:
            raise ValueError(f"an update keeps kind and id: {self._member.kind}/{self._member.member_id}")
        if self._ended:
            return
        self._member = member
        attempted = asyncio.get_running_loop().create_future()
        self._updates.append(attempted)
        self._wake.set()
        await attempted

    async def revoke(self) -> None:
        await wait_for_cancelled([self.cancel()])
        if self._lease_id is None:
            return
        lease_id = self._lease_id
        try:
            await self._connector.call(lambda link: link.revoke(lease_id))
        except KvferryError as error:
            log.warning(f"{self._key} could not be revoked, its lease ends it: {error.message}")
        else:
            self._lease_id = None
        self._renewed_at_s = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"keep {self._key}")

    def cancel(self) -> asyncio.Task[None] | None:
        self._ended = True
        if self._task is not None:
            self._task.cancel()
        self._settle(self._updates)
        self._on_ended(self)
        return self._task

    async def _keep(self) -> None:
        # The first renewal is early, so that a fault shows while there is time left.
        await self._pause(self._ttl_s / 10)
        num_failures = 0
        while True:
            try:
                async with self._connector.link() as link:
                    while True:
                        await self.renew(link)
                        if num_failures:
                            log.info(f"{self._key} is registered again")
                        num_failures = 0
                        await self._pause(self._ttl_s / 3 * self._rng.uniform(0.8, 1.0))
            except Exception as error:
                num_failures += 1
                log_fault(f"{self._key} cannot be renewed", error, num_failures)
                self._settle(self._updates)
            await self._pause(self._retry.pause_s(num_failures, self._rng))

    async def _pause(self, pause_s: float) -> None:
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def renew(self, link: EtcdLink) -> None:
        """Renew the lease and write the newest record. Repeatable."""
        updates, self._updates = self._updates, []
        try:
            begin_s = self._clock()
            ttl_s = 0
            if self._lease_id is not None:
                ttl_s = await link.keep_alive(self._lease_id)
                if ttl_s <= 0:
                    self._lose_lease()
            if self._lease_id is None:
                self._lease_id = secrets.randbelow(2**62) + 1
                ttl_s = await link.grant(self._lease_id, self._config.lease_ttl_s)
            try:
                await link.ensure(self._key, msgspec.json.encode(self._member), self._lease_id)
            except grpc.RpcError as error:
                if status_of(error) == grpc.StatusCode.NOT_FOUND:
                    self._lose_lease()
                if self._renewed_at_s is None or not is_full(error):
                    raise
                # A full etcd still renews leases: the member stays, with the record that it has.
                if not self._is_outdated:
                    log.warning(f"{self._key} is renewed, and its record not written: {describe(error)}")
                self._is_outdated = True
            else:
                self._is_outdated = False
            self._ttl_s = float(ttl_s)
            self._renewed_at_s = begin_s
        finally:
            self._settle(updates)

    def _lose_lease(self) -> None:
        if self._renewed_at_s is not None:
            log.warning(f"the lease of {self._key} ran out; registering again")
        self._lease_id = None
        self._renewed_at_s = None

    @staticmethod
    def _settle(updates: list[asyncio.Future[None]]) -> None:
        for attempted in updates:
            if not attempted.done():
                attempted.set_result(None)
        updates.clear()
