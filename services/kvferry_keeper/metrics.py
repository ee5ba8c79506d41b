"""The metrics of one keeper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvferry.observability import telemetry
from kvferry.observability.exposition import Exposition, Reading, SpanCounts, read_spans
from kvferry.observability.telemetry import VERIFICATION_FAILURES, Exporter
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.remote.chunk_lender import ChunkLender
from kvferry_keeper.remote.remote_reader import RemoteReader
from kvferry_keeper.volumes.volume_io import VolumeIoStats

_READ = (
    *(telemetry.KEEPER_ENGINES, telemetry.KEEPER_REGIONS, telemetry.KEEPER_JOB_SECONDS, telemetry.KEEPER_PAGES),
    *(telemetry.KEEPER_BYTES, telemetry.KEEPER_REMOTE_PAGES, telemetry.KEEPER_REMOTE_BYTES),
    *(telemetry.KEEPER_REMOTE_SECONDS, telemetry.KEEPER_LENT, telemetry.KEEPER_EXPIRED, telemetry.KEEPER_SPANS),
    *(telemetry.KEEPER_UNCANCELLED, telemetry.KEEPER_UNUSABLE_VOLUMES),
    *(telemetry.TIER_PAGES, telemetry.TIER_USED, telemetry.TIER_CAPACITY, telemetry.TIER_QUEUE),
    *(telemetry.TIER_RUNNING, telemetry.TIER_OVERDUE, telemetry.TIER_OPERATIONS, telemetry.TIER_BYTES),
    *(telemetry.TIER_SECONDS, telemetry.TIER_READ_RATE, telemetry.TIER_VERIFICATION_FAILURES),
    *(telemetry.TIER_QUARANTINED, telemetry.TIER_EVICTED, telemetry.TIER_BREAKER, telemetry.TIER_TRIPS),
    *(telemetry.TIER_TENANT_USED, telemetry.TIER_TENANT_FLOOR, telemetry.TIER_TENANT_CAP),
    *(telemetry.TIER_TENANT_BORROWED, telemetry.TIER_TENANT_EVICTED, telemetry.TIER_TENANT_DISPLACED),
    telemetry.TIER_TENANT_REFUSED,
)


class KeeperMetrics:
    def __init__(
        self,
        keeper: Keeper,
        remote: RemoteReader,
        lender: ChunkLender,
        *,
        read_span_counts: Callable[[], SpanCounts] = SpanCounts,
        read_volume_faults: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._keeper = keeper
        self._remote = remote
        self._lender = lender
        self._read_span_counts = read_span_counts
        self._read_volume_faults = read_volume_faults
        self.exposition = Exposition(Exporter.KEEPER, {"keeper": keeper.keeper_id})
        self.exposition.read(_READ, self._read)

    async def render(self) -> bytes:
        return self.exposition.render()

    def _read(self) -> Iterator[Reading]:
        stats, remote, lender = self._keeper.stats, self._remote.stats, self._lender
        yield Reading(telemetry.KEEPER_ENGINES, (), len(stats.engines))
        yield Reading(telemetry.KEEPER_REGIONS, (), stats.num_regions_mapped)
        yield Reading(telemetry.KEEPER_UNUSABLE_VOLUMES, (), len(self._read_volume_faults()))
        yield Reading(telemetry.KEEPER_JOB_SECONDS, ("load",), stats.ended_load_jobs, stats.load_job_s)
        yield Reading(telemetry.KEEPER_JOB_SECONDS, ("store",), stats.ended_store_jobs, stats.store_job_s)
        for job, outcomes in (("load", stats.loads), ("store", stats.stores)):
            for outcome, count in outcomes.items():
                yield Reading(telemetry.KEEPER_PAGES, (job, outcome), count)
        yield Reading(telemetry.KEEPER_BYTES, ("load",), stats.bytes_loaded)
        yield Reading(telemetry.KEEPER_BYTES, ("store",), stats.bytes_stored)
        for outcome, count in stats.remote_loads.items():
            yield Reading(telemetry.KEEPER_REMOTE_PAGES, (outcome,), count)
        yield Reading(telemetry.KEEPER_REMOTE_BYTES, (), remote.bytes_loaded)
        yield Reading(telemetry.KEEPER_REMOTE_SECONDS, ("fetch",), remote.fetch_s)
        yield Reading(telemetry.KEEPER_REMOTE_SECONDS, ("read",), remote.read_s)
        yield Reading(telemetry.KEEPER_UNCANCELLED, (), remote.num_uncancelled)
        yield Reading(telemetry.KEEPER_LENT, (), lender.num_lent)
        yield Reading(telemetry.KEEPER_EXPIRED, (), lender.num_expired)
        yield from read_spans(telemetry.KEEPER_SPANS, self._read_span_counts())
        for volume in stats.volumes:
            yield from _read_volume(volume)


def _read_volume(stats: VolumeIoStats) -> Iterator[Reading]:
    state = stats.state
    volume = state.volume_id
    yield Reading(telemetry.TIER_PAGES, (volume,), state.num_chunks)
    yield Reading(telemetry.TIER_USED, (volume,), state.used_bytes)
    yield Reading(telemetry.TIER_CAPACITY, (volume,), state.capacity_bytes)
    yield Reading(telemetry.TIER_QUEUE, (volume, "read"), state.queue_bytes)
    yield Reading(telemetry.TIER_QUEUE, (volume, "write"), stats.queued_write_bytes)
    yield Reading(telemetry.TIER_RUNNING, (volume,), stats.num_running)
    yield Reading(telemetry.TIER_OVERDUE, (volume,), stats.num_overdue)
    # Zeros, which later readings replace: an unused volume would have no series of these.
    yield Reading(telemetry.TIER_OPERATIONS, (volume, "read", "ok"), 0)
    yield Reading(telemetry.TIER_VERIFICATION_FAILURES, (volume, VERIFICATION_FAILURES[0]), 0)
    for (direction, outcome), count in stats.outcomes.items():
        if direction not in telemetry.DIRECTIONS:
            continue  # a hanging task
        yield Reading(telemetry.TIER_OPERATIONS, (volume, direction, outcome), count)
        if direction == "read" and outcome in VERIFICATION_FAILURES:
            yield Reading(telemetry.TIER_VERIFICATION_FAILURES, (volume, outcome), count)
    yield Reading(telemetry.TIER_BYTES, (volume, "read"), stats.bytes_read)
    yield Reading(telemetry.TIER_BYTES, (volume, "write"), stats.bytes_written)
    yield Reading(telemetry.TIER_SECONDS, (volume, "read"), stats.read_s)
    yield Reading(telemetry.TIER_SECONDS, (volume, "write"), stats.write_s)
    yield Reading(telemetry.TIER_READ_RATE, (volume,), state.read_bytes_per_s)
    yield Reading(telemetry.TIER_QUARANTINED, (volume,), stats.quarantined)
    yield Reading(telemetry.TIER_EVICTED, (volume,), stats.evicted)
    for tenant, usage in stats.tenants.items():
        yield Reading(telemetry.TIER_TENANT_USED, (volume, tenant), usage.used)
        yield Reading(telemetry.TIER_TENANT_FLOOR, (volume, tenant), usage.floor)
        yield Reading(telemetry.TIER_TENANT_CAP, (volume, tenant), usage.cap)
        yield Reading(telemetry.TIER_TENANT_BORROWED, (volume, tenant), usage.borrowed)
        yield Reading(telemetry.TIER_TENANT_DISPLACED, (volume, tenant), usage.displaced)
        for cause, count in usage.evicted.items():
            yield Reading(telemetry.TIER_TENANT_EVICTED, (volume, tenant, cause.name.lower()), count)
        for reason, count in usage.refused.items():
            yield Reading(telemetry.TIER_TENANT_REFUSED, (volume, tenant, reason.name.lower()), count)
    for direction, breaker in (("read", stats.breaker), ("write", stats.write_breaker)):
        yield Reading(telemetry.TIER_BREAKER, (volume, direction, breaker.value), 1)
    yield Reading(telemetry.TIER_TRIPS, (volume,), state.trips)
