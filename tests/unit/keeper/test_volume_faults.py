"""Faults that say nothing of the drive, and drives whose faults must be seen."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry_keeper.keeper import Keeper
from kvferry_keeper.remote.nixl_agent import NixlAgent
from kvferry_keeper.server import update_to_wire
from kvferry_keeper.store import folder
from kvferry_keeper.store.direct_io import Fault, FaultyIo
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes import volume_io
from kvferry_keeper.volumes.io_threads import Kind, Operation
from kvferry_keeper.volumes.volume_io import VolumeIo
from support.tier_chunks import CHUNK_BYTES, LAYOUT, chunk, empty, payload
from support.tier_keeper import open_volumes, tier_config
from support.waiting import SOON_S, until

DIGEST = LAYOUT.digest


@pytest.fixture(autouse=True)
def one_io_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_io, "NUM_IO_THREADS", 1)


class Node:
    """A volume behind its I/O threads, whose drive fails while it is dead."""

    def __init__(self, folder: Path, **values: Any) -> None:
        self.now_s = 0.0
        self.is_dead = False
        config = tier_config(folder, volume={"capacity_gib": 0.001})
        io = FaultyIo(lambda operation, path: Fault(error=errno.EIO) if self.is_dead else None)
        self.volume = Volume(config.volumes[0].path, capacity_bytes=80 * CHUNK_BYTES, io=io, **values)
        self.volume.open()
        self.volume.add_layout(LAYOUT)
        loop = asyncio.get_running_loop()
        self.io = VolumeIo(
            self.volume,
            config,
            config.volumes[0],
            loop,
            on_readable_changed=lambda io: None,
            clock=lambda: self.now_s,
        )
        self.io.load_layouts()
        self.io.start()
        self.outcomes: list[str] = []

    def put(self, *numbers: int) -> Outcome:
        return [self.volume.write(DIGEST, chunk(n), payload(chunk(n))) for n in numbers][-1]

    def get(self, number: int) -> Outcome:
        return self.volume.read(DIGEST, chunk(number), empty())

    async def do(self, kind: Kind, run: Callable[[], str]) -> None:
        num_before = len(self.outcomes)
        if kind is Kind.WRITE:
            self.io.begin_write()
        self.io.submit(Operation(kind, 1, run, self.outcomes.append))
        await until(lambda: len(self.outcomes) > num_before)


@asynccontextmanager
async def running(folder: Path, **values: Any) -> AsyncIterator[Node]:
    node = Node(folder, **values)
    try:
        yield node
    finally:
        node.is_dead = False
        await node.io.stop(5)
        node.volume.close()


async def test_writes_that_need_no_drive_hide_no_dead_one(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.put(1)
        node.is_dead = True
        for number in range(100, 110):
            await node.do(Kind.WRITE, lambda number=number: node.put(number))  # type: ignore[misc]
            await node.do(Kind.WRITE, lambda: node.put(1))
        assert set(node.outcomes) == {Outcome.IO_ERROR, Outcome.EXISTS}
        assert node.io.stats().write_breaker == "open"
        node.now_s += 60
        assert node.io.accepts_writes(node.now_s)
        await node.do(Kind.WRITE, lambda: node.put(1))
        assert node.io.stats().write_breaker != "closed", "nobody has asked the drive"
        node.is_dead = False
        node.now_s += 60
        assert node.io.accepts_writes(node.now_s)
        await node.do(Kind.WRITE, lambda: node.put(200))
        assert node.io.stats().write_breaker == "closed"


async def test_reads_that_need_no_drive_hide_no_dead_one(tmp_path: Path) -> None:
    async with running(tmp_path) as node:
        node.put(*range(20))
        node.is_dead = True
        for number in range(20):
            await node.do(Kind.READ, lambda number=number: node.get(number))  # type: ignore[misc]
            await node.do(Kind.READ, lambda: node.get(999))
        assert node.io.stats().breaker == "open"


async def test_a_probe_that_has_no_key_closes_no_breaker(tmp_path: Path) -> None:
    config = tier_config(tmp_path, volume={"capacity_gib": 0.001})
    plain = Volume(config.volumes[0].path, capacity_bytes=80 * CHUNK_BYTES)
    plain.open()
    for number in range(3):
        assert plain.write(DIGEST, chunk(number), payload(chunk(number))) is Outcome.OK
    plain.close()
    async with running(tmp_path, keyring=SecretsKeyring({"acme": b"m" * 32})) as node:
        node.is_dead = True
        for _ in range(3):
            await node.do(Kind.READ, lambda: Outcome.IO_ERROR)
        assert node.io.stats().breaker == "open"
        for _ in range(3):
            node.now_s += 60
            node.io.maintain(node.now_s)
            await until(lambda: node.io.stats().breaker != "half_open")
            assert node.io.stats().breaker == "open"


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
async def test_a_breaker_that_opens_names_folder_and_cause(
    tmp_path: Path, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as node:
        node.put(*range(5))
        node.is_dead = True
        for number in range(3):
            run = (lambda n=number: node.get(n)) if kind is Kind.READ else (lambda n=number: node.put(100 + n))  # type: ignore[misc]
            await node.do(kind, run)
        path = node.volume.path
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert f"at {path}: too many failed {kind.value}s" in line
    assert "[Errno 5] Input/output error" in line


async def test_a_drive_is_full_until_a_write_after_the_pause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Writes that other threads began before may still succeed."""
    async with running(tmp_path) as node:
        for outcome in (Outcome.NO_SPACE, Outcome.OK, Outcome.NO_SPACE, Outcome.OK):
            await node.do(Kind.WRITE, lambda outcome=outcome: outcome)  # type: ignore[misc]
            assert node.io.state().full
            assert not node.io.state().is_writable
            assert not node.io.accepts_writes(node.now_s)
        node.now_s += 60
        assert node.io.accepts_writes(node.now_s)
        assert node.io.state().full, "nothing was written since"
        await node.do(Kind.WRITE, lambda: Outcome.OK)
        assert node.io.state().is_writable
        path = node.volume.path
    assert [record.getMessage().partition(" at ")[2] for record in caplog.records] == [
        f"{path}: the drive is full",
        f"{path}: the drive has room again",
    ]


