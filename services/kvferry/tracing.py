"""Traces: one per request, over every process that has a part in it, to an OpenTelemetry collector.

W3C trace context comes in with a request and goes on with it: to workers in their Submit, to keepers in an engine's
frames and between keepers as gRPC metadata. Whoever gets a context traces its part under it; whoever gets none does
nothing, so that a request that is not sampled costs one comparison per hop. Without `tracing.endpoint` nothing of
OpenTelemetry is even imported.

Spans wait in a bounded queue for a thread that sends them. A collector that cannot be reached loses spans, counted and
said once, and holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import __version__
from kvferry.config import TracingConfig
from kvferry.errors import ConfigError, KvferryError
from kvferry.exposition import SpanCounts

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Spans that wait at most; more are dropped.
MAX_WAITING_SPANS = 8192
_BATCH_SPANS = 512
_EXPORT_PERIOD_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 3.0

# The SDK says the same again and again for as long as a collector is away; we say it once.
_CHATTY_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Whose child a span is to be, as W3C says it. Only of traces that are sampled."""

    traceparent: str
    tracestate: str = ""

    def headers(self) -> dict[str, str]:
        """For whatever carries headers."""
        headers = {TRACEPARENT: self.traceparent}
        if self.tracestate:
            headers[TRACESTATE] = self.tracestate
        return headers

    @staticmethod
    def of(traceparent: str, tracestate: str = "") -> TraceContext | None:
        """None for an empty traceparent."""
        return TraceContext(traceparent, tracestate) if traceparent else None


