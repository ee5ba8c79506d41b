"""What an engine may rely on: real sockets, shared memory, files, processes, and what breaks them.

The invariants: each job ends exactly once; no row is given back while it may still be written or read; whatever cannot
be loaded leaves the mirror; what a volume does is the matter of its own chunks alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvferry.config import TierConfig
from kvferry.errors import TierError
from kvferry.keeper import messages
from kvferry.keeper.client import AWAY
from kvferry.keeper.layout import ChunkId
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.store.direct_io import Fault, Operation
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes import volume_io, volume_set
from kvferry_keeper.volumes.breaker import BreakerState, Cause
from support.tier_keeper import Engine, KeeperProcess, SwitchableIo, engine, keeping, tier_config
from support.tier_rows import Rows, key_of, layout_of, rows_of
from support.waiting import PATIENCE_S, SOON_S, until

ROW_BYTES = 64 << 10
LAYOUT = layout_of(ROW_BYTES)
CHUNKS = range(16)


@pytest.fixture
def rows() -> Iterator[Rows]:
    with rows_of(64, ROW_BYTES) as rows:
        yield rows


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of volumes that were left alone."""
    monkeypatch.setattr(volume_io, "BREAKER_RETRY_S", 0.2)


@contextlib.asynccontextmanager
async def engine_of(keeper: Keeper | KeeperProcess, rows: Rows, **options: object) -> AsyncIterator[Engine]:
    with engine(keeper.socket_path, rows, LAYOUT, **options) as each:
        await each.connected()
        yield each
        # Leaving waits for the keeper's Bye, which needs this loop.
        await asyncio.to_thread(each.client.stop)


async def test_chunks_come_back_as_they_were(tmp_path: Path, rows: Rows) -> None:
    config = tier_config(tmp_path)
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        done = await a.store(CHUNKS)
        assert (done.succeeded, done.num_bytes) == ({key_of(i) for i in CHUNKS}, 16 * ROW_BYTES)
        await a.sees(CHUNKS)
        done = await a.load(CHUNKS[::-1], first_row=30)
        assert done.succeeded == {key_of(i) for i in CHUNKS}
        assert a.holds(CHUNKS[::-1], 30)
        # Again: there already.
        done = await a.store(CHUNKS)
        assert (len(done.succeeded), done.num_bytes) == (16, 0)
        assert keeper.stats.stores == {Outcome.OK: 16, Outcome.EXISTS: 16}
        with rows_of(64, ROW_BYTES) as others, engine(keeper.socket_path, others, LAYOUT, "f") as b:
            await b.sees(CHUNKS)
            await b.load(CHUNKS)
            assert b.holds(CHUNKS)
            # What one stores the other sees.
            await b.store([99])
            await a.sees([99])
            await asyncio.to_thread(b.client.stop)
    # And the next keeper too.
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        await a.sees([*CHUNKS, 99])
        assert len((await a.load(CHUNKS)).succeeded) == 16
        assert a.holds(CHUNKS)


async def test_a_chunk_of_another_layout_or_namespace_is_none(tmp_path: Path, rows: Rows) -> None:
    async with keeping(tier_config(tmp_path)) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        done = await a.load(CHUNKS, namespace=Namespace("other", 0))
        assert set(done.failed.values()) == {Outcome.WRONG_NAMESPACE}
        await a.misses(CHUNKS)
        with engine(keeper.socket_path, rows, layout_of(ROW_BYTES, dtype="bfloat16"), "f") as b:
            await b.connected()
            done = await b.load(CHUNKS)
            assert set(done.failed.values()) == {Outcome.MISSING}
            await asyncio.to_thread(b.client.stop)


