"""The metrics of one worker and its engine, and metrics and spans of its requests, made at their end (see ADR 15)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Protocol

from msgspec import structs

from kvferry.engine.base import (
    Engine,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineTimes,
    FinishReason,
    KvTransferStats,
)
from kvferry.errors import KvferryError, Preempted
from kvferry.observability import telemetry
from kvferry.observability.exposition import Exposition, Reading, SpanCounts, read_spans
from kvferry.observability.telemetry import Exporter
from kvferry.observability.tracing import Clock, Span, Tracing, error_type
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, TenantUsage
from kvferry.worker.turns import TenantTimes

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


class ReadServer(Protocol):
    # What metrics read of `server.py`.

    died: asyncio.Event

    @property
    def draining(self) -> bool: ...
    @property
    def sessions(self) -> Sized: ...
    @property
    def tenant_times(self) -> Mapping[str, TenantTimes]: ...


class WorkerMetrics:
    def __init__(
        self,
        engine: Engine,
        read_server: Callable[[], ReadServer],
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
        """`reason` is one of telemetry.END_REASONS."""
        self._reason_to_count[reason].inc()

    def observe(self, times: EngineTimes) -> None:
        """Not called for aborted requests."""
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


class RequestInstrumentation:
    """`metrics` and `tracing` are None when disabled."""

    def __init__(
        self,
        role: str,
        metrics: WorkerMetrics | None = None,
        read_tracing: Callable[[], Tracing | None] = lambda: None,
    ) -> None:
        self.role, self.metrics = role, metrics
        self._read_tracing = read_tracing

    @property
    def tracing(self) -> Tracing | None:
        return self._read_tracing()

    def refused(self) -> None:
        if self.metrics is not None:
            self.metrics.count("refused")

    def begin(self, request: EngineRequest) -> InstrumentedRequest:
        span = None
        if request.trace is not None and (tracing := self.tracing) is not None:
            span = tracing.serve(
                request.trace,
                f"worker {self.role}",
                {
                    "kvferry.request_id": request.request_id,
                    "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                },
            )
        return InstrumentedRequest(self, span)


class InstrumentedRequest:
    """One request. Either `finished` or `failed` is called, once."""

    __slots__ = ("_instrumentation", "span")

    def __init__(self, instrumentation: RequestInstrumentation, span: Span | None) -> None:
        self._instrumentation = instrumentation
        self.span = span

    def finished(self, last: EngineOutput) -> None:
        assert last.finish_reason is not None
        times, metrics = last.times, self._instrumentation.metrics
        if metrics is not None:
            metrics.count(last.finish_reason.value)
            if times is not None and last.finish_reason is not FinishReason.ABORT:
                metrics.observe(times)
        if self.span is not None:
            if times is not None:
                record_times(self.span, last, times)
            self.span.set({"gen_ai.response.finish_reasons": [last.finish_reason.value]})
            self.span.end()

    def failed(self, error: BaseException) -> None:
        """Called without a last output: cancelled, or with an error."""
        if self._instrumentation.metrics is not None:
            reason = "preempted" if isinstance(error, Preempted) else "error"
            self._instrumentation.metrics.count(reason if isinstance(error, Exception) else "abort")
        if self.span is not None:
            self.span.fail(error_type(error))
            self.span.end()


def record_times(span: Span, last: EngineOutput, times: EngineTimes) -> None:
    clock = Clock()
    sources = last.sources

    def part(name: str, begin_s: float, end_s: float, attributes: dict[str, int] | None = None) -> None:
        span.record(name, clock.unix_ns(begin_s), clock.unix_ns(end_s), attributes)

    waits = sorted(
        (wait, name)
        for wait, name in ((times.kv_transfer, "ferry"), (times.load, "load from tiers"))
        if wait is not None
    )
    part("queue", times.queued_s, waits[0][0][0] if waits else times.scheduled_s)
    cached = last.cached
    brought = {} if cached is None else {"ferry": cached.kv_transfer, "load from tiers": cached.cpu + cached.volume}
    for (begin_s, end_s), name in waits:
        part(name, begin_s, end_s, {"kvferry.tokens": brought[name]} if brought else {})
    computed = {} if sources is None else {"kvferry.tokens": sources.local_compute}
    part("compute prompt", times.scheduled_s, times.first_token_s, computed)
    if times.last_token_s > times.first_token_s:
        part("generate", times.first_token_s, times.last_token_s)
