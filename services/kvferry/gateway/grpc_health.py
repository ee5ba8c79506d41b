"""grpc.health.v1 of a gateway: SERVING means ready. Needs no key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from kvferry.errors import KvferryError, shortened
from kvferry.gateway.grpc_errors import status_of
from kvferry.gateway.grpc_messages import MessageReads

SERVICE = "grpc.health.v1.Health"

# Callers have no key: of each, as many as a cluster's probes and balancers need.
MAX_WATCHERS = 256
_MAX_WATCHERS_PER_CONNECTION = 32
# Calls whose message has not come, of each method: others would keep clients with keys out.
_MAX_READS = 4
_MAX_WAITING = 28
_PATIENCE_S = 0.2  # a message is small, and a probe waits a second in all
_MAX_SHOWN_BYTES = 128  # of an unknown service's name

Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """`handler` serves it. A watcher that does not read delays nothing but itself."""

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        self._services = services
        self._is_ready = is_ready
        # Apart, so that watching holds up no probe.
        self._check_reads = MessageReads(_MAX_READS, _MAX_WAITING, _PATIENCE_S)
        self._watch_reads = MessageReads(_MAX_READS, _MAX_WAITING, _PATIENCE_S)
        self._watchers: dict[asyncio.Event, str] = {}  # and their connections

    def __repr__(self) -> str:
        return f"<Health watchers={len(self._watchers)}>"

    def handler(self) -> grpc.GenericRpcHandler:
        to_bytes = health_pb2.HealthCheckResponse.SerializeToString
        # Both read their message themselves, so that its size and its time are limited.
        methods: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=to_bytes),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=to_bytes),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def notify(self) -> None:
        """Make watchers look again."""
        for watcher in self._watchers:
            watcher.set()

    async def _check(self, _: object, context: Context) -> health_pb2.HealthCheckResponse:
        service = await _service(self._check_reads, context)
        if service not in self._services:
            shown = shortened(repr(service), _MAX_SHOWN_BYTES)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {shown} here")
        return health_pb2.HealthCheckResponse(status=self._status(service))

    async def _watch(self, _: object, context: Context) -> None:
        service, peer = await _service(self._watch_reads, context), context.peer()
        if len(self._watchers) >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_WATCHERS} calls watch already")
        if list(self._watchers.values()).count(peer) >= _MAX_WATCHERS_PER_CONNECTION:
            refusal = f"{_MAX_WATCHERS_PER_CONNECTION} calls of this connection watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        changed, last = asyncio.Event(), None
        self._watchers[changed] = peer
        try:
            while True:
                changed.clear()
                status = self._status(service)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                await changed.wait()
        finally:
            del self._watchers[changed]

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return response.SERVICE_UNKNOWN
        return response.SERVING if self._is_ready() else response.NOT_SERVING


async def _service(reads: MessageReads, context: Context) -> str:
    try:
        raw = await reads.read(context)
    except KvferryError as error:
        status = status_of(error)
        await context.abort(status.code, status.details, status.trailing_metadata)
    try:
        return str(health_pb2.HealthCheckRequest.FromString(raw).service)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is no HealthCheckRequest")
    raise AssertionError("an aborted call goes on")
