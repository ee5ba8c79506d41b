"""Admission of requests, for HTTP and gRPC alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.config import GatewayConfig
from kvferry.errors import KvferryError, NotReady, Overloaded
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.request_trace import RequestTrace
from kvferry.tracing import Tracing


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests can be answered now; `waiting_for` names missing parts."""

    ready: bool
    waiting_for: Sequence[str]
    members: Sequence[str]


@dataclass(slots=True)
class CountedRequest:
    """One request in flight. `status` is its HTTP status in metrics, `trace` its span or None."""

    status: str = "500"
    trace: RequestTrace | None = None
    error: KvferryError | None = None

    def failed(self, error: KvferryError) -> None:
        self.status = str(error.http_status)
        self.error = error
        if self.trace is not None:
            self.trace.failed(error)

    def left(self, error: BaseException) -> None:
        self.status = "499"
        if self.trace is not None:
            self.trace.failed(error)


class Admission:
    """Counts requests; refuses them while the gateway is full, unready or leaving."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, read_readiness: Callable[[], Readiness]) -> None:
        self.draining = False
        self.num_in_flight = 0
        self.idle = asyncio.Event()  # set while nothing is in flight
        self.idle.set()
        self.tracing: Tracing | None = None
        self._max_requests = config.max_requests
        self._metrics = metrics
        self._read_readiness = read_readiness

    def __repr__(self) -> str:
        return f"<Admission {self.num_in_flight}/{self._max_requests}{' draining' if self.draining else ''}>"

    @contextlib.contextmanager
    def count_request(self, endpoint: str) -> Iterator[CountedRequest]:
        """Count a request in flight, and its status at the end."""
        counted = CountedRequest()
        begun_s = time.perf_counter()
        self.num_in_flight += 1
        self.idle.clear()
        self._metrics.requests_in_flight.inc()
        try:
            yield counted
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.idle.set()
            self._metrics.requests_in_flight.dec()
            self._metrics.requests.labels(endpoint=endpoint, status=counted.status).inc()
            self._metrics.request_seconds[endpoint].observe(time.perf_counter() - begun_s)
            if counted.error is not None:
                self._metrics.note_refusal(counted.error.code)
            if counted.trace is not None:
                counted.trace.end(counted.status)

    def require_admission(self, *, can_render: bool) -> None:
        """Raises NotReady or Overloaded for the request that has just begun."""
        if not can_render or self.draining:
            raise NotReady(
                "this gateway is stopping" if self.draining else "this gateway is starting: " + self._missing()
            )
        if self.num_in_flight > self._max_requests:
            raise Overloaded(f"{self._max_requests} requests are in flight, the limit of this gateway")

    def _missing(self) -> str:
        return "waiting for " + (", ".join(self._read_readiness().waiting_for) or "the renderer")
