"""Rescans of a shared volume: one at a time, beside reads, the next one a period after the end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvferry.errors import TierError
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes import volume_io
from kvferry_keeper.volumes.breaker import Cause
from kvferry_keeper.volumes.io_threads import Kind, Operation
from kvferry_keeper.volumes.volume_io import VolumeIo
from support.tier_chunks import LAYOUT, chunk, empty, payload
from support.tier_keeper import tier_config
from support.tier_volumes import opened_volumes
from support.waiting import SOON_S, until


@pytest.fixture(autouse=True)
def one_io_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_io, "NUM_IO_THREADS", 1)


class Rescanned(Volume):
    """Its rescans last until the test allows them to end."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        super().__init__(path, capacity_bytes=1 << 20, shared=shared)
        self.may_end = threading.Event()
        self.num_running = self.num_begun = 0

    def rescan(self) -> None:
        self.num_begun += 1
        self.num_running += 1
        assert self.num_running == 1
        assert self.may_end.wait(30)
        self.num_running -= 1


class Rescans:
    def __init__(self, folder: Path, *, shared: bool = True) -> None:
        config = self.config = tier_config(folder, volume={"shared": shared, "capacity_gib": 0.001})
        self.now_s = 0.0
        self.volume = Rescanned(config.volumes[0].path, shared=shared)
        self.volume.open()
        loop = asyncio.get_running_loop()
        self.io = VolumeIo(
            self.volume, config, config.volumes[0], loop, on_readable_changed=lambda io: None, clock=lambda: self.now_s
        )
        self.io.start()

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        self.io.maintain(self.now_s)


@pytest_asyncio.fixture
async def rescans(tmp_path: Path) -> AsyncIterator[Rescans]:
    rescans = Rescans(tmp_path)
    yield rescans
    rescans.volume.may_end.set()
    assert await rescans.io.stop(10)
    rescans.volume.close()


async def test_a_rescan_takes_no_thread_of_reads_and_has_no_second_one(rescans: Rescans) -> None:
    rescans.after(volume_io._RESCAN_PERIOD_S)
    await until(lambda: rescans.volume.num_running == 1)
    for _ in range(5):
        rescans.after(volume_io._RESCAN_PERIOD_S)
    outcomes: list[str] = []
    rescans.io.submit(Operation(Kind.READ, 1, lambda: "ok", outcomes.append))
    await until(lambda: outcomes == ["ok"], what="a read on the only thread")
    assert rescans.volume.num_begun == 1
    assert not await rescans.io.stop(0.01), "the volume must not be closed"


async def test_the_period_begins_at_the_end(rescans: Rescans) -> None:
    rescans.after(volume_io._RESCAN_PERIOD_S)
    await until(lambda: rescans.volume.num_running == 1)
    rescans.now_s += 1000
    rescans.volume.may_end.set()
    await until(lambda: not rescans.io._is_rescanning)
    rescans.after(volume_io._RESCAN_PERIOD_S - 1)
    assert rescans.volume.num_begun == 1
    rescans.after(1)
    await until(lambda: rescans.volume.num_begun == 2)


async def test_a_rescan_that_fails_is_repeated(rescans: Rescans, monkeypatch: pytest.MonkeyPatch) -> None:
    num_begun = 0

    def fail() -> None:
        nonlocal num_begun
        num_begun += 1
        raise ValueError("a bug")

    monkeypatch.setattr(rescans.volume, "rescan", fail)
    for number in (1, 2):
        rescans.after(volume_io._RESCAN_PERIOD_S)
        await until(lambda n=number: num_begun == n and not rescans.io._is_rescanning)  # type: ignore[misc]


