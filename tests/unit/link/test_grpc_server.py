"""What tools ask a worker."""

from __future__ import annotations

import grpc

from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from support.link_peers import serving, simulated


async def test_the_generated_stub_speaks_to_it() -> None:
    """Its handler is written by hand; the service is still the one in worker.proto."""
    async with (
        simulated() as engine,
        serving(engine) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        described = await stub.Describe(pb.DescribeRequest())
        assert (described.worker_id, described.engine_id) == ("w", engine.info.engine_id)
