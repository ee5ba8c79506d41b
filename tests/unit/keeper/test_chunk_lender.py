"""Leases of memory that is lent to other nodes."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import secrets
from collections.abc import Callable

import pytest

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry_keeper.remote.chunk_lender import MAX_KEYS, ChunkLender
from kvferry_keeper.store.chunk_file import HEADER_BYTES
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import Cause
from support.tier_chunks import LAYOUT, chunk
from support.virtual_time import run

PAYLOAD_BYTES = LAYOUT.payload_bytes
MAX_UINT64 = (1 << 64) - 1


class Agent:
    """An agent whose memory no peer reads."""

    name = "lender"

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.deregistered: list[int] = []
        self.num_lending = 0
        self.faults: list[TierError] = []  # of the next registrations

    async def register(self, address: int, num_bytes: int) -> None:
        self.registered.append((address, num_bytes))
        await asyncio.sleep(0)
        if self.faults:
            raise self.faults.pop(0)

    async def metadata(self, address: int) -> bytes:
        return f"memory at {address}".encode()

    async def deregister(self, address: int) -> None:
        self.deregistered.append(address)

    def begin_lending(self) -> None:
        self.num_lending += 1

    def end_lending(self) -> None:
        self.num_lending -= 1


class Local:
    """A volume `v` whose chunks are read at once, but for those of `outcomes` and `hanging`."""

    def __init__(self) -> None:
        self.outcomes: dict[bytes, str] = {}  # by key
        self.hanging: dict[bytes, asyncio.Future[str]] = {}  # by key
        self.read_chunks: list[ChunkId] = []

    def pool_of(self, volume_id: str) -> str | None:
        return {"v": "", "of finance": "finance"}.get(volume_id)

    def payload_bytes(self, layout: LayoutDigest) -> int | None:
        return {LAYOUT.digest: PAYLOAD_BYTES}.get(layout)

    def read(
        self, volume_id: str, layout: LayoutDigest, chunk: ChunkId, into: memoryview, header: memoryview
    ) -> asyncio.Future[str]:
        assert layout == LAYOUT.digest
        assert (len(into), len(header)) == (PAYLOAD_BYTES, HEADER_BYTES)
        self.read_chunks.append(chunk)
        into[:] = payload(chunk.key)
        header[: len(volume_id)] = volume_id.encode()
        if (hanging := self.hanging.get(chunk.key)) is not None:
            return hanging
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result(self.outcomes.get(chunk.key, Outcome.OK))
        return done


def payload(key: bytes) -> bytes:
    return key[:1] * PAYLOAD_BYTES


def request(*numbers: int, **fields: object) -> pb.FetchRequest:
    values: dict[str, object] = {
        "volume_id": "v",
        "layout": LAYOUT.digest,
        "payload_bytes": PAYLOAD_BYTES,
        "tenant": "default",
        "keys": b"".join(chunk(number).key for number in numbers),
    }
    return pb.FetchRequest(**values | fields)  # type: ignore[arg-type]


def causes(reply: pb.FetchReply) -> list[str]:
    """Return why there is no chunk, by key; empty where there is one."""
    return [fetched.cause for fetched in reply.chunks]


class Lender(ChunkLender):
    """A lender of memory for a few chunks, with its local chunks and its agent."""

    def __init__(self, num_chunks: int = 4, *, timeout_s: float = 10.0) -> None:
        self.chunks, self.agent = Local(), Agent()
        self.all_free = f"<ChunkLender <Staging {num_chunks * PAYLOAD_BYTES} of {num_chunks * PAYLOAD_BYTES} bytes free"
        super().__init__(
            self.chunks,
            self.agent,  # type: ignore[arg-type]
            staging_bytes=num_chunks * PAYLOAD_BYTES,
            timeout_s=timeout_s,
        )

    def hang(self, *numbers: int) -> list[asyncio.Future[str]]:
        """Let reads of these chunks hang until their future is done."""
        reads = [asyncio.get_running_loop().create_future() for _ in numbers]
        self.chunks.hanging |= {chunk(number).key: read for number, read in zip(numbers, reads, strict=True)}
        return reads

    @property
    def num_free_chunks(self) -> float:
        free, _, _ = repr(self).removeprefix("<ChunkLender <Staging ").partition(" ")
        return int(free) / PAYLOAD_BYTES


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_virtual_time(test: Callable[..., object]) -> Callable[..., None]:
    """Run an asynchronous test with pauses that take no time."""

    def run_test(caplog: pytest.LogCaptureFixture) -> None:
        run(test())  # type: ignore[arg-type]
        assert not caplog.records, "nothing fails unseen in a callback"

    return run_test


@in_virtual_time
async def test_leases_of_others_cannot_be_guessed() -> None:
    lender = Lender(8)
    leases = [(await lender.fetch(request(number))).lease for number in range(8)]
    for lease in leases:
        for guess in {*range(1, 100), lease + 1, lease - 1} - set(leases):
            lender.release(guess)
    assert repr(lender).endswith("8 leases>")
    steps = {later - lease for lease, later in itertools.pairwise(leases)}
    assert len(steps) == 7, "numbers follow from each other"
    for lease in leases:
        lender.release(lease)
    assert repr(lender) == f"{lender.all_free}, 0 pieces allocated>, 0 leases>"
    await lender.close()


def test_the_number_of_a_lease_is_neither_zero_nor_over_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 stands for no lease."""

    async def main() -> None:
        lender = Lender()
        for number, extreme in ((1, lambda end: 0), (MAX_UINT64, lambda end: end - 1)):
            monkeypatch.setattr(secrets, "randbelow", extreme)
            assert (await lender.fetch(request(0))).lease == number
        await lender.close()

    run(main())


