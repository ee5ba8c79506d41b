"""The keeper of a node: it moves chunks between the regions of its engines and its volumes.

Everything here happens in one event loop but the I/O, which volumes do on threads of their own (lane.py). An engine's
job is one operation per chunk. It is answered when the last of them has ended, so that an engine never gets back a row
that may still be written, or read: a chunk that is stored while its row already holds another would be wrong with
a right checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvferry.config import TierConfig
from kvferry.errors import TierError
from kvferry.keeper import messages
from kvferry.keeper.engine_session import EngineSession, Listener, parts_of
from kvferry.keeper.mapped_region import MappedRegion
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.peer_process import PeerProcess
from kvferry.keeper.socket_path import LOCK, make_private, socket_path
from kvferry.keeper.volume_feed import Update, VolumeFeed
from kvferry.keeper.volume_io import Cause, Kind, Operation, VolumeIo, VolumeIoState
from kvferry.store import folder
from kvferry.store.layout import ChunkId, ChunkKey, ChunkLayout, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.store.volume import Volume
from kvferry.task_set import TaskSet
from kvferry.tenancy.namespace import Namespace
from kvferry.tracing import Span, TraceContext, Tracing

log = logging.getLogger(__name__)

# Changes of so long go to engines as one message.
_TELL_AFTER_S = 0.005
_STOP_GRACE_S = 5.0


class RemoteChunks(Protocol):
    """Brings chunks of volumes that other keepers have (remote.py). Everything is called in the keeper's event loop."""

    def add_region(self, region: MappedRegion) -> None:
        """Chunks may be asked for into this region from now on. Holds it."""

    def remove_region(self, region: MappedRegion) -> None:
        """Its engine is gone: release it as soon as nothing is being written there."""

    async def load(
        self,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None = None,
    ) -> list[str]:
        """Bring chunks into rows; an Outcome or Cause for each. Returns only once none of the rows is written any more.

        `trace`: whose part this is. Raises nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class EngineState:
    """An engine that is connected."""

    engine_id: str
    pid: int
    layout: str  # its digest, hexadecimal
    region_bytes: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """Everything a keeper counts, since it started. Chunks, unless the name says otherwise."""

    keeper_id: str
    engines: tuple[EngineState, ...]
    volumes: tuple[VolumeIoState, ...]
    num_regions_mapped: int  # more than engines where one that left is still being read or written
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


class _Job:
    """What an engine asked for and has not been answered. `failed` is index -> cause."""

    __slots__ = ("began_s", "failed", "is_load", "keys", "link", "num_bytes", "num_left", "number", "span")

    def __init__(
        self, link: EngineSession, number: int, keys: Sequence[ChunkKey], *, is_load: bool, now_s: float
    ) -> None:
        self.link = link
        self.number = number
        self.keys = keys
        self.is_load = is_load
        self.num_left = len(keys)
        self.failed: dict[int, str] = {}
        self.num_bytes = 0
        self.began_s = now_s
        self.span: Span | None = None  # of a load for a request that is traced


class _KeysFeed:
    """What can be loaded of one layout, told to its engines."""

    def __init__(self, layout: ChunkLayout) -> None:
        self.layout = layout
        self.links: set[EngineSession] = set()
        self.sequence = 0
        self.changed: set[ChunkKey] = set()
        self.flush: asyncio.TimerHandle | None = None


class Keeper:
    """Serves engines on a Unix socket, from `start` to `stop`; belongs to the event loop it is started in.

    The volumes are open, and stay their owner's to close, after `stop` has returned True. `config.volumes` has one
    entry for each of them, in the same order.
    """

    def __init__(
        self,
        config: TierConfig,
        volumes: Sequence[Volume],
        *,
        remote: RemoteChunks | None = None,
        keeper_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is in seconds and never goes back. Raises ValueError when volumes and configuration do not match."""
        if len(volumes) != len(config.volumes):
            raise ValueError(f"{len(volumes)} volumes for {len(config.volumes)} in the configuration")
        self._config = config
        self._volumes = tuple(volumes)
        self._remote = remote
        self._clock = clock
        self.tracing: Tracing | None = None
        self.keeper_id = keeper_id or f"keeper-{secrets.token_hex(4)}"
        self._lanes: dict[str, VolumeIo] = {}
        self._feeds: dict[str, VolumeFeed] = {}
        self._layouts: dict[LayoutDigest, _KeysFeed] = {}
        self._links: set[EngineSession] = set()
        self._regions: set[MappedRegion] = set()
        self._jobs: dict[EngineSession, dict[int, _Job]] = {}
        self._storing: set[tuple[LayoutDigest, ChunkKey]] = set()
        self._remote_loads = TaskSet()
        self._listener: Listener | None = None
        self._socket_path: Path | None = None
        self._lock_fd = -1
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._num_load_jobs = 0
        self._num_store_jobs = 0
        self._num_ended_load_jobs = 0
        self._num_ended_store_jobs = 0
        self._loads: Counter[str] = Counter()
        self._stores: Counter[str] = Counter()
        self._remote_outcomes: Counter[str] = Counter()
        self._bytes_loaded = 0
        self._bytes_stored = 0
        self._load_job_s = 0.0
        self._store_job_s = 0.0

    def __repr__(self) -> str:
        num_jobs = sum(map(len, self._jobs.values()))
        return f"<Keeper {self.keeper_id}: {len(self._links)} engines, {num_jobs} jobs, {list(self._lanes.values())}>"

    @property
    def volume_ids(self) -> tuple[str, ...]:
        return tuple(volume.volume_id for volume in self._volumes)

    @property
    def socket_path(self) -> Path:
        """Where engines connect. Raises TierError where there is no such place."""
        return self._socket_path or socket_path(self._config)

    @property
    def stats(self) -> KeeperStats:
        """A copy."""
        return KeeperStats(
            keeper_id=self.keeper_id,
            engines=tuple(
                EngineState(
                    engine_id=link.engine_id,
                    pid=link.pid,
                    layout=link.layout.digest.hex(),
                    region_bytes=link.region.num_bytes,
                    num_jobs=len(self._jobs.get(link, ())),
                )
                for link in self._links
                if link.layout is not None and link.region is not None
            ),
            volumes=tuple(lane.state() for lane in self._lanes.values()),
            num_regions_mapped=len(self._regions),
            load_jobs=self._num_load_jobs,
            store_jobs=self._num_store_jobs,
            ended_load_jobs=self._num_ended_load_jobs,
            ended_store_jobs=self._num_ended_store_jobs,
            loads=dict(self._loads),
            stores=dict(self._stores),
            remote_loads=dict(self._remote_outcomes),
            bytes_loaded=self._bytes_loaded,
            bytes_stored=self._bytes_stored,
            load_job_s=self._load_job_s,
            store_job_s=self._store_job_s,
        )

    async def start(self) -> None:
        """Serve. Raises TierError where the socket cannot be made, or another keeper serves there."""
        loop = asyncio.get_running_loop()
        path = self._socket_path = socket_path(self._config)
        make_private(path.parent)
        lock_fd = folder.lock(path.with_name(LOCK), shared=False)
        if lock_fd is None:
            raise TierError(f"another keeper serves at {path}")
        self._lock_fd = lock_fd
        for volume, volume_config in zip(self._volumes, self._config.volumes, strict=True):
            lane = VolumeIo(volume, self._config, volume_config, loop, on_visible=self._visibility, clock=self._clock)
            feed = VolumeFeed(lane.state)
            self._lanes[volume.volume_id], self._feeds[volume.volume_id] = lane, feed
            await asyncio.to_thread(lane.learn)
            # Nothing changes between these two: nobody uses the volume yet.
            volume.on_change = _in_loop(loop, self._changed, lane)
            for layout in volume.layouts():
                feed.load(volume.keys(layout))
            lane.start()
        self._listener = Listener(str(path), self._accept)
        try:
            self._listener.start()
        except OSError as error:
            raise TierError(f"tier.socket_dir: {path}: {error.strerror}") from error
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self, grace_s: float = _STOP_GRACE_S) -> bool:
        """Take nothing more, end what runs, and say Bye to the engines. May be repeated.

        False where I/O hangs: those rows stay with this process until it ends, and their engines are told nothing.
        """
        self._is_stopping = True
        if self._listener is not None:
            self._listener.close()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._ticking = None
        for link in list(self._links):
            link.refuse("the keeper stops")
        ended = [lane.stop(grace_s) for lane in self._lanes.values()]
        are_quiet = all(await asyncio.gather(*ended))
        are_quiet &= await self._remote_loads.ended_within(grace_s)
        for volume in self._volumes:
            volume.on_change = _tell_nobody
        for feed in self._feeds.values():
            feed.close()
        for keys_feed in self._layouts.values():
            if keys_feed.flush is not None:
                keys_feed.flush.cancel()
        for link in list(self._links):
            if link.region is None or not link.region.is_mapped:
                link.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        return are_quiet

    def check_health(self) -> None:
        """Raises TierError once it does not serve any more."""
        ticking = self._ticking
        if ticking is None or ticking.done():
            fault = None if ticking is None or ticking.cancelled() else ticking.exception()
            raise TierError(f"keeper {self.keeper_id} does not serve{f': {fault!r}' if fault else ''}")

    def follow(self, volume_id: str) -> AsyncGenerator[Update, None]:
        """What a volume holds, for gateways: its state, a snapshot, then changes and now and then its state again.

        It never ends by itself, and is to be closed. Raises TierError for a volume that is not here.
        """
        feed = self._feeds.get(volume_id)
        if feed is None:
            raise TierError(f"keeper {self.keeper_id} has no volume {volume_id}")
        return feed.follow()

    def payload_bytes(self, layout: LayoutDigest) -> int | None:
        """Of the chunks of a layout, where its engines or one of the volumes have told of it."""
        for lane in self._lanes.values():
            num_bytes = lane.layout_to_payload_bytes.get(layout)
            if num_bytes is not None:
                return num_bytes
        return None

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        """Read a chunk for another keeper, and make the header of a plain chunk file for it.

        Both belong to the operation until the future is done. The outcome or cause is the result; never an exception.
        """
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def done(outcome: str) -> None:
            if not future.done():
                future.set_result(outcome)

        lane = self._lanes.get(volume_id)
        if lane is None or not lane.is_visible or self._is_stopping:
            done(Cause.UNAVAILABLE)
            return future

        def run() -> str:
            return lane.volume.read(layout, chunk, into, header)

        def read(outcome: str) -> None:
            if outcome == Outcome.IO_ERROR:
                lane.suspect(layout, chunk)
            done(outcome)

        lane.submit(Operation(Kind.READ, len(into), run, read))
        return future

    # What links tell

    def greeted(self, link: EngineSession, hello: messages.Hello) -> None:
        assert link.layout is not None
        assert link.region is not None
        region, layout = link.region, link.layout
        self._regions.add(region)
        region.on_unmapped = lambda: self._unmapped(link, region)
        self._jobs[link] = {}
        for lane in self._lanes.values():
            lane.add_layout(layout)
        if self._remote is not None:
            self._remote.add_region(region)
        feed = self._layouts.get(layout.digest)
        if feed is None:
            feed = self._layouts[layout.digest] = _KeysFeed(layout)
        feed.links.add(link)
        link.snapshot = lambda: self._snapshot(feed)
        log.info("engine %s (process %d) has %d rows of %d bytes", link.engine_id, link.pid, *self._shape(region))
        link.answer(messages.Welcome(self.keeper_id, messages.PROTOCOL))
        link.begin_snapshot()

    def asked(self, link: EngineSession, message: messages.Store | messages.Load | messages.Touch) -> None:
        assert link.layout is not None
        keys = messages.unpack_chunk_keys(message.keys)
        if isinstance(message, messages.Touch):
            for lane in self._lanes.values():
                lane.volume.touch(link.layout.digest, keys)
            return
        assert link.region is not None
        if len(message.rows) != len(keys):
            raise ProtocolError(f"job {message.job} has {len(keys)} keys and {len(message.rows)} rows")
        if not all(map(link.region.has, message.rows)):
            raise ProtocolError(f"job {message.job} names a row outside its region of {link.region.num_rows} rows")
        jobs = self._jobs[link]
        if message.job in jobs:
            raise ProtocolError(f"job {message.job} has not ended")
        try:
            namespace = Namespace(message.tenant, message.epoch)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        is_load = isinstance(message, messages.Load)
        job = jobs[message.job] = _Job(link, message.job, keys, is_load=is_load, now_s=self._clock())
        if isinstance(message, messages.Load):
            self._num_load_jobs += 1
            if self.tracing is not None and message.traceparent:
                context = TraceContext(message.traceparent, message.tracestate)
                job.span = self.tracing.serve(context, "keeper load", {"kvferry.pages": len(keys)})
            self._load(job, namespace, message)
        else:
            self._num_store_jobs += 1
            self._store(job, namespace, message)
        if not keys:
            self._settle(job)

    def left(self, link: EngineSession) -> None:
        """Its jobs that run end by themselves; the region is unmapped then."""
        for lane in self._lanes.values():
            lane.drop(link, Cause.ENGINE_GONE)
        if link.layout is not None and link.layout.digest in self._layouts:
            self._layouts[link.layout.digest].links.discard(link)
        region = link.region
        if region is None:
            link.say_bye()
            return
        region.close()
        if self._remote is not None and region in self._regions:
            self._remote.remove_region(region)

    def _unmapped(self, link: EngineSession, region: MappedRegion) -> None:
        self._regions.discard(region)
        link.say_bye()

    def _accept(self, connection: socket.socket, peer: PeerProcess) -> None:
        link = EngineSession(connection, peer, self)
        link.on_closed = self._closed
        self._links.add(link)
        link.start()

    def _closed(self, link: EngineSession) -> None:
        self._links.discard(link)
        self._jobs.pop(link, None)

    @staticmethod
    def _shape(region: MappedRegion) -> tuple[int, int]:
        return region.num_rows, region.row_bytes

    # Jobs

    def _load(self, job: _Job, namespace: Namespace, message: messages.Load) -> None:
        region, layout = job.link.region, job.link.layout
        assert region is not None
        assert layout is not None
        digest = layout.digest
        index_to_volume = {i: volume_id for volume_id, indices in message.volumes.items() for i in indices}
        volume_to_remote: dict[str, list[int]] = {}
        for i, (key, row) in enumerate(zip(job.keys, message.rows, strict=True)):
            lane = self._lane_with(digest, key)
            volume_id = index_to_volume.get(i)
            if lane is None and volume_id is not None:
                lane = self._lanes.get(volume_id)
                if lane is None:
                    volume_to_remote.setdefault(volume_id, []).append(i)
                    continue
            if lane is None:
                self._ended(job, i, Outcome.MISSING)
            elif not lane.is_visible:
                self._ended(job, i, Cause.UNAVAILABLE)
            else:
                self._read(job, i, lane, digest, ChunkId(key, 0, namespace), region, row)
        for volume_id, indices in volume_to_remote.items():
            chunks = [ChunkId(job.keys[i], 0, namespace) for i in indices]
            self._read_remote(job, indices, volume_id, layout, chunks, [message.rows[i] for i in indices])

    def _read(
        self,
        job: _Job,
        index: int,
        lane: VolumeIo,
        layout: LayoutDigest,
        chunk: ChunkId,
        region: MappedRegion,
        row: int,
    ) -> None:
        def run() -> str:
            if not region.is_whole():
                return Cause.ENGINE_GONE
            with region.row(row) as into:
                return lane.volume.read(layout, chunk, into)

        def done(outcome: str) -> None:
            if outcome == Outcome.IO_ERROR:
                lane.suspect(layout, chunk)
            self._ended(job, index, outcome)
            region.release()  # after the answer: the last one to release it says Bye

        region.hold()
        lane.submit(Operation(Kind.READ, region.row_bytes, run, done, owner=job.link))

    def _read_remote(
        self,
        job: _Job,
        indices: Sequence[int],
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        rows: Sequence[int],
    ) -> None:
        region, remote = job.link.region, self._remote
        assert region is not None
        if remote is None:
            for i in indices:
                self._remote_outcomes[Cause.UNAVAILABLE] += 1
                self._ended(job, i, Cause.UNAVAILABLE)
            return

        trace = job.span.context if job.span is not None else None

        async def load() -> None:
            outcomes = await remote.load(volume_id, layout, chunks, region, rows, trace)
            for i, outcome in zip(indices, outcomes, strict=True):
                self._remote_outcomes[outcome] += 1
                self._ended(job, i, outcome)
            region.release()

        region.hold()
        self._remote_loads.spawn(load())

    def _store(self, job: _Job, namespace: Namespace, message: messages.Store) -> None:
        region, layout = job.link.region, job.link.layout
        assert region is not None
        assert layout is not None
        if len(message.route_keys) != len(job.keys):
            raise ProtocolError(f"job {job.number} has {len(job.keys)} keys and {len(message.route_keys)} route keys")
        try:
            chunks = [
                ChunkId(key, route_key, namespace) for key, route_key in zip(job.keys, message.route_keys, strict=True)
            ]
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        for i, (chunk, row) in enumerate(zip(chunks, message.rows, strict=True)):
            if (layout.digest, chunk.key) in self._storing:
                # Another engine computed the same.
                self._ended(job, i, Outcome.EXISTS)
                continue
            holder = self._lane_with(layout.digest, chunk.key)
            if holder is not None:
                # It says EXISTS without any I/O, or replaces a chunk of another namespace.
                if holder.takes_writes(self._clock()):
                    self._write(job, i, holder, layout.digest, chunk, region, row, is_new=False)
                else:
                    self._ended(job, i, Outcome.EXISTS)
                continue
            lane, cause = self._lane_for(region.row_bytes)
            if lane is None:
                self._ended(job, i, cause)
            else:
                self._write(job, i, lane, layout.digest, chunk, region, row, is_new=True)

    def _write(
        self,
        job: _Job,
        index: int,
        lane: VolumeIo,
        layout: LayoutDigest,
        chunk: ChunkId,
        region: MappedRegion,
        row: int,
        *,
        is_new: bool,
    ) -> None:
        num_bytes = region.row_bytes

        def run() -> str:
            if not region.is_whole():
                return Cause.ENGINE_GONE
            with region.row(row) as payload:
                return lane.volume.write(layout, chunk, payload)

        def done(outcome: str) -> None:
            self._storing.discard((layout, chunk.key))
            if is_new and outcome != Outcome.OK:
                lane.budget.give_back(num_bytes)
            elif not is_new and outcome == Outcome.OK:
                lane.budget.spend(num_bytes)
            self._ended(job, index, outcome)
            region.release()

        region.hold()
        self._storing.add((layout, chunk.key))
        lane.begin_write()
        if is_new:
            lane.budget.spend(num_bytes)
        lane.submit(Operation(Kind.WRITE, num_bytes, run, done, owner=job.link))

    def _ended(self, job: _Job, index: int, outcome: str) -> None:
        """One chunk of a job."""
        link = job.link
        (self._loads if job.is_load else self._stores)[outcome] += 1
        if outcome == Outcome.OK:
            assert link.region is not None
            job.num_bytes += link.region.row_bytes
        elif job.is_load or outcome != Outcome.EXISTS:
            job.failed[index] = outcome
        job.num_left -= 1
        if not job.num_left:
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        seconds = self._clock() - job.began_s
        if job.is_load:
            self._num_ended_load_jobs += 1
            self._bytes_loaded += job.num_bytes
            self._load_job_s += seconds
        else:
            self._num_ended_store_jobs += 1
            self._bytes_stored += job.num_bytes
            self._store_job_s += seconds
        if job.span is not None:
            _end_span(job.span, job)
        jobs = self._jobs.get(job.link)
        if jobs is not None:
            del jobs[job.number]
        job.link.answer(messages.Done(job.number, job.failed, job.num_bytes))

    def _lane_with(self, layout: LayoutDigest, key: ChunkKey) -> VolumeIo | None:
        """Where a chunk can be loaded from, soonest."""
        holders = [lane for lane in self._lanes.values() if lane.is_visible and lane.volume.contains(layout, key)]
        return min(holders, key=lambda lane: lane.queued_bytes, default=None)

    def _lane_for(self, num_bytes: int) -> tuple[VolumeIo | None, str]:
        """Where a new chunk is to be kept: with room, and the shortest queue; or None, and why."""
        now_s = self._clock()
        lanes = [lane for lane in self._lanes.values() if lane.takes_writes(now_s)]
        if not lanes:
            return None, Cause.UNAVAILABLE
        lanes = [lane for lane in lanes if lane.budget.allows(now_s)]
        if not lanes:
            return None, Outcome.REFUSED
        queued_bytes = sum(lane.queued_write_bytes for lane in self._lanes.values())
        if queued_bytes + num_bytes > self._config.queue_mib << 20:
            return None, Cause.QUEUE_FULL
        if len(lanes) == 1:
            return lanes[0], ""
        lane_to_fill = {lane: lane.fill(num_bytes) for lane in lanes}
        return min(lanes, key=lambda lane: (lane_to_fill[lane] > 1, lane.queued_bytes, lane_to_fill[lane])), ""

    # What is told

    def _changed(
        self, lane: VolumeIo, layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]
    ) -> None:
        self._feeds[lane.volume_id].change(added, removed)
        feed = self._layouts.get(layout)
        if feed is None or not lane.is_visible:
            return
        feed.changed.update(chunk.key for chunk in added)
        feed.changed.update(chunk.key for chunk in removed)
        if feed.flush is None:
            feed.flush = asyncio.get_running_loop().call_later(_TELL_AFTER_S, self._tell, feed)

    def _tell(self, feed: _KeysFeed) -> None:
        """Tell of keys that changed what they are now, however they came to be it."""
        feed.flush = None
        changed, feed.changed = feed.changed, set()
        if not feed.links:
            return
        digest = feed.layout.digest
        lanes = [lane for lane in self._lanes.values() if lane.is_visible]
        added = [key for key in changed if any(lane.volume.contains(digest, key) for lane in lanes)]
        removed = changed.difference(added)
        feed.sequence += 1
        # A frame is bounded: a purge may take a million chunks at once.
        if len(changed) > messages.MAX_PART_KEYS:
            for link in feed.links:
                link.begin_snapshot()
            return
        change = messages.encode(
            messages.ChangedKeys(feed.sequence, messages.pack_chunk_keys(added), messages.pack_chunk_keys(removed))
        )
        for link in feed.links:
            link.tell(change)

    def _snapshot(self, feed: _KeysFeed) -> Iterator[bytes]:
        digest = feed.layout.digest
        keys = [chunk.key for lane in self._lanes.values() if lane.is_visible for chunk in lane.volume.keys(digest)]
        return parts_of(feed.sequence, keys)

    def _visibility(self, lane: VolumeIo) -> None:
        """A volume's chunks can be loaded from now on, or no more."""
        self._feeds[lane.volume_id].show(lane.is_visible)
        for feed in self._layouts.values():
            for link in feed.links:
                link.begin_snapshot()

    async def _tick(self) -> None:
        """Deadlines and probes often, the rest every second."""
        period_s = min(0.5, self._config.io_timeout_s / 4, self._config.breaker_retry_s / 2)
        next_pulse_s = self._clock()
        while True:
            now_s = self._clock()
            for lane in self._lanes.values():
                lane.check(now_s)
            if now_s >= next_pulse_s:
                next_pulse_s = now_s + messages.PULSE_S
                for lane in self._lanes.values():
                    lane.measure()
                    self._feeds[lane.volume_id].tell_state()
                for link in list(self._links):
                    if link.region is not None:
                        link.pulse()
            await asyncio.sleep(period_s)


def _in_loop(
    loop: asyncio.AbstractEventLoop,
    changed: Callable[[VolumeIo, LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None],
    lane: VolumeIo,
) -> Callable[[LayoutDigest, Sequence[ChunkId], Sequence[ChunkId]], None]:
    def tell(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(changed, lane, layout, added, removed)

    return tell


def _end_span(span: Span, job: _Job) -> None:
    """Chunks that failed are misses: no error of the request."""
    causes = sorted({str(cause) for cause in job.failed.values()})
    span.set(
        {"kvferry.bytes": job.num_bytes, "kvferry.failed_pages": len(job.failed), "kvferry.causes": causes or None}
    )
    span.end()


def _tell_nobody(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
    pass
