"""The metrics of one worker and its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import structs

from kvferry.engine.base import Engine, EngineStats, EngineTimes, KvTransferStats
from kvferry.errors import KvferryError
from kvferry.observability import telemetry
from kvferry.observability.exposition import Exposition, Reading, SpanCounts, read_spans
from kvferry.observability.telemetry import Exporter
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, TenantUsage
from kvferry.worker.server import WorkerServer

_READ = (
    *(telemetry.ENGINE_ALIVE, telemetry.ENGINE_DRAINING, telemetry.ENGINE_GATEWAYS, telemetry.ENGINE_RUNNING),
    *(telemetry.ENGINE_WAITING, telemetry.ENGINE_PAGES, telemetry.ENGINE_PAGES_USED, telemetry.ENGINE_CPU_PAGES),
    *(telemetry.ENGINE_STEPS, telemetry.ENGINE_PROMPT_TOKENS, telemetry.ENGINE_CACHED_TOKENS),
    *(
        telemetry.ENGINE_GENERATED_TOKENS,
        telemetry.KV_TRANSFER_SECONDS,
        telemetry.KV_TRANSFER_BYTES,
        telemetry.KV_TRANSFER_FAILED,
    ),
    telemetry.WORKER_SPANS,
    telemetry.ENGINE_TENANT_PROMPTS,
    telemetry.ENGINE_TENANT_WAITS,
    telemetry.ENGINE_TENANT_SLOT_WAITS,
    telemetry.ENGINE_TENANT_PROMPT_TOKENS,
    telemetry.ENGINE_TENANT_CACHED,
    *(telemetry.ENGINE_TENANT_USED, telemetry.ENGINE_TENANT_FLOOR, telemetry.ENGINE_TENANT_CAP),
    *(telemetry.ENGINE_TENANT_BORROWED, telemetry.ENGINE_TENANT_EVICTED, telemetry.ENGINE_TENANT_DISPLACED),
    telemetry.ENGINE_TENANT_REFUSED,
)
_NOTHING = TenantUsage(evicted=dict.fromkeys(Cause, 0), refused=dict.fromkeys(Refusal, 0))


class WorkerMetrics:
    def __init__(
        self,
        engine: Engine,
        read_server: Callable[[], WorkerServer],
        *,
        worker_id: str,
        role: str,
        read_span_counts: Callable[[], SpanCounts] = SpanCounts,
    ) -> None:
        self._engine = engine
        self._read_server = read_server
        self._read_span_counts = read_span_counts
        self.exposition = Exposition(Exporter.WORKER, {"worker": worker_id, "role": role})
        requests = self.exposition.counter(telemetry.ENGINE_REQUESTS)
        # A label lookup costs as much as the count itself.
        self._reason_to_count = {reason: requests.labels(reason=reason) for reason in telemetry.END_REASONS}
        self._queue_seconds = self.exposition.histogram(telemetry.ENGINE_QUEUE_SECONDS)
        self._prefill_seconds = self.exposition.histogram(telemetry.ENGINE_PREFILL_SECONDS)
        self._decode_seconds = self.exposition.histogram(telemetry.ENGINE_DECODE_SECONDS)
        self.exposition.read(_READ, self._read)

    def count(self, reason: str) -> None:
        self._reason_to_count[reason].inc()

    def observe(self, times: EngineTimes) -> None:
        self._queue_seconds.observe(max(0.0, times.begun_s - times.queued_s))
        self._prefill_seconds.observe(max(0.0, times.first_token_s - times.scheduled_s))
        self._decode_seconds.observe(max(0.0, times.last_token_s - times.first_token_s))

    async def render(self) -> bytes:
        ours = self.exposition.render()
        # An engine's own metrics may be thousands of series: not on the event loop that carries tokens.
        return ours + await asyncio.to_thread(self._render_engine)

    def _render_engine(self) -> bytes:
        return self.exposition.render_others(self._engine_families())

    def _engine_families(self) -> Iterable[Any]:
        try:
            return self._engine.own_metrics()
        except KvferryError:
            return ()

    def _read(self) -> Iterator[Reading]:
        engine, server = self._engine, self._read_server()
        try:
            stats, kv_transfer, num_cpu_pages = engine.stats(), engine.kv_transfer_stats(), engine.info.num_cpu_pages
            usages = engine.tenant_usages()
        except KvferryError:
            stats, kv_transfer, num_cpu_pages, usages = EngineStats(), KvTransferStats(), 0, {}
        yield Reading(telemetry.ENGINE_ALIVE, (), float(not server.died.is_set()))
        yield Reading(telemetry.ENGINE_DRAINING, (), float(server.draining))
        yield Reading(telemetry.ENGINE_GATEWAYS, (), len(server.sessions))
        yield Reading(telemetry.ENGINE_RUNNING, (), stats.num_running)
        yield Reading(telemetry.ENGINE_WAITING, (), stats.num_waiting)
        yield Reading(telemetry.ENGINE_PAGES, (), stats.num_pages)
        yield Reading(telemetry.ENGINE_PAGES_USED, (), stats.num_pages_used)
        yield Reading(telemetry.ENGINE_CPU_PAGES, (), num_cpu_pages)
        yield Reading(telemetry.ENGINE_STEPS, (), stats.num_steps)
        for source, tokens in structs.asdict(stats.prompt_tokens).items():
            yield Reading(telemetry.ENGINE_PROMPT_TOKENS, (source,), tokens)
        for tier, tokens in stats.cached_tokens.by_tier().items():
            yield Reading(telemetry.ENGINE_CACHED_TOKENS, (tier,), tokens)
        yield Reading(telemetry.ENGINE_GENERATED_TOKENS, (), stats.num_generated_tokens)
        yield Reading(telemetry.KV_TRANSFER_SECONDS, (), kv_transfer.num_transfers, kv_transfer.seconds)
        yield Reading(telemetry.KV_TRANSFER_BYTES, (), kv_transfer.num_bytes)
        for cause, count in kv_transfer.num_failed.items():
            yield Reading(telemetry.KV_TRANSFER_FAILED, (cause,), count)
        for tenant, times in server.tenant_times.items():
            yield Reading(telemetry.ENGINE_TENANT_PROMPTS, (tenant,), times.charged_s)
            yield Reading(telemetry.ENGINE_TENANT_WAITS, (tenant,), times.num_waits, times.waited_s)
            yield Reading(telemetry.ENGINE_TENANT_SLOT_WAITS, (tenant,), times.num_slot_waits, times.slot_waited_s)
            yield Reading(telemetry.ENGINE_TENANT_PROMPT_TOKENS, (tenant,), times.num_prompt_tokens)
            for tier, tokens in times.cached.by_tier().items():
                yield Reading(telemetry.ENGINE_TENANT_CACHED, (tenant, tier), tokens)
        for tier in telemetry.ENGINE_TIERS:
            for tenant, usage in {OTHER: _NOTHING, **usages.get(tier, {})}.items():
                yield from _read_usage(tenant, tier, usage)
        yield from read_spans(telemetry.WORKER_SPANS, self._read_span_counts())


def _read_usage(tenant: str, tier: str, usage: TenantUsage) -> Iterator[Reading]:
    yield Reading(telemetry.ENGINE_TENANT_USED, (tenant, tier), usage.used)
    yield Reading(telemetry.ENGINE_TENANT_FLOOR, (tenant, tier), usage.floor)
    yield Reading(telemetry.ENGINE_TENANT_CAP, (tenant, tier), usage.cap)
    yield Reading(telemetry.ENGINE_TENANT_BORROWED, (tenant, tier), usage.borrowed)
    yield Reading(telemetry.ENGINE_TENANT_DISPLACED, (tenant, tier), usage.displaced)
    for cause, count in usage.evicted.items():
        yield Reading(telemetry.ENGINE_TENANT_EVICTED, (tenant, tier, cause.name.lower()), count)
    for reason, count in usage.refused.items():
        yield Reading(telemetry.ENGINE_TENANT_REFUSED, (tenant, tier, reason.name.lower()), count)
