"""Metrics and spans of a worker's requests, made at their end (see ADR 15)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.engine.base import EngineOutput, EngineRequest, EngineTimes, FinishReason
from kvferry.errors import Preempted
from kvferry.observability.tracing import Clock, Span, Tracing, error_type


class RequestMetrics(Protocol):
    def count(self, reason: str) -> None:
        """`reason` is one of telemetry.END_REASONS."""
        ...

    def observe(self, times: EngineTimes) -> None:
        """Not called for aborted requests."""
        ...


class RequestInstrumentation:
    """`metrics` and `tracing` are None when disabled."""

    def __init__(
        self,
        role: str,
        metrics: RequestMetrics | None = None,
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
