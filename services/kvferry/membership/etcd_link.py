"""Connections to etcd: channels, logins, calls and watches.

etcd3aio's own watch can miss changes, and its keepalive hides failed renewals.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from etcd3aio import EtcdError, EtcdPermissionDeniedError, EtcdUnauthenticatedError, prefix_range_end

# The package has no public name for its messages and stubs; its version is pinned exactly.
from etcd3aio._protobuf import (
    Compare,
    LeaseKeepAliveRequest,
    LeaseStub,
    WatchCreateRequest,
    WatchRequest,
    WatchStub,
)
from etcd3aio.auth import AuthService
from etcd3aio.kv import KVService
from etcd3aio.lease import LeaseService

from kvferry.config import MembershipConfig
from kvferry.errors import ConfigError, KvferryError, UnavailableError
from kvferry.membership.etcd_records import Listing

T = TypeVar("T")

log = logging.getLogger(__name__)

_CHANNEL_OPTIONS: Final = (
    # These pings detect a dead connection under a watch. etcd disconnects a client that pings more often than every
    # 5 s, or while no call is open.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # without it gRPC 1.85 waits a minute in spite of the timeout above
    ("grpc.http2.max_pings_without_data", 0),
    # Otherwise all channels to one address share the backoff of a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The registry is inside the cluster; a proxy of the environment is for other addresses.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
# This many of the largest records of tenants stay within the limit above.
KEYS_PER_READ: Final = 500
_EOF: Final[Any] = grpc.aio.EOF
# etcd has no status of its own for these; the wording is that of 3.4 to 3.6.
_TOKEN_FAULTS: Final = ("revision in header is old", "revision of auth store is old", "user name is empty")


class Interrupted(Exception):
    """An etcd stream ended, or changes may have been missed."""


# Exceptions of etcd and of the connection; any other is a bug of ours.
FAULTS: Final = (EtcdError, grpc.RpcError, TimeoutError, OSError, asyncio.InvalidStateError, Interrupted)


def open_channel(config: MembershipConfig, endpoint: str) -> grpc.aio.Channel:
    """Raises ConfigError for an unreadable certificate."""
    credentials = _credentials(config)
    target = f"dns:///{endpoint}"
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)


def read_password(name: str, file: Path | None) -> str:
    """Return a file's content, "" without a file. Raises ConfigError naming `name`."""
    content = _read_file(name, file)
    try:
        return "" if content is None else content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {file}: not UTF-8") from None


def _credentials(config: MembershipConfig) -> grpc.ChannelCredentials | None:
    if config.ca_file is None and config.cert_file is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read_file("membership.ca_file", config.ca_file),
        private_key=_read_file("membership.key_file", config.key_file),
        certificate_chain=_read_file("membership.cert_file", config.cert_file),
    )