@in_virtual_time
async def test_chunks_are_lent_where_a_peer_can_read_them() -> None:
    lender = Lender()
    reply = await lender.fetch(request(1, 2, tenant="acme", epoch=7))
    assert lender.chunks.read_chunks == [ChunkId(chunk(number).key, 0, Namespace("acme", 7)) for number in (1, 2)]
    assert causes(reply) == ["", ""]
    ((base, num_bytes),) = lender.agent.registered
    assert num_bytes == 4 * PAYLOAD_BYTES
    assert all(base <= lent.address <= base + num_bytes - PAYLOAD_BYTES for lent in reply.chunks)
    for number, lent in zip((1, 2), reply.chunks, strict=True):
        assert ctypes.string_at(lent.address, PAYLOAD_BYTES) == payload(chunk(number).key)
        assert lent.header == b"v".ljust(HEADER_BYTES, b"\0")
    assert (reply.agent, reply.agent_metadata) == ("lender", f"memory at {base}".encode())
    assert (lender.num_free_chunks, lender.agent.num_lending, lender.num_lent) == (2, 1, 2)
    again = await lender.fetch(request(3, agent="lender"))
    assert (again.agent, again.agent_metadata) == ("lender", b""), "the caller knows it"
    assert (lender.agent.num_lending, lender.num_lent) == (2, 3)
    for lease in (reply.lease, again.lease, reply.lease):
        lender.release(lease)
    assert (lender.num_free_chunks, lender.agent.num_lending) == (4, 0)
    assert len(lender.agent.registered) == 1
    await lender.close()


@in_virtual_time
async def test_chunks_that_cannot_be_read_are_lent_by_cause_and_keep_no_memory() -> None:
    lender = Lender()
    lender.chunks.outcomes = {chunk(1).key: Outcome.CORRUPT_PAYLOAD}
    reply = await lender.fetch(request(1, 2))
    assert causes(reply) == [Outcome.CORRUPT_PAYLOAD, ""]
    assert (reply.chunks[0].address, lender.num_lent, lender.num_free_chunks) == (0, 1, 3)
    nothing = await lender.fetch(request(1, 1))
    assert causes(nothing) == [Outcome.CORRUPT_PAYLOAD] * 2
    assert (nothing.lease, lender.num_lent, lender.num_free_chunks) == (0, 1, 3)
    await lender.close()
    assert lender.num_free_chunks == 4


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"pool": "finance"}, Cause.UNAVAILABLE),
        ({"volume_id": "of finance"}, Cause.UNAVAILABLE),
        ({"volume_id": "of finance", "pool": "finance"}, ""),
        ({"volume_id": "another"}, ""),  # reading it says what is wrong with it
        ({"volume_id": "another", "pool": "finance"}, ""),
        ({"layout": bytes(len(LAYOUT.digest))}, Outcome.MISSING),
        ({"payload_bytes": PAYLOAD_BYTES + 1}, Outcome.WRONG_LAYOUT),
    ],
)
def test_chunks_of_another_pool_or_layout_are_not_lent(fields: dict[str, object], cause: str) -> None:
    async def main() -> None:
        lender = Lender()
        reply = await lender.fetch(request(1, 2, **fields))
        assert causes(reply) == [cause] * 2
        assert len(lender.chunks.read_chunks) == (0 if cause else 2)
        await lender.close()

    run(main())


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"layout": b"short"}, "a layout digest of 5 bytes"),
        ({"keys": b""}, "0 keys at once"),
        ({"keys": b"x"}, "1 bytes of keys"),
        ({"keys": chunk(0).key * (MAX_KEYS + 1)}, f"{MAX_KEYS + 1} keys at once"),
        ({"tenant": "Not A Tenant"}, "tenant"),
    ],
)
def test_a_malformed_request_is_refused(fields: dict[str, object], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        run(Lender().fetch(request(1, **fields)))


def test_a_request_may_have_a_mebibyte_of_keys() -> None:
    reply = run(Lender().fetch(request(keys=chunk(0).key * MAX_KEYS, pool="finance")))
    assert len(reply.chunks) == MAX_KEYS


@in_virtual_time
async def test_a_lease_ends_after_half_a_minute() -> None:
    lender = Lender()
    one = await lender.fetch(request(1))
    await asyncio.sleep(20.0)
    await lender.fetch(request(2, 3))
    await lender.fetch(request(4))
    lender.release(one.lease)
    await asyncio.sleep(29.9)
    assert (lender.num_free_chunks, lender.num_expired) == (1, 0), "a lease that was released does not expire"
    await asyncio.sleep(0.2)
    assert (lender.num_free_chunks, lender.num_expired, lender.agent.num_lending) == (4, 2, 0)
    await lender.close()


@in_virtual_time
async def test_memory_of_a_read_that_hangs_is_lent_again_only_once_it_ended() -> None:
    """It may still write there."""
    lender = Lender()
    reads = lender.hang(1, 2)
    reply = await lender.fetch(request(1, 2, 3), 4.0)
    assert now_s() == 4.0
    assert causes(reply) == [Cause.TIMEOUT, Cause.TIMEOUT, ""]
    lender.release(reply.lease)
    assert lender.num_free_chunks == 2
    for read, outcome in zip(reads, (Outcome.OK, Outcome.GONE), strict=True):
        read.set_result(outcome)
        await turns()
    assert lender.num_free_chunks == 4
    await lender.close()


@pytest.mark.parametrize(("timeout_s", "took_s"), [(None, 10.0), (3.0, 3.0), (60.0, 10.0)])
def test_a_read_is_waited_for_at_most_as_long_as_the_lender_waits(timeout_s: float | None, took_s: float) -> None:
    async def main() -> None:
        lender = Lender()
        await asyncio.sleep(100.0)
        (read,) = lender.hang(1)
        assert causes(await lender.fetch(request(1), timeout_s)) == [Cause.TIMEOUT]
        assert now_s() == 100.0 + took_s
        read.set_result(Outcome.OK)
        await lender.close()

    run(main())


@in_virtual_time
async def test_a_full_lender_waits_for_memory_for_at_most_a_second() -> None:
    lender = Lender(2)
    first = await lender.fetch(request(1, 2))
    assert causes(await lender.fetch(request(3))) == [Cause.QUEUE_FULL]
    assert now_s() == 1.0
    assert causes(await lender.fetch(request(3), 0.5)) == [Cause.QUEUE_FULL]
    assert now_s() == 1.5
    waiting = [asyncio.create_task(lender.fetch(request(number))) for number in (3, 4, 5)]
    await asyncio.sleep(0.9)
    lender.release(first.lease)
    replies = await asyncio.gather(*waiting)
    assert now_s() == 2.5
    assert [causes(reply) for reply in replies] == [[""], [""], [Cause.QUEUE_FULL]]
    for reply in replies:
        lender.release(reply.lease)
    assert lender.num_free_chunks == 2
    await lender.close()


@in_virtual_time
async def test_a_chunk_that_never_fits_is_not_waited_for() -> None:
    small, exact = (
        ChunkLender(Local(), Agent(), staging_bytes=num_bytes, timeout_s=10.0)  # type: ignore[arg-type]
        for num_bytes in (PAYLOAD_BYTES - 1, PAYLOAD_BYTES)
    )
    assert causes(await small.fetch(request(1))) == [Cause.QUEUE_FULL]
    assert causes(await exact.fetch(request(1))) == [""]
    assert now_s() == 0.0
    for lender in (small, exact):
        await lender.close()


@in_virtual_time
async def test_a_caller_that_goes_away_keeps_no_memory() -> None:
    lender = Lender(3)
    lender.chunks.outcomes = {chunk(4).key: Outcome.GONE}
    (read,) = lender.hang(2)
    fetching = asyncio.create_task(lender.fetch(request(1, 2, 4, 3, 5)))  # the last one waits for memory
    await asyncio.sleep(0.1)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await turns()
    assert lender.num_free_chunks == 2, "one is still read"
    read.set_result(Outcome.OK)
    await turns()
    assert (lender.num_free_chunks, lender.agent.num_lending, lender.num_lent) == (3, 0, 0)
    await lender.close()


@in_virtual_time
async def test_memory_is_registered_once_and_again_after_a_fault() -> None:
    lender = Lender()
    lender.agent.faults = [TierError("no NIXL"), TierError("no NIXL")]
    with pytest.raises(TierError, match="no NIXL"):
        await lender.warm_up()
    with pytest.raises(TierError, match="no NIXL"):
        await lender.fetch(request(1))
    impatient, *others = [asyncio.create_task(lender.warm_up()) for _ in range(3)]
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(*others)
    assert len(lender.agent.registered) == 3
    assert len(set(lender.agent.registered)) == 1, "it is the same memory"
    assert causes(await lender.fetch(request(1))) == [""]
    assert len(lender.agent.registered) == 3
    await lender.close()


@in_virtual_time
async def test_a_lender_that_closes_ends_its_leases_and_its_registration() -> None:
    lender = Lender()
    for number in range(3):
        await lender.fetch(request(number))
    for _ in range(2):
        await lender.close()
        assert repr(lender) == f"{lender.all_free}, 0 pieces allocated>, 0 leases>"
        assert lender.agent.num_lending == 0
        assert lender.agent.deregistered == [address for address, _ in lender.agent.registered]
    assert len(asyncio.all_tasks()) == 1


@in_virtual_time
async def test_a_lender_without_memory_closes_too() -> None:
    unused, broken = Lender(), Lender()
    await unused.close()
    broken.agent.faults = [TierError("no NIXL")]
    with pytest.raises(TierError):
        await broken.warm_up()
    for _ in range(2):
        await broken.close()
    assert (unused.agent.deregistered, broken.agent.deregistered) == ([], [])
