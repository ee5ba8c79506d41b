"""The simulator's tiers: CPU memory, and the volumes of a keeper behind it."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.engine.base import KvEvent, PagesRemoved, PagesStored
from kvferry.keeper.client import JobDone, KeeperClient, Region
from kvferry.keeper.layout import ALIGNMENT, CHUNK_KEY_BYTES, ChunkKey, ChunkLayout
from kvferry.observability.tracing import TraceContext
from kvferry.residency.index import Tier
from kvferry.tenancy.namespace import Namespace
from kvferry_sim.block_pool import PageHash

# Neither vLLM nor the simulator is notified of ended jobs. vLLM polls once a step; an idle engine steps every ms.
_POLL_EVERY_S = 0.001

_MEDIUM = "CPU"


class PageRef(NamedTuple):
    page_hash: PageHash
    route_key: int


class LoadedPage(NamedTuple):
    content: bytes
    tier: Tier  # source: CPU or VOLUME


def page_key(page_hash: PageHash) -> ChunkKey:
    return ChunkKey(page_hash.to_bytes(CHUNK_KEY_BYTES - 4, "big") + bytes(4))


def sim_layout(model: str, *, block_size: int, page_bytes: int) -> ChunkLayout:
    return ChunkLayout(
        model=model,
        weights_revision="sim",
        exchange="sim",
        dtype="sim",
        kv_cache_dtype="sim",
        tokens_per_block=block_size,
        blocks_per_chunk=1,
        num_layers=1,
        num_kv_heads=1,
        head_size=1,
        isa="sim",
        tensor_parallel=1,
        pipeline_parallel=1,
        kv_layout=f"sim-{page_bytes}",
        payload_bytes=-(-page_bytes // ALIGNMENT) * ALIGNMENT,
    )


@dataclass(slots=True, eq=False)
class _Job:
    pages: Sequence[tuple[PageRef, int]]  # with their rows
    reader: asyncio.Future[None] | None = None  # of a load: set when the job ends


class SimTier:
    """Owns its memory and its keeper client until `stop`. Single event loop.

    A row is free, ready (it holds a page), loading, or abandoned (its load failed while a reader pins it).
    """

    def __init__(
        self,
        layout: ChunkLayout,
        *,
        page_bytes: int,
        num_rows: int,
        engine_id: str,
        keeper_socket: str = "",
        volume_pool: str = "",
    ) -> None:
        self.num_rows = num_rows
        self._page_bytes = page_bytes
        self._row_bytes = layout.payload_bytes
        self._fd = os.memfd_create("kvferry-sim-tier", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_rows * self._row_bytes)
        self._memory = mmap.mmap(self._fd, num_rows * self._row_bytes)
        self._free = list(range(num_rows))
        self._pins = [0] * num_rows
        self._ready: OrderedDict[PageHash, int] = OrderedDict()  # -> row; least recently used first
        self._loading: dict[PageHash, int] = {}  # -> the row that the keeper fills
        self._abandoned: set[int] = set()  # rows of failed loads that a reader still pins
        self._jobs: dict[int, _Job] = {}
        self._num_jobs = 0
        self._num_readers = 0
        self._events: list[KvEvent] = []
        self._poller: asyncio.Task[None] | None = None
        self._client: KeeperClient | None = None
        if keeper_socket:
            region = Region(self._fd, num_rows, self._row_bytes)
            self._client = KeeperClient(keeper_socket, region, layout, engine_id=engine_id, pool=volume_pool)
            self._client.start()

    def __repr__(self) -> str:
        return (
            f"<SimTier {len(self._ready)}/{self.num_rows} ready, {len(self._loading)} loading, {len(self._jobs)} jobs>"
        )

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.connected

    @property
    def num_jobs(self) -> int:
        return len(self._jobs)

    def has(self, page_hash: PageHash, volume_id: str | None = None, *, from_volumes: bool = True) -> bool:
        """`volume_id` is a hint."""
        if page_hash in self._ready:
            return True
        client = self._client
        if client is None or page_hash in self._loading or not from_volumes:
            return False
        return client.contains(page_key(page_hash)) or (volume_id is not None and client.connected)

    def store(self, pages: Sequence[tuple[PageRef, bytes]], namespace: Namespace, *, on_volumes: bool = True) -> None:
        """Copy pages while rows are available; the keeper gets those not stored yet."""
        new: list[tuple[PageRef, int]] = []
        for ref, content in pages:
            if ref.page_hash in self._ready:
                self._ready.move_to_end(ref.page_hash)
                continue
            if ref.page_hash in self._loading or (row := self._allocate()) is None:
                continue
            start = row * self._row_bytes
            self._memory[start : start + self._page_bytes] = content
            self._add(ref, row)
            new.append((ref, row))
        if self._client is None or not on_volumes:
            return
        unstored = [(ref, row) for ref, row in new if not self._client.contains(page_key(ref.page_hash))]
        if unstored:
            job = self._begin(_Job(unstored))
            self._client.store(job, namespace, [(page_key(ref.page_hash), ref.route_key, row) for ref, row in unstored])

    async def load(
        self,
        pages: Sequence[tuple[PageRef, str | None]],
        namespace: Namespace,
        *,
        timeout_s: float,
        trace: TraceContext | None = None,
    ) -> list[LoadedPage]:
        """Return the longest available run from the start.

        Pages not loaded within `timeout_s` count as missing; their rows stay the keeper's until the job ends.
        """
        run: list[tuple[PageRef, int, Tier]] = []
        missing: list[tuple[PageRef, int]] = []
        volumes: dict[ChunkKey, str] = {}
        for ref, volume_id in pages:
            if not self.has(ref.page_hash, volume_id):
                break
            ready = self._ready.get(ref.page_hash)
            if ready is not None:
                self._ready.move_to_end(ref.page_hash)
                self._pins[ready] += 1
                run.append((ref, ready, Tier.CPU))
                continue
            row = self._allocate()
            if row is None:
                break
            self._loading[ref.page_hash] = row
            self._pins[row] += 1  # the reader's; the keeper's comes with the job
            missing.append((ref, row))
            run.append((ref, row, Tier.VOLUME))
            if volume_id is not None:
                volumes[page_key(ref.page_hash)] = volume_id
        self._num_readers += 1
        try:
            if missing:
                await self._load_missing(missing, volumes, namespace, timeout_s, trace)
            loaded: list[LoadedPage] = []
            for ref, row, tier in run:
                if self._ready.get(ref.page_hash) != row:
                    break
                start = row * self._row_bytes
                loaded.append(LoadedPage(self._memory[start : start + self._page_bytes], tier))
            return loaded
        finally:
            self._num_readers -= 1
            for _, row, _ in run:
                self._unpin(row)

    async def _load_missing(
        self,
        missing: Sequence[tuple[PageRef, int]],
        volumes: dict[ChunkKey, str],
        namespace: Namespace,
        timeout_s: float,
        trace: TraceContext | None,
    ) -> None:
        assert self._client is not None
        reader = asyncio.get_running_loop().create_future()
        job = self._begin(_Job(missing, reader))
        rows = [(page_key(ref.page_hash), row) for ref, row in missing]
        self._client.load(job, namespace, rows, volumes, trace)
        await asyncio.wait([reader], timeout=timeout_s)

    def drain_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return events

    async def stop(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
            self._poller = None
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.stop)
        if self._fd >= 0:
            self._memory.close()
            os.close(self._fd)
            self._fd = -1

    def check(self) -> None:
        rows = [*self._free, *self._ready.values(), *self._loading.values(), *self._abandoned]
        assert len(set(rows)) == len(rows), "a row holds two pages"
        assert set(rows) == set(range(self.num_rows)), "a row is lost"
        assert all(self._pins[row] == 0 for row in self._free), "a free row is in use"
        if not self._jobs:
            assert not self._loading, "a page is loading without a job"
            assert self._num_readers or not any(self._pins), "a row is pinned without a reader"

    # Rows

    def _allocate(self) -> int | None:
        if self._free:
            return self._free.pop()
        for page_hash, row in self._ready.items():
            if not self._pins[row]:
                del self._ready[page_hash]
                self._events.append(PagesRemoved([page_hash], _MEDIUM))
                return row
        return None

    def _unpin(self, row: int) -> None:
        self._pins[row] -= 1
        assert self._pins[row] >= 0, f"row {row} was unpinned twice"
        if not self._pins[row] and row in self._abandoned:
            self._abandoned.remove(row)
            self._free.append(row)

    def _add(self, ref: PageRef, row: int) -> None:
        self._ready[ref.page_hash] = row
        self._events.append(PagesStored([ref.page_hash], None, (), 0, medium=_MEDIUM, route_keys=[ref.route_key]))

    # Jobs

    def _begin(self, job: _Job) -> int:
        self._num_jobs += 1
        self._jobs[self._num_jobs] = job
        for _, row in job.pages:
            self._pins[row] += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll_jobs())
        return self._num_jobs

    async def _poll_jobs(self) -> None:
        client = self._client
        while client is not None and self._jobs:
            for done in client.finished():
                self._end(done)
            if self._jobs:
                await asyncio.sleep(_POLL_EVERY_S)

    def _end(self, done: JobDone) -> None:
        job = self._jobs.pop(done.job)
        for ref, row in job.pages:
            if done.is_load:
                del self._loading[ref.page_hash]
                if page_key(ref.page_hash) in done.succeeded:
                    self._add(ref, row)
                else:
                    self._abandoned.add(row)
            self._unpin(row)
        if job.reader is not None and not job.reader.done():
            job.reader.set_result(None)