async def test_a_corrupt_chunk_leaves_the_good_ones(tmp_path: Path, rows: Rows) -> None:
    async with keeping(tier_config(tmp_path)) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        (file,) = (tmp_path / "v0" / "pages").rglob(f"{key_of(3).hex()}-*.page")
        content = bytearray(file.read_bytes())
        content[5000] ^= 1
        file.write_bytes(content)
        done = await a.load(CHUNKS)
        assert done.failed == {key_of(3): Outcome.CORRUPT_PAYLOAD}
        assert done.succeeded == {key_of(i) for i in CHUNKS if i != 3}
        assert not a.client.contains(key_of(3))
        assert a.holds(CHUNKS[:3])
        assert a.holds(CHUNKS[4:], 4)
        await a.store([3])
        await a.sees([3])
        assert (await a.load([3])).succeeded
        assert a.holds([3])


async def test_several_jobs_at_once_end_once_each(tmp_path: Path, rows: Rows) -> None:
    async with keeping(tier_config(tmp_path, num_volumes=2)) as keeper, engine_of(keeper, rows) as a:
        jobs = [a.submit_store([i]) for i in range(64)]
        for job in jobs:
            assert (await a.end_of(job)).succeeded
        await a.sees(range(64))
        loads = [a.submit_load([i], first_row=i) for i in range(64)]
        for job in loads:
            assert (await a.end_of(job)).succeeded
        assert a.holds(range(64))
        assert a.client.wait_idle(0)
        await asyncio.sleep(0)
        assert len(a.collect()) == 128
        volumes = keeper.stats.volumes
        assert all(volume.state.num_chunks > 8 for volume in volumes), "both are used"
        assert sum(volume.state.num_chunks for volume in volumes) == 64, "and no chunk is on both"


# Whose memory it is


async def test_a_keeper_killed_in_mid_read_keeps_the_row_until_it_is_gone(tmp_path: Path, rows: Rows) -> None:
    keeper = KeeperProcess(tmp_path)
    keeper.start()
    try:
        async with engine_of(keeper, rows) as a:
            await a.store(CHUNKS)
            await a.sees(CHUNKS)
            keeper.stall()
            load = a.submit_load(CHUNKS[:8], first_row=20)
            store = a.submit_store([100])
            await until(lambda: keeper.num_stalled >= 4)
            keeper.kill()
            # The order matters: first what the client says, then whether the process has gone.
            while not a.collect().keys() >= {load, store}:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert keeper.has_ended, "the client gave rows back that a living process may write"
            assert set(a.done[load].failed.values()) == {AWAY}
            await a.misses(CHUNKS)
            keeper.reap()
            # Misses between, and no waiting for them.
            assert set((await a.load([0])).failed.values()) == {AWAY}
            keeper.go_on()
            keeper.start()
            await a.sees(CHUNKS)
            await a.load(CHUNKS)
            assert a.holds(CHUNKS)
            assert a.client.stats.reconnects == 1
    finally:
        keeper.reap()


async def test_a_keeper_that_is_stopped_hides_its_chunks_and_owns_its_rows(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "SILENCE_S", 1.5)
    monkeypatch.setattr("kvferry.keeper.client_thread._TICK_S", 0.1)
    keeper = KeeperProcess(tmp_path)
    keeper.start()
    try:
        async with engine_of(keeper, rows) as a:
            await a.store(CHUNKS)
            await a.sees(CHUNKS)
            os.kill(keeper.pid, signal.SIGSTOP)
            await asyncio.to_thread(os.waitid, os.P_PID, keeper.pid, os.WSTOPPED)  # its threads run on for a moment
            job = a.submit_load(CHUNKS)
            await a.misses(CHUNKS)
            assert not a.client.connected
            assert job not in a.collect()
            os.kill(keeper.pid, signal.SIGCONT)
            assert len((await a.end_of(job)).succeeded) == 16
            assert a.holds(CHUNKS)
            await a.sees(CHUNKS)
    finally:
        keeper.reap()


_ENGINE = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from support.tier_keeper import engine
from support.tier_rows import layout_of, rows_of
async def main():
    with rows_of(64, 65536) as rows, engine(sys.argv[1], rows, layout_of(65536), "killed") as a:
        await a.connected()
        await a.store(range(16))
        import os
        print(os.fstat(rows.fd).st_ino, flush=True)
        sys.stdin.readline()
        a.submit_load(range(16), first_row=20)
        print("asked", flush=True)
        sys.stdin.readline()