async def test_a_needed_rescan_outlives_a_lack_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of one writer rescans once after its breaker has closed; shared volumes rescan in every period."""
    rescans = Rescans(tmp_path, shared=False)
    rescans.volume.may_end.set()
    for _ in range(3):
        rescans.io.submit(Operation(Kind.READ, 1, lambda: Outcome.IO_ERROR, lambda outcome: None))
    await until(lambda: not rescans.io.is_readable)
    rescans.after(volume_io.BREAKER_RETRY_S)
    await until(lambda: rescans.io.is_readable)
    num_begun = rescans.volume.num_begun  # by the probe

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        rescans.after(0)
    assert rescans.volume.num_begun == num_begun
    rescans.after(volume_io._RESCAN_PERIOD_S)
    await until(lambda: rescans.volume.num_begun == num_begun + 1)
    assert await rescans.io.stop(10)
    rescans.volume.close()


async def test_a_lack_of_descriptors_does_not_blame_the_drive(rescans: Rescans) -> None:
    def read(outcome: str) -> None:
        rescans.io.submit(Operation(Kind.READ, 1, lambda: outcome, outcomes.append))

    outcomes: list[str] = []
    for number in range(10):
        read(Outcome.NO_RESOURCES)
        await until(lambda n=number: len(outcomes) == n + 1)  # type: ignore[misc]
        assert rescans.io.is_readable
    for _ in range(3):
        read(Outcome.IO_ERROR)
    await until(lambda: not rescans.io.is_readable)


async def test_uses_are_recorded_on_volumes_of_one_writer_too(tmp_path: Path) -> None:
    config = tier_config(tmp_path, volume={"capacity_gib": 0.001})
    volume, recorded = Volume(config.volumes[0].path, capacity_bytes=1 << 20), asyncio.Event()
    loop = asyncio.get_running_loop()
    volume.record = lambda: loop.call_soon_threadsafe(recorded.set)  # type: ignore[method-assign,assignment]
    volume.rescan = None  # type: ignore[method-assign,assignment]
    volume.open()
    now_s = 0.0
    io = VolumeIo(volume, config, config.volumes[0], loop, on_readable_changed=lambda io: None, clock=lambda: now_s)
    io.start()
    now_s += volume_io._RESCAN_PERIOD_S
    io.maintain(now_s)
    async with asyncio.timeout(SOON_S):
        await recorded.wait()
    assert await io.stop(10)
    volume.close()


async def test_a_long_queue_is_no_hanging_drive(tmp_path: Path) -> None:
    config = tier_config(tmp_path, io_timeout_s=1.0, volume={"capacity_gib": 0.001})
    volume = Volume(config.volumes[0].path, capacity_bytes=1 << 20)
    volume.open()
    now_s = 0.0
    io = VolumeIo(
        volume,
        config,
        config.volumes[0],
        asyncio.get_running_loop(),
        on_readable_changed=lambda io: None,
        clock=lambda: now_s,
    )
    outcomes: list[str] = []
    io.submit(Operation(Kind.READ, 1, lambda: "ok", outcomes.append))  # waits: no thread has begun
    now_s = 1.0
    io._drop(lambda operation: now_s - operation.queued_s > io._queue_timeout_s, Cause.TIMEOUT)
    assert not outcomes
    now_s = 1.1
    io.maintain(now_s)
    await until(lambda: bool(outcomes))
    assert outcomes == [Cause.TIMEOUT]
    assert io.is_readable
    assert await io.stop(10)
    volume.close()


async def test_a_writer_whose_reads_fail_says_that_it_lives(rescans: Rescans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another keeper would adopt its chunks."""
    monkeypatch.setattr(rescans.io, "_probe", lambda: Outcome.IO_ERROR)
    rescans.volume.may_end.set()
    for _ in range(3):
        rescans.io.submit(Operation(Kind.READ, 1, lambda: Outcome.IO_ERROR, lambda outcome: None))
    await until(lambda: not rescans.io.is_readable)
    lock = rescans.volume.path / "tmp" / "local.lock"
    for _ in range(2):
        os.utime(lock, (0, 0))
        rescans.after(volume_io._RESCAN_PERIOD_S)
        await until(lambda: lock.stat().st_mtime > 0 and not rescans.io._is_rescanning)
    assert rescans.volume.num_begun == 0


async def test_a_failed_read_removes_no_file_of_another_writer(tmp_path: Path) -> None:
    config = tier_config(tmp_path, volume={"capacity_gib": 0.001, "shared": True})
    with opened_volumes(tmp_path) as open_volume:
        other, ours = (open_volume("v0", shared=True, writer=writer) for writer in ("other", "ours"))
        for volume, number in ((other, 1), (other, 2), (ours, 3)):
            assert volume.write(LAYOUT.digest, chunk(number), payload(chunk(number))) is Outcome.OK
        ours.rescan()
        loop = asyncio.get_running_loop()
        io = VolumeIo(ours, config, config.volumes[0], loop, on_readable_changed=lambda io: None)
        io.load_layouts()
        io.start()
        for number in (1, 3):
            io.mark_unreadable(LAYOUT.digest, chunk(number))
        io.submit(Operation(Kind.READ, 1, lambda: Outcome.OK, lambda outcome: None))
        await until(lambda: not any(ours.contains(LAYOUT.digest, chunk(number).key) for number in (1, 3)))
        assert await io.stop(10)
        ours.rescan()
        for volume in (other, ours):
            outcomes = [volume.read(LAYOUT.digest, chunk(number), empty()) for number in (1, 2, 3)]
            assert outcomes == [Outcome.OK, Outcome.OK, Outcome.MISSING]


async def test_a_purge_is_seen_although_the_first_rescan_after_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_begun = 0

    def fail() -> None:
        nonlocal num_begun
        num_begun += 1
        raise TierError("the drive is away")

    local = Rescans(tmp_path, shared=False)
    local.volume.may_end.set()
    with monkeypatch.context() as patched:
        patched.setattr(local.volume, "rescan", fail)
        (local.volume.path / "purged").touch()
        local.after(volume_io._PURGE_PERIOD_S)
        await until(lambda: local.io._rescan_at_s <= local.now_s)
        local.after(0)
        await until(lambda: num_begun == 1 and not local.io._is_rescanning)
    local.after(volume_io._RESCAN_PERIOD_S)
    await until(lambda: local.volume.num_begun == 1 and not local.io._is_rescanning)
    for _ in range(3):
        local.after(volume_io._RESCAN_PERIOD_S)
        await until(lambda: not local.io._is_rescanning)
    assert local.volume.num_begun == 1
    assert await local.io.stop(10)
    local.volume.close()
