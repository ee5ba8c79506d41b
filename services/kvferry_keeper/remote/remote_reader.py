"""Loads other nodes' chunks from memory that their keepers lend.

NIXL copies into the engine's row; the copy is verified, so a fault or an expired lease only fails the chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId, ChunkLayout
from kvferry.keeper.messages import pack_chunk_keys
from kvferry.observability.tracing import TraceContext
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry.wire.v1 import keeper_pb2_grpc
from kvferry_keeper.mapped_region import MappedRegion
from kvferry_keeper.remote.nixl_agent import NixlAgent, Read
from kvferry_keeper.store import chunk_file
from kvferry_keeper.store.chunk_file import HEADER_BYTES, Keyring
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import Breaker, Cause

log = logging.getLogger(__name__)

# Size of one request to a lender: two of them at a time keep both drive and network busy.
BATCH_BYTES = 16 << 20
_MAX_BATCHES = 2
# Pause before an unreachable keeper is asked again: each chunk would wait for its deadline.
_RETRY_S = 2.0
_MAX_FAILURES = 2
_VERIFIERS = 2


@dataclass(frozen=True, slots=True)
class RemoteStats:
    loaded: int
    failed: dict[str, int]  # by outcome or cause
    bytes_loaded: int
    fetch_s: float  # in requests to lenders, summed
    read_s: float  # in NIXL, summed
    num_uncancelled: int  # transfers whose rows stay in use


class RemoteReader:
    """A keeper's RemoteChunks.

    `locate` returns a serving keeper's address, or None. `dial` makes a channel.
    """

    def __init__(
        self,
        agent: NixlAgent,
        locate: Callable[[str], str | None],
        dial: Callable[[str], grpc.aio.Channel],
        *,
        keyring: Keyring | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self._agent = agent
        self._locate = locate
        self._dial = dial
        self._keyring = keyring
        self._timeout_s = timeout_s
        self._lenders: dict[str, _Lender] = {}
        self._regions: dict[MappedRegion, _RegionUse] = {}
        self._closing = TaskSet()
        self._verifiers = ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="verify")
        self._failed: Counter[str] = Counter()
        self._num_loaded = 0
        self._bytes_loaded = 0
        self._fetch_s = 0.0
        self._read_s = 0.0

    def __repr__(self) -> str:
        return f"<RemoteReader {sorted(self._lenders)}, {len(self._regions)} regions>"

    @property
    def stats(self) -> RemoteStats:
        return RemoteStats(
            self._num_loaded,
            dict(self._failed),
            self._bytes_loaded,
            self._fetch_s,
            self._read_s,
            self._agent.num_uncancelled,
        )

    def add_region(self, region: MappedRegion) -> None:
        region.hold()
        self._regions[region] = _RegionUse()

    def remove_region(self, region: MappedRegion) -> None:
        use = self._regions.pop(region)

        async def release() -> None:
            # NIXL may still write there.
            while use.num_loads:
                use.idle.clear()
                await use.idle.wait()
            if use.registering is not None:
                with contextlib.suppress(TierError):
                    await use.registering
                    await self._agent.deregister(region.address)
            region.release()

        self._closing.spawn(release())

    def keep_only(self, addresses: Collection[str]) -> None:
        for address in self._lenders.keys() - set(addresses):
            self._closing.spawn(self._lenders.pop(address).channel.close())

    async def load(
        self,
        volume_id: str,
        layout: ChunkLayout,
        chunks: Sequence[ChunkId],
        region: MappedRegion,
        rows: Sequence[int],
        trace: TraceContext | None = None,
        pool: str = "",
    ) -> list[str]:
        outcomes = await self._load(_Load(volume_id, layout, chunks, region, rows, trace, pool))
        for outcome in outcomes:
            if outcome == Outcome.OK:
                self._num_loaded += 1
                self._bytes_loaded += layout.payload_bytes
            else:
                self._failed[outcome] += 1
        return outcomes

    async def close(self) -> None:
        """No load may be running. Idempotent."""
        await self._closing.wait()
        lenders, self._lenders = self._lenders, {}
        for lender in lenders.values():
            await lender.channel.close()
        self._verifiers.shutdown(wait=False)

    async def _load(self, load: _Load) -> list[str]:
        address, use = self._locate(load.volume_id), self._regions.get(load.region)
        if address is None or use is None:
            return load.unavailable()
        use.num_loads += 1
        try:
            await self._register(load.region, use)
            lender = self._lenders.get(address)
            if lender is None:
                lender = self._lenders[address] = _Lender(address, self._dial(address))
            if not lender.may_be_asked(time.monotonic()):
                return load.unavailable()
            return await self._load_from(lender, load)
        except TierError:
            return load.unavailable()  # the agent has logged why
        finally:
            use.num_loads -= 1
            use.idle.set()

    async def _load_from(self, lender: _Lender, load: _Load) -> list[str]:
        turns = asyncio.Semaphore(_MAX_BATCHES)

        async def load_batch(batch: _Load) -> list[str]:
            async with turns:
                return await self._load_batch(lender, batch)

        return [outcome for outcomes in await asyncio.gather(*map(load_batch, load.batches())) for outcome in outcomes]

    async def _register(self, region: MappedRegion, use: _RegionUse) -> None:
        task = use.registering
        if task is None or (task.done() and task.exception() is not None):
            task = use.registering = asyncio.create_task(self._agent.register(region.address, region.num_bytes))
        await asyncio.shield(task)

    async def _load_batch(self, lender: _Lender, load: _Load) -> list[str]:
        try:
            return await self._fetch(lender, load)
        except grpc.aio.AioRpcError as error:
            lender.failed(time.monotonic(), f"{error.code().name}: {error.details()}")
        except (TierError, ValueError) as error:
            lender.failed(time.monotonic(), str(error))
        except Exception:
            lender.failed(time.monotonic(), "a fault of this keeper")
            log.exception("loading chunks of volume %s fails", load.volume_id)
        return load.unavailable()

    async def _fetch(self, lender: _Lender, load: _Load) -> list[str]:
        """Request, copy and verify chunks. If this raises, no row is being written."""
        begin_s = time.monotonic()
        reply = await lender.stub.Fetch(
            load.request(lender.agent),
            timeout=self._timeout_s,
            metadata=tuple(load.trace.headers().items()) if load.trace is not None else None,
        )
        self._fetch_s += time.monotonic() - begin_s
        try:
            if len(reply.chunks) != len(load.chunks):
                raise ValueError(f"{len(reply.chunks)} chunks for {len(load.chunks)} keys")
            outcomes = [fetched.cause or str(Outcome.OK) for fetched in reply.chunks]
            lent = [i for i, outcome in enumerate(outcomes) if outcome == Outcome.OK]
            if lent and not load.region.is_whole():
                lent, outcomes = [], [Cause.ENGINE_GONE] * len(outcomes)
            if lent:
                await self._copy(lender, reply, load, lent)
            lender.succeeded()
        finally:
            if reply.lease:
                lender.release(reply.lease, self._timeout_s)
        loop = asyncio.get_running_loop()
        verified = await asyncio.gather(
            *(
                loop.run_in_executor(self._verifiers, _verify, reply.chunks[i].header, load, i, self._keyring)
                for i in lent
            )
        )
        for i, outcome in zip(lent, verified, strict=True):
            outcomes[i] = outcome
        return outcomes

    async def _copy(self, lender: _Lender, reply: pb.FetchReply, load: _Load, lent: Sequence[int]) -> None:
        begin_s = time.monotonic()
        await lender.connect(self._agent, reply)
        is_whole = await self._agent.read(
            lender.agent,
            [Read(reply.chunks[i].address, load.row_address(i), load.layout.payload_bytes) for i in lent],
            self._timeout_s,
        )
        self._read_s += time.monotonic() - begin_s
        if not is_whole:
            # The lender is gone, or has restarted with another agent: request its metadata again.
            lender.forget_agent()
            raise TierError("NIXL could not read what was lent")


@dataclass(frozen=True, slots=True)
class _Load:
    """Chunks of one namespace and the row of `region` that each goes to."""

    volume_id: str
    layout: ChunkLayout
    chunks: Sequence[ChunkId]
    region: MappedRegion
    rows: Sequence[int]
    trace: TraceContext | None
    pool: str = ""  # of the engine

    def batches(self) -> list[_Load]:
        batch = max(1, BATCH_BYTES // self.layout.payload_bytes)
        cuts = [slice(start, start + batch) for start in range(0, len(self.chunks), batch)]
        return [dataclasses.replace(self, chunks=self.chunks[cut], rows=self.rows[cut]) for cut in cuts]

    def request(self, agent: str) -> pb.FetchRequest:
        namespace = self.chunks[0].namespace
        return pb.FetchRequest(
            volume_id=self.volume_id,
            layout=self.layout.digest,
            payload_bytes=self.layout.payload_bytes,
            tenant=namespace.tenant,
            epoch=namespace.epoch,
            keys=pack_chunk_keys(chunk.key for chunk in self.chunks),
            agent=agent,
            pool=self.pool,
        )

    def row_address(self, i: int) -> int:
        return self.region.address + self.rows[i] * self.region.row_bytes

    def unavailable(self) -> list[str]:
        return [Cause.UNAVAILABLE] * len(self.chunks)


class _RegionUse:
    def __init__(self) -> None:
        self.registering: asyncio.Task[None] | None = None
        self.num_loads = 0
        self.idle = asyncio.Event()


class _Lender:
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
        self.agent = ""  # the agent whose metadata NIXL has
        self._breaker = Breaker(_MAX_FAILURES, _RETRY_S)
        self._logged_fault = ""
        self._connecting = asyncio.Lock()
        self._releases = TaskSet()

    def may_be_asked(self, now_s: float) -> bool:
        """Return False while the breaker is open; else the request may be its trial."""
        if self._breaker.is_retry_due(now_s):
            self._breaker.begin_trial()
            return True
        return self._breaker.is_closed

    def succeeded(self) -> None:
        self._breaker.succeeded()
        self._logged_fault = ""

    def failed(self, now_s: float, fault: str) -> None:
        self._breaker.failed(now_s)
        if fault != self._logged_fault:
            self._logged_fault = fault
            log.warning("the keeper at %s lends nothing: %s", self.address, fault)

    async def connect(self, agent: NixlAgent, reply: pb.FetchReply) -> None:
        async with self._connecting:
            if reply.agent == self.agent:
                return
            if not reply.agent_metadata:
                raise TierError("the lender has another agent than before")
            if self.agent:
                with contextlib.suppress(TierError):
                    await agent.remove_remote(self.agent)
                self.agent = ""
            self.agent = await agent.add_remote(reply.agent_metadata)

    def forget_agent(self) -> None:
        self.agent = ""

    def release(self, lease: int, timeout_s: float) -> None:
        async def release() -> None:
            # If the call fails, the lease expires.
            with contextlib.suppress(grpc.RpcError):
                await self.stub.Release(pb.ReleaseRequest(lease=lease), timeout=timeout_s)

        self._releases.spawn(release())


def _verify(header: bytes, load: _Load, i: int, keyring: Keyring | None) -> str:
    if len(header) != HEADER_BYTES:
        return Outcome.CORRUPT_HEADER
    parsed = chunk_file.parse_header(memoryview(header))
    if parsed is None:
        return Outcome.CORRUPT_HEADER
    chunk = load.chunks[i]
    # The reader may not know the route key.
    wanted = ChunkId(chunk.key, parsed.chunk.route_key, chunk.namespace)
    if not load.region.is_whole():
        return Cause.ENGINE_GONE
    with load.region.row(load.rows[i]) as payload:
        outcome = chunk_file.verify_identity(parsed, load.layout.digest, wanted, len(payload))
        if outcome is not Outcome.OK:
            return outcome
        if keyring is None:
            return chunk_file.verify_plain(parsed, payload)
        keys = keyring.keys(chunk.namespace, load.volume_id)
        if not keys:
            return Outcome.UNDECRYPTABLE
        return chunk_file.unseal(parsed, memoryview(header), payload, payload, keys)
