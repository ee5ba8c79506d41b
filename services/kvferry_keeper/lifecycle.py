"""Lifetime of a keeper process: opens the volumes, serves, registers, and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import time

import grpc

from kvferry import __version__, mutual_tls
from kvferry.config import ClusterConfig, VolumeConfig
from kvferry.errors import TierError
from kvferry.membership.base import Member, MemberId, MemberKind, Membership, Registration
from kvferry.membership.follower import MemberFollower
from kvferry.observability.exposition import SpanCounts
from kvferry.observability.metrics_listener import MetricsListener
from kvferry.observability.tracing import Tracing, start_tracing
from kvferry.util.addresses import NODE_NAME_VARIABLE, is_loopback, join_host_port, ucx_environment
from kvferry.util.grpc_options import CHANNEL_OPTIONS
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.metrics import KeeperMetrics
from kvferry_keeper.remote.chunk_lender import ChunkLender
from kvferry_keeper.remote.nixl_agent import NixlAgent
from kvferry_keeper.remote.remote_reader import RemoteReader
from kvferry_keeper.server import KeeperServer
from kvferry_keeper.store import folder
from kvferry_keeper.store.folder import MAX_WRITER_CHARS
from kvferry_keeper.store.index.eviction import TenantRetention
from kvferry_keeper.store.keyring import SealingKeyFile
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volume_tenants import VolumeTenants

log = logging.getLogger(__name__)

_KEYS_PERIOD_S = 1.0
# Pauses before a volume is tried again: each may scan a million chunks.
_REOPEN_FIRST_S = 5.0
_REOPEN_MOST_S = 60.0
_STOP_GRACE_S = 5.0


class KeeperHost:
    """`node` names this keeper's host; $KVFERRY_NODE_NAME, if set, the machine whose writer it is on shared volumes."""

    def __init__(self, config: ClusterConfig, membership: Membership, *, node: str = "") -> None:
        """Raises ConfigError for unreadable sealing keys."""
        tier = config.tier
        self._config = config
        self._membership = membership
        self._node = node or socket.gethostname()
        self._tls = config.worker.tls if config.worker.tls.enabled else None
        self._registration: Registration | None = None
        self._warming: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.keeper_id = MemberId(f"{MemberKind.KEEPER.value}-{secrets.token_hex(4)}")
        self._follower = MemberFollower(membership, {MemberKind.KEEPER}, on_change=self._on_members_changed)
        self._others = _OtherKeepers(self._follower, self.keeper_id)
        keyring = self._key_file = (
            SealingKeyFile(tier.encryption_keys_file) if tier.encryption_keys_file is not None else None
        )
        self._watching_keys: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._volumes = [self._make_volume(each) for each in tier.volumes]
        self._volume_faults: dict[int, str] = {}  # by place in the configuration
        self._started_unix_s = 0.0
        self._agent = NixlAgent(self.keeper_id)
        self.remote = RemoteReader(
            self._agent, self._others.locate, self._dial, keyring=keyring, timeout_s=tier.load_timeout_s
        )
        self._tracing: Tracing | None = None
        self.keeper = Keeper(tier, (), remote=self.remote, keeper_id=self.keeper_id, read_tracing=lambda: self._tracing)
        self._tenants: VolumeTenants | None = None
        if config.gateway.tenants_in_etcd:
            self._tenants = VolumeTenants(membership, self.keeper, self._volumes)
        self.lender = ChunkLender(self.keeper, self._agent, timeout_s=tier.load_timeout_s)
        self.server = KeeperServer(self.keeper, self.lender, node=self._node, read_tracing=lambda: self._tracing)
        self.metrics = KeeperMetrics(
            self.keeper,
            self.remote,
            self.lender,
            read_span_counts=self._span_counts,
            read_volume_faults=lambda: tuple(self._volume_faults.values()),
        )
        self._listener = MetricsListener(config.metrics, config.metrics.keeper_port, self.metrics.render)

    def __repr__(self) -> str:
        return f"<KeeperHost {self.keeper!r} port={self.server.port}, others: {self._others!r}>"

    @property
    def member(self) -> Member:
        return Member(
            kind=MemberKind.KEEPER,
            member_id=self.keeper_id,
            address=join_host_port(self._config.tier.host, self.server.port),
            model=self._config.served_name,
            version=__version__,
            node=self._node,
            pid=os.getpid(),
            volumes=self.keeper.volume_ids,
            volume_faults=tuple(self._volume_faults.values()),
            socket_path=str(self.keeper.socket_path),
            metrics_address=self._listener.address,
            started_unix_s=self._started_unix_s,
        )

    async def start(self) -> None:
        """Raises TierError for an unusable socket, UnavailableError without the registry."""
        self._prepare_environment()
        self._started_unix_s = time.time()
        self._tracing = start_tracing(self._config.tracing, service=MemberKind.KEEPER.value, instance=self.keeper_id)
        await self.keeper.start()
        for place in range(len(self._volumes)):
            await self._open(place)
        await self._listener.start()
        await self.server.start(self._config.tier.host, self._tls)
        self._follower.start()
        if self._tenants is not None:
            self._tenants.start()
        if self._key_file is not None:
            self._watching_keys = asyncio.create_task(self._watch_keys(self._key_file))
        self._registration = await self._membership.register(self.member)
        self._reopening = asyncio.create_task(self._reopen())
        log.info("%s serves %s", self.keeper_id, ", ".join(self.keeper.volume_ids) or "no volumes")

    async def check_health(self) -> None:
        self.keeper.check_health()

    async def stop(self) -> None:
        """Idempotent; also after a failed start."""
        if self._is_stopped:
            return
        self._is_stopped = True
        await self._follower.close()
        if self._tenants is not None:
            await self._tenants.close()
        tasks = [task for task in (self._warming, self._watching_keys, self._reopening) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._registration is not None:
            await self._registration.revoke()
        await self.server.stop()
        is_idle = await self.keeper.stop(_STOP_GRACE_S)
        await self.lender.close()
        if is_idle:
            await self.remote.close()
            for volume in self._volumes:
                await asyncio.to_thread(volume.close)  # writes tens of thousands of access times
        else:
            # Hanging I/O still uses its volume and memory until the process ends.
            log.warning("%s stops while I/O hangs", self.keeper_id)
        await self._agent.stop()
        await self._listener.stop()
        if self._tracing is not None:
            await self._tracing.close()
        await self._membership.close()

    def _make_volume(self, volume: VolumeConfig) -> Volume:
        machine = os.environ.get(NODE_NAME_VARIABLE) or self._node
        writer = re.sub(r"[^A-Za-z0-9._-]", "-", machine).lstrip("._-")[:MAX_WRITER_CHARS] or "node"
        capacity_bytes = int(volume.capacity_gib * (1 << 30))
        return Volume(
            volume.path,
            capacity_bytes=capacity_bytes,
            cluster=self._config.name,
            shared=volume.shared,
            writer=folder.free_writer(volume.path, writer) if volume.shared else "local",
            eviction=TenantRetention(capacity_bytes) if self._config.gateway.tenants_in_etcd else None,
            keyring=self._key_file,
        )

    async def _open(self, place: int) -> None:
        volume, volume_config = self._volumes[place], self._config.tier.volumes[place]
        begin_s = time.monotonic()
        try:
            await asyncio.to_thread(volume.open)
            await self.keeper.add(volume, volume_config)
        except TierError as error:
            await asyncio.to_thread(volume.close)
            self._volumes[place] = await asyncio.to_thread(self._make_volume, volume_config)
            if self._volume_faults.get(place) != error.message:
                log.error("a volume is not used, and is tried again: %s", error.message)
            self._volume_faults[place] = error.message
            return
        self._volume_faults.pop(place, None)
        log.info("%r found in %.2f s", volume, time.monotonic() - begin_s)

    async def _reopen(self) -> None:
        assert self._registration is not None
        pause_s = _REOPEN_FIRST_S
        while self._volume_faults:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _REOPEN_MOST_S)
            before = self.member
            for place in list(self._volume_faults):
                await self._open(place)
            if self.member == before:
                continue
            if self._tenants is not None:
                self._tenants.begin_anew()
            await self._registration.update(self.member)

    def _span_counts(self) -> SpanCounts:
        return self._tracing.counts if self._tracing is not None else SpanCounts()

    def _prepare_environment(self) -> None:
        """Set what UCX reads, before NIXL is loaded. An operator's values stay."""
        values = {"NIXL_LOG_LEVEL": "WARN"}
        if self._config.engine.device == "cpu":
            values |= ucx_environment(self._config.tier.host)
        elif is_loopback(self._config.tier.host):
            values["UCX_NET_DEVICES"] = "lo"
        for name, value in values.items():
            os.environ.setdefault(name, value)

    def _dial(self, address: str) -> grpc.aio.Channel:
        return mutual_tls.channel_to(
            address, self._config.worker.tls, (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0))
        )

    def _on_members_changed(self) -> None:
        addresses = self._others.addresses
        self.remote.keep_only(addresses)
        if addresses and self._warming is None:
            self._warming = asyncio.create_task(self._warm_up())

    async def _watch_keys(self, key_file: SealingKeyFile) -> None:
        while True:
            await asyncio.sleep(_KEYS_PERIOD_S)
            await asyncio.to_thread(key_file.refresh)

    async def _warm_up(self) -> None:
        with contextlib.suppress(TierError):  # it has logged the reason
            await self.lender.warm_up()


class _OtherKeepers:
    def __init__(self, follower: MemberFollower, own: MemberId) -> None:
        self._follower = follower
        self._own = own

    def __repr__(self) -> str:
        return f"{sorted(member.member_id for member in self._members())}"

    @property
    def addresses(self) -> set[str]:
        return {member.address for member in self._members()}

    def locate(self, volume_id: str) -> str | None:
        # The youngest: an older one may have been killed while its lease still runs.
        serving = [member for member in self._members() if volume_id in member.volumes]
        return max(serving, key=lambda member: member.started_unix_s).address if serving else None

    def _members(self) -> list[Member]:
        return [member for member in self._follower.members if member.member_id != self._own]
