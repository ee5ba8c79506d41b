"""grpc.health.v1 of a gateway: SERVING means ready. Needs no key."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from kvferry.errors import KvferryError, shortened
from kvferry.gateway.grpc.grpc_messages import MessageReads, status_of

SERVICE = "grpc.health.v1.Health"

# Callers have no key: of all, as many as a cluster's probes and balancers need. Beyond it a new one takes the place of
# the oldest of the address that has most, so that nobody keeps others out.
MAX_WATCHERS = 256
_MAX_WATCHERS_PER_CONNECTION = 32
# Calls whose message has not come, of each method: others would keep clients with keys out.
_MAX_READS = 4
_MAX_WAITING = 28
_PATIENCE_S = 0.2  # a message is small, and a probe waits a second in all
_MAX_SHOWN_BYTES = 128  # of an unknown service's name

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class _Watcher:
    peer: str  # scheme:address:port
    end: Callable[[], object]  # also of one whose client does not read
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_replaced: bool = False

    @property
    def address(self) -> str:
        return self.peer.rpartition(":")[0]


class Health:
    """`handler` serves it. A watcher that does not read delays nothing but itself."""

    def __init__(self, services: Collection[str], is_ready: Callable[[], bool]) -> None:
        self._services = services
        self._is_ready = is_ready
        # Apart, so that watching holds up no probe.
        self._check_reads = MessageReads(_MAX_READS, _MAX_WAITING, _PATIENCE_S)
        self._watch_reads = MessageReads(_MAX_READS, _MAX_WAITING, _PATIENCE_S)
        self._watchers: dict[_Watcher, None] = {}  # the oldest first

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
            watcher.changed.set()

    async def _check(self, _: object, context: Context) -> health_pb2.HealthCheckResponse:
        service = await _service(self._check_reads, context)
        if service not in self._services:
            shown = shortened(repr(service), _MAX_SHOWN_BYTES)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {shown} here")
        return health_pb2.HealthCheckResponse(status=self._status(service))

    async def _watch(self, _: object, context: Context) -> None:
        service, peer = await _service(self._watch_reads, context), context.peer()
        if sum(watcher.peer == peer for watcher in self._watchers) >= _MAX_WATCHERS_PER_CONNECTION:
            refusal = f"{_MAX_WATCHERS_PER_CONNECTION} calls of this connection watch already"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        if len(self._watchers) >= MAX_WATCHERS:
            self._replace_one()
        task = asyncio.current_task()
        assert task is not None
        watcher, last = _Watcher(peer, task.cancel), None
        self._watchers[watcher] = None
        try:
            while True:
                watcher.changed.clear()
                status = self._status(service)
                if status != last:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                await watcher.changed.wait()
        except asyncio.CancelledError:
            if not watcher.is_replaced:
                raise
            task.uncancel()
            refusal = f"a newer call replaces this one: {MAX_WATCHERS} may watch"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        finally:
            self._watchers.pop(watcher, None)

    def _replace_one(self) -> None:
        # The oldest of the address that has most, and there of the connection that has most.
        address = _most_common(watcher.address for watcher in self._watchers)
        peer = _most_common(watcher.peer for watcher in self._watchers if watcher.address == address)
        oldest = next(watcher for watcher in self._watchers if watcher.peer == peer)
        del self._watchers[oldest]
        oldest.is_replaced = True
        oldest.end()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return response.SERVICE_UNKNOWN
        return response.SERVING if self._is_ready() else response.NOT_SERVING


def _most_common(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]


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
