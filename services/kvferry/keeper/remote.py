"""Chunks of volumes that are mounted on another node: its keeper lends them, ours reads them through NIXL into the row.

The lender reads and verifies a chunk into *staging*, memory that it has registered, and answers with its address and a
header made for these very bytes. The reader copies them with NIXL, straight into the engine's row, then verifies header
and checksum over what has arrived: whatever happened on the way, and whatever the lender's memory held by then, is a
failed chunk and never a wrong one. A lease ends what nobody releases.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvferry.errors import TierError
from kvferry.keeper.breaker import Breaker
from kvferry.keeper.mapped_region import MappedRegion
from kvferry.keeper.messages import ProtocolError, pack_chunk_keys, unpack_chunk_keys
from kvferry.keeper.nixl_agent import NixlAgent, Read
from kvferry.keeper.staging import Staging
from kvferry.keeper.volume_io import Cause
from kvferry.store import chunk_file
from kvferry.store.chunk_file import HEADER_BYTES
from kvferry.store.layout import CHUNK_KEY_BYTES, LAYOUT_DIGEST_BYTES, ChunkId, ChunkKey, ChunkLayout, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.task_set import TaskSet
from kvferry.tenancy.namespace import Namespace
from kvferry.tracing import TraceContext
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry.wire.v1 import keeper_pb2_grpc

log = logging.getLogger(__name__)

STAGING_BYTES = 128 << 20
# One question to a lender: as much as two of them together keep both drive and network busy.
BATCH_BYTES = 16 << 20
_MAX_BATCHES = 2
LEASE_S = 30.0
# For memory that is lent to others: whoever waits longer had better compute the chunk.
_ROOM_WAIT_S = 1.0
# A keeper that cannot be reached is not asked again for so long: each chunk would wait for its deadline.
_RETRY_S = 2.0
_MAX_FAILURES = 2
_VERIFIERS = 2


@dataclass(frozen=True, slots=True)
class RemoteStats:
    """Chunks, since the start."""

    loaded: int
    failed: dict[str, int]  # by outcome or cause
    bytes_loaded: int
    fetch_s: float  # asking and waiting for the lender, summed
    read_s: float  # NIXL, summed


class RemoteKeepers:
    """The reader's side; a keeper's RemoteChunks. Belongs to one event loop.

    `locate` gives the address of a keeper that serves a volume, or None. `dial` makes a channel to an address.
    """

    def __init__(
        self,
        agent: NixlAgent,
        locate: Callable[[str], str | None],
        dial: Callable[[str], grpc.aio.Channel],
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` bounds a lender's answer to one question."""
        self._agent = agent
        self._locate = locate
        self._dial = dial
        self._timeout_s = timeout_s
        self._clock = clock
        self._keepers: dict[str, _RemoteKeeper] = {}
        self._regions: dict[MappedRegion, _Region] = {}
        self._leaving = TaskSet()
        self._verifiers = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="verify")
        self._failed: Counter[str] = Counter()
        self._num_loaded = 0
        self._bytes_loaded = 0
        self._fetch_s = 0.0
        self._read_s = 0.0

    def __repr__(self) -> str:
        return f"<RemoteKeepers {sorted(self._keepers)}, {len(self._regions)} regions>"

    @property
    def stats(self) -> RemoteStats:
        """A copy."""
        return RemoteStats(self._num_loaded, dict(self._failed), self._bytes_loaded, self._fetch_s, self._read_s)

    def add_region(self, region: MappedRegion) -> None:
        """Registered when the first chunk is asked for, and once."""
        region.hold()
        self._regions[region] = _Region()

    def remove_region(self, region: MappedRegion) -> None:
        entry = self._regions.pop(region)

        async def leave() -> None:
            # NIXL may not lose memory that it writes to.
            while entry.num_loads:
                entry.idle.clear()
                await entry.idle.wait()
            if entry.registering is not None:
                with contextlib.suppress(TierError):
                    await entry.registering
                    await self._agent.deregister(region.address)
            region.release()

        self._leaving.spawn(leave())

    def keep_only(self, addresses: Collection[str]) -> None:
        """Forget keepers that are at none of these addresses any more."""
        for address in self._keepers.keys() - set(addresses):
            self._leaving.spawn(self._keepers.pop(address).channel.close())

    async def load(
        self,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None = None,
    ) -> list[str]:
        """See RemoteChunks."""
        outcomes = await self._load(volume_id, layout, chunks, region, rows, trace)
        for outcome in outcomes:
            if outcome == Outcome.OK:
                self._num_loaded += 1
                self._bytes_loaded += layout.payload_bytes
            else:
                self._failed[outcome] += 1
        return outcomes

    async def close(self) -> None:
        """Nothing may be loading. May be repeated."""
        await self._leaving.wait()
        keepers, self._keepers = self._keepers, {}
        for keeper in keepers.values():
            await keeper.channel.close()
        self._verifiers.shutdown(wait=False)

    async def _load(
        self,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None,
    ) -> list[str]:
        nothing: list[str] = [Cause.UNAVAILABLE] * len(chunks)
        address, entry = self._locate(volume_id), self._regions.get(region)
        if address is None or entry is None:
            return nothing
        entry.num_loads += 1
        try:
            await self._register(region, entry)
            keeper = self._keepers.get(address)
            if keeper is None:
                keeper = self._keepers[address] = _RemoteKeeper(address, self._dial(address))
            if not keeper.may_be_asked(self._clock()):
                return nothing
            return await self._load_from(keeper, volume_id, layout, chunks, region, rows, trace)
        except TierError:
            return nothing  # the agent has said why
        finally:
            entry.num_loads -= 1
            entry.idle.set()

    async def _load_from(
        self,
        keeper: _RemoteKeeper,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None,
    ) -> list[str]:
        batch = max(1, BATCH_BYTES // layout.payload_bytes)
        cuts = [slice(start, start + batch) for start in range(0, len(chunks), batch)]
        turns = asyncio.Semaphore(_MAX_BATCHES)

        async def load(cut: slice) -> list[str]:
            async with turns:
                return await self._load_batch(keeper, volume_id, layout, chunks[cut], region, rows[cut], trace)

        return [outcome for outcomes in await asyncio.gather(*map(load, cuts)) for outcome in outcomes]

    async def _register(self, region: MappedRegion, entry: _Region) -> None:
        task = entry.registering
        if task is None or (task.done() and task.exception() is not None):
            task = entry.registering = asyncio.create_task(self._agent.register(region.address, region.num_bytes))
        await asyncio.shield(task)

    async def _load_batch(
        self,
        keeper: _RemoteKeeper,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None,
    ) -> list[str]:
        try:
            return await self._fetch(keeper, volume_id, layout, chunks, region, rows, trace)
        except grpc.aio.AioRpcError as error:
            keeper.failed(self._clock(), f"{error.code().name}: {error.details()}")
        except (TierError, ValueError) as error:
            keeper.failed(self._clock(), str(error))
        except Exception:
            keeper.failed(self._clock(), "a fault of this keeper's")
            log.exception("loading pages of volume %s fails", volume_id)
        return [Cause.UNAVAILABLE] * len(chunks)

    async def _fetch(
        self,
        keeper: _RemoteKeeper,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None,
    ) -> list[str]:
        """Nothing that is raised here leaves a row being written."""
        namespace = chunks[0].namespace
        begin_s = self._clock()
        reply = await keeper.stub.Fetch(
            pb.FetchRequest(
                volume_id=volume_id,
                layout=layout.digest,
                payload_bytes=layout.payload_bytes,
                tenant=namespace.tenant,
                epoch=namespace.epoch,
                keys=pack_chunk_keys(chunk.key for chunk in chunks),
                agent=keeper.agent,
            ),
            timeout=self._timeout_s,
            metadata=tuple(trace.headers().items()) if trace is not None else None,
        )
        try:
            fetched_s = self._clock()
            self._fetch_s += fetched_s - begin_s
            if len(reply.chunks) != len(chunks):
                raise ValueError(f"{len(reply.chunks)} pages for {len(chunks)} keys")
            outcomes = [fetched.cause or str(Outcome.OK) for fetched in reply.chunks]
            lent = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
            if not lent:
                keeper.succeeded()
                return outcomes
            await keeper.meet(self._agent, reply)
            start = region.address
            is_whole = await self._agent.read(
                keeper.agent,
                [Read(reply.chunks[i].address, start + rows[i] * region.row_bytes, layout.payload_bytes) for i in lent],
            )
            self._read_s += self._clock() - fetched_s
            if not is_whole:
                # The lender is gone, or has another agent by now: whatever is there is asked for anew.
                keeper.forget()
                raise TierError("NIXL could not read what was lent")
            keeper.succeeded()
        finally:
            if reply.lease:
                keeper.release(reply.lease, self._timeout_s)
        loop = asyncio.get_running_loop()
        verified = await asyncio.gather(
            *(
                loop.run_in_executor(
                    self._verifiers, _verify, reply.chunks[i].header, layout.digest, chunks[i], region, rows[i]
                )
                for i in lent
            )
        )
        for i, outcome in zip(lent, verified, strict=True):
            outcomes[i] = outcome
        return outcomes


class _Region:
    """A region and what NIXL has to do with it."""

    def __init__(self) -> None:
        self.registering: asyncio.Task[None] | None = None
        self.num_loads = 0
        self.idle = asyncio.Event()


class _RemoteKeeper:
    """A lender as its reader knows it."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self._complaint = ""
        self.stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
        self.agent = ""  # whose metadata NIXL has
        self._breaker = Breaker(_MAX_FAILURES, _RETRY_S)
        self._meeting = asyncio.Lock()
        self._releases = TaskSet()

    def may_be_asked(self, now_s: float) -> bool:
        """False while it is not worth a deadline. Whoever may ask while it is open is on trial."""
        if self._breaker.is_ripe(now_s):
            self._breaker.begin_trial()
            return True
        return self._breaker.is_closed

    def succeeded(self) -> None:
        self._breaker.succeeded()
        self._complaint = ""

    def failed(self, now_s: float, why: str) -> None:
        self._breaker.failed(now_s)
        if why != self._complaint:
            self._complaint = why
            log.warning("the keeper at %s lends nothing: %s", self.address, why)

    async def meet(self, agent: NixlAgent, reply: pb.FetchReply) -> None:
        """Make NIXL know the lender's agent. Raises TierError."""
        async with self._meeting:
            if reply.agent == self.agent:
                return
            if not reply.agent_metadata:
                raise TierError("the lender has another agent than before")
            if self.agent:
                with contextlib.suppress(TierError):
                    await agent.remove_remote(self.agent)
                self.agent = ""
            self.agent = await agent.add_remote(reply.agent_metadata)

    def forget(self) -> None:
        """Ask for its metadata anew."""
        self.agent = ""

    def release(self, lease: int, timeout_s: float) -> None:
        async def release() -> None:
            # Where it does not arrive the lease ends by itself.
            with contextlib.suppress(grpc.RpcError):
                await self.stub.Release(pb.ReleaseRequest(lease=lease), timeout=timeout_s)

        self._releases.spawn(release())


def _verify(header: bytes, layout: LayoutDigest, chunk: ChunkId, region: MappedRegion, row: int) -> str:
    """What has arrived, over its whole length."""
    if len(header) != HEADER_BYTES:
        return Outcome.CORRUPT_HEADER
    parsed = chunk_file.parse_header(memoryview(header))
    if parsed is None:
        return Outcome.CORRUPT_HEADER
    # Route keys are hints, which the reader may not know.
    wanted = ChunkId(chunk.key, parsed.chunk.route_key, chunk.namespace)
    with region.row(row) as payload:
        outcome = chunk_file.verify_identity(parsed, layout, wanted, len(payload))
        return outcome if outcome is not Outcome.OK else chunk_file.verify_plain(parsed, payload)


class ChunkReader(Protocol):
    """What a lender needs of its keeper."""

    def payload_bytes(self, layout: LayoutDigest) -> int | None: ...

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        """Read a chunk, and make the header of a plain chunk file for it. Both are in use until the future is done."""
        ...


class ChunkLender:
    """The lender's side: chunks in staging memory under leases. Belongs to one event loop."""

    def __init__(
        self,
        keeper: ChunkReader,
        agent: NixlAgent,
        *,
        staging_bytes: int = STAGING_BYTES,
        timeout_s: float = 10.0,
        lease_s: float = LEASE_S,
    ) -> None:
        """`timeout_s` bounds reading one chunk. Memory is taken at the first question."""
        self._keeper = keeper
        self._agent = agent
        self._staging = Staging(staging_bytes)
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._memory: mmap.mmap | None = None
        self._base = 0
        self._metadata: asyncio.Task[bytes] | None = None
        self._lease_to_starts: dict[int, tuple[list[int], asyncio.TimerHandle]] = {}
        self._num_leases = 0
        self._room = asyncio.Condition()
        self._waking = TaskSet()
        self.num_lent = 0  # chunks, since the start
        self.num_expired = 0  # leases that nobody released

    def __repr__(self) -> str:
        return f"<PageLender {self._staging}, {len(self._lease_to_starts)} leases>"

    async def warm_up(self) -> None:
        """Make ready to lend. Raises TierError where that cannot be."""
        await self._ready()

    async def fetch(self, request: pb.FetchRequest, timeout_s: float | None = None) -> pb.FetchReply:
        """Lend chunks, those that can be read within `timeout_s`.

        Raises TierError where nothing can be lent at all, ValueError for a question that is none.
        """
        keys = _keys_of(request)
        layout = LayoutDigest(request.layout)
        namespace = Namespace(request.tenant, request.epoch)
        num_bytes = self._keeper.payload_bytes(layout)
        if num_bytes is None:
            return _refusal(Outcome.MISSING, keys)
        if num_bytes != request.payload_bytes:
            return _refusal(Outcome.WRONG_LAYOUT, keys)
        metadata = await self._ready()
        deadline_s = asyncio.get_running_loop().time() + min(self._timeout_s, timeout_s or self._timeout_s)
        lending = [
            asyncio.create_task(
                self._lend(request.volume_id, layout, ChunkId(key, 0, namespace), num_bytes, deadline_s)
            )
            for key in keys
        ]
        try:
            lent = await asyncio.gather(*lending)
        except BaseException:
            for task in lending:
                task.add_done_callback(self._not_wanted)
            raise
        starts = [each.start for each in lent if isinstance(each, _Lent)]
        reply = pb.FetchReply(agent=self._agent.name)
        if request.agent != self._agent.name:
            reply.agent_metadata = metadata
        for each in lent:
            if isinstance(each, _Lent):
                reply.chunks.add(address=self._base + each.start, header=each.header)
            else:
                reply.chunks.add(cause=each)
        if starts:
            reply.lease = self._begin_lease(starts)
        return reply

    def release(self, lease: int) -> None:
        """Nobody reads it any more. May be repeated."""
        starts, timer = self._lease_to_starts.pop(lease, ([], None))
        if timer is None:
            return
        timer.cancel()
        self._agent.take_back()
        for start in starts:
            self._give_back(start)

    async def close(self) -> None:
        """Whatever is lent is lent no more. May be repeated. The memory goes with its last read."""
        for lease in list(self._lease_to_starts):
            self.release(lease)
        await self._waking.wait()
        if self._metadata is not None:
            with contextlib.suppress(TierError):
                await self._metadata
                await self._agent.deregister(self._base)
            self._metadata = None

    async def _ready(self) -> bytes:
        """Memory, registered; and what a reader needs to know to read it."""
        if self._metadata is None or (self._metadata.done() and self._metadata.exception() is not None):
            self._metadata = asyncio.create_task(self._prepare())
        return await asyncio.shield(self._metadata)

    async def _prepare(self) -> bytes:
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._staging.num_bytes)
            self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        await self._agent.register(self._base, self._staging.num_bytes)
        return await self._agent.metadata(self._base)

    async def _lend(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, num_bytes: int, deadline_s: float
    ) -> _Lent | str:
        start = await self._take(num_bytes, deadline_s)
        if start is None:
            return Cause.QUEUE_FULL
        assert self._memory is not None
        into = memoryview(self._memory)[start : start + num_bytes]
        header = memoryview(bytearray(HEADER_BYTES))
        reading = self._keeper.read(volume_id, layout, chunk, into, header)
        try:
            async with asyncio.timeout_at(deadline_s):
                outcome = await asyncio.shield(reading)
        except TimeoutError:
            outcome = Cause.TIMEOUT
        except asyncio.CancelledError:
            reading.add_done_callback(lambda _: self._give_back(start))
            raise
        if outcome == Outcome.OK:
            return _Lent(start, bytes(header))
        if reading.done():
            self._give_back(start)
        else:
            # It hangs, and may still write there.
            reading.add_done_callback(lambda _: self._give_back(start))
        return outcome

    def _not_wanted(self, task: asyncio.Task[_Lent | str]) -> None:
        if not task.cancelled() and task.exception() is None and isinstance(lent := task.result(), _Lent):
            self._give_back(lent.start)

    async def _take(self, num_bytes: int, deadline_s: float) -> int | None:
        start = self._staging.take(num_bytes)
        if start is not None or num_bytes > self._staging.num_bytes:
            return start
        given_up_s = min(deadline_s, asyncio.get_running_loop().time() + _ROOM_WAIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(given_up_s), self._room:
                while (start := self._staging.take(num_bytes)) is None:
                    await self._room.wait()
        return start

    def _give_back(self, start: int) -> None:
        self._staging.give_back(start)

        async def wake() -> None:
            async with self._room:
                self._room.notify_all()

        self._waking.spawn(wake())

    def _begin_lease(self, starts: list[int]) -> int:
        self._num_leases += 1
        lease = self._num_leases
        timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, lease)
        self._lease_to_starts[lease] = (starts, timer)
        self._agent.lend()
        self.num_lent += len(starts)
        return lease

    def _expire(self, lease: int) -> None:
        self.num_expired += 1
        self.release(lease)


@dataclass(frozen=True, slots=True)
class _Lent:
    start: int
    header: bytes


def _keys_of(request: pb.FetchRequest) -> Sequence[ChunkKey]:
    """Raises ValueError."""
    if len(request.layout) != LAYOUT_DIGEST_BYTES:
        raise ValueError(f"a layout digest of {len(request.layout)} bytes")
    try:
        keys = unpack_chunk_keys(request.keys)
    except ProtocolError as error:
        raise ValueError(str(error)) from None
    if not keys or len(keys) * CHUNK_KEY_BYTES > 1 << 20:
        raise ValueError(f"{len(keys)} keys at once")
    return keys


def _refusal(cause: str, keys: Sequence[ChunkKey]) -> pb.FetchReply:
    return pb.FetchReply(chunks=[pb.FetchedChunk(cause=cause) for _ in keys])
