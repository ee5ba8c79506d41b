"""Traces to an OpenTelemetry collector: one per request, over all its processes.

A W3C trace context travels in HTTP headers, a worker's Submit, frames to keepers and gRPC metadata. Without one, a
process makes no spans. They wait in a bounded queue; lost ones are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry import __version__
from kvferry.config import TracingConfig
from kvferry.errors import ConfigError, KvferryError
from kvferry.observability.exposition import SpanCounts

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

log = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

# Further spans are dropped.
MAX_WAITING_SPANS = 8192
_BATCH_SPANS = 512
_EXPORT_PERIOD_S = 1.0
_EXPORT_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 3.0

# The SDK repeats itself while a collector is unreachable; `_SpanQueue` logs it once.
_CHATTY_LOGGERS = ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal")

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value | None]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C context of a sampled parent span."""

    traceparent: str
    tracestate: str = ""

    def headers(self) -> dict[str, str]:
        headers = {TRACEPARENT: self.traceparent}
        if self.tracestate:
            headers[TRACESTATE] = self.tracestate
        return headers

    @staticmethod
    def of(traceparent: str, tracestate: str = "") -> TraceContext | None:
        return TraceContext(traceparent, tracestate) if traceparent else None


class Span:
    """`end` it once. Times are Unix nanoseconds."""

    __slots__ = ("_as_parent", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        self._tracing = tracing
        self._span = span
        self._as_parent: Context | None = None

    @property
    def is_sampled(self) -> bool:
        """If False, children need not be made."""
        return self._span.is_recording()

    @property
    def context(self) -> TraceContext:
        carrier = self._tracing.inject(self._parent_context())
        return TraceContext(carrier.get(TRACEPARENT, ""), carrier.get(TRACESTATE, ""))

    def child(self, name: str, attributes: Attributes | None = None, *, remote: bool = False) -> Span:
        """`remote`: another process makes a span under this one."""
        return self._tracing.start(name, self._parent_context(), "client" if remote else "internal", attributes)

    def record(self, name: str, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """A start after `end_ns` becomes `end_ns`."""
        span = self._tracing.start(name, self._parent_context(), "internal", attributes, start_ns=min(start_ns, end_ns))
        span.end(end_ns=end_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def fail(self, error: str) -> None:
        """`error` is a code or a class, never client input."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(StatusCode.ERROR)

    def end(self, *, end_ns: int | None = None) -> None:
        """Idempotent."""
        if self._span.is_recording():
            self._span.end(end_ns)

    def _parent_context(self) -> Context:
        if self._as_parent is None:
            self._as_parent = self._tracing.as_parent(self._span)
        return self._as_parent


class Tracing:
    """`service` is the process's kind, `instance` its id."""

    def __init__(
        self, config: TracingConfig, *, service: str, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        """Starts a thread, so call it after the last fork. Raises ConfigError for an unreadable CA file."""
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
        return self._queue.counts

    def receive(self, headers: Mapping[str, str], name: str, attributes: Attributes | None = None) -> Span:
        """Begin a request's span from HTTP headers or gRPC metadata, names in lower case.

        Continues the caller's trace; without one it may begin a sampled trace.
        """
        return self.start(name, self._propagator.extract(headers), "server", attributes)

    def serve(self, context: TraceContext, name: str, attributes: Attributes | None = None) -> Span:
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
        """Block until waiting spans are sent."""
        self._provider.force_flush()

    async def close(self) -> None:
        """Send waiting spans for at most _CLOSE_TIMEOUT_S."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        # Not an executor thread: the process would wait for it at exit.
        threading.Thread(target=end, name="traces-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await ended.wait()


def start_tracing(config: TracingConfig, *, service: str, instance: str) -> Tracing | None:
    """None without an endpoint. Raises ConfigError as Tracing does."""
    return Tracing(config, service=service, instance=instance) if config.endpoint else None


class Clock:
    """Converts `time.monotonic` seconds to Unix nanoseconds.

    Use one per request: the system clock may be set in between.
    """

    __slots__ = ("_offset_ns",)

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def unix_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


def error_type(error: BaseException) -> str:
    """The error's code, else its class."""
    if isinstance(error, KvferryError) and error.code is not None:
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__.lstrip("_")


@contextlib.contextmanager
def end_after(span: Span | None) -> Iterator[None]:
    """End `span` with the block, failed if the block raises."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            span.fail(error_type(error))
        raise
    finally:
        if span is not None:
            span.end()


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
        """Called in the SDK's thread."""
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
