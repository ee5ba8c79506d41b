"""A worker's gRPC server: Describe, for tools."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvferry.errors import UnavailableError
from kvferry.util.addresses import join_host_port
from kvferry.util.grpc_options import CHANNEL_OPTIONS
from kvferry.wire.v1 import worker_pb2 as pb

SERVICE = "kvferry.wire.v1.Worker"

Context = grpc.aio.ServicerContext[pb.DescribeRequest, pb.Welcome]


class GrpcServer:
    def __init__(self, welcome: Callable[[], pb.Welcome]) -> None:
        self._welcome = welcome
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self, host: str, credentials: grpc.ServerCredentials | None) -> None:
        server = self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        handlers = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._serve_describe, pb.DescribeRequest.FromString, pb.Welcome.SerializeToString
            )
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = join_host_port(host, 0)
        if credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, credentials)
        await server.start()

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
