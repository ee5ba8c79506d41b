"""A keeper's gRPC server, for gateways and for keepers of other nodes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import grpc

from kvferry import __version__, mutual_tls
from kvferry.config import TlsConfig
from kvferry.errors import TierError
from kvferry.keeper.layout import CHUNK_KEY_BYTES
from kvferry.observability.tracing import TRACEPARENT, TRACESTATE, Span, TraceContext, Tracing, end_after
from kvferry.residency.codec import delta_to_wire, part_to_wire
from kvferry.residency.feed import Delta, SnapshotPart
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry.wire.v1 import worker_pb2
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.remote.chunk_lender import ChunkLender
from kvferry_keeper.volumes.volume_feed import Update

log = logging.getLogger(__name__)

SERVICE = "kvferry.wire.v1.Keeper"

# Share of the caller's deadline for the work; the rest is for the reply's way back.
_ANSWER_SHARE = 0.9

Context = grpc.aio.ServicerContext[Any, Any]


class KeeperServer:
    def __init__(
        self,
        keeper: Keeper,
        lender: ChunkLender,
        *,
        node: str,
        read_tracing: Callable[[], Tracing | None] = lambda: None,
    ) -> None:
        self._keeper = keeper
        self._lender = lender
        self._node = node
        self._server: grpc.aio.Server | None = None
        self._read_tracing = read_tracing
        self.port = 0

    def __repr__(self) -> str:
        return f"<KeeperServer of {self._keeper.keeper_id} port={self.port}>"

    async def start(self, host: str, tls: TlsConfig | None) -> None:
        handlers: dict[str, Any] = {
            "Follow": grpc.unary_stream_rpc_method_handler(
                self._follow, pb.FollowRequest.FromString, pb.VolumeUpdate.SerializeToString
            ),
            "Fetch": grpc.unary_unary_rpc_method_handler(
                self._fetch, pb.FetchRequest.FromString, pb.FetchReply.SerializeToString
            ),
            "Release": grpc.unary_unary_rpc_method_handler(
                self._release, pb.ReleaseRequest.FromString, pb.ReleaseReply.SerializeToString
            ),
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe, worker_pb2.DescribeRequest.FromString, pb.KeeperDescription.SerializeToString
            ),
        }
        self._server, self.port = await mutual_tls.start_server(SERVICE, handlers, host, tls)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Idempotent."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    # Not a generator: gRPC leaves a generator cancelled in a blocked write to the garbage collector.
    async def _follow(self, request: pb.FollowRequest, context: Context) -> None:
        try:
            updates = self._keeper.follow(request.volume_id)
        except TierError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, error.message)
            raise
        async with contextlib.aclosing(updates):
            async for update in updates:
                await context.write(update_to_wire(update))

    async def _fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchReply:
        with end_after(self._span_of(request, context)):
            return await self._lend(request, context)

    def _span_of(self, request: pb.FetchRequest, context: Context) -> Span | None:
        if (tracing := self._read_tracing()) is None:
            return None
        metadata = dict(context.invocation_metadata() or ())
        trace = TraceContext.of(str(metadata.get(TRACEPARENT, "")), str(metadata.get(TRACESTATE, "")))
        if trace is None:
            return None
        num_chunks = len(request.keys) // CHUNK_KEY_BYTES
        return tracing.serve(trace, "keeper lend", {"kvferry.pages": num_chunks})

    async def _lend(self, request: pb.FetchRequest, context: Context) -> pb.FetchReply:
        remaining_s = context.time_remaining()
        try:
            return await self._lender.fetch(request, None if remaining_s is None else remaining_s * _ANSWER_SHARE)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise
        except TierError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise

    async def _release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        self._lender.release(request.lease)
        return pb.ReleaseReply()

    async def _describe(self, request: worker_pb2.DescribeRequest, context: Context) -> pb.KeeperDescription:
        stats = self._keeper.stats
        return pb.KeeperDescription(
            keeper_id=stats.keeper_id,
            version=__version__,
            node=self._node,
            num_engines=len(stats.engines),
            volumes=[volume.state.to_wire() for volume in stats.volumes],
        )


def update_to_wire(update: Update) -> pb.VolumeUpdate:
    if isinstance(update, SnapshotPart):
        return pb.VolumeUpdate(residency=part_to_wire(update))
    if isinstance(update, Delta):
        return pb.VolumeUpdate(residency=delta_to_wire(update))
    return pb.VolumeUpdate(state=update.to_wire())
