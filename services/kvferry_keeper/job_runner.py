"""Carries out loads and stores, one operation per chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkId, ChunkKey, ChunkLayout, LayoutDigest
from kvferry.keeper.messages import ProtocolError
from kvferry.observability.tracing import TraceContext
from kvferry.tenancy.namespace import Namespace
from kvferry.util.task_set import TaskSet
from kvferry_keeper.job_table import Job, JobTable
from kvferry_keeper.mapped_region import MappedRegion
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import Cause
from kvferry_keeper.volumes.io_threads import Kind, Operation
from kvferry_keeper.volumes.volume_io import VolumeIo
from kvferry_keeper.volumes.volume_set import VolumeSet


class RemoteChunks(Protocol):
    def add_region(self, region: MappedRegion) -> None:
        pass

    def remove_region(self, region: MappedRegion) -> None:
        pass

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
        """Return each chunk's Outcome or Cause, once no row is being written. Never raises."""
        ...


class JobRunner:
    """Belongs to one event loop."""

    def __init__(
        self, volumes: VolumeSet, jobs: JobTable, remote: RemoteChunks | None, clock: Callable[[], float]
    ) -> None:
        self._volumes = volumes
        self._jobs = jobs
        self._remote = remote
        self._clock = clock
        self._storing: set[tuple[str, LayoutDigest, ChunkKey]] = set()  # pool, layout, key
        self._remote_loads = TaskSet()
        self.remote_outcomes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<JobRunner {len(self._storing)} chunks being stored, {len(self._remote_loads)} remote loads>"

    async def finish_remote(self, timeout_s: float) -> bool:
        return await self._remote_loads.ended_within(timeout_s)

    # Loads

    def load(self, job: Job, namespace: Namespace, message: messages.Load) -> None:
        _, layout = _region_and_layout(job)
        volumes = self._volumes.of(job.session.pool)
        index_to_volume = {i: volume_id for volume_id, indices in message.volumes.items() for i in indices}
        volume_to_remote: dict[str, list[int]] = {}
        for i, (key, row) in enumerate(zip(job.keys, message.rows, strict=True)):
            volume = volumes.with_chunk(layout.digest, key)
            volume_id = index_to_volume.get(i)
            if volume is None and volume_id is not None:
                volume = volumes.get(volume_id)
                if volume is None and self._volumes.get(volume_id) is None:
                    volume_to_remote.setdefault(volume_id, []).append(i)
                    continue
            if volume is None:
                self._jobs.end_chunk(job, i, Outcome.MISSING)
            elif not volume.is_readable:
                self._jobs.end_chunk(job, i, Cause.UNAVAILABLE)
            else:
                self._read(job, i, volume, layout.digest, ChunkId(key, 0, namespace), row)
        for volume_id, indices in volume_to_remote.items():
            chunks = [ChunkId(job.keys[i], 0, namespace) for i in indices]
            self._load_remote(job, indices, volume_id, chunks, [message.rows[i] for i in indices])

    def _read(self, job: Job, index: int, volume: VolumeIo, layout: LayoutDigest, chunk: ChunkId, row: int) -> None:
        region, _ = _region_and_layout(job)

        def run() -> str:
            if not region.is_whole():
                return Cause.ENGINE_GONE
            with region.row(row) as into:
                return volume.volume.read(layout, chunk, into)

        def done(outcome: str) -> None:
            if outcome == Outcome.IO_ERROR:
                volume.mark_unreadable(layout, chunk)
            self._jobs.end_chunk(job, index, outcome)
            region.release()  # after the answer: the last release may lead to Bye

        region.hold()
        volume.submit(Operation(Kind.READ, region.row_bytes, run, done, owner=job.session))

    def _load_remote(
        self, job: Job, indices: Sequence[int], volume_id: str, chunks: Sequence[ChunkId], rows: Sequence[int]
    ) -> None:
        region, layout = _region_and_layout(job)
        remote = self._remote
        if remote is None:
            self._end_remote(job, indices, [Cause.UNAVAILABLE] * len(indices))
            return
        trace = job.span.context if job.span is not None else None

        async def load() -> None:
            outcomes = await remote.load(volume_id, layout, chunks, region, rows, trace, job.session.pool)
            self._end_remote(job, indices, outcomes)
            region.release()

        region.hold()
        self._remote_loads.spawn(load())

    def _end_remote(self, job: Job, indices: Sequence[int], outcomes: Sequence[str]) -> None:
        for i, outcome in zip(indices, outcomes, strict=True):
            self.remote_outcomes[outcome] += 1
            self._jobs.end_chunk(job, i, outcome)

    # Stores

    def store(self, job: Job, namespace: Namespace, message: messages.Store) -> None:
        """Raises ProtocolError for malformed chunks."""
        region, layout = _region_and_layout(job)
        if len(message.route_keys) != len(job.keys):
            raise ProtocolError(f"job {job.number} has {len(job.keys)} keys and {len(message.route_keys)} route keys")
        try:
            chunks = [
                ChunkId(key, route_key, namespace) for key, route_key in zip(job.keys, message.route_keys, strict=True)
            ]
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        volumes = self._volumes.of(job.session.pool)
        for i, (chunk, row) in enumerate(zip(chunks, message.rows, strict=True)):
            if (job.session.pool, layout.digest, chunk.key) in self._storing:
                # Another engine has computed the same chunk.
                self._jobs.end_chunk(job, i, Outcome.EXISTS)
                continue
            holder = volumes.with_chunk(layout.digest, chunk.key)
            if holder is not None:
                # The write returns EXISTS without I/O, or replaces a chunk of another namespace.
                if holder.accepts_writes(self._clock()):
                    self._write(job, i, holder, layout.digest, chunk, row, message.wanted_s, is_new=False)
                else:
                    self._jobs.end_chunk(job, i, Outcome.EXISTS)
                continue
            choice = volumes.for_new_chunk(region.row_bytes)
            if isinstance(choice, VolumeIo):
                self._write(job, i, choice, layout.digest, chunk, row, message.wanted_s, is_new=True)
            else:
                self._jobs.end_chunk(job, i, choice)

    def _write(
        self,
        job: Job,
        index: int,
        volume: VolumeIo,
        layout: LayoutDigest,
        chunk: ChunkId,
        row: int,
        wanted_s: float | None,
        *,
        is_new: bool,
    ) -> None:
        region, _ = _region_and_layout(job)
        num_bytes = region.row_bytes

        def run() -> str:
            if not region.is_whole():
                return Cause.ENGINE_GONE
            with region.row(row) as payload:
                return volume.volume.write(layout, chunk, payload)

        def done(outcome: str) -> None:
            self._storing.discard((volume.pool, layout, chunk.key))
            if is_new and outcome != Outcome.OK:
                volume.budget.refund(num_bytes)
            elif not is_new and outcome == Outcome.OK:
                volume.budget.spend(num_bytes)
            if wanted_s is not None and outcome == Outcome.OK:
                volume.volume.hint(layout, [chunk.key], wanted_s)
            self._jobs.end_chunk(job, index, outcome)
            region.release()

        region.hold()
        self._storing.add((volume.pool, layout, chunk.key))
        volume.begin_write()
        if is_new:
            volume.budget.spend(num_bytes)
        volume.submit(Operation(Kind.WRITE, num_bytes, run, done, owner=job.session))


def _region_and_layout(job: Job) -> tuple[MappedRegion, ChunkLayout]:
    region, layout = job.session.region, job.session.layout
    assert region is not None
    assert layout is not None
    return region, layout
