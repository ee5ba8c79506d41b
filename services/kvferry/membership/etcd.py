"""Members in etcd: keys `{prefix}/members/{kind}/{member_id}`, values JSON, each under its owner's lease.

Every task that talks to etcd owns one connection to one endpoint and throws it away at the first fault; the
next one goes to the next endpoint. So nothing is shared that could break for two at once, certificates and
passwords are read again whenever they may have been renewed, and no stream outlives a doubt: it is closed,
and the watcher lists again.

Of etcd3aio only messages, stubs and single calls are used. Its watch resumes by itself, which can miss
changes after a compaction and is silent for good when etcd lost its data; its keepalive does not tell whether
a renewal succeeded; its channels take no host names.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
import msgspec
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
from kvferry.membership.base import Joined, Left, Member, MemberChange, MemberId, MemberKind, Snapshot

T = TypeVar("T")

_log = logging.getLogger(__name__)

_CHANNEL_OPTIONS: Final = (
    # A watch on a connection that died without a word is noticed by these pings. etcd hangs up on a client
    # that pings more often than every 5 s, or at all while no call is open.
    ("grpc.keepalive_time_ms", 6_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # else the timeout above counts for nothing: a minute, seen with 1.85
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC would share a broken connection's pause between all channels to one address.
    ("grpc.use_local_subchannel_pool", 1),
    # The registry is inside the cluster; a proxy in the environment is meant for others.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
)
_EOF: Final[Any] = grpc.aio.EOF
# etcd has no status of its own for these; the wording is that of 3.4 to 3.6.
_TOKEN_FAULTS: Final = ("revision in header is old", "revision of auth store is old", "user name is empty")
_MAX_BACKLOG: Final = 4096  # changes; a reader further behind gets a Snapshot instead


class _Interrupted(Exception):
    """A stream of etcd ended, or told that changes may have been missed."""


# What etcd and the way to it may throw; anything else is a fault of ours.
_FAULTS: Final = (EtcdError, grpc.RpcError, TimeoutError, OSError, asyncio.InvalidStateError, _Interrupted)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Pauses between attempts: doubling, and random, so that not everyone meets a returning etcd at once."""

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, num_failures: int, rng: random.Random) -> float:
        """The pause after this many failures in a row, at least 1."""
        ceiling_s: float = min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 30))
        return ceiling_s * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Listing:
    """All records at one revision of etcd: what a watch from `revision` + 1 continues."""

    key_to_value: dict[str, bytes]
    revision: int


class MemberView:
    """What a watcher was told so far, and what each event of etcd adds to it. Pure."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._key_to_member: dict[str, Member] = {}

    def replace(self, listing: Listing) -> Snapshot:
        """Start over from a listing."""
        self._key_to_member = {
            key: member
            for key, value in sorted(listing.key_to_value.items())
            if (member := decode_record(self._prefix, key, value)) is not None
        }
        return Snapshot(tuple(self._key_to_member.values()))

    def put(self, key: str, value: bytes) -> Joined | None:
        """A record was written. None: it says nothing new, or cannot be read and what was known stays."""
        member = decode_record(self._prefix, key, value)
        if member is None or self._key_to_member.get(key) == member:
            return None
        self._key_to_member[key] = member
        return Joined(member)

    def delete(self, key: str) -> Left | None:
        """A record is gone. None: it was not known."""
        member = self._key_to_member.pop(key, None)
        return None if member is None else Left(member.kind, member.member_id)


def record_prefix(prefix: str) -> str:
    """Where all records of a cluster are."""
    return f"{prefix.rstrip('/')}/members/"


def record_key(prefix: str, kind: MemberKind, member_id: MemberId) -> str:
    """Where one record is."""
    return f"{record_prefix(prefix)}{kind}/{member_id}"


def decode_record(prefix: str, key: str, value: bytes) -> Member | None:
    """None, with a line in the log, for a record that cannot be read or stands under another's key."""
    try:
        member = msgspec.json.decode(value, type=Member)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _log.warning(f"passing over {key}: {error}")
        return None
    if key != record_key(prefix, member.kind, member.member_id):
        _log.warning(f"passing over {key}: it holds the record of {member.kind}/{member.member_id}")
        return None
    return member


def open_channel(config: MembershipConfig, endpoint: str) -> grpc.aio.Channel:
    """A connection of its own to one member. Raises ConfigError for a certificate that cannot be read."""
    credentials = _credentials(config)
    target = f"dns:///{endpoint}"
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(target, credentials, options=_CHANNEL_OPTIONS)


