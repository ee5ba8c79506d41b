"""Leases of memory that is lent to other nodes."""

from __future__ import annotations

import asyncio
import itertools

from kvferry.keeper.chunk_lender import ChunkLender
from kvferry.store.layout import ChunkId, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.wire.v1 import keeper_pb2 as pb
from support.tier_chunks import LAYOUT, chunk


class Agent:
    """An agent whose memory no peer reads."""

    name = "lender"

    async def register(self, address: int, num_bytes: int) -> None:
        pass

    async def metadata(self, address: int) -> bytes:
        return b"m"

    async def deregister(self, address: int) -> None:
        pass

    def begin_lending(self) -> None:
        pass

    def end_lending(self) -> None:
        pass


class Local:
    def pool_of(self, volume_id: str) -> str:
        return ""

    def payload_bytes(self, layout: LayoutDigest) -> int:
        return LAYOUT.payload_bytes

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result(Outcome.OK)
        return done


def request(number: int) -> pb.FetchRequest:
    return pb.FetchRequest(
        volume_id="v",
        layout=LAYOUT.digest,
        payload_bytes=LAYOUT.payload_bytes,
        tenant="default",
        keys=chunk(number).key,
    )


async def test_leases_of_others_cannot_be_guessed() -> None:
    lender = ChunkLender(Local(), Agent(), staging_bytes=1 << 20)  # type: ignore[arg-type]
    leases = [(await lender.fetch(request(number))).lease for number in range(8)]
    for lease in leases:
        for guess in {*range(1, 100), lease + 1, lease - 1} - set(leases):
            lender.release(guess)
    assert len(lender._lease_to_starts) == 8
    steps = {later - lease for lease, later in itertools.pairwise(leases)}
    assert len(steps) == 7, "numbers follow from each other"
    for lease in leases:
        lender.release(lease)
    assert lender._staging.num_free == 1 << 20
    await lender.close()
