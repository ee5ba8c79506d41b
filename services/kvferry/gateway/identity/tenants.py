"""The tenant of a request."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from kvferry.engine.base import CacheSalt, TenantName, Turn
from kvferry.errors import ConfigError, KvferryError, NotReady
from kvferry.membership.base import RecordStore
from kvferry.router.request import Contract
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, MIN_SECRET_BYTES, Namespace, make_salt

log = logging.getLogger(__name__)

SECRET_RECORD: Final = "salt-secret"
RETRY_S: Final = 1.0
SECRET_CHECK_S: Final = 30.0
_NUM_KEPT: Final = 4096  # tenants whose salts are kept
# Where every client is the same tenant: there is no other one to guess.
_OPEN_SECRET: Final = bytes(MIN_SECRET_BYTES)


@dataclass(frozen=True, slots=True)
class Tenant:
    """An authenticated identity. Raises ValueError for an invalid name.

    `cache_salt` enters every page hash and route key, so tenants never share pages; `contract` names the folders on
    volumes. Clients can set neither, only part their own pages with `salt_of`.
    """

    name: TenantName
    epoch: int = 0
    group: str = ""
    share: float = 1.0
    has_turn: bool = False  # also the default tenant waits for its turn
    pool: str = ""  # of workers, and no others, that serve it; empty: none of its own
    secret: bytes = field(default=_OPEN_SECRET, repr=False, kw_only=True)
    cache_salt: CacheSalt = field(init=False, repr=False)
    contract: Contract = field(init=False, repr=False)

    def __post_init__(self) -> None:
        namespace = Namespace(self.name, self.epoch)
        is_default = namespace == DEFAULT_NAMESPACE and not self.group
        salt = "" if is_default else make_salt(self.secret, namespace, self.group)
        object.__setattr__(self, "cache_salt", salt)
        has_turn = self.has_turn or self.name != DEFAULT_NAMESPACE.tenant
        turn = Turn(self.name, self.share) if has_turn else None
        object.__setattr__(self, "contract", Contract(turn, namespace))

    def salt_of(self, client_salt: str) -> CacheSalt:
        """Return the salt of requests for which a client names one."""
        return CacheSalt(make_salt(self.secret, Namespace(self.name, self.epoch), self.group, client_salt))


# The tenant of every request where no authentication is configured.
DEFAULT_TENANT = Tenant(TenantName(DEFAULT_NAMESPACE.tenant))


class Tenants:
    """Makes tenants with the cluster's secret."""

    def __init__(self, secret: bytes | None = None, *, have_turns: bool = False) -> None:
        self._secret = secret
        self._have_turns = have_turns
        self._made = functools.lru_cache(_NUM_KEPT)(self._make)

    @property
    def have_secret(self) -> bool:
        return self._secret is not None

    def set_secret(self, secret: bytes) -> None:
        self._secret = secret
        self._made.cache_clear()

    def named(self, name: str, epoch: int = 0, group: str = "", share: float = 1.0, pool: str = "") -> Tenant:
        """Raises ValueError for an invalid name, and NotReady until the secret is known."""
        return self._made(name, epoch, group, share, pool)

    def _make(self, name: str, epoch: int, group: str, share: float, pool: str) -> Tenant:
        if self._secret is None:
            raise NotReady("this gateway is starting: it waits for etcd to read the secret of tenants' salts")
        return Tenant(TenantName(name), epoch, group, share, self._have_turns, pool, secret=self._secret)


def read_secret(file: Path) -> bytes:
    """Raises ConfigError for a file that cannot be read, or holds under 32 bytes."""
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"gateway.salt_secret_file: {file}: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"gateway.salt_secret_file: {file}: {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed"
        )
    return secret


async def shared_secret(records: RecordStore, on_wait: Callable[[], None] = lambda: None) -> bytes:
    """Return the secret that all gateways of the cluster share. The first of them makes it."""
    while True:
        try:
            found = await records.read(SECRET_RECORD)
            if found is not None and len(found.value) >= MIN_SECRET_BYTES:
                return found.value
            if found is not None:
                log.error("the record %s has %d bytes and is made anew", SECRET_RECORD, len(found.value))
            await records.write(SECRET_RECORD, secrets.token_hex(32).encode(), found.revision if found else 0)
        except KvferryError as error:
            log.warning("the secret of tenants' salts cannot be read yet: %s", error.message)
            on_wait()
            await asyncio.sleep(RETRY_S)


async def keep_secret(records: RecordStore, secret: bytes, check_s: float = SECRET_CHECK_S) -> NoReturn:
    """Write the secret again where etcd lost it, and log one that differs: gateways would share no pages."""
    is_same = True
    while True:
        await asyncio.sleep(check_s)
        try:
            found = await records.read(SECRET_RECORD)
            if found is None:
                log.warning("the record %s was lost from etcd, and is written again", SECRET_RECORD)
                await records.write(SECRET_RECORD, secret, 0)
        except KvferryError:
            continue  # in an outage all stays as it is
        was_same, is_same = is_same, found is None or found.value == secret
        if was_same and not is_same:
            log.error(
                "the record %s has changed: gateways that started since find none of the pages that this one does,"
                " until it is restarted",
                SECRET_RECORD,
            )