def read_password(name: str, file: Path | None) -> str:
    """What a file holds, without the end of its line; empty without a file. Raises ConfigError naming `name`."""
    content = _read(name, file)
    try:
        return "" if content is None else content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: {file}: not UTF-8") from None


def _credentials(config: MembershipConfig) -> grpc.ChannelCredentials | None:
    if config.ca_file is None and config.cert_file is None:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read("membership.ca_file", config.ca_file),
        private_key=_read("membership.key_file", config.key_file),
        certificate_chain=_read("membership.cert_file", config.cert_file),
    )


class EtcdMembership:
    """Membership over etcd. Connects at the first call; `close` ends every task and connection it started."""

    def __init__(
        self,
        config: MembershipConfig,
        *,
        retry: RetryPolicy = RetryPolicy(),
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """Raises ConfigError when there is no endpoint, or a certificate or password file cannot be read."""
        if not config.endpoints:
            raise ConfigError("membership.endpoints: at least one host:port of etcd is needed, not ()")
        self._config = config
        self._retry = retry
        self._clock = clock
        self._rng = rng or random.Random()
        self._endpoint_index = self._rng.randrange(len(config.endpoints))
        self._token = ""  # of the last login; shared, as each login costs etcd a password hash
        self._closed = False
        self._watches: list[EtcdWatch] = []
        self._registrations: list[EtcdRegistration] = []
        # Not longer than the pause between renewals: an endpoint that hangs must not cost the lease.
        self._timeout_s = min(5.0, max(1.0, config.lease_ttl_s / 3))
        _credentials(config)
        self._password()

    def __repr__(self) -> str:
        counts = f"{len(self._registrations)} registrations, {len(self._watches)} watches"
        return f"<EtcdMembership {','.join(self._config.endpoints)}, {counts}>"

    async def register(self, member: Member) -> EtcdRegistration:
        """See Membership. Also raises ConfigError when etcd refuses the user, the password or the prefix."""
        if self._closed:
            raise UnavailableError("membership is closed")
        registration = EtcdRegistration(self, member)
        await self._anywhere(registration._round)
        if self._closed:  # closed while we waited; the lease ends what was written
            raise UnavailableError("membership is closed")
        registration._start()
        self._registrations.append(registration)
        return registration

    async def members(self) -> tuple[Member, ...]:
        """See Membership. Also raises ConfigError when etcd refuses the user, the password or the prefix."""
        listing = await self._anywhere(self._list)
        return MemberView(self._config.prefix).replace(listing).members

    def watch(self) -> EtcdWatch:
        """See Membership. Its task starts at the first `__anext__`; its `aclose` or our `close` ends it."""
        watch = EtcdWatch(self)
        if self._closed:
            watch._cancel()
        else:
            self._watches.append(watch)
        return watch

    async def close(self) -> None:
        """See Membership."""
        self._closed = True
        tasks = [watch._cancel() for watch in self._watches]
        tasks += [registration._cancel() for registration in self._registrations]
        await _ended(tasks)

    async def _list(self, link: _Link) -> Listing:
        return await link.list(record_prefix(self._config.prefix))

    async def _anywhere(self, call: Callable[[_Link], Awaitable[T]]) -> T:
        """One attempt at each endpoint. Raises our own errors."""
        last: Exception | None = None
        for _ in self._config.endpoints:
            try:
                async with self._link() as link:
                    return await call(link)
            except _FAULTS as error:
                last = error
        assert last is not None
        raise self._as_ours(last) from last

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[_Link]:
        """A connection to the endpoint that answered last; after a fault the next one goes elsewhere."""
        index = self._endpoint_index
        channel = open_channel(self._config, self._config.endpoints[index])
        try:
            yield _Link(self, channel, self._timeout_s)
        except Exception:
            if self._endpoint_index == index:
                self._endpoint_index = (index + 1) % len(self._config.endpoints)
            raise
        finally:
            await channel.close(None)

    def _password(self) -> str:
        return read_password("membership.password_file", self._config.password_file)

    async def _login(self, auth: Any) -> str:
        try:
            answer = await auth.authenticate(self._config.user, self._password(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            if _status(error) in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                raise EtcdUnauthenticatedError(_explain(error)) from None
            raise
        self._token = str(answer.token)
        return self._token

    def _as_ours(self, error: Exception) -> KvferryError:
        if isinstance(error, EtcdUnauthenticatedError) or _wants_token(error):
            return ConfigError(f"membership.user: etcd refuses user {self._config.user!r} with this password")
        if isinstance(error, EtcdPermissionDeniedError):
            return ConfigError(
                f"membership.prefix: etcd refuses user {self._config.user!r} the right to read and write"
                f" under {self._config.prefix!r}"
            )
        _log.warning(f"etcd at {', '.join(self._config.endpoints)} cannot be reached: {_explain(error)}")
        return UnavailableError("the registry cannot be reached")

    def _pause_s(self, num_failures: int) -> float:
        return self._retry.pause_s(num_failures, self._rng)


class EtcdRegistration:
    """A record under a lease, kept by one task, the only writer of both."""

    def __init__(self, etcd: EtcdMembership, member: Member) -> None:
        self._etcd = etcd
        self._member = member
        self._key = record_key(etcd._config.prefix, member.kind, member.member_id)
        self._lease_id: int | None = None  # chosen by us before it is granted, so that revoke never misses one
        self._ttl_s = 0.0
        self._renewed_at_s: float | None = None  # before the last renewal was sent; None: not registered
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._updates: list[asyncio.Future[None]] = []
        self._ended = False

    def __repr__(self) -> str:
        state = "ended" if self._ended else "fenced" if self.fenced else "kept"
        return f"<EtcdRegistration {self._key} {state}>"

    @property
    def fenced(self) -> bool:
        """See Registration."""
        return self._renewed_at_s is None or self._etcd._clock() - self._renewed_at_s > self._ttl_s

    async def update(self, member: Member) -> None:
        """See Registration. Returns once the record is written, or one attempt failed: later ones follow."""
        if record_key(self._etcd._config.prefix, member.kind, member.member_id) != self._key:
            raise ValueError(f"an update keeps kind and id: {self._member.kind}/{self._member.member_id}")
        if self._ended:
            return
        self._member = member
        attempted = asyncio.get_running_loop().create_future()
        self._updates.append(attempted)
        self._wake.set()
        await attempted

    async def revoke(self) -> None:
        """See Registration."""
        await _ended([self._cancel()])
        if self._lease_id is None:
            return
        lease_id = self._lease_id
        try:
            await self._etcd._anywhere(lambda link: link.revoke(lease_id))
        except KvferryError as error:
            _log.warning(f"{self._key} could not be revoked, its lease ends it: {error.message}")
        else:
            self._lease_id = None
        self._renewed_at_s = None

    def _start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"keep {self._key}")

    def _cancel(self) -> asyncio.Task[None] | None:
        self._ended = True
        if self._task is not None:
            self._task.cancel()
        self._settle(self._updates)
        if self in self._etcd._registrations and not self._etcd._closed:
            self._etcd._registrations.remove(self)
        return self._task

    async def _keep(self) -> None:
        # Soon, not a third of the life later: whatever kept us from renewing shows while there is time left.
        await self._pause(self._ttl_s / 10)
        num_failures = 0
        while True:
            try:
                async with self._etcd._link() as link:
                    while True:
                        await self._round(link)
                        if num_failures:
                            _log.info(f"{self._key} is registered again")
                        num_failures = 0
                        await self._pause(self._ttl_s / 3 * self._etcd._rng.uniform(0.8, 1.0))
            except Exception as error:
                num_failures += 1
                _tell_fault(f"{self._key} cannot be renewed", error, num_failures)
                self._settle(self._updates)
            await self._pause(self._etcd._pause_s(num_failures))

    async def _pause(self, pause_s: float) -> None:
        """Until the time is over or there is an update."""
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _round(self, link: _Link) -> None:
        """Afterwards the lease lives and the newest record is under it; may be repeated after any failure."""
        updates, self._updates = self._updates, []
        try:
            began_s = self._etcd._clock()
            ttl_s = 0
            if self._lease_id is not None:
                ttl_s = await link.keep_alive(self._lease_id)
                if ttl_s <= 0:
                    self._lose_lease()
            if self._lease_id is None:
                self._lease_id = secrets.randbelow(2**62) + 1
                ttl_s = await link.grant(self._lease_id, self._etcd._config.lease_ttl_s)
            try:
                await link.ensure(self._key, msgspec.json.encode(self._member), self._lease_id)
            except grpc.RpcError as error:
                if _status(error) == grpc.StatusCode.NOT_FOUND:
                    self._lose_lease()
                raise
            self._ttl_s = float(ttl_s)
            self._renewed_at_s = began_s
        finally:
            self._settle(updates)

    def _lose_lease(self) -> None:
        if self._renewed_at_s is not None:
            _log.warning(f"the lease of {self._key} ran out; registering again")
        self._lease_id = None
        self._renewed_at_s = None

    @staticmethod
    def _settle(updates: list[asyncio.Future[None]]) -> None:
        for attempted in updates:
            if not attempted.done():
                attempted.set_result(None)
        updates.clear()


class EtcdWatch(AsyncIterator[MemberChange]):
    """Changes as they come, read from etcd by a task of its own: a cancelled wait loses nothing."""

    def __init__(self, etcd: EtcdMembership) -> None:
        self._etcd = etcd
        self._view = MemberView(etcd._config.prefix)
        self._changes: asyncio.Queue[MemberChange | None] = asyncio.Queue()  # None: the end
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    async def __anext__(self) -> MemberChange:
        if self._ended:
            raise StopAsyncIteration
        if self._task is None:
            self._task = asyncio.create_task(self._follow_for_good(), name="watch members")
        change = await self._changes.get()
        if change is None:
            self._changes.put_nowait(None)  # whoever else waits ends too
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """End this watch; may be repeated."""
        await _ended([self._cancel()])

    def _cancel(self) -> asyncio.Task[None] | None:
        if not self._ended:
            self._ended = True
            self._changes.put_nowait(None)
        if self._task is not None:
            self._task.cancel()
        if self in self._etcd._watches and not self._etcd._closed:
            self._etcd._watches.remove(self)
        return self._task

    async def _follow_for_good(self) -> None:
        num_failures = 0
        while True:
            try:
                async with self._etcd._link() as link:
                    listing = await self._etcd._list(link)
                    self._drain()  # a Snapshot replaces all that was not read yet
                    self._changes.put_nowait(self._view.replace(listing))
                    async with link.watch(record_prefix(self._etcd._config.prefix), listing.revision + 1) as stream:
                        if num_failures:
                            _log.info("members are watched again")
                        num_failures = 0
                        while True:
                            self._tell(await stream.events())
            except Exception as error:
                num_failures += 1
                _tell_fault("members cannot be watched, the last known stay", error, num_failures)
            await asyncio.sleep(self._etcd._pause_s(num_failures))

    def _tell(self, events: Iterable[Any]) -> None:
        for event in events:
            key = event.kv.key.decode(errors="replace")
            change = self._view.delete(key) if event.type == event.DELETE else self._view.put(key, event.kv.value)
            if change is not None:
                if self._changes.qsize() >= _MAX_BACKLOG:
                    raise _Interrupted(f"the reader is {_MAX_BACKLOG} changes behind")
                self._changes.put_nowait(change)

    def _drain(self) -> None:
        while not self._changes.empty():
            self._changes.get_nowait()


class _Link:
    """One connection, owned by one task. A refused token is replaced once per call."""

    def __init__(self, etcd: EtcdMembership, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._etcd = etcd
        self._timeout_s = timeout_s
        self._auth = AuthService(channel, max_attempts=1)
        self._kv = KVService(channel, max_attempts=1)
        self._lease = LeaseService(channel, max_attempts=1)
        self._lease_stub = LeaseStub(channel)
        self._watch_stub = WatchStub(channel)
        self._token = ""

    async def list(self, prefix: str) -> Listing:
        """All keys under a prefix, linearised."""
        answer = await self._call(lambda: self._kv.get(prefix, prefix_range_end(prefix), timeout=self._timeout_s))
        return Listing({kv.key.decode(errors="replace"): kv.value for kv in answer.kvs}, answer.header.revision)

    async def grant(self, lease_id: int, ttl_s: int) -> int:
        """Returns the time to live that etcd chose, in seconds."""
        answer = await self._call(lambda: self._lease.grant(ttl_s, lease_id, timeout=self._timeout_s))
        return int(answer.TTL)

    async def revoke(self, lease_id: int) -> None:
        """A lease that is not there counts as revoked."""
        try:
            await self._call(lambda: self._lease.revoke(lease_id, timeout=self._timeout_s))
        except grpc.RpcError as error:
            if _status(error) != grpc.StatusCode.NOT_FOUND:
                raise

    async def ensure(self, key: str, value: bytes, lease_id: int) -> None:
        """Write, unless exactly this is there: a read where nothing changed, a repair of a deleted key."""
        unchanged = [
            KVService.txn_compare_value(key, value),
            Compare(result=Compare.EQUAL, target=Compare.LEASE, key=key.encode(), lease=lease_id),
        ]
        put = [KVService.txn_op_put(key, value, lease=lease_id)]
        await self._call(lambda: self._kv.txn(unchanged, [], put, timeout=self._timeout_s))

    async def keep_alive(self, lease_id: int) -> int:
        """Returns the seconds left; 0 when there is no such lease."""
        return await self._call(lambda: self._keep_alive(lease_id))

    async def _keep_alive(self, lease_id: int) -> int:
        call = self._lease_stub.LeaseKeepAlive(metadata=self._metadata(), timeout=self._timeout_s)
        try:
            await call.write(LeaseKeepAliveRequest(ID=lease_id))
            answer = await call.read()
        finally:
            call.cancel()
        if answer is _EOF:
            raise _Interrupted("etcd did not answer a renewal")
        return int(answer.TTL)

    @asynccontextmanager
    async def watch(self, prefix: str, start_revision: int) -> AsyncIterator[_Stream]:
        """Entered once etcd has accepted the watch. _Interrupted, here or within, means: list again."""
        await self._use_token()
        # Else a member of etcd that lost its peers would keep us waiting for events that it cannot have.
        call = self._watch_stub.Watch(metadata=(*self._metadata(), ("hasleader", "true")))
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.write(
                    WatchRequest(
                        create_request=WatchCreateRequest(
                            key=prefix.encode(),
                            range_end=prefix_range_end(prefix),
                            start_revision=start_revision,
                        )
                    )
                )
                stream = _Stream(call)
                await stream.accepted()
            yield stream
        finally:
            call.cancel()

    async def _call(self, request: Callable[[], Awaitable[T]]) -> T:
        await self._use_token()
        try:
            return await request()
        except (EtcdError, grpc.RpcError) as error:
            if not self._etcd._config.user or not _wants_token(error):
                raise
            if self._etcd._token == self._token:  # else another task has logged in since
                self._etcd._token = ""
            await self._use_token()
            return await request()

    async def _use_token(self) -> None:
        if not self._etcd._config.user:
            return
        token = self._etcd._token or await self._etcd._login(self._auth)
        self._token = token
        self._kv.set_token(token)
        self._lease.set_token(token)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self._token),) if self._token else ()


class _Stream:
    """An open watch."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def accepted(self) -> None:
        """Wait for etcd to confirm the watch."""
        while not (await self._read()).created:
            pass

    async def events(self) -> Iterable[Any]:
        """The next events, in order; none for a mere sign of progress."""
        return (await self._read()).events  # type: ignore[no-any-return]

    async def _read(self) -> Any:
        answer = await self._call.read()
        if answer is _EOF:
            raise _Interrupted("etcd ended the watch")
        # After a compaction etcd says so in one message and then nothing more, for ever.
        if answer.canceled or answer.compact_revision:
            raise _Interrupted(f"etcd cancelled the watch: {answer.cancel_reason or 'its start is compacted'}")
        return answer


async def _ended(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Wait for cancelled tasks, whatever they ended with."""
    await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


def _read(key: str, file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: {file}: {error.strerror}") from None


def _status(error: BaseException) -> grpc.StatusCode | None:
    return error.code() if isinstance(error, grpc.aio.AioRpcError) else None


def _wants_token(error: BaseException) -> bool:
    """True when a fresh login may help: the token expired or was lost in a restart, or rights changed."""
    if isinstance(error, EtcdUnauthenticatedError):
        return True
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    details = error.details() or ""
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or any(told in details for told in _TOKEN_FAULTS)


def _explain(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _tell_fault(what: str, error: Exception, num_failures: int) -> None:
    """One line per outage; all of it for a fault of our own, which must not end a task that nobody awaits."""
    if not isinstance(error, (*_FAULTS, KvferryError)):
        _log.error(f"{what}", exc_info=error)
    elif num_failures == 1:
        _log.warning(f"{what}: {_explain(error)}")
    else:
        _log.debug(f"{what}, {num_failures} times: {_explain(error)}")