class Span:
    """A part of a request that has begun; `end` it once. Times are Unix time in nanoseconds."""

    __slots__ = ("_as_parent", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        self._tracing = tracing
        self._span = span
        self._as_parent: Context | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether anybody will see it. Where not, its children need not be made."""
        return self._span.is_recording()

    @property
    def context(self) -> TraceContext:
        """For those whose spans are to be its children."""
        carrier = self._tracing.inject(self._parent_context())
        return TraceContext(carrier.get(TRACEPARENT, ""), carrier.get(TRACESTATE, ""))

    def child(self, name: str, attributes: Attributes | None = None, *, remote: bool = False) -> Span:
        """Begin a part of it. `remote`: another process does the work, and makes a span of its own under this one."""
        return self._tracing.start(name, self._parent_context(), "client" if remote else "internal", attributes)

    def record(self, name: str, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """A part of it that is over. A start after its end is its end."""
        span = self._tracing.start(name, self._parent_context(), "internal", attributes, start_ns=min(start_ns, end_ns))
        span.end(end_ns=end_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def fail(self, error: str) -> None:
        """What it was begun for did not happen. `error` is a code or a class, never what a client sent."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(StatusCode.ERROR)

    def end(self, *, end_ns: int | None = None) -> None:
        """May be repeated."""
        if self._span.is_recording():
            self._span.end(end_ns)

    def _parent_context(self) -> Context:
        if self._as_parent is None:
            self._as_parent = self._tracing.as_parent(self._span)
        return self._as_parent


class Tracing:
    """What one process traces with. `service` is what it is, `instance` its id."""

    def __init__(
        self, config: TracingConfig, *, service: str, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        """`exporter` stands in for the one to `config.endpoint`. Raises ConfigError for a CA file that cannot be read.

        Starts a thread; not before the last fork of this process.
        """
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.prompts = config.prompts
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        resource = Resource.create(
            {
                "service.name": f"kvferry-{service}",
                "service.namespace": "kvferry",
                "service.instance.id": instance,
                "service.version": __version__,
            }
        )
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), resource=resource, shutdown_on_exit=False
        )
        self._queue = _SpanQueue(exporter if exporter is not None else _exporter_to(config), config.endpoint)
        self._provider.add_span_processor(self._queue.processor)
        self._tracer: Tracer = self._provider.get_tracer("kvferry", __version__)
        self._kinds = {
            "server": trace.SpanKind.SERVER,
            "client": trace.SpanKind.CLIENT,
            "internal": trace.SpanKind.INTERNAL,
        }

    @property
    def counts(self) -> SpanCounts:
        """What became of this process's spans."""
        return self._queue.counts

    def receive(self, headers: Mapping[str, str], name: str, attributes: Attributes | None = None) -> Span:
        """Begin the span of a request that came in with these headers (HTTP) or this metadata (gRPC), names in lower
        case. It continues the caller's trace where they carry one; else it begins a trace, if it is to be sampled.
        """
        return self.start(name, self._propagator.extract(headers), "server", attributes)

    def serve(self, context: TraceContext, name: str, attributes: Attributes | None = None) -> Span:
        """Begin what another process of ours asked for."""
        return self.start(name, self._propagator.extract(context.headers()), "server", attributes)

    def start(
        self, name: str, parent: Context, kind: str, attributes: Attributes | None, *, start_ns: int | None = None
    ) -> Span:
        given = {name: value for name, value in attributes.items() if value is not None} if attributes else None
        return Span(self, self._tracer.start_span(name, parent, self._kinds[kind], given, start_time=start_ns))

    def as_parent(self, span: OtelSpan) -> Context:
        return self._trace.set_span_in_context(span)

    def inject(self, context: Context) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return carrier

    def flush(self) -> None:
        """Send what waits, now; blocks until it is sent or lost. For tests and tools."""
        self._provider.force_flush()

    async def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        # Not one of the loop's own threads: those are waited for at the end of the process.
        threading.Thread(target=end, name="traces-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await ended.wait()


def start_tracing(config: TracingConfig, *, service: str, instance: str) -> Tracing | None:
    """None where traces go nowhere. Raises ConfigError as Tracing does."""
    return Tracing(config, service=service, instance=instance) if config.endpoint else None


class Clock:
    """From seconds of `time.monotonic` on this machine to Unix time in nanoseconds, as the two stood when it was made.

    Made when spans are: a clock that was set in between would tear a request apart.
    """

    __slots__ = ("_offset_ns",)

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


def error_type(error: BaseException) -> str:
    """What `error.type` says: our code where the error has one, else its class."""
    if isinstance(error, KvferryError) and error.code is not None:
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__.lstrip("_")


def _exporter_to(config: TracingConfig) -> SpanExporter:
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    credentials = None
    if config.uses_tls:
        authority = None
        if config.ca_file is not None:
            try:
                authority = config.ca_file.read_bytes()
            except OSError as error:
                raise ConfigError(f"tracing.ca_file: {config.ca_file}: {error.strerror}") from None
        credentials = grpc.ssl_channel_credentials(authority)
    return OTLPSpanExporter(
        endpoint=config.endpoint,
        insecure=credentials is None,
        credentials=credentials,
        timeout=_EXPORT_TIMEOUT_S,
        channel_options=(("grpc.enable_http_proxy", 0),),  # type: ignore[arg-type]
    )


class _SpanQueue:
    """The SDK's batches, with a bound that drops before the SDK complains, and an exporter that says things once."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        span_queue = self
        self._num_ended = 0
        self._num_exported = 0
        self._num_failed = 0
        self._num_dropped = 0
        self._is_away = False

        class Counted(SpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                try:
                    result = exporter.export(spans)
                except Exception:
                    log.debug("sending spans failed", exc_info=True)
                    result = SpanExportResult.FAILURE
                span_queue.exported(len(spans), endpoint, arrived=result is SpanExportResult.SUCCESS)
                return result

            def shutdown(self) -> None:
                exporter.shutdown()

        class Bounded(BatchSpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                if span_queue.admit(span):
                    super().on_end(span)

        self.processor = Bounded(
            Counted(),
            max_queue_size=2 * MAX_WAITING_SPANS,
            schedule_delay_millis=_EXPORT_PERIOD_S * 1e3,
            max_export_batch_size=_BATCH_SPANS,
        )

    @property
    def counts(self) -> SpanCounts:
        return SpanCounts(self._num_exported, self._num_failed, self._num_dropped)

    def admit(self, span: ReadableSpan) -> bool:
        if self._num_ended - self._num_exported - self._num_failed >= MAX_WAITING_SPANS:
            self._num_dropped += 1
            return False
        if span.context is not None and span.context.trace_flags.sampled:
            self._num_ended += 1
        return True

    def exported(self, num_spans: int, endpoint: str, *, arrived: bool) -> None:
        """In the SDK's thread."""
        if arrived:
            self._num_exported += num_spans
        else:
            self._num_failed += num_spans
        if arrived == self._is_away:
            self._is_away = not arrived
            if self._is_away:
                log.warning("traces do not reach %s; they are lost until it answers", endpoint)
            else:
                log.warning("traces reach %s again", endpoint)
