"""Reads from other nodes' keepers into an engine's region."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import grpc
import pytest

from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry.wire.v1 import keeper_pb2_grpc
from kvferry_keeper.mapped_region import MappedRegion
from kvferry_keeper.remote.nixl_agent import Read
from kvferry_keeper.remote.remote_reader import RemoteReader
from kvferry_keeper.store import chunk_file
from kvferry_keeper.volumes.breaker import Cause
from support.tier_chunks import LAYOUT, chunk, payload
from support.tier_rows import rows_of


class Lender(keeper_pb2_grpc.KeeperServicer):
    """A keeper that lends chunk 1 to everybody."""

    def __init__(self, on_fetch: Callable[[], None]) -> None:
        self.on_fetch = on_fetch
        self.released = asyncio.Event()

    async def Fetch(self, request: pb.FetchRequest, context: object) -> pb.FetchReply:  # noqa: N802 - gRPC's name
        self.on_fetch()
        header = memoryview(bytearray(chunk_file.HEADER_BYTES))
        chunk_file.write_plain_header(header, payload(chunk(1)), LAYOUT.digest, chunk(1), 1.0)
        lent = pb.FetchedChunk(address=4096, header=bytes(header))
        return pb.FetchReply(agent="b", agent_metadata=b"m", chunks=[lent], lease=7)

    async def Release(self, request: pb.ReleaseRequest, context: object) -> pb.ReleaseReply:  # noqa: N802
        self.released.set()
        return pb.ReleaseReply()


class Agent:
    """An agent whose reads change no memory."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self.on_read = on_read
        self.num_reads = 0
        self.num_uncancelled = 0

    name = "a"

    async def register(self, address: int, num_bytes: int) -> None:
        pass

    async def deregister(self, address: int) -> None:
        pass

    async def add_remote(self, metadata: bytes) -> str:
        return "b"

    async def read(self, remote: str, reads: Sequence[Read], timeout_s: float) -> bool:
        self.num_reads += len(reads)
        self.on_read()
        return True


@pytest.mark.parametrize("when", ["before the copy", "before the verification"])
async def test_a_region_that_shrinks_is_not_touched(when: str) -> None:
    """Memory that is not there any more would end the keeper with SIGBUS."""
    with rows_of(4, LAYOUT.payload_bytes) as rows:
        region = MappedRegion(os.dup(rows.fd), 4, LAYOUT.payload_bytes)

        def shrink() -> None:
            os.ftruncate(rows.fd, 0)

        agent = Agent(shrink if when == "before the verification" else lambda: None)
        lender = Lender(shrink if when == "before the copy" else lambda: None)
        server = grpc.aio.server()
        keeper_pb2_grpc.add_KeeperServicer_to_server(lender, server)  # type: ignore[no-untyped-call]
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        reader = RemoteReader(agent, lambda volume_id: address, grpc.aio.insecure_channel)  # type: ignore[arg-type]
        reader.add_region(region)
        assert await reader.load("v", LAYOUT, [chunk(1)], region, [3]) == [Cause.ENGINE_GONE]
        assert agent.num_reads == (when == "before the verification")
        await asyncio.wait_for(lender.released.wait(), 10)
        reader.remove_region(region)
        await reader.close()
        await server.stop(None)
        region.close()