asyncio.run(main())
"""


async def test_an_engine_that_is_killed_leaves_nothing(tmp_path: Path, rows: Rows) -> None:
    """Even with reads in flight: the keeper unmaps its region when they have ended, and serves on."""
    keeper = KeeperProcess(tmp_path, io_timeout_s=60)
    keeper.start()
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", _ENGINE, str(keeper.socket_path), str(Path(__file__).parents[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        inode = int(await asyncio.to_thread(child.stdout.readline))
        assert keeper.maps(inode)
        keeper.stall()
        child.stdin.write("\n")
        child.stdin.flush()
        await asyncio.to_thread(child.stdout.readline)
        await until(lambda: keeper.num_stalled >= 4)
        child.kill()
        child.wait()
        async with engine_of(keeper, rows) as a:
            await a.sees(CHUNKS)
            assert keeper.maps(inode), "it is still being read into"
            keeper.go_on()
            await until(lambda: not keeper.maps(inode))
            await a.load(CHUNKS)
            assert a.holds(CHUNKS)
            mine = os.fstat(rows.fd).st_ino
            assert keeper.maps(mine)
        await until(lambda: not keeper.maps(mine))
    finally:
        child.kill()
        child.communicate()
        keeper.reap()


async def test_a_hanging_read_keeps_its_row_and_a_stopping_keeper_its_word(tmp_path: Path, rows: Rows) -> None:
    io, gate = SwitchableIo(), threading.Event()
    config = tier_config(tmp_path, io_timeout_s=0.2)
    async with keeping(config, [io]) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        io.operation_to_fault[Operation.READ] = Fault(until=gate)
        job = a.submit_load(CHUNKS)
        await until(lambda: keeper.stats.volumes[0].num_overdue == 4)
        assert not await keeper.stop(0.2)
        assert job not in a.collect(), "its rows may still be written"
        assert a.client.has_unfinished
        gate.set()
        # Once the last read has ended the region is unmapped and the engine gets Bye.
        done = await a.end_of(job)
        assert set(done.failed.values()) == {Cause.UNAVAILABLE}
        assert len(done.succeeded) == 4


async def test_rows_that_are_given_back_are_never_written_again(tmp_path: Path, rows: Rows) -> None:
    """Kills at random moments: a row whose load failed is marked, and the mark stays."""
    rng = random.Random(11)
    keeper = KeeperProcess(tmp_path)
    keeper.start()
    marked: dict[int, bytes] = {}
    num_kills = num_failed = num_loaded = 0
    try:
        async with engine_of(keeper, rows) as a:
            await a.store(CHUNKS)
            while num_kills < 6 or not (num_failed and num_loaded):
                assert num_kills < 60, f"{num_failed} loads failed and {num_loaded} did not"
                await a.sees(CHUNKS)
                job_to_rows: dict[int, range] = {}
                for first_row in range(0, 64, 16):
                    for row in range(first_row, first_row + 16):
                        marked.pop(row, None)
                    job = a.submit_load(CHUNKS, first_row=first_row)
                    job_to_rows[job] = range(first_row, first_row + 16)
                await asyncio.sleep(rng.random() * 0.02)
                keeper.kill()
                num_kills += 1
                for job, its_rows in job_to_rows.items():
                    done = await a.end_of(job)
                    for row in its_rows:
                        i = CHUNKS[row % 16]
                        if key_of(i) in done.succeeded:
                            assert a.holds([i], row)
                            num_loaded += 1
                        else:
                            marked[row] = rows[row] = rng.randbytes(ROW_BYTES)
                            num_failed += 1
                keeper.reap()
                keeper.start()
                await a.connected()
                assert all(rows[row] == mark for row, mark in marked.items())
            assert len(a.collect()) == a.num_jobs
    finally:
        keeper.reap()


# What engines say


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (messages.Load(1, "default", 0, key_of(0), [64], {}), "a row outside its region"),
        (messages.Load(1, "default", 0, key_of(0), [-1], {}), "a row outside its region"),
        (messages.Store(1, "default", 0, key_of(0), [0], [1 << 40]), "a row outside its region"),
        (messages.Load(1, "default", 0, key_of(0), [], {}), "1 keys and 0 rows"),
        (messages.Store(1, "default", 0, key_of(0), [], [0]), "0 route keys"),
        (messages.Store(1, "default", 0, key_of(0), [-1], [0]), "route key"),
        (messages.Load(1, "../..", 0, key_of(0), [0], {}), "tenant"),
        (messages.Load(1, "default", -1, key_of(0), [0], {}), "epoch"),
        (messages.Load(1, "default", 0, bytes(35), [0], {}), "35 bytes"),
        (messages.Touch(key_of(0), -1.0), "wanted for -1.0 s"),
        (messages.Store(1, "default", 0, key_of(0), [0], [0], 1e9), "wanted for"),
        (messages.Hello(messages.PROTOCOL, "e", b"", 1, 4096), "Hello twice"),
    ],
)
async def test_a_broken_engine_costs_itself_alone(
    tmp_path: Path, rows: Rows, frame: messages.ToKeeper, why: str
) -> None:
    async with keeping(tier_config(tmp_path)) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        with socket.socket(socket.AF_UNIX) as broken, rows_of(64, ROW_BYTES) as others:
            broken.connect(str(keeper.socket_path))
            hello = messages.Hello(messages.PROTOCOL, "broken", LAYOUT.to_json(), 64, ROW_BYTES)
            socket.send_fds(broken, [messages.encode(hello)], [others.fd])
            broken.setblocking(False)
            broken.send(messages.encode(frame))
            assert why in await bye_of(broken)
        await a.load(CHUNKS)
        assert a.holds(CHUNKS)
        assert keeper.stats.num_regions_mapped == 1


@pytest.mark.parametrize(
    ("hello", "num_fds", "why"),
    [
        (messages.Hello(9, "e", LAYOUT.to_json(), 64, ROW_BYTES), 1, "version 9"),
        (messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 64, ROW_BYTES), 0, "0 descriptors"),
        (messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 64, ROW_BYTES), 2, "2 descriptors"),
        (messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 65, ROW_BYTES), 1, "for 65 rows"),
        (messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 0, ROW_BYTES), 1, "0 rows"),
        (messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 64, 4096), 1, "rows of 4096 bytes"),
        (messages.Hello(messages.PROTOCOL, "e", b"{}", 64, ROW_BYTES), 1, "layout"),
        (messages.Hello(messages.PROTOCOL, "e", b"\xff", 64, ROW_BYTES), 1, "cannot be used"),
        (messages.Touch(b""), 0, "not Hello"),
    ],
)
async def test_a_hello_that_is_wrong_is_told_why(
    tmp_path: Path, rows: Rows, hello: messages.ToKeeper, num_fds: int, why: str
) -> None:
    async with keeping(tier_config(tmp_path)) as keeper:
        num_before = num_open_files()
        with socket.socket(socket.AF_UNIX) as broken:
            broken.connect(str(keeper.socket_path))
            socket.send_fds(broken, [messages.encode(hello)], [rows.fd] * num_fds)
            broken.setblocking(False)
            assert why in await bye_of(broken)
            assert await asyncio.get_running_loop().sock_recv(broken, 1) == b""
        await until(lambda: num_open_files() <= num_before)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def bye_of(connection: socket.socket) -> str:
    reader, loop = messages.FrameReader(), asyncio.get_running_loop()
    async with asyncio.timeout(SOON_S):
        while True:
            data = await loop.sock_recv(connection, 1 << 20)
            assert data, "the end, and no Bye"
            for payload in reader.feed(data):
                message = messages.decode_to_engine(payload)
                if isinstance(message, messages.Bye):
                    return message.reason


async def test_a_region_that_shrinks_costs_its_own_chunks(tmp_path: Path) -> None:
    """Hashing what is not there any more would end the keeper."""
    async with keeping(tier_config(tmp_path)) as keeper:
        with rows_of(64, ROW_BYTES) as rows, engine(keeper.socket_path, rows, LAYOUT) as a:
            await a.connected()
            await a.store(CHUNKS)
            rows.memory.close()
            os.ftruncate(rows.fd, ROW_BYTES)
            a.client.store(77, Namespace(), [(key_of(50), 0, 50)])
            assert set((await a.end_of(77)).failed.values()) == {Cause.ENGINE_GONE}
            await asyncio.to_thread(a.client.stop)


async def test_noise_ends_nothing_but_its_own_connection(tmp_path: Path, rows: Rows) -> None:
    rng = random.Random(3)
    hello = messages.encode(messages.Hello(messages.PROTOCOL, "e", LAYOUT.to_json(), 64, ROW_BYTES))
    async with keeping(tier_config(tmp_path)) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        for _ in range(300):
            with socket.socket(socket.AF_UNIX) as broken:
                broken.connect(str(keeper.socket_path))
                noise = bytearray(hello)
                if rng.random() < 0.5:
                    noise += messages.encode(messages.Load(1, "default", 0, b"".join(map(key_of, CHUNKS)), [*CHUNKS]))
                for _ in range(rng.randrange(4)):
                    noise[rng.randrange(len(noise))] = rng.randrange(256)
                with contextlib.suppress(OSError):
                    socket.send_fds(broken, [bytes(noise[: rng.randrange(1, len(noise))])], [rows.fd])
                # Otherwise the backlog fills up, and a connecting engine waits for this loop.
                await asyncio.sleep(0)
        await until(lambda: len(keeper._sessions) == 1)
        await until(lambda: keeper.stats.num_regions_mapped == 1)
        await a.load(CHUNKS)
        assert a.holds(CHUNKS)


async def test_only_one_keeper_serves_a_socket(tmp_path: Path, rows: Rows) -> None:
    config = tier_config(tmp_path)
    async with keeping(config) as keeper:
        other = Keeper(config.model_copy(update={"volumes": ()}), [])
        with pytest.raises(TierError, match="another keeper"):
            await other.start()
        await other.stop()
        async with engine_of(keeper, rows) as a:
            assert (await a.store(CHUNKS)).succeeded
        assert keeper.socket_path.stat().st_mode & 0o777 == 0o600
    assert not keeper.socket_path.exists()
    keeper.socket_path.touch()  # what a killed one leaves
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        await a.sees(CHUNKS)


async def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    config = tier_config(tmp_path, num_volumes=0)
    assert config.socket_dir is not None
    config.socket_dir.mkdir()
    config.socket_dir.chmod(0o755)
    with pytest.raises(TierError, match="others may enter"):
        await Keeper(config, []).start()


# Volumes that break


@pytest.mark.usefixtures("quick_retries")
async def test_a_volume_that_hangs_is_left_alone_and_heals(tmp_path: Path, rows: Rows) -> None:
    ios, gate = [SwitchableIo(), SwitchableIo()], threading.Event()
    # What waits fails with the volume, however late a busy machine looks at it.
    config = tier_config(tmp_path, num_volumes=2, io_timeout_s=0.4)
    async with keeping(config, ios) as keeper, engine_of(keeper, rows) as a:
        for i in range(32):
            await a.store([i])  # one by one, so that both get some
        await a.sees(range(32))
        hanging, well = keeper._volume_set
        hanging._queue_timeout_s = well._queue_timeout_s = PATIENCE_S
        on_hanging = [i for i in range(32) if hanging.volume.contains(LAYOUT.digest, key_of(i))]
        on_well = [i for i in range(32) if well.volume.contains(LAYOUT.digest, key_of(i))]
        assert len(on_hanging) > 8
        assert len(on_well) > 8
        ios[0].operation_to_fault[Operation.READ] = Fault(until=gate)
        stuck = a.submit_load(on_hanging)
        # Other volumes go on at once, not after the deadline.
        begin_s = time.monotonic()
        assert len((await a.load(on_well, first_row=32)).succeeded) == len(on_well)
        assert time.monotonic() - begin_s < 0.4
        await a.misses(on_hanging)
        await a.sees(on_well)
        # Its threads may have begun one after the other.
        await until(lambda: keeper.stats.volumes[0].num_overdue >= 4)
        volumes = {volume.state.volume_id: volume for volume in keeper.stats.volumes}
        assert volumes[hanging.volume_id].breaker is not BreakerState.CLOSED
        assert volumes[well.volume_id].breaker is BreakerState.CLOSED
        assert stuck not in a.collect(), "four of its rows may still be written"
        # New chunks go to the other one, and loads fail at once.
        assert (await a.store(range(200, 204))).succeeded
        assert set((await a.load(on_hanging[:1], first_row=40)).failed.values()) <= {Outcome.MISSING}
        # Several probes hang as well.
        await until(lambda: keeper.stats.volumes[0].num_overdue >= 6)
        ios[0].operation_to_fault.clear()
        gate.set()
        done = await a.end_of(stuck)
        assert set(done.failed.values()) == {Cause.UNAVAILABLE}
        assert len(done.succeeded) == 4, "what came late came all the same"
        await a.sees(on_hanging)
        assert len((await a.load(on_hanging)).succeeded) == len(on_hanging)
        assert a.holds(on_hanging)
        await until(lambda: keeper.stats.volumes[0].num_overdue == 0)
        assert keeper.stats.volumes[0].breaker is BreakerState.CLOSED


@pytest.mark.parametrize("operation", [Operation.READ, Operation.OPEN])
@pytest.mark.usefixtures("quick_retries")
async def test_a_volume_that_fails_is_left_alone_and_heals(tmp_path: Path, rows: Rows, operation: Operation) -> None:
    io = SwitchableIo()
    config = tier_config(tmp_path)
    async with keeping(config, [io]) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        io.operation_to_fault[operation] = Fault(errno.EIO)
        done = await a.load(CHUNKS)
        assert len(done.failed) == 16
        assert set(done.failed.values()) <= {Outcome.IO_ERROR, Cause.UNAVAILABLE}
        await a.misses(CHUNKS)
        assert not any((await a.store([50])).succeeded)
        io.operation_to_fault.clear()
        await a.sees(CHUNKS)
        await a.load(CHUNKS)
        assert a.holds(CHUNKS)
        assert keeper.stats.volumes[0].state.trips >= 1


async def test_one_bad_sector_is_one_chunk(tmp_path: Path, rows: Rows) -> None:
    io = SwitchableIo()
    async with keeping(tier_config(tmp_path), [io]) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        io.choose = lambda operation, path: (
            Fault(errno.EIO) if operation is Operation.READ and key_of(5).hex() in path else None
        )
        assert (await a.load([5])).failed == {key_of(5): Outcome.IO_ERROR}
        assert len((await a.load(CHUNKS[6:])).succeeded) == 10
        # It is removed, so that it can be stored again.
        await until(lambda: keeper.stats.volumes[0].state.num_chunks == 15)
        io.choose = lambda operation, path: None
        async with asyncio.timeout(SOON_S):
            while (await a.store([5])).num_bytes != ROW_BYTES:  # refused while its file is being put aside
                pass
        await a.sees([5])
        assert keeper.stats.volumes[0].breaker is BreakerState.CLOSED


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.usefixtures("quick_retries")
async def test_writes_that_fail_lose_no_job(tmp_path: Path, rows: Rows, error: int) -> None:
    io = SwitchableIo()
    config = tier_config(tmp_path)
    num_failed = 0

    def choose(operation: Operation, path: str) -> Fault | None:
        nonlocal num_failed
        if operation is not Operation.WRITE:
            return None
        num_failed += 1
        return Fault(error)

    async with keeping(config, [io]) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        io.choose = choose
        jobs = [a.submit_store([i]) for i in range(100, 132)]
        for job in jobs:
            assert len((await a.end_of(job)).failed) == 1
        # Reading is not its business; chunks that gave way for others are gone, which on a full drive is what they do.
        there = [i for i in CHUNKS if keeper._volumes[0].contains(LAYOUT.digest, key_of(i))]
        if error == errno.ENOSPC:
            # A store on a full drive writes twice: to space of its own, then over a chunk that gives way.
            assert len(CHUNKS) - len(there) <= num_failed // 2
        else:
            assert there == list(CHUNKS)
        assert not keeper.stats.volumes[0].state.is_writable
        await a.misses([i for i in CHUNKS if i not in there])
        assert len((await a.load(there)).succeeded) == len(there)
        assert a.holds(there)
        io.choose = lambda operation, path: None

        async with asyncio.timeout(SOON_S):
            while not (await a.store([140])).succeeded:  # tried again by itself, now and then
                pass
        assert keeper.stats.volumes[0].write_breaker is BreakerState.CLOSED


async def test_a_full_volume_makes_room(tmp_path: Path, rows: Rows) -> None:
    capacity_gib = 20 * (ROW_BYTES + 4096) / (1 << 30)
    config = tier_config(tmp_path, volume={"capacity_gib": capacity_gib})
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        for i in range(60):
            assert (await a.store([i])).succeeded
        await a.misses(range(40))
        await a.sees(range(40, 60))
        await a.load(range(40, 60))
        assert a.holds(range(40, 60))
        assert keeper.stats.volumes[0].evicted == 40


@pytest.mark.usefixtures("quick_retries")
async def test_a_volume_that_disappears_comes_back(tmp_path: Path, rows: Rows) -> None:
    config = tier_config(tmp_path)
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        (tmp_path / "v0").rename(tmp_path / "away")
        done = await a.load(CHUNKS)
        assert set(done.failed.values()) <= {Outcome.IO_ERROR, Cause.UNAVAILABLE}
        await a.misses(CHUNKS)
        assert not (await a.store([50])).succeeded
        assert not (tmp_path / "v0").exists(), "nothing is written below a mount point"
        (tmp_path / "away").rename(tmp_path / "v0")
        await a.sees(CHUNKS)
        await a.load(CHUNKS)
        assert a.holds(CHUNKS)
        assert keeper.stats.volumes[0].state.num_chunks == 16


async def test_the_write_budget_refuses_and_fills_up_again(tmp_path: Path, rows: Rows) -> None:
    now_s = [1000.0]
    # Two chunks an hour, and a bucket for as many.
    gib_per_day = 48 * ROW_BYTES / (1 << 30)
    config = tier_config(tmp_path, volume={"write_gib_per_day": gib_per_day})
    async with keeping(config, clock=lambda: now_s[0]) as keeper, engine_of(keeper, rows) as a:
        done = await a.store(CHUNKS)
        assert len(done.succeeded) == 2
        assert set(done.failed.values()) == {Cause.BUDGET}
        now_s[0] += 3600
        assert len((await a.store(CHUNKS)).succeeded) == 4, "two are there already"
        assert keeper.stats.stores == {Outcome.OK: 4, Outcome.EXISTS: 2, Cause.BUDGET: 26}


async def test_the_queue_is_bounded_and_reads_go_first(
    tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_io, "NUM_IO_THREADS", 1)
    io, gate = SwitchableIo(), threading.Event()
    monkeypatch.setattr(volume_set, "MAX_QUEUED_WRITE_BYTES", 1 << 20)
    config = tier_config(tmp_path)
    async with keeping(config, [io]) as keeper, engine_of(keeper, rows) as a:
        await a.store(CHUNKS)
        await a.sees(CHUNKS)
        order: list[str] = []

        def choose(operation: Operation, path: str) -> Fault | None:
            if operation in (Operation.READ, Operation.WRITE):
                order.append(operation.value)
            return Fault(until=gate)

        io.choose = choose
        writes = a.submit_store(range(100, 120))
        await until(lambda: keeper.stats.volumes[0].num_running == 1)
        reads = a.submit_load(CHUNKS, first_row=40)
        await until(lambda: keeper.stats.volumes[0].state.queue_bytes == 16 * ROW_BYTES)
        gate.set()
        assert len((await a.end_of(reads)).succeeded) == 16
        assert a.holds(CHUNKS, 40)
        done = await a.end_of(writes)
        assert len(done.succeeded) == 16
        assert set(done.failed.values()) == {Cause.QUEUE_FULL}
        assert order == ["write"] + 16 * ["read"] + 15 * ["write"]


async def test_two_engines_that_store_the_same_write_it_once(tmp_path: Path, rows: Rows) -> None:
    async with keeping(tier_config(tmp_path)) as keeper, engine_of(keeper, rows) as a:
        with rows_of(64, ROW_BYTES) as others, engine(keeper.socket_path, others, LAYOUT, "f") as b:
            await b.connected()
            jobs = a.submit_store(CHUNKS), b.submit_store(CHUNKS)
            assert len((await a.end_of(jobs[0])).succeeded) == len((await b.end_of(jobs[1])).succeeded) == 16
            assert keeper.stats.volumes[0].bytes_written == 16 * ROW_BYTES
            await asyncio.to_thread(b.client.stop)


async def test_a_shared_volume_is_searched_for_what_others_wrote(tmp_path: Path, rows: Rows) -> None:
    """A chunk that another node has just written, and that the router knows of."""
    config = tier_config(tmp_path, volume={"shared": True})
    async with keeping(config) as keeper, engine_of(keeper, rows) as a:
        other = Volume(config.volumes[0].path, capacity_bytes=1 << 26, shared=True, writer="elsewhere")
        await asyncio.to_thread(other.open)
        rows.fill(0, 7)
        assert other.write(LAYOUT.digest, ChunkId(key_of(7), 8), memoryview(rows.memory)[:ROW_BYTES]) is Outcome.OK
        other.close()
        assert not a.client.contains(key_of(7))
        done = await a.load([7], volumes={7: other.volume_id}, first_row=9)
        assert done.succeeded
        assert a.holds([7], 9)
        await a.sees([7])


async def test_a_pools_engines_use_its_volumes_and_no_others(tmp_path: Path, rows: Rows) -> None:
    values = tier_config(tmp_path, 2).model_dump()
    values["volumes"][1]["pool"] = "finance"
    config = TierConfig.model_validate(values)
    async with keeping(config) as keeper, engine_of(keeper, rows) as common:
        with rows_of(64, ROW_BYTES) as others, engine(keeper.socket_path, others, LAYOUT, "f", pool="finance") as own:
            await own.connected()
            default, finance = (volume.state.volume_id for volume in keeper.stats.volumes)
            # Both at once, of the same keys: neither counts as the other's.
            jobs = own.submit_store(range(8)), common.submit_store(range(4, 16))
            for each, job in zip((own, common), jobs, strict=True):
                assert not (await each.end_of(job)).failed
            assert dict(keeper.stats.stores) == {Outcome.OK: 20}
            await own.sees(range(8))
            await common.sees(range(4, 16))
            held = {volume.state.volume_id: volume.state.num_chunks for volume in keeper.stats.volumes}
            assert held == {default: 12, finance: 8}
            assert {each.state.pool for each in keeper.stats.volumes} == {"", "finance"}
            assert not any(own.client.contains(key_of(i)) for i in range(8, 16))
            assert not any(common.client.contains(key_of(i)) for i in range(4))
            # Also where a gateway names the other's volume.
            for each, chunks, other in ((own, range(8, 12), default), (common, range(4), finance)):
                done = await each.load(chunks, volumes=dict.fromkeys(chunks, other))
                assert set(done.failed.values()) == {Outcome.MISSING}
            assert len((await own.load(range(8), first_row=20)).succeeded) == 8
            assert own.holds(range(8), 20)
            await asyncio.to_thread(own.client.stop)


async def test_an_engine_of_a_pool_without_a_volume_is_refused(
    tmp_path: Path, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(tier_config(tmp_path)) as keeper:
        with engine(keeper.socket_path, rows, LAYOUT, pool="finance") as each:
            await until(lambda: "it is of pool 'finance', which has no volume here" in caplog.text)
            assert not each.client.connected
            await asyncio.to_thread(each.client.stop)
