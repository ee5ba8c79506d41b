"""A worker's gRPC server: Describe, for tools."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvferry import mutual_tls
from kvferry.config import TlsConfig
from kvferry.errors import UnavailableError
from kvferry.wire.v1 import worker_pb2 as pb

SERVICE = "kvferry.wire.v1.Worker"

Context = grpc.aio.ServicerContext[pb.DescribeRequest, pb.Welcome]


class GrpcServer:
    def __init__(self, welcome: Callable[[], pb.Welcome]) -> None:
        self._welcome = welcome
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self, host: str, tls: TlsConfig | None) -> None:
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._serve_describe, pb.DescribeRequest.FromString, pb.Welcome.SerializeToString
            )
        }
        self._server, self.port = await mutual_tls.start_server(SERVICE, handlers, host, tls)

    async def stop(self, grace_s: float) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)

    async def _serve_describe(self, request: pb.DescribeRequest, context: Context) -> pb.Welcome:
        try:
            return self._welcome()
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise
