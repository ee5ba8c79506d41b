"""Chunks of volumes that another node has: read through NIXL into the row, or failed, and never wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from bench.etcd_server import Authority
from kvferry.config import TlsConfig
from kvferry.residency.codec import residency_from_wire
from kvferry.residency.feed import ResidencyFollower, SnapshotPart
from kvferry.residency.index import ResidencyIndex
from kvferry.tenancy.namespace import Namespace
from kvferry.wire.v1 import keeper_pb2 as pb
from kvferry.wire.v1 import keeper_pb2_grpc, worker_pb2
from kvferry_keeper.lifecycle import KeeperHost
from kvferry_keeper.store import chunk_file
from kvferry_keeper.store.direct_io import Fault, Operation
from kvferry_keeper.store.keyring import load_keyring
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import Cause
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.tier_keeper import Engine, SwitchableIo, engine
from support.tier_node import FolderMembership, NodeProcess, hosting, node_config
from support.tier_rows import Rows, key_of, layout_of, rows_of
from support.waiting import PATIENCE_S, SOON_S, until

ROW_BYTES = 256 << 10
LAYOUT = layout_of(ROW_BYTES)
CHUNKS = range(40)

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="NIXL is not installed")


@pytest.fixture
def rows() -> Iterator[Rows]:
    with rows_of(96, ROW_BYTES) as rows:
        yield rows


@contextlib.asynccontextmanager
async def engine_at(socket_path: object, rows: Rows, engine_id: str = "e", pool: str = "") -> AsyncIterator[Engine]:
    with engine(str(socket_path), rows, LAYOUT, engine_id, pool=pool) as each:
        await each.connected()
        yield each
        await asyncio.to_thread(each.client.stop)


@contextlib.asynccontextmanager
async def two_hosts(
    tmp_path: Path, tls: tuple[TlsConfig, TlsConfig] | None = None, writer_pool: str = "", **options: object
) -> AsyncIterator[tuple[KeeperHost, KeeperHost]]:
    """With PAGES on the volume of the second; in one process."""
    registry = MemoryRegistry()
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    configs = [
        node_config(folder, tls=tls[i] if tls is not None else None, **options) for i, folder in enumerate(folders)
    ]
    async with (
        hosting(configs[0], MemoryMembership(registry), "a") as a,
        hosting(configs[1], MemoryMembership(registry), "b") as b,
    ):
        with rows_of(96, ROW_BYTES) as rows:
            async with engine_at(b.keeper.socket_path, rows, "writer", writer_pool) as writer:
                assert len((await writer.store(CHUNKS)).succeeded) == len(CHUNKS)
        await until(lambda: bool(a._others.locate(b.keeper.volume_ids[0])))
        yield a, b


def on(volume_id: str, chunks: object = CHUNKS) -> dict[int, str]:
    return dict.fromkeys(chunks, volume_id)  # type: ignore[call-overload]


async def test_two_processes(tmp_path: Path, rows: Rows) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    a, b = NodeProcess(tmp_path / "a", registry, "a"), NodeProcess(tmp_path / "b", registry, "b")
    try:
        a.start()
        b.start()
        with rows_of(64, ROW_BYTES) as others:
            async with engine_at(b.socket_path, others, "writer") as writer:
                assert len((await writer.store(CHUNKS)).succeeded) == len(CHUNKS)
        async with engine_at(a.socket_path, rows) as reader:

            async def load(first_row: int = 0) -> bool:
                done = await reader.load(CHUNKS, volumes=on(b.volume_id), first_row=first_row)
                assert set(done.failed.values()) <= {Cause.UNAVAILABLE, Cause.TIMEOUT}
                return len(done.succeeded) == len(CHUNKS)

            async with asyncio.timeout(PATIENCE_S):
                while not await load():
                    pass
            assert reader.holds(CHUNKS)
            assert not reader.client.contains(key_of(0)), "the mirror is of what is here"
            # The other one is killed, in the midst of it.
            jobs = [reader.submit_load(CHUNKS, volumes=on(b.volume_id), first_row=50) for _ in range(3)]
            b.reap()
            for job in jobs:
                done = await reader.end_of(job)
                assert len(done.succeeded) + len(done.failed) == len(CHUNKS)
            begin_s = time.monotonic()
            assert not await load()
            assert time.monotonic() - begin_s < 5
            # And comes back: another process, another agent, the same volume.
            b.start()
            async with asyncio.timeout(PATIENCE_S):
                while not await load(4):
                    pass
            assert reader.holds(CHUNKS, 4)
    finally:
        a.reap()
        b.reap()


async def test_a_lender_that_is_stopped_delays_and_wrongs_nobody(tmp_path: Path, rows: Rows) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    (tmp_path / "a").mkdir()
    b = NodeProcess(tmp_path / "b", registry, "b")
    config = node_config(tmp_path / "a", io_timeout_s=1.0)
    try:
        b.start()
        with rows_of(64, ROW_BYTES) as others:
            async with engine_at(b.socket_path, others, "writer") as writer:
                await writer.store(CHUNKS)
        async with (
            hosting(config, FolderMembership(registry), "a") as a,
            engine_at(a.keeper.socket_path, rows) as reader,
        ):
            await until(lambda: bool(a._others.locate(b.volume_id)))
            os.kill(b.member.pid, signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, b.member.pid, os.WSTOPPED)  # its threads run on for a moment
            done = await reader.load(CHUNKS, volumes=on(b.volume_id))
            assert set(done.failed.values()) == {Cause.UNAVAILABLE}
            assert done.seconds < 20
            os.kill(b.member.pid, signal.SIGCONT)
            async with asyncio.timeout(SOON_S):
                while not (await reader.load(CHUNKS, volumes=on(b.volume_id))).succeeded:
                    pass
    finally:
        b.reap()


async def test_chunks_here_and_there_make_one_job(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
        volume_id = b.keeper.volume_ids[0]
        await reader.store(range(80, 90))
        await reader.sees(range(80, 90))
        mixed = [*range(80, 90), *range(10), 99]
        done = await reader.load(mixed, volumes=on(volume_id, [*range(10), 99]), first_row=20)
        assert done.failed == {key_of(99): Outcome.MISSING}
        assert reader.holds(mixed[:-1], 20)
        assert a.keeper.stats.remote_loads == {Outcome.OK: 10, Outcome.MISSING: 1}
        assert a.remote.stats.loaded == 10
        # Whose chunk it is counts there too.
        done = await reader.load([1], volumes=on(volume_id), namespace=Namespace("other", 0))
        assert set(done.failed.values()) == {Outcome.WRONG_NAMESPACE}
        done = await reader.load([1], volumes={1: "v-nobody-has"})
        assert set(done.failed.values()) == {Cause.UNAVAILABLE}
        # Its leases end with what was read.
        await until(lambda: not b.lender._lease_to_starts)
        assert b.lender._staging.num_free == b.lender._staging.num_bytes
        b.lender._staging.check()


async def test_one_registration_for_each_region(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path) as (a, b):
        volume_id = b.keeper.volume_ids[0]
        async with engine_at(a.keeper.socket_path, rows) as reader:
            jobs = [reader.submit_load(CHUNKS[:8], volumes=on(volume_id), first_row=8 * i) for i in range(6)]
            for i, job in enumerate(jobs):
                done = await reader.end_of(job)
                async with asyncio.timeout(PATIENCE_S):  # on a machine that stood still, a copy is late and fails
                    while len(done.succeeded) < 8:
                        done = await reader.load(CHUNKS[:8], volumes=on(volume_id), first_row=8 * i)
            assert reader.holds(list(CHUNKS[:8]) * 6)
            assert len(a._agent._registered) == 2, "this region, and what is lent"
        await until(lambda: not a.keeper._regions)
        assert len(a._agent._registered) == 1


def keys_file(folder: Path, byte: str) -> Path:
    file = folder / f"keys-{byte}.json"
    file.write_text(json.dumps({"*": byte * 32}))
    file.chmod(0o600)
    return file


async def test_sealed_chunks_are_lent_too(tmp_path: Path, rows: Rows) -> None:
    """They stay sealed until they lie in the row of the engine that asked."""
    async with (
        two_hosts(tmp_path, encryption_keys_file=str(keys_file(tmp_path, "5a"))) as (a, b),
        engine_at(a.keeper.socket_path, rows) as reader,
    ):
        done = await reader.load(CHUNKS, volumes=on(b.keeper.volume_ids[0]))
        assert len(done.succeeded) == len(CHUNKS)
        assert reader.holds(CHUNKS)
        memory = b.lender._memory
        assert memory is not None
        lent = bytes(memory)
        assert lent.strip(b"\0")
        assert not any(rows[i][:64] in lent for i in CHUNKS)


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_node_with_keys_takes_only_what_is_sealed_with_them(
    tmp_path: Path, rows: Rows, is_sealed: bool
) -> None:
    lenders_file = str(keys_file(tmp_path, "5a")) if is_sealed else None
    async with (
        two_hosts(tmp_path, encryption_keys_file=lenders_file) as (a, b),
        engine_at(a.keeper.socket_path, rows) as reader,
    ):
        a.remote._keyring = load_keyring(keys_file(tmp_path, "6b"))
        done = await reader.load(CHUNKS, volumes=on(b.keeper.volume_ids[0]))
        assert done.failed == {key_of(i): Outcome.UNDECRYPTABLE for i in CHUNKS}


async def test_bad_chunks_of_the_lender(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
        volume_id = b.keeper.volume_ids[0]
        (file,) = (tmp_path / "b" / "v0" / "pages").rglob(f"{key_of(3).hex()}-*.page")
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
        done = await reader.load(CHUNKS, volumes=on(volume_id))
        assert done.failed == {key_of(3): Outcome.CORRUPT_PAYLOAD}
        assert len(done.succeeded) == len(CHUNKS) - 1
        assert reader.holds(CHUNKS[4:], 4)


async def test_what_changes_on_the_way_is_seen(tmp_path: Path, rows: Rows) -> None:
    """The lender's memory is its own: by the time it is read it may hold anything."""
    async with two_hosts(tmp_path) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
        volume_id = b.keeper.volume_ids[0]
        fetch = b.lender.fetch

        def spoil(reply: pb.FetchReply, how: str) -> None:
            first, second = reply.chunks[0], reply.chunks[1]
            if how == "flipped":
                ctypes.c_ubyte.from_address(first.address + 77).value ^= 1
            elif how == "swapped memory":
                first.address, second.address = second.address, first.address
            elif how == "swapped headers":
                first.header, second.header = second.header, first.header
            elif how == "swapped pages":
                swapped = pb.FetchedChunk()
                swapped.CopyFrom(first)
                first.CopyFrom(second)
                second.CopyFrom(swapped)
            elif how == "no header":
                first.header = b""
            elif how == "a header of zeros":
                first.header = bytes(chunk_file.HEADER_BYTES)

        expected = {
            "flipped": {Outcome.CORRUPT_PAYLOAD},
            "swapped memory": {Outcome.CORRUPT_PAYLOAD},
            "swapped headers": {Outcome.WRONG_KEY},
            "swapped pages": {Outcome.WRONG_KEY},
            "no header": {Outcome.CORRUPT_HEADER},
            "a header of zeros": {Outcome.CORRUPT_HEADER},
        }
        for how, causes in expected.items():

            async def spoiled(
                request: pb.FetchRequest, timeout_s: float | None = None, how: str = how
            ) -> pb.FetchReply:
                reply = await fetch(request, timeout_s)
                spoil(reply, how)
                return reply

            b.lender.fetch = spoiled  # type: ignore[method-assign]
            done = await reader.load(CHUNKS[:4], volumes=on(volume_id))
            assert set(done.failed.values()) == causes, how
            assert len(done.succeeded) == (3 if len(done.failed) == 1 else 2), how
            assert reader.holds(CHUNKS[2:4], 2)


async def test_addresses_that_were_never_lent(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
        fetch = b.lender.fetch

        async def elsewhere(request: pb.FetchRequest, timeout_s: float | None = None) -> pb.FetchReply:
            reply = await fetch(request, timeout_s)
            reply.chunks[0].address = min(chunk.address for chunk in reply.chunks) - (1 << 20)
            return reply

        b.lender.fetch = elsewhere  # type: ignore[method-assign]
        done = await reader.load(CHUNKS[:4], volumes=on(b.keeper.volume_ids[0]))
        assert set(done.failed.values()) == {Cause.UNAVAILABLE}


async def test_a_lease_ends_by_itself(tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_hosts(tmp_path) as (_, b):
        b.lender._lease_s = 0.1
        async with grpc.aio.insecure_channel(b.member.address) as channel:
            stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
            reply = await stub.Fetch(question(b, CHUNKS))
            assert reply.lease
            assert b.lender._staging.num_free < b.lender._staging.num_bytes
            await until(lambda: b.lender.num_expired == 1)
            assert b.lender._staging.num_free == b.lender._staging.num_bytes
            await stub.Release(pb.ReleaseRequest(lease=reply.lease))


async def test_memory_that_is_lent_out_is_waited_for(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path, io_timeout_s=2.0) as (_, b):
        b.lender._staging = type(b.lender._staging)(10 * ROW_BYTES)
        async with grpc.aio.insecure_channel(b.member.address) as channel:
            stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
            first = await stub.Fetch(question(b, CHUNKS[:8]))
            waiting = asyncio.ensure_future(stub.Fetch(question(b, CHUNKS[8:16])))
            await until(lambda: b.lender._staging.num_free == 0, what="the second question has what is left")
            assert not waiting.done()
            await stub.Release(pb.ReleaseRequest(lease=first.lease))
            second = await waiting
            assert not any(chunk.cause for chunk in second.chunks)
            # But not for long: computing anew is quicker.
            begin_s = time.monotonic()
            third = await stub.Fetch(question(b, CHUNKS[16:24]))
            assert 0.5 < time.monotonic() - begin_s < 1.9
            assert [chunk.cause for chunk in third.chunks].count(Cause.QUEUE_FULL) == 6
            # A caller that gives up leaves nothing behind.
            given_up = stub.Fetch(question(b, CHUNKS[:8]))
            await until(lambda: b.lender._staging.num_free == 0)
            given_up.cancel()
            for lease in (second.lease, third.lease):
                await stub.Release(pb.ReleaseRequest(lease=lease))
            await until(lambda: b.lender._staging.num_free == 10 * ROW_BYTES)


async def test_a_lender_whose_volume_hangs_answers_in_time(tmp_path: Path, rows: Rows) -> None:
    gate, io = threading.Event(), SwitchableIo()
    async with two_hosts(tmp_path, io_timeout_s=0.5) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
        io.is_direct = b._volumes[0]._files.io.is_direct
        b._volumes[0]._files.io = io
        io.operation_to_fault[Operation.READ] = Fault(until=gate)
        done = await reader.load(CHUNKS[:4], volumes=on(b.keeper.volume_ids[0]))
        assert set(done.failed.values()) <= {Cause.TIMEOUT, Cause.UNAVAILABLE}
        assert len(done.failed) == 4
        assert b.lender._staging.num_free < b.lender._staging.num_bytes, "it may still be written"
        gate.set()
        await until(lambda: b.lender._staging.num_free == b.lender._staging.num_bytes)


@pytest.mark.parametrize(
    "question_of",
    [
        pb.FetchRequest(volume_id="v", layout=bytes(3), keys=bytes(36), tenant="t"),
        pb.FetchRequest(volume_id="v", layout=LAYOUT.digest, keys=bytes(35), tenant="t"),
        pb.FetchRequest(volume_id="v", layout=LAYOUT.digest, keys=b"", tenant="t"),
        pb.FetchRequest(volume_id="v", layout=LAYOUT.digest, keys=bytes(36), tenant="../x"),
    ],
)
async def test_questions_that_are_none(tmp_path: Path, rows: Rows, question_of: pb.FetchRequest) -> None:
    async with two_hosts(tmp_path) as (_, b), grpc.aio.insecure_channel(b.member.address) as channel:
        stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await stub.Fetch(question_of)


async def test_a_chunk_of_another_size_is_not_read(tmp_path: Path, rows: Rows) -> None:
    """A file that is not as long as what is asked for would count as a torn one, and moved away."""
    async with two_hosts(tmp_path) as (_, b), grpc.aio.insecure_channel(b.member.address) as channel:
        stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
        asked = question(b, CHUNKS)
        asked.payload_bytes = 4096
        reply = await stub.Fetch(asked)
        assert {chunk.cause for chunk in reply.chunks} == {Outcome.WRONG_LAYOUT}
        asked.layout = bytes(16)
        reply = await stub.Fetch(asked)
        assert {chunk.cause for chunk in reply.chunks} == {Outcome.MISSING}
        assert b.keeper.stats.volumes[0].state.num_chunks == len(CHUNKS)


async def test_without_nixl_chunks_of_other_nodes_are_misses(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with caplog.at_level(logging.WARNING):
        async with two_hosts(tmp_path) as (a, b), engine_at(a.keeper.socket_path, rows) as reader:
            for _ in range(3):
                done = await reader.load(CHUNKS, volumes=on(b.keeper.volume_ids[0]))
                assert set(done.failed.values()) == {Cause.UNAVAILABLE}
            await reader.store([80])
            await reader.sees([80])
            assert (await reader.load([80])).succeeded
    said = [record for record in caplog.records if "not installed" in record.getMessage()]
    assert len(said) == 2, "once for each keeper of this process"


@pytest.mark.parametrize("shown", ["ours", "theirs"])
async def test_over_mutual_tls(tmp_path: Path, rows: Rows, shown: str) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    (cert, key), (other_cert, other_key) = ours.issue("node"), theirs.issue("stranger")
    member = TlsConfig(cert_file=cert, key_file=key, ca_file=ours.ca_file)
    stranger = TlsConfig(cert_file=other_cert, key_file=other_key, ca_file=ours.ca_file)
    async with (
        two_hosts(tmp_path, (member if shown == "ours" else stranger, member)) as (a, b),
        engine_at(a.keeper.socket_path, rows) as reader,
    ):
        done = await reader.load(CHUNKS, volumes=on(b.keeper.volume_ids[0]))
        if shown == "ours":
            assert len(done.succeeded) == len(CHUNKS)
            assert reader.holds(CHUNKS)
        else:
            assert set(done.failed.values()) == {Cause.UNAVAILABLE}


async def test_gateways_follow_a_volume(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path) as (_, b), grpc.aio.insecure_channel(b.member.address) as channel:
        stub = keeper_pb2_grpc.KeeperStub(channel)  # type: ignore[no-untyped-call]
        volume_id = b.keeper.volume_ids[0]
        index = ResidencyIndex()
        follower = ResidencyFollower(index, volume_id)
        states: list[pb.VolumeState] = []

        async def follow() -> None:
            async for update in stub.Follow(pb.FollowRequest(volume_id=volume_id)):
                if update.WhichOneof("kind") == "state":
                    states.append(update.state)
                    continue
                residency = residency_from_wire(update.residency)
                if isinstance(residency, SnapshotPart):
                    follower.apply_part(residency)
                else:
                    follower.apply_delta(residency)

        task = asyncio.create_task(follow())
        await until(lambda: index.num_pages == len(CHUNKS))
        assert states[0].num_chunks == len(CHUNKS)
        assert states[0].capacity_bytes > 0
        async with engine_at(b.keeper.socket_path, rows) as writer:
            await writer.store(range(50, 60))
            await until(lambda: index.num_pages == len(CHUNKS) + 10)
            assert len((await writer.load(range(50, 60))).succeeded) == 10
        await until(lambda: states[-1].read_bytes_per_s > 0)
        assert not states[-1].breaker_open
        assert states[-1].blocks_per_chunk == LAYOUT.blocks_per_chunk
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not b.keeper._volume_feeds[volume_id].num_followers)
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await anext(aiter(stub.Follow(pb.FollowRequest(volume_id="v-none"))))
        described = await stub.Describe(worker_pb2.DescribeRequest())
        assert (described.node, [volume.volume_id for volume in described.volumes]) == ("b", [volume_id])


def question(host: KeeperHost, chunks: object) -> pb.FetchRequest:
    return pb.FetchRequest(
        volume_id=host.keeper.volume_ids[0],
        layout=LAYOUT.digest,
        payload_bytes=ROW_BYTES,
        tenant="default",
        keys=b"".join(key_of(i) for i in chunks),  # type: ignore[attr-defined]
    )


async def test_a_volume_of_a_pool_is_lent_to_engines_of_the_pool_only(tmp_path: Path, rows: Rows) -> None:
    async with two_hosts(tmp_path, volume={"pool": "finance"}, writer_pool="finance") as (a, b):
        volume_id = b.keeper.volume_ids[0]
        async with engine_at(a.keeper.socket_path, rows, "own", pool="finance") as own:
            assert len((await own.load(CHUNKS, volumes=on(volume_id))).succeeded) == len(CHUNKS)
            assert own.holds(CHUNKS)
        async with engine_at(a.keeper.socket_path, rows, "other") as other:
            done = await other.load(CHUNKS, volumes=on(volume_id))
            assert set(done.failed.values()) == {Cause.UNAVAILABLE}
