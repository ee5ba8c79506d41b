"""A keeper for tests: in this process, or in one of its own that can be killed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.config import TierConfig
from kvferry.keeper.client import JobDone, KeeperClient
from kvferry.keeper.layout import ChunkLayout
from kvferry.keeper.unix_socket import socket_path
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.store.direct_io import DirectIo, Fault, FaultyIo, Operation
from kvferry_keeper.store.volume import Volume
from support.child_imports import import_environment
from support.tier_rows import Rows, content_of, key_of, route_key_of
from support.waiting import until


def tier_config(folder: Path, num_volumes: int = 1, **options: Any) -> TierConfig:
    """Volumes `v0`, `v1`, ... and the socket below `folder`. `volume` has the options of every volume."""
    volume = {"capacity_gib": 0.25, **options.pop("volume", {})}
    return TierConfig.model_validate(
        {
            "enabled": True,
            "socket_dir": folder / "s",
            "volumes": [{"path": folder / f"v{i}", **volume} for i in range(num_volumes)],
            **options,
        }
    )


def open_volumes(config: TierConfig, ios: Sequence[DirectIo] = ()) -> list[Volume]:
    volumes = []
    for i, each in enumerate(config.volumes):
        volume = Volume(
            each.path,
            capacity_bytes=int(each.capacity_gib * (1 << 30)),
            shared=each.shared,
            io=ios[i] if i < len(ios) else None,
        )
        volume.open()
        volumes.append(volume)
    return volumes


@contextlib.asynccontextmanager
async def keeping(
    config: TierConfig, ios: Sequence[DirectIo] = (), *, quiet: bool = True, **options: Any
) -> AsyncIterator[Keeper]:
    """A keeper with its volumes; checks the volumes' invariants on leaving."""
    volumes = open_volumes(config, ios)
    keeper = Keeper(config, volumes, **options)
    try:
        await keeper.start()
        yield keeper
    finally:
        is_quiet = await keeper.stop()
        for volume in volumes:
            volume.close()
    assert is_quiet == quiet
    if quiet:
        for volume in volumes:
            volume.check()
        assert not keeper._regions


@contextlib.contextmanager
def engine(path: Path | str, rows: Rows, layout: ChunkLayout, engine_id: str = "e", **options: Any) -> Iterator[Engine]:
    client = KeeperClient(str(path), rows.region, layout, engine_id=engine_id, **options)
    client.start()
    try:
        yield Engine(client, rows)
    finally:
        client.stop()


@dataclass
class Engine:
    """A client with rows; chunks are numbers, and chunk i is stored from row i modulo the number of rows."""

    client: KeeperClient
    rows: Rows
    num_jobs: int = 0
    done: dict[int, JobDone] = field(default_factory=dict)

    def submit_store(
        self, chunks: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE, wanted_s: float | None = None
    ) -> int:
        self.num_jobs += 1
        num_rows = self.rows.region.num_rows
        for i in chunks:
            self.rows.fill(i % num_rows, i)
        named = [(key_of(i), route_key_of(i), i % num_rows) for i in chunks]
        self.client.store(self.num_jobs, namespace, named, wanted_s)
        return self.num_jobs

    def submit_load(
        self,
        chunks: Sequence[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        volumes: dict[int, str] | None = None,
        first_row: int = 0,
    ) -> int:
        self.num_jobs += 1
        for row, _ in enumerate(chunks, first_row):
            self.rows[row] = bytes(self.rows.region.row_bytes)
        self.client.load(
            self.num_jobs,
            namespace,
            [(key_of(i), row) for row, i in enumerate(chunks, first_row)],
            {key_of(i): volume for i, volume in (volumes or {}).items()},
        )
        return self.num_jobs

    def collect(self) -> dict[int, JobDone]:
        for each in self.client.finished():
            assert each.job not in self.done, f"job {each.job} ended twice"
            self.done[each.job] = each
        return self.done

    async def end_of(self, job: int, within_s: float = 30.0) -> JobDone:
        await until(lambda: job in self.collect(), within_s=within_s, what=f"the end of job {job}")
        return self.done[job]

    async def store(
        self, chunks: Sequence[int], namespace: Namespace = DEFAULT_NAMESPACE, wanted_s: float | None = None
    ) -> JobDone:
        return await self.end_of(self.submit_store(chunks, namespace, wanted_s))

    async def load(self, chunks: Sequence[int], **options: Any) -> JobDone:
        return await self.end_of(self.submit_load(chunks, **options))

    async def connected(self) -> None:
        await until(lambda: self.client.connected)

    async def sees(self, chunks: Sequence[int]) -> None:
        await until(lambda: all(self.client.contains(key_of(i)) for i in chunks), what=f"{len(chunks)} chunks are seen")

    async def misses(self, chunks: Sequence[int]) -> None:
        await until(lambda: not any(self.client.contains(key_of(i)) for i in chunks), what=f"{len(chunks)} are misses")

    def holds(self, chunks: Sequence[int], first_row: int = 0) -> bool:
        """Return whether the rows hold these chunks."""
        size = self.rows.region.row_bytes
        return all(self.rows[row] == content_of(i, size) for row, i in enumerate(chunks, first_row))


class SwitchableIo(FaultyIo):
    """Faults for chosen operations, while they are switched on."""

    def __init__(self) -> None:
        super().__init__(lambda operation, path: self.operation_to_fault.get(operation))
        self.operation_to_fault: dict[Operation, Fault] = {}


class KeeperProcess:
    """A keeper in a process of its own. Reads hang while `<folder>/stall` exists.

    Each hanging read makes a file `<folder>/stalled-*`.
    """

    def __init__(self, folder: Path, num_volumes: int = 1, **options: Any) -> None:
        self.folder = folder
        self._arguments = json.dumps({"num_volumes": num_volumes, **options})
        self.config = tier_config(folder, num_volumes, **options)
        self.process: subprocess.Popen[str] | None = None

    @property
    def socket_path(self) -> Path:
        return socket_path(self.config)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.tier_keeper", str(self.folder), self._arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=import_environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        """SIGKILL; the process stays a zombie until `reap`."""
        os.kill(self.pid, signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended with all its threads, reaped or not."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def stall(self) -> None:
        (self.folder / "stall").touch()

    def go_on(self) -> None:
        (self.folder / "stall").unlink()

    @property
    def num_stalled(self) -> int:
        return len(list(self.folder.glob("stalled-*")))

    def maps(self, inode: int) -> bool:
        """Return whether the process has a file mapped."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return any(line.split(maxsplit=5)[4] == str(inode) for line in lines)


class StallingIo(DirectIo):
    """Reads hang while `<folder>/stall` exists; each makes a file `<folder>/stalled-*`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._stall = folder / "stall"
        self._folder = folder

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._stall.exists():
            # Half of it is there already, as a drive would leave it.
            os.preadv(fd, [buffers[0], buffers[1][:4096]], offset)
            (self._folder / f"stalled-{time.monotonic_ns()}").touch()
        while self._stall.exists():
            time.sleep(0.001)
        return super().preadv(fd, buffers, offset)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    config = tier_config(arguments.folder, **arguments.options)
    keeper = Keeper(config, open_volumes(config, [StallingIo(arguments.folder) for _ in config.volumes]))
    await keeper.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
