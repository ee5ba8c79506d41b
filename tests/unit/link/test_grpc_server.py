"""What only gRPC can say."""

from __future__ import annotations

import grpc
import pytest

from kvferry import __version__
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from support.link_peers import Gateway, GrpcWire, LinkEnded, request, serving, simulated
from support.waiting import until


async def test_a_link_that_does_not_begin_with_hello_is_told_so() -> None:
    async with simulated() as engine, serving(engine) as worker:
        gateway = Gateway(worker, "grpc")
        await gateway.submit(1, request("a"))
        with pytest.raises(LinkEnded, match=r"INVALID_ARGUMENT.*Hello"):
            await gateway.read()
        await gateway.leave()


async def test_what_cannot_be_read_is_told() -> None:
    async with simulated() as engine, serving(engine) as worker:
        gateway = Gateway(worker, "grpc")
        await gateway.hello()
        await gateway.wire.send(b"\xff" * 20)
        with pytest.raises(LinkEnded, match=r"INVALID_ARGUMENT.*not a message"):
            await gateway.read_ends(1)
        await until(lambda: not worker.sessions)
        await gateway.leave()


async def test_the_generated_stub_speaks_to_it() -> None:
    """Handlers are written by hand, to pass bytes on; the service is still the one in worker.proto."""
    async with (
        simulated() as engine,
        serving(engine) as worker,
        grpc.aio.insecure_channel(f"127.0.0.1:{worker.port}") as channel,
    ):
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        described = await stub.Describe(pb.DescribeRequest())
        assert (described.worker_id, described.engine_id) == ("w", engine.info.engine_id)
        call = stub.Attach()
        await call.write(pb.Downward(hello=pb.Hello(gateway_id="g", version=__version__)))
        assert (await call.read()).welcome.worker_id == "w"
        call.cancel()


async def test_without_frames_only_grpc_listens() -> None:
    async with simulated() as engine, serving(engine, frames=False) as worker:
        assert worker.frame_port == 0
        gateway = Gateway(worker, "grpc")
        assert isinstance(gateway.wire, GrpcWire)
        assert (await gateway.hello()).worker_id == "w"
        await gateway.leave()
