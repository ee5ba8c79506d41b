"""A real OTLP server for tests: it takes what exporters send over gRPC, and shows it as trees."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass
class SpanNode:
    """One span as it arrived; times in seconds since the epoch."""

    name: str
    service: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    is_error: bool
    attributes: dict[str, Any]
    children: list[SpanNode] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def all(self) -> Iterator[SpanNode]:
        yield self
        for child in self.children:
            yield from child.all()

    def find(self, *path: str) -> SpanNode:
        """The one descendant at this path of names."""
        here = self
        for name in path:
            found = [child for child in here.children if child.name == name]
            names = [child.name for child in here.children]
            assert len(found) == 1, f"{len(found)} {name!r} below {here.name!r}, which has {names}"
            here = found[0]
        return here


class Collector(service.TraceServiceServicer):
    """`with Collector() as collector:`; may be stopped and started on the same port."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self._spans: list[SpanNode] = []
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self._port = 0

    def __enter__(self) -> Collector:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        service.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None

    def Export(  # noqa: N802 - gRPC's name
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._lock:
            self.raw.append(request.SerializeToString())
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                for scope in group.scope_spans:
                    self._spans += [_node(span, str(resource["service.name"])) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def spans(self, trace_id: str | None = None) -> list[SpanNode]:
        with self._lock:
            return [span for span in self._spans if trace_id in (None, span.trace_id)]

    def tree(self, trace_id: str, parent_id: str = "") -> SpanNode:
        """The only root of a trace (or child of the client's span), with everything below it."""
        spans = self.spans(trace_id)
        by_id = {span.span_id: span for span in spans}
        assert len(by_id) == len(spans), "a span came twice"
        for span in spans:
            span.children = []
        roots = []
        for span in sorted(spans, key=lambda span: span.start_s):
            if span.parent_id == parent_id:
                roots.append(span)
            else:
                assert span.parent_id in by_id, f"{span.name} has a parent that never came"
                by_id[span.parent_id].children.append(span)
        assert len(roots) == 1, [root.name for root in roots]
        assert len(list(roots[0].all())) == len(spans), "not one tree"
        return roots[0]


def _node(span: trace_pb2.Span, service_name: str) -> SpanNode:
    return SpanNode(
        name=span.name,
        service=service_name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_s=span.start_time_unix_nano / 1e9,
        end_s=span.end_time_unix_nano / 1e9,
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind is not None else None
