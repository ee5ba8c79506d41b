"""Life cycle of what a gateway knows of tenants: records, keys, tokens, the secret of salts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvferry.config import GatewayConfig
from kvferry.errors import Unauthenticated
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.jwt_tokens import JwtTokens
from kvferry.gateway.identity.tenant_directory import TenantDirectory
from kvferry.gateway.identity.tenant_requests import GatewayLimits, TenantRequests
from kvferry.gateway.identity.tenants import Tenants, keep_secret, read_secret, shared_secret
from kvferry.membership.base import RecordStore

log = logging.getLogger(__name__)


class Identification:
    def __init__(self, config: GatewayConfig, records: RecordStore, on_change: Callable[[], None]) -> None:
        """Raises ConfigError for files that cannot be used."""
        self._records = records
        self._on_change = on_change
        secret_file = config.salt_secret_file
        secret = read_secret(secret_file) if secret_file is not None else None
        self.tenants = Tenants(secret, have_turns=config.tenants_in_etcd)
        self.requests: TenantRequests | None = None  # where tenants can be deleted
        self.directory: TenantDirectory | None = None
        self.limits: GatewayLimits | None = None
        if config.tenants_in_etcd:
            self.requests = TenantRequests()
            self.directory = TenantDirectory(records, on_ended=self._end_requests, on_change=on_change)
            self.limits = GatewayLimits(self.directory.limits)
        self._tokens = JwtTokens(config.jwt) if config.jwt.enabled else None
        self.access = Access(config, self.tenants, self.directory, self._tokens)
        self._reading: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.directory is not None:
            self.directory.follower.start()
        if self._tokens is not None:
            self._tokens.start()
        if not self.access.is_open and not self.tenants.have_secret:
            self._reading = asyncio.create_task(self._read_secret())

    def missing(self) -> list[str]:
        """Return the names of parts without which no client is known."""
        missing = []
        if self.directory is not None and not self.directory.is_known:
            missing.append("tenants")
        if not self.access.is_open and not self.tenants.have_secret:
            missing.append("secret of tenants' salts")
        # Clients with keys must not depend on an issuer that is away.
        if self._tokens is not None and not self._tokens.have_keys and not self.access.takes_keys:
            missing.append("keys of the tokens' issuer")
        return missing

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self.directory is not None:
            await self.directory.follower.close()
        if self._tokens is not None:
            await self._tokens.close()

    async def _read_secret(self) -> None:
        secret = await shared_secret(self._records)
        self.tenants.set_secret(secret)
        self._on_change()
        await keep_secret(self._records, secret)

    def _end_requests(self, tenant: str) -> None:
        assert self.requests is not None
        if num_ended := self.requests.end(tenant, Unauthenticated("this tenant was deleted")):
            log.info("ended %d requests of the tenant %s, which was deleted", num_ended, tenant)