async def test_a_want_of_threads_ends_no_maintenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_io, "_RESCAN_PERIOD_S", 0.05)
    config = tier_config(tmp_path, volume={"shared": True})
    volumes = open_volumes(config)
    keeper = Keeper(config, volumes)
    await keeper.start()
    start, refused, begun = threading.Thread.start, [], []

    def start_or_not(self: threading.Thread) -> None:
        if self.name.startswith("rescan") and len(refused) < 3:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        if self.name.startswith("rescan"):
            begun.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    try:
        await until(lambda: len(refused) == 3 and bool(begun), within_s=SOON_S)
        keeper.check_health()
    finally:
        monkeypatch.undo()
        await keeper.stop(1)
        for volume in volumes:
            volume.close()


async def test_a_fault_of_polling_leaves_nixl_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    polled: list[None] = []

    class Faulty:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def register_memory(self, *_: object, **__: object) -> object:
            return object()

        def get_new_notifs(self) -> None:
            polled.append(None)
            raise RuntimeError("NIXL_ERR_BACKEND")

    api = types.ModuleType("nixl._api")
    api.nixl_agent, api.nixl_agent_config = Faulty, lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    agent = NixlAgent("a")
    try:
        await agent.register(4096, 4096)
        agent.begin_lending()
        await until(lambda: len(polled) > 3)
        async with asyncio.timeout(SOON_S):
            await agent.register(8192, 4096)
    finally:
        agent.end_lending()
        await agent.stop()


@pytest.mark.parametrize("blocks", [1 << 40, -1])
async def test_a_layout_that_cannot_be_is_none(tmp_path: Path, blocks: int) -> None:
    with pytest.raises(ValueError, match="blocks_per_chunk"):
        dataclasses.replace(LAYOUT, blocks_per_chunk=blocks)
    async with running(tmp_path) as node:
        text = LAYOUT.to_json().replace(
            f'"blocks_per_chunk":{LAYOUT.blocks_per_chunk}'.encode(), f'"blocks_per_chunk":{blocks}'.encode()
        )
        assert text != LAYOUT.to_json()
        (node.volume.path / "layouts" / f"{'0' * 32}.json").write_bytes(text)
        node.io.load_layouts()
        assert folder.load_layouts(node.volume.path).keys() == {DIGEST}
        update_to_wire(node.io.state())


async def test_a_keeper_says_that_it_lives_during_a_long_rescan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, said = threading.Event(), []
    async with running(tmp_path) as node:
        monkeypatch.setattr(node.volume, "record", go_on.wait)
        monkeypatch.setattr(node.volume, "say_alive", lambda: said.append(node.now_s))
        node.now_s += 31
        node.io.maintain(node.now_s)
        for minute in range(1, 4):
            node.now_s += 61
            node.io.maintain(node.now_s)
            await until(lambda minute=minute: len(said) == minute)
        go_on.set()
        monkeypatch.undo()
