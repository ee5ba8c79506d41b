"""The keeper of a node: one event loop, and I/O threads per volume."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.config import TierConfig, VolumeConfig
from kvferry.errors import TierError
from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.unix_socket import LOCK, PeerProcess, make_private, socket_path
from kvferry.observability.tracing import TraceContext, Tracing
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.engine_listener import EngineListener
from kvferry_keeper.engine_session import EngineSession
from kvferry_keeper.job_runner import JobRunner, RemoteChunks
from kvferry_keeper.job_table import JobTable
from kvferry_keeper.key_feed import KeyFeed
from kvferry_keeper.mapped_region import MappedRegion
from kvferry_keeper.store import folder
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes.breaker import Cause
from kvferry_keeper.volumes.io_threads import Kind, Operation
from kvferry_keeper.volumes.volume_feed import Update, VolumeFeed
from kvferry_keeper.volumes.volume_io import VolumeIo, VolumeIoStats
from kvferry_keeper.volumes.volume_set import VolumeSet

log = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineState:
    engine_id: str
    pid: int
    layout: str  # its digest, hexadecimal
    region_bytes: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """Counts of chunks since the start, unless the name says otherwise."""

    keeper_id: str
    engines: tuple[EngineState, ...]
    volumes: tuple[VolumeIoStats, ...]
    num_regions_mapped: int  # includes regions of engines that left while I/O runs
    load_jobs: int
    store_jobs: int
    ended_load_jobs: int
    ended_store_jobs: int
    loads: Mapping[str, int]  # by outcome or cause; remote ones and those that reached no volume too
    stores: Mapping[str, int]
    remote_loads: Mapping[str, int]
    bytes_loaded: int
    bytes_stored: int
    load_job_s: float  # from a job's arrival to its end, summed
    store_job_s: float


class Keeper:
    """Serves engines on a Unix socket. Belongs to one event loop.

    The caller opens volumes, in the order of `config.volumes` or one by one for `add`, and closes them after `stop`
    returned True.
    """

    def __init__(
        self,
        config: TierConfig,
        volumes: Sequence[Volume],
        *,
        remote: RemoteChunks | None = None,
        keeper_id: str = "",
        clock: Callable[[], float] = time.monotonic,
        read_tracing: Callable[[], Tracing | None] = lambda: None,
    ) -> None:
        if volumes and len(volumes) != len(config.volumes):
            raise ValueError(f"{len(volumes)} volumes for {len(config.volumes)} in the configuration")
        self._config = config
        self._volumes = tuple(volumes)
        self._remote = remote
        self._clock = clock
        self._read_tracing = read_tracing
        self.keeper_id = keeper_id or f"keeper-{secrets.token_hex(4)}"
        self._volume_set = VolumeSet(clock)
        self._jobs = JobTable(clock)
        self._runner = JobRunner(self._volume_set, self._jobs, remote, clock)
        self._volume_feeds: dict[str, VolumeFeed] = {}
        self._key_feeds: dict[tuple[LayoutDigest, str], KeyFeed] = {}  # by layout and pool
        self._sessions: set[EngineSession] = set()
        self._regions: set[MappedRegion] = set()
        self._listener: EngineListener | None = None
        self._socket_path: Path | None = None
        self._lock_fd = -1
        self._maintenance: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.lowest_epochs: Mapping[str, int] = {}  # by tenant; chunks of lower ones are neither read nor written

    def __repr__(self) -> str:
        return f"<Keeper {self.keeper_id}: {len(self._sessions)} engines, {self._jobs!r}, {self._volume_set!r}>"

    @property
    def volume_ids(self) -> tuple[str, ...]:
        return tuple(volume.volume_id for volume in self._volume_set)

    @property
    def socket_path(self) -> Path:
        """Raises TierError if the configured path is unusable."""
        return self._socket_path or socket_path(self._config)

    @property
    def stats(self) -> KeeperStats:
        loads, stores = self._jobs.loads, self._jobs.stores
        return KeeperStats(
            keeper_id=self.keeper_id,
            engines=tuple(
                EngineState(
                    engine_id=session.engine_id,
                    pid=session.pid,
                    layout=session.layout.digest.hex(),
                    region_bytes=session.region.num_bytes,
                    num_jobs=self._jobs.num_jobs(session),
                )
                for session in self._sessions
                if session.layout is not None and session.region is not None
            ),
            volumes=tuple(volume.stats() for volume in self._volume_set),
            num_regions_mapped=len(self._regions),
            load_jobs=loads.num_begun,
            store_jobs=stores.num_begun,
            ended_load_jobs=loads.num_ended,
            ended_store_jobs=stores.num_ended,
            loads=dict(loads.outcomes),
            stores=dict(stores.outcomes),
            remote_loads=dict(self._runner.remote_outcomes),
            bytes_loaded=loads.num_bytes,
            bytes_stored=stores.num_bytes,
            load_job_s=loads.seconds,
            store_job_s=stores.seconds,
        )

    async def start(self) -> None:
        """Raises TierError without a usable socket, if another keeper serves there, or for a volume and its copy."""
        path = self._socket_path = socket_path(self._config)
        make_private(path.parent)
        lock_fd = folder.lock(path.with_name(LOCK), shared=False)
        if lock_fd is None:
            raise TierError(f"another keeper serves at {path}")
        self._lock_fd = lock_fd
        for volume, volume_config in zip(self._volumes, self._config.volumes, strict=False):
            await self.add(volume, volume_config)
        self._listener = EngineListener(str(path), self._accept)
        try:
            self._listener.start()
        except OSError as error:
            raise TierError(f"tier.socket_dir: {path}: {error.strerror}") from error
        self._maintenance = asyncio.create_task(self._maintain())

    async def add(self, volume: Volume, volume_config: VolumeConfig) -> None:
        """Raises TierError for a copy of another volume."""
        loop = asyncio.get_running_loop()
        volume_io = VolumeIo(
            volume,
            self._config,
            volume_config,
            loop,
            on_readable_changed=self._on_readable_changed,
            clock=self._clock,
        )
        self._volume_set.add(volume_io)
        feed = self._volume_feeds[volume.volume_id] = VolumeFeed(volume_io.state)
        await asyncio.to_thread(volume_io.load_layouts)
        # Before I/O starts, so that nothing changes between setting the listener and reading the keys.
        volume.on_change = _in_loop(loop, self._on_change, volume_io)
        for layout in volume.layouts():
            feed.load(volume.keys(layout))
        volume_io.start()
        for session in self._sessions:
            if session.layout is not None and session.pool == volume_io.pool:
                volume_io.add_layout(session.layout)
        for key_feed in self._key_feeds.values():
            key_feed.begin_snapshots()

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> bool:
        """Refuse new jobs, finish running I/O, and say Bye to the engines. Idempotent.

        Returns False if I/O hangs: its engines get no Bye, and rows stay in use until this process ends.
        """
        self._is_stopping = True
        if self._listener is not None:
            self._listener.close()
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.gather(self._maintenance, return_exceptions=True)
            self._maintenance = None
        for session in list(self._sessions):
            session.refuse("the keeper stops")
        is_idle = all(await asyncio.gather(*(volume.stop(grace_s) for volume in self._volume_set)))
        is_idle &= await self._runner.finish_remote(grace_s)
        for each in self._volume_set:
            each.volume.on_change = _ignore_change
        for volume_feed in self._volume_feeds.values():
            volume_feed.close()
        for key_feed in self._key_feeds.values():
            key_feed.close()
        for session in list(self._sessions):
            if session.region is None or not session.region.is_mapped:
                session.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        return is_idle

    def check_health(self) -> None:
        task = self._maintenance
        if task is None or task.done():
            fault = None if task is None or task.cancelled() else task.exception()
            raise TierError(f"keeper {self.keeper_id} does not serve{f': {fault!r}' if fault else ''}")

    # For gateways and other keepers

    def follow(self, volume_id: str) -> AsyncGenerator[Update, None]:
        """Yield state and snapshot, then changes. Raises TierError for an unknown volume."""
        feed = self._volume_feeds.get(volume_id)
        if feed is None:
            raise TierError(f"keeper {self.keeper_id} has no volume {volume_id}")
        return feed.follow()

    def payload_bytes(self, layout: LayoutDigest) -> int | None:
        return self._volume_set.payload_bytes(layout)

    def pool_of(self, volume_id: str) -> str | None:
        volume = self._volume_set.get(volume_id)
        return None if volume is None else volume.pool

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        volume = self._volume_set.get(volume_id)
        if volume is None or not volume.is_readable or self._is_stopping:
            future.set_result(Cause.UNAVAILABLE)
            return future

        def run() -> str:
            return volume.volume.read(layout, chunk, into, header)

        def done(outcome: str) -> None:
            if outcome == Outcome.IO_ERROR:
                volume.mark_unreadable(layout, chunk)
            if not future.done():
                future.set_result(outcome)

        volume.submit(Operation(Kind.READ, len(into), run, done))
        return future

    # Sessions of engines

    def why_refused(self, hello: messages.Hello) -> str:
        if hello.pool in {"", *(volume.pool for volume in self._config.volumes)}:
            return ""
        return f"it is of pool {hello.pool[:64]!r}, which has no volume here"

    def on_hello(self, session: EngineSession, hello: messages.Hello) -> None:
        assert session.layout is not None
        assert session.region is not None
        region, layout = session.region, session.layout
        self._regions.add(region)
        region.on_unmapped = lambda: self._on_unmapped(session, region)
        self._jobs.add_session(session)
        volumes = self._volume_set.of(session.pool)
        for volume in volumes:
            volume.add_layout(layout)
        if self._remote is not None:
            self._remote.add_region(region)
        feed = self._key_feeds.get((layout.digest, session.pool))
        if feed is None:
            feed = self._key_feeds[layout.digest, session.pool] = KeyFeed(layout.digest, volumes)
        log.info(
            "engine %s (process %d) has %d rows of %d bytes",
            session.engine_id,
            session.pid,
            region.num_rows,
            region.row_bytes,
        )
        session.answer(messages.Welcome(self.keeper_id, messages.PROTOCOL))
        feed.add(session)

    def on_request(self, session: EngineSession, message: messages.Store | messages.Load | messages.Touch) -> None:
        assert session.layout is not None
        keys = messages.unpack_chunk_keys(message.keys)
        messages.check_wanted(message)
        if isinstance(message, messages.Touch):
            for volume in self._volume_set.of(session.pool):
                volume.volume.touch(session.layout.digest, keys, message.wanted_s)
            return
        assert session.region is not None
        if len(message.rows) != len(keys):
            raise ProtocolError(f"job {message.job} has {len(keys)} keys and {len(message.rows)} rows")
        if not all(map(session.region.has, message.rows)):
            raise ProtocolError(f"job {message.job} names a row outside its region of {session.region.num_rows} rows")
        try:
            namespace = Namespace(message.tenant, message.epoch)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        job = self._jobs.begin(session, message.job, keys, is_load=isinstance(message, messages.Load))
        if namespace.epoch < self.lowest_epochs.get(namespace.tenant, 0):
            for i in range(len(keys)):
                self._jobs.end_chunk(job, i, Cause.EPOCH_OVER)
        elif isinstance(message, messages.Load):
            if message.traceparent and (tracing := self._read_tracing()) is not None:
                context = TraceContext(message.traceparent, message.tracestate)
                job.span = tracing.serve(context, "keeper load", {"kvferry.pages": len(keys)})
            self._runner.load(job, namespace, message)
        else:
            self._runner.store(job, namespace, message)
        if not keys:
            self._jobs.end(job)

    def on_left(self, session: EngineSession) -> None:
        """Running operations go on; the region is unmapped after them."""
        for volume in self._volume_set:
            volume.drop_operations_of(session, Cause.ENGINE_GONE)
        feed = None if session.layout is None else self._key_feeds.get((session.layout.digest, session.pool))
        if feed is not None:
            feed.discard(session)
        region = session.region
        if region is None:
            session.say_bye()
            return
        region.close()
        if self._remote is not None and region in self._regions:
            self._remote.remove_region(region)

    def on_closed(self, session: EngineSession) -> None:
        self._sessions.discard(session)
        self._jobs.discard_session(session)

    def _accept(self, connection: socket.socket, peer: PeerProcess) -> None:
        session = EngineSession(connection, peer, self)
        self._sessions.add(session)
        session.start()

    def _on_unmapped(self, session: EngineSession, region: MappedRegion) -> None:
        self._regions.discard(region)
        session.say_bye()

    # Changes of volumes

    def _on_change(
        self, volume: VolumeIo, layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]
    ) -> None:
        self._volume_feeds[volume.volume_id].change(added, removed)
        feed = self._key_feeds.get((layout, volume.pool))
        if feed is not None and volume.is_readable:
            feed.change(chunk.key for chunk in (*added, *removed))

    def _on_readable_changed(self, volume: VolumeIo) -> None:
        self._volume_feeds[volume.volume_id].set_readable(volume.is_readable)
        for (_, pool), feed in self._key_feeds.items():
            if pool == volume.pool:
                feed.begin_snapshots()

    async def _maintain(self) -> None:
        period_s = min(0.5, self._config.io_timeout_s / 4)
        next_pulse_s = self._clock()
        while True:
            now_s = self._clock()
            for volume in self._volume_set:
                volume.maintain(now_s)
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + messages.PULSE_S
                for volume in self._volume_set:
                    volume.measure()
                    self._volume_feeds[volume.volume_id].send_state()
                for session in list(self._sessions):
                    if session.region is not None:
                        session.pulse()
            await asyncio.sleep(period_s)


def _in_loop(
    loop: asyncio.AbstractEventLoop,
    on_change: Callable[[VolumeIo, LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None],
    volume: VolumeIo,
) -> Callable[[LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None]:

    def notify(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(on_change, volume, layout, added, removed)

    return notify


def _ignore_change(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
    pass