class EtcdLogin:
    """User and shared token: each login costs etcd a password hash."""

    def __init__(self, config: MembershipConfig, timeout_s: float) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self.user = config.user
        self.token = ""
        self._read_password()

    async def log_in(self, auth: Any) -> str:
        try:
            answer = await auth.authenticate(self.user, self._read_password(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            if status_of(error) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                raise EtcdUnauthenticatedError(describe(error)) from None
            raise
        self.token = str(answer.token)
        return self.token

    def _read_password(self) -> str:
        return read_password("membership.password_file", self._config.password_file)


class EtcdLink:
    """One task's connection. A refused token is replaced once per call."""

    def __init__(self, login: EtcdLogin, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._login = login
        self._timeout_s = timeout_s
        self._auth = AuthService(channel, max_attempts=1)
        self._kv = KVService(channel, max_attempts=1)
        self._lease = LeaseService(channel, max_attempts=1)
        self._lease_stub = LeaseStub(channel)
        self._watch_stub = WatchStub(channel)
        self._token = ""

    async def list(self, prefix: str) -> Listing:
        return Listing(*await self._range(prefix, lambda kv: bytes(kv.value)))

    async def read(self, key: str) -> tuple[bytes, int] | None:
        """Return the value and the revision of its last change."""
        answer = await self._call(lambda: self._kv.get(key, timeout=self._timeout_s))
        return (answer.kvs[0].value, answer.kvs[0].mod_revision) if answer.kvs else None

    async def read_all(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        found, _ = await self._range(prefix, lambda kv: (bytes(kv.value), int(kv.mod_revision)))
        return found

    async def _range(self, prefix: str, take: Callable[[Any], T]) -> tuple[dict[str, T], int]:
        """Return what `take` makes of all keys below a prefix at one revision, and it; read below gRPC's limit."""
        found: dict[str, T] = {}
        begin, end, revision = prefix.encode(), prefix_range_end(prefix), 0
        while True:
            read = functools.partial(
                self._kv.get, begin, end, revision=revision, limit=KEYS_PER_READ, timeout=self._timeout_s
            )
            answer = await self._call(read)
            revision = revision or answer.header.revision
            # Piece by piece: all of 10,000 tenants' records together take 0.05 s of the event loop.
            found.update((kv.key.decode(errors="replace"), take(kv)) for kv in answer.kvs)
            if not answer.more or not answer.kvs:
                return found, revision
            begin = answer.kvs[-1].key + b"\0"

    async def write(self, key: str, value: bytes | None, revision: int) -> bool:
        """Write, or delete for None, if the key's last change was at `revision`, 0 for a key that is not there."""
        unchanged = Compare(result=Compare.EQUAL, target=Compare.MOD, key=key.encode(), mod_revision=revision)
        change = KVService.txn_op_delete(key) if value is None else KVService.txn_op_put(key, value)
        answer = await self._call(lambda: self._kv.txn([unchanged], [change], timeout=self._timeout_s))
        return bool(answer.succeeded)

    async def grant(self, lease_id: int, ttl_s: int) -> int:
        """Return the time to live that etcd chose, in seconds."""
        answer = await self._call(lambda: self._lease.grant(ttl_s, lease_id, timeout=self._timeout_s))
        return int(answer.TTL)

    async def revoke(self, lease_id: int) -> None:
        try:
            await self._call(lambda: self._lease.revoke(lease_id, timeout=self._timeout_s))
        except grpc.RpcError as error:
            if status_of(error) != grpc.StatusCode.NOT_FOUND:
                raise

    async def ensure(self, key: str, value: bytes, lease_id: int) -> None:
        unchanged = [
            KVService.txn_compare_value(key, value),
            Compare(result=Compare.EQUAL, target=Compare.LEASE, key=key.encode(), lease=lease_id),
        ]
        put = [KVService.txn_op_put(key, value, lease=lease_id)]
        await self._call(lambda: self._kv.txn(unchanged, [], put, timeout=self._timeout_s))

    async def keep_alive(self, lease_id: int) -> int:
        return await self._call(lambda: self._keep_alive(lease_id))

    async def _keep_alive(self, lease_id: int) -> int:
        call = self._lease_stub.LeaseKeepAlive(metadata=self._metadata(), timeout=self._timeout_s)
        try:
            await call.write(LeaseKeepAliveRequest(ID=lease_id))
            answer = await call.read()
        finally:
            call.cancel()
        if answer is _EOF:
            raise Interrupted("etcd did not answer a renewal")
        return int(answer.TTL)

    @asynccontextmanager
    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[EtcdWatchStream]:
        """Entered once etcd accepts the watch. Raises Interrupted: list again."""
        await self._use_token()
        # Without it, an endpoint that lost its quorum would accept the watch and never send an event.
        call = self._watch_stub.Watch(metadata=(*self._metadata(), ("hasleader", "true")))
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.write(
                    WatchRequest(
                        create_request=WatchCreateRequest(
                            key=prefix.encode(),
                            range_end=prefix_range_end(prefix),
                            start_revision=start_revision,
                            fragment=True,
                        )
                    )
                )
                stream = EtcdWatchStream(call)
                await stream.accepted()
            yield stream
        finally:
            call.cancel()

    async def _call(self, request: Callable[[], Awaitable[T]]) -> T:
        await self._use_token()
        try:
            return await request()
        except (EtcdError, grpc.RpcError) as error:
            if not self._login.user or not wants_token(error):
                raise
            if self._login.token == self._token:  # else another task has logged in since
                self._login.token = ""
            await self._use_token()
            return await request()

    async def _use_token(self) -> None:
        if not self._login.user:
            return
        token = self._login.token or await self._login.log_in(self._auth)
        self._token = token
        self._kv.set_token(token)
        self._lease.set_token(token)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()


class EtcdWatchStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def accepted(self) -> None:
        while not (await self._read()).created:
            pass

    async def events(self) -> Iterable[Any]:
        return (await self._read()).events  # type: ignore[no-any-return]

    async def _read(self) -> Any:
        answer = await self._call.read()
        if answer is _EOF:
            raise Interrupted("etcd ended the watch")
        # After a compaction etcd sends one such message, and then nothing more.
        if answer.canceled or answer.compact_revision:
            raise Interrupted(f"etcd cancelled the watch: {answer.cancel_reason or 'its start is compacted'}")
        return answer


class EtcdConnector:
    """Opens links to the last endpoint that answered; after a fault, to the next."""

    def __init__(self, config: MembershipConfig, rng: random.Random) -> None:
        """Raises ConfigError."""
        self._config = config
        self._endpoint_index = rng.randrange(len(config.endpoints))
        # At most the pause between renewals: an endpoint that hangs must not cost the lease.
        self._timeout_s = min(5.0, max(1.0, config.lease_ttl_s / 3))
        _credentials(config)
        self.login = EtcdLogin(config, self._timeout_s)

    @asynccontextmanager
    async def link(self) -> AsyncIterator[EtcdLink]:
        index = self._endpoint_index
        channel = open_channel(self._config, self._config.endpoints[index])
        try:
            yield EtcdLink(self.login, channel, self._timeout_s)
        except Exception:
            if self._endpoint_index == index:
                self._endpoint_index = (index + 1) % len(self._config.endpoints)
            raise
        finally:
            await channel.close(None)

    async def call(self, request: Callable[[EtcdLink], Awaitable[T]]) -> T:
        """Try each endpoint once. Raises ConfigError or UnavailableError."""
        last: Exception | None = None
        for _ in self._config.endpoints:
            try:
                async with self.link() as link:
                    return await request(link)
            except FAULTS as error:
                last = error
        assert last is not None
        raise self._translate(last) from last

    def _translate(self, error: Exception) -> KvferryError:
        if isinstance(error, EtcdUnauthenticatedError) or wants_token(error):
            return ConfigError(f"membership.user: etcd refuses user {self._config.user!r} with this password")
        if isinstance(error, EtcdPermissionDeniedError):
            return ConfigError(
                f"membership.prefix: etcd refuses user {self._config.user!r} the right to read and write"
                f" under {self._config.prefix!r}"
            )
        if is_full(error):
            return UnavailableError(
                f"the registry writes nothing, its etcd is full ({describe(error)}): make room in etcd and disarm its "
                "alarm, see docs/operator/etcd.md"
            )
        log.warning(f"etcd at {', '.join(self._config.endpoints)} cannot be reached: {describe(error)}")
        return UnavailableError("the registry cannot be reached")


async def wait_for_cancelled(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _read_file(key: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {file}: {error.strerror}") from None


def status_of(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def wants_token(error: BaseException) -> bool:
    """Return whether a new login may help."""
    if isinstance(error, EtcdUnauthenticatedError):
        return True
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    details = error.details() or ""
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or any(fault in details for fault in _TOKEN_FAULTS)


def is_full(error: BaseException) -> bool:
    """Return whether etcd's database is over its quota."""
    is_exhausted = status_of(error) == grpc.StatusCode.RESOURCE_EXHAUSTED
    return is_exhausted and "database space exceeded" in describe(error)


def describe(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def log_fault(what: str, error: Exception, num_failures: int) -> None:
    """Log one line per outage; for a bug, the traceback."""
    if not isinstance(error, (*FAULTS, KvferryError)):
        log.error(f"{what}", exc_info=error)
    elif num_failures == 1:
        log.warning(f"{what}: {describe(error)}")
    else:
        log.debug(f"{what}, {num_failures} times: {describe(error)}")
