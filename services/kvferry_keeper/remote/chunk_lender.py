"""Lends chunks to other nodes' keepers, in NIXL memory under leases."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import TierError
from kvferry.keeper.layout import CHUNK_KEY_BYTES, LAYOUT_DIGEST_BYTES, ChunkId, ChunkKey, LayoutDigest
from kvferry.keeper.messages import ProtocolError, unpack_chunk_keys
from kvferry.tenancy.namespace import Namespace
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry_keeper.remote.nixl_agent import NixlAgent
from kvferry_keeper.remote.staging import Staging
from kvferry_keeper.store.chunk_file import HEADER_BYTES
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import Cause

STAGING_BYTES = 128 << 20
LEASE_S = 30.0
MAX_KEYS = (1 << 20) // CHUNK_KEY_BYTES  # of a request
# Longest wait for staging memory: after that, computing the chunk anew is cheaper.
_STAGING_WAIT_S = 1.0
_MAX_LEASE = (1 << 64) - 1  # 0: nothing is lent


class LocalChunks(Protocol):
    def pool_of(self, volume_id: str) -> str | None:
        """None: unknown volume."""
        ...

    def payload_bytes(self, layout: LayoutDigest) -> int | None:
        """None: unknown layout."""
        ...

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        """The future gives an Outcome or Cause; until then both buffers are in use."""
        ...


class ChunkLender:
    """Belongs to one event loop."""

    def __init__(
        self,
        local: LocalChunks,
        agent: NixlAgent,
        *,
        staging_bytes: int = STAGING_BYTES,
        timeout_s: float,
    ) -> None:
        self._local = local
        self._agent = agent
        self._staging = Staging(staging_bytes)
        self._timeout_s = timeout_s
        self._memory: mmap.mmap | None = None
        self._registering: asyncio.Task[_Registered] | None = None
        self._lease_to_starts: dict[int, tuple[list[int], asyncio.TimerHandle]] = {}
        self._staging_freed = asyncio.Condition()
        self._wakeups = TaskSet()
        self.num_lent = 0  # chunks, since the start
        self.num_expired = 0  # leases

    def __repr__(self) -> str:
        return f"<ChunkLender {self._staging}, {len(self._lease_to_starts)} leases>"

    async def warm_up(self) -> None:
        """Raises TierError."""
        await self._ready()

    async def fetch(self, request: pb.FetchRequest, timeout_s: float | None = None) -> pb.FetchReply:
        """Lend the chunks that can be read within `timeout_s`.

        Raises TierError if lending is impossible, ValueError for a malformed request.
        """
        keys = _keys_of(request)
        layout = LayoutDigest(request.layout)
        namespace = Namespace(request.tenant, request.epoch)
        if self._local.pool_of(request.volume_id) not in (None, request.pool):
            return _refusal(Cause.UNAVAILABLE, keys)
        num_bytes = self._local.payload_bytes(layout)
        if num_bytes is None:
            return _refusal(Outcome.MISSING, keys)
        if num_bytes != request.payload_bytes:
            return _refusal(Outcome.WRONG_LAYOUT, keys)
        registered = await self._ready()
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
                task.add_done_callback(self._free_abandoned)
            raise
        starts = [result.start for result in lent if isinstance(result, _Lent)]
        reply = pb.FetchReply(agent=self._agent.name)
        if request.agent != self._agent.name:
            reply.agent_metadata = registered.metadata
        for result in lent:
            if isinstance(result, _Lent):
                reply.chunks.add(address=registered.base + result.start, header=result.header)
            else:
                reply.chunks.add(cause=result)
        if starts:
            reply.lease = self._begin_lease(starts)
        return reply

    def release(self, lease: int) -> None:
        """Idempotent."""
        starts, timer = self._lease_to_starts.pop(lease, ([], None))
        if timer is None:
            return
        timer.cancel()
        self._agent.end_lending()
        for start in starts:
            self._free(start)

    async def close(self) -> None:
        """End all leases. Idempotent. The memory is freed after its last read."""
        for lease in list(self._lease_to_starts):
            self.release(lease)
        await self._wakeups.wait()
        if self._registering is not None:
            with contextlib.suppress(TierError):
                await self._agent.deregister((await self._registering).base)
            self._registering = None

    async def _ready(self) -> _Registered:
        if self._registering is None or (self._registering.done() and self._registering.exception() is not None):
            self._registering = asyncio.create_task(self._register())
        return await asyncio.shield(self._registering)

    async def _register(self) -> _Registered:
        if self._memory is None:
            self._memory = mmap.mmap(-1, self._staging.num_bytes)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        await self._agent.register(base, self._staging.num_bytes)
        return _Registered(base, await self._agent.metadata(base))

    async def _lend(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, num_bytes: int, deadline_s: float
    ) -> _Lent | str:
        start = await self._allocate(num_bytes, deadline_s)
        if start is None:
            return Cause.QUEUE_FULL
        assert self._memory is not None
        into = memoryview(self._memory)[start : start + num_bytes]
        header = memoryview(bytearray(HEADER_BYTES))
        reading = self._local.read(volume_id, layout, chunk, into, header)
        try:
            async with asyncio.timeout_at(deadline_s):
                outcome = await asyncio.shield(reading)
        except TimeoutError:
            outcome = Cause.TIMEOUT
        except asyncio.CancelledError:
            reading.add_done_callback(lambda _: self._free(start))
            raise
        if outcome == Outcome.OK:
            return _Lent(start, bytes(header))
        if reading.done():
            self._free(start)
        else:
            # The read hangs, and may still write there.
            reading.add_done_callback(lambda _: self._free(start))
        return outcome

    def _free_abandoned(self, task: asyncio.Task[_Lent | str]) -> None:
        if not task.cancelled() and task.exception() is None and isinstance(lent := task.result(), _Lent):
            self._free(lent.start)

    async def _allocate(self, num_bytes: int, deadline_s: float) -> int | None:
        if num_bytes > self._staging.num_bytes:
            return None
        given_up_s = min(deadline_s, asyncio.get_running_loop().time() + _STAGING_WAIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(given_up_s), self._staging_freed:
                while (start := self._staging.allocate(num_bytes)) is None:
                    await self._staging_freed.wait()
                return start
        return None

    def _free(self, start: int) -> None:
        self._staging.free(start)

        async def wake() -> None:
            async with self._staging_freed:
                self._staging_freed.notify_all()

        self._wakeups.spawn(wake())

    def _begin_lease(self, starts: list[int]) -> int:
        # Its number is all that it takes to end a lease.
        lease = secrets.randbelow(_MAX_LEASE) + 1
        timer = asyncio.get_running_loop().call_later(LEASE_S, self._expire, lease)
        self._lease_to_starts[lease] = (starts, timer)
        self._agent.begin_lending()
        self.num_lent += len(starts)
        return lease

    def _expire(self, lease: int) -> None:
        self.num_expired += 1
        self.release(lease)


@dataclass(frozen=True, slots=True)
class _Registered:
    """The memory that is lent, as its agent knows it."""

    base: int  # its address
    metadata: bytes


@dataclass(frozen=True, slots=True)
class _Lent:
    start: int
    header: bytes


def _keys_of(request: pb.FetchRequest) -> Sequence[ChunkKey]:
    if len(request.layout) != LAYOUT_DIGEST_BYTES:
        raise ValueError(f"a layout digest of {len(request.layout)} bytes")
    try:
        keys = unpack_chunk_keys(request.keys)
    except ProtocolError as error:
        raise ValueError(str(error)) from None
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ValueError(f"{len(keys)} keys at once")
    return keys


def _refusal(cause: str, keys: Sequence[ChunkKey]) -> pb.FetchReply:
    return pb.FetchReply(chunks=[pb.FetchedChunk(cause=cause) for _ in keys])
