#!/usr/bin/env python3
"""Damage chunks of the tier in many ways, and compare every delivered chunk with the original.

    make fuzz-tier            100,000 mutations
    make fuzz-tier N=5000 ARGS="--seed 7 --folder /mnt/nvme"

Without --folder the files are in memory (/dev/shm), where a mutation takes about a millisecond. On a drive it takes
some milliseconds, mostly for removing files. The findings are the same, because faults of drives are injected.

A mutation changes a chunk's file, replaces it by another chunk's, kills a writer, injects a fault of the drive, or runs
a second writer on the same chunks. Then the chunk is read. Others are operations of three nodes on a shared volume,
with keys that rotate and nodes that vanish (`bench/fuzz_nodes.py`). Mutations are counted by kind and by the outcome of
the read (or of the write, if the fault is in the write).

The first of these ends the benchmark with exit code 1: a delivery of other bytes than were written under that key,
layout, tenant and epoch; a good chunk that another node moved or removed; a moment at which a node's files had more
bytes than its capacity; an exception of a volume, a broken invariant, or a writer that ended by itself.

Counts are a line of JSON on stdout after each stage, and the last line has all.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import logging
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from bench.fuzz_nodes import NodesStage, shared_chunk
from bench.fuzzed_chunks import NAMESPACES, SMALL, Tally, truth
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.keeper.layout import ChunkId, ChunkKey, ChunkLayout
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_file, paths
from kvferry_keeper.store.chunk_file import HEADER_BYTES
from kvferry_keeper.store.direct_io import Fault, FaultyIo, Operation, aligned_buffer
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from kvferry_loadtest.machine import machine_line

KEYRING = SecretsKeyring({"*": b"not a secret, as everybody sees."})
LAYOUTS = (SMALL, dataclasses.replace(SMALL, blocks_per_chunk=8, payload_bytes=16384),
           dataclasses.replace(SMALL, blocks_per_chunk=32, payload_bytes=65536))  # fmt: skip
CHUNKS_PER_LAYOUT = (32, 16, 6)
# The capacity is three quarters of the chunks, so that files are recycled all the time.
CAPACITY_SHARE = 0.75

# Shares of all mutations; the rest changes or replaces files.
TWO_WRITERS_SHARE = 0.08
THREE_NODES_SHARE = 0.2
KILLS_SHARE = 0.001
MIN_KILLS = 2
STALL_TIMEOUT_S = 30.0
CHILD_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    layout: ChunkLayout
    chunk: ChunkId

    @property
    def num_bytes(self) -> int:
        return chunk_file.chunk_file_bytes(self.layout.payload_bytes)


class Drive(threading.local):
    """Faults for the next operations of a thread."""

    def __init__(self) -> None:
        self.next: Callable[[Operation, str], Fault | None] | None = None

    def __call__(self, operation: Operation, path: str) -> Fault | None:
        return None if self.next is None else self.next(operation, path)

    def fail(self, operations: Sequence[Operation], fault: Fault, after: int, *, once: bool) -> None:
        """Inject the fault into these operations on chunk files, after the first `after`; or only into the next one."""
        left = [after]

        def choose(operation: Operation, path: str) -> Fault | None:
            if operation not in operations or not path.endswith(".page"):
                return None
            left[0] -= 1
            return fault if left[0] == -1 or (left[0] < 0 and not once) else None

        self.next = choose


class Stage:
    """A volume, its chunks, and the mutations of them."""

    def __init__(
        self, folder: Path, seeded: random.Random, tally: Tally, volume_class: type[Volume], *, is_sealed: bool
    ) -> None:
        self._random = seeded
        self._tally = tally
        self._is_sealed = is_sealed
        self._drive = Drive()
        self._targets = [
            Target(layout, ChunkId(ChunkKey(seeded.randbytes(36)), seeded.randrange(1, 1 << 64), namespace))
            for layout, count in zip(LAYOUTS, CHUNKS_PER_LAYOUT, strict=True)
            for namespace in seeded.choices(NAMESPACES, k=count)
        ]
        self._truths = {target: truth(target.layout, target.chunk) for target in self._targets}
        self._buffers = {layout: aligned_buffer(layout.payload_bytes) for layout in LAYOUTS}
        self._other_buffers = {layout: aligned_buffer(layout.payload_bytes) for layout in LAYOUTS}
        self._image = aligned_buffer(chunk_file.chunk_file_bytes(LAYOUTS[-1].payload_bytes))
        self._volume = volume_class(
            folder,
            capacity_bytes=int(CAPACITY_SHARE * sum(target.num_bytes for target in self._targets)),
            keyring=KEYRING if is_sealed else None,
            io=FaultyIo(self._drive),
        )
        self._volume.open()
        for layout in LAYOUTS:
            self._volume.add_layout(layout)
        # For reads that stall while this thread goes on.
        self._reader = ThreadPoolExecutor(max_workers=1)
        self._mutations: dict[str, Callable[[Target], Outcome]] = {
            "flip in header": lambda target: self._read_damaged(target, self._flip(0, 192)),
            "flip in padding": lambda target: self._read_damaged(target, self._flip(192, HEADER_BYTES - 32)),
            "flip in checksums": lambda target: self._read_damaged(target, self._flip(HEADER_BYTES - 32, HEADER_BYTES)),
            "flip in payload": lambda target: self._read_damaged(target, self._flip(HEADER_BYTES, target.num_bytes)),
            "burst": lambda target: self._read_damaged(target, self._burst),
            "hole": lambda target: self._read_damaged(target, self._hole),
            "truncate": lambda target: self._read_damaged(target, self._truncate),
            "extend": lambda target: self._read_damaged(target, self._extend),
            "swap": self._swap,
            "torn": lambda target: self._read_damaged(target, self._tear),
            "header of one, payload of another": lambda target: self._read_damaged(target, self._cross),
            "another key": lambda target: self._read_replaced(target, self._another_key(target)),
            "another model": lambda target: self._read_replaced(target, self._with(target, model="qwen")),
            "another dtype": lambda target: self._read_replaced(target, self._with(target, dtype="float16")),
            "another block size": lambda target: self._read_replaced(
                target, self._with(target, tokens_per_block=32, blocks_per_chunk=target.layout.blocks_per_chunk // 2)
            ),
            "another tenant": lambda target: self._read_replaced(target, self._as(target, tenant=True)),
            "another epoch": lambda target: self._read_replaced(target, self._as(target, tenant=False)),
            "sealed or not": self._other_algorithm,
            "ENOSPC": self._no_space,
            "EIO": self._io_error,
            "EMFILE": self._no_descriptor,
            "short transfers": self._short,
            "stall": self._stall,
        }

    @property
    def causes(self) -> list[str]:
        return list(self._mutations)

    def mutate(self, cause: str) -> None:
        """Apply a mutation to a random chunk, and count the outcome."""
        target = self._random.choice(self._targets)
        try:
            self._ensure(target)
            outcome = self._mutations[cause](target)
            self._tally.count(cause, outcome)
        except Exception:
            self._tally.crashes.append(f"{cause}: {traceback.format_exc()}")
            self._tally.count(cause, "crash")
        finally:
            self._drive.next = None
            self._restore(target)

    def close(self) -> None:
        """Check the volume's invariants and read every chunk."""
        self._reader.shutdown()
        try:
            self._volume.rescan()
            self._volume.check()
            for target in self._targets:
                self._read(target)
            self._volume.check()
        except Exception:
            self._tally.crashes.append(f"in the end: {traceback.format_exc()}")
        self._volume.close()

    # Reading and writing

    def _ensure(self, target: Target) -> None:
        if not self._volume.contains(target.layout.digest, target.chunk.key):
            self._write(target)

    def _absent(self, target: Target) -> Target:
        """Return a chunk of the same size that is not in the volume."""
        for other in self._random.sample(self._targets, len(self._targets)):
            if other.layout is target.layout and not self._volume.contains(other.layout.digest, other.chunk.key):
                return other
        self._volume.remove(target.layout.digest, target.chunk)
        return target

    def _restore(self, target: Target) -> None:
        """Undo the mutation, so that the next one does not meet it."""
        if self._read(target) is not Outcome.OK:
            # On a drive that is sent every freed block (discard), removing files takes most of the time.
            self._volume.remove(target.layout.digest, target.chunk)
            self._write(target)

    def _write(self, target: Target) -> Outcome:
        buffer = self._buffers[target.layout]
        buffer[:] = self._truths[target]
        return self._volume.write(target.layout.digest, target.chunk, buffer)

    def _read(self, target: Target, buffers: dict[ChunkLayout, memoryview] | None = None) -> Outcome:
        into = (self._buffers if buffers is None else buffers)[target.layout]
        # The result of an earlier read must not look like this one's.
        into[:64] = bytes(64)
        outcome = self._volume.read(target.layout.digest, target.chunk, into)
        if outcome is Outcome.OK and bytes(into) != self._truths[target]:
            self._tally.num_wrong_chunks += 1
        return outcome

    def _path(self, target: Target) -> Path:
        return self._volume.path / paths.chunk_path("local", target.layout.digest, target.chunk)

    # Changing a file

    def _read_damaged(self, target: Target, damage: Callable[[Target, Path], None]) -> Outcome:
        damage(target, self._path(target))
        return self._read(target)

    def _flip(self, begin: int, end: int) -> Callable[[Target, Path], None]:
        def flip(target: Target, path: Path) -> None:
            with path.open("r+b", buffering=0) as file:
                for at in {self._random.randrange(begin, end) for _ in range(self._random.choice((1, 1, 1, 2, 8)))}:
                    byte = os.pread(file.fileno(), 1, at)[0]
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << self._random.randrange(8)]), at)

        return flip

    def _burst(self, target: Target, path: Path) -> None:
        """Random adjacent bytes, as a failing controller delivers them."""
        with path.open("r+b", buffering=0) as file:
            file.seek(self._random.randrange(target.num_bytes - 64))
            file.write(self._random.randbytes(self._random.randrange(1, 64)))

    def _hole(self, target: Target, path: Path) -> None:
        """Sectors that were never written."""
        begin = 512 * self._random.randrange(target.num_bytes // 512)
        with path.open("r+b", buffering=0) as file:
            file.seek(begin)
            file.write(bytes(min(512 * self._random.choice((1, 8, 64)), target.num_bytes - begin)))

    def _truncate(self, target: Target, path: Path) -> None:
        os.truncate(path, self._random.choice((0, self._random.randrange(target.num_bytes), HEADER_BYTES,
                                               512 * self._random.randrange(target.num_bytes // 512))))  # fmt: skip

    def _extend(self, target: Target, path: Path) -> None:
        os.truncate(path, target.num_bytes + self._random.choice((1, 512, 4096, target.num_bytes)))

    def _tear(self, target: Target, path: Path) -> None:
        """A recycled file after a power cut: sectors of two chunks, name and times of one."""
        other = self._image_of(self._another_key(target))
        sector = self._random.choice((512, 4096))
        count = target.num_bytes // sector
        num_sectors = self._random.choice((1, count - 1, self._random.randrange(1, count)))
        which = range(num_sectors) if self._random.random() < 0.5 else self._random.sample(range(count), num_sectors)
        with path.open("r+b", buffering=0) as file:
            for i in which:
                os.pwrite(file.fileno(), other[i * sector : (i + 1) * sector], i * sector)

    def _cross(self, target: Target, path: Path) -> None:
        other = self._image_of(self._another_key(target))
        with path.open("r+b", buffering=0) as file:
            if self._random.random() < 0.5:
                os.pwrite(file.fileno(), other[HEADER_BYTES:], HEADER_BYTES)
            else:
                # This chunk's header beside its neighbour's payload, whose own header has the right name.
                image = self._image_of(target)
                os.pwrite(file.fileno(), other[:HEADER_BYTES], 0)
                os.pwrite(file.fileno(), image[HEADER_BYTES:], HEADER_BYTES)

    def _swap(self, target: Target) -> Outcome:
        """Two files change places, as after a wrong copy or in a broken directory."""
        other = self._random.choice([t for t in self._targets if t.layout is target.layout and t is not target])
        self._ensure(other)
        self._ensure(target)
        one, two = self._path(target), self._path(other)
        if one.exists() and two.exists():
            aside = self._volume.path / "aside"
            one.rename(aside)
            two.rename(one)
            aside.rename(two)
        outcome = self._read(target)
        self._read(other)
        self._restore(other)
        return outcome

    # Another chunk under the name

    def _another_key(self, target: Target) -> Target:
        """Return a chunk of the same layout and namespace, on the volume or not."""
        key = ChunkKey(self._random.randbytes(36))
        if self._random.random() < 0.3:
            # The key differs in one bit.
            bits = bytearray(target.chunk.key)
            bits[self._random.randrange(36)] ^= 1 << self._random.randrange(8)
            key = ChunkKey(bytes(bits))
        return Target(target.layout, dataclasses.replace(target.chunk, key=key))

    def _with(self, target: Target, **changes: Any) -> Target:
        return Target(dataclasses.replace(target.layout, **changes), target.chunk)

    def _as(self, target: Target, *, tenant: bool) -> Target:
        mine = target.chunk.namespace
        other = Namespace(mine.tenant + "x", mine.epoch) if tenant else Namespace(mine.tenant, mine.epoch + 1)
        return Target(target.layout, dataclasses.replace(target.chunk, namespace=other))

    def _read_replaced(self, target: Target, by: Target) -> Outcome:
        self._overwrite(target, self._image_of(by))
        return self._read(target)

    def _overwrite(self, target: Target, image: memoryview) -> None:
        # In place: truncating the file first would free its blocks, which takes longer than all else.
        with self._path(target).open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), image, 0)

    def _other_algorithm(self, target: Target) -> Outcome:
        """A plain chunk where chunks are sealed, or the other way round, with another payload."""
        payload = random.Random(1).randbytes(target.layout.payload_bytes)
        self._overwrite(target, self._image_of(target, payload, is_sealed=not self._is_sealed))
        return self._read(target)

    def _image_of(self, target: Target, payload: bytes | None = None, *, is_sealed: bool | None = None) -> memoryview:
        """Return a valid file of a chunk."""
        payload = truth(target.layout, target.chunk) if payload is None else payload
        image = memoryview(bytearray(target.num_bytes))
        header, body = image[:HEADER_BYTES], image[HEADER_BYTES:]
        digest, now_s = target.layout.digest, time.time()
        if self._is_sealed if is_sealed is None else is_sealed:
            (key,) = KEYRING.keys(target.chunk.namespace, self._volume.volume_id)
            chunk_file.seal(header, memoryview(payload), body, digest, target.chunk, now_s, key)
        else:
            body[:] = payload
            chunk_file.write_plain_header(header, body, digest, target.chunk, now_s)
        return image

    # A drive that fails

    def _no_space(self, target: Target) -> Outcome:
        operations = self._random.choice(
            ((Operation.OPEN,), (Operation.WRITE,), (Operation.RENAME,), (Operation.WRITE,))
        )
        num_bytes = self._random.choice((None, 512, 4096, 8192)) if operations == (Operation.WRITE,) else None
        return self._write_with_fault(target, operations, Fault(errno.ENOSPC, num_bytes))

    def _io_error(self, target: Target) -> Outcome:
        num_bytes = self._random.choice((None, 4096))
        if self._random.random() < 0.5:
            operation = self._random.choice((Operation.OPEN, Operation.READ))
            fault = Fault(errno.EIO, num_bytes if operation is Operation.READ else None)
            self._drive.fail([operation], fault, 0, once=True)
            outcome = self._read(target)
            self._drive.next = None
            self._read(target)
            return outcome
        operation = self._random.choice(list(Operation))
        num_bytes = num_bytes if operation in (Operation.READ, Operation.WRITE) else None
        return self._write_with_fault(target, (operation,), Fault(errno.EIO, num_bytes))

    def _no_descriptor(self, target: Target) -> Outcome:
        self._drive.fail([Operation.OPEN], Fault(errno.EMFILE, None), 0, once=True)
        outcome = self._read(target)
        self._drive.next = None
        return outcome if self._read(target) is Outcome.OK else Outcome.MISSING

    def _write_with_fault(self, target: Target, operations: Sequence[Operation], fault: Fault) -> Outcome:
        target = self._absent(target)
        self._drive.fail(operations, fault, self._random.choice((0, 0, 1)), once=self._random.random() < 0.5)
        outcome = self._write(target)
        self._drive.next = None
        self._read(target)
        return outcome

    def _short(self, target: Target) -> Outcome:
        """The kernel moves fewer bytes than requested, again and again."""

        def choose(operation: Operation, path: str) -> Fault | None:
            if operation not in (Operation.READ, Operation.WRITE) or self._random.random() < 0.3:
                return None
            return Fault(num_bytes=self._random.choice((1, 512, 4096, 5000)))

        target = self._absent(target)
        self._drive.next = choose
        self._write(target)
        return self._read(target)

    def _stall(self, target: Target) -> Outcome:
        """A read that waits while its chunk is removed, evicted, changed or replaced."""
        stalled, end = threading.Event(), threading.Event()

        def wait(operation: Operation, path: str) -> Fault | None:
            if operation is not Operation.READ or stalled.is_set():
                return None
            stalled.set()
            return Fault(until=end)

        def read() -> Outcome:
            self._drive.next = wait
            try:
                return self._read(target, self._other_buffers)
            finally:
                self._drive.next = None

        reading = self._reader.submit(read)
        try:
            if stalled.wait(STALL_TIMEOUT_S):
                match self._random.randrange(4):
                    case 0:
                        self._volume.remove(target.layout.digest, target.chunk)
                    case 1:
                        for other in self._random.sample(self._targets, len(self._targets) // 2):
                            self._ensure(other)
                    case 2:
                        self._replace_file(target, self._another_key(target))
                    case _:
                        self._restore(target)
        finally:
            end.set()
        return reading.result(STALL_TIMEOUT_S)

    def _replace_file(self, target: Target, by: Target) -> None:
        """By rename, as another process would."""
        aside = self._volume.path / "aside"
        aside.write_bytes(self._image_of(by))
        aside.rename(self._path(target))


class SharedStage:
    """A volume that another process writes at the same time: the same chunks, in its own files."""

    NUM_CHUNKS = 16

    def __init__(self, folder: Path, seed: int, tally: Tally, volume_class: type[Volume]) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._tally = tally
        self._volume_class = volume_class

    def run(self, num_mutations: int) -> Iterator[None]:
        """Each read of a chunk that both processes write, recycle and remove is a mutation."""
        volume = shared_volume(self._volume_class, self._folder, "parent")
        child = Child(self._folder, "child", seed=self._random.randrange(1 << 30), piece_bytes=0)
        into = aligned_buffer(SMALL.payload_bytes)
        try:
            for i in range(num_mutations):
                chunk = shared_chunk(self._random.randrange(self.NUM_CHUNKS))
                if self._random.random() < 0.6:
                    into[:] = truth(SMALL, chunk)
                    volume.write(SMALL.digest, chunk, into)
                if self._random.random() < 0.1:
                    volume.remove(SMALL.digest, shared_chunk(self._random.randrange(self.NUM_CHUNKS)))
                if i % 50 == 0:
                    volume.rescan()
                chunk = shared_chunk(self._random.randrange(self.NUM_CHUNKS))
                outcome = volume.read(SMALL.digest, chunk, into)
                self._tally.count("two writers", outcome)
                if outcome is Outcome.OK and bytes(into) != truth(SMALL, chunk):
                    self._tally.num_wrong_chunks += 1
                yield
        except Exception:
            self._tally.crashes.append(f"two writers: {traceback.format_exc()}")
        finally:
            child.kill(self._tally)
        try:
            volume.rescan()
            volume.check()
        except Exception:
            self._tally.crashes.append(f"two writers, in the end: {traceback.format_exc()}")
        volume.close()


class KillStage:
    """A writer that is killed at a random moment, and its successor."""

    def __init__(self, folder: Path, seed: int, tally: Tally, volume_class: type[Volume]) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._tally = tally
        self._volume_class = volume_class

    def run(self, num_mutations: int) -> Iterator[None]:
        into = aligned_buffer(SMALL.payload_bytes)
        for _ in range(num_mutations):
            child = Child(self._folder, "parent", seed=self._random.randrange(1 << 30), piece_bytes=512)
            # The kill comes at a random moment.
            time.sleep(self._random.uniform(0.0, 0.03))
            child.kill(self._tally)
            was_torn = any((self._folder / paths.TEMPORARY / "parent").iterdir())
            outcomes: Counter[Outcome] = Counter()
            try:
                volume = shared_volume(self._volume_class, self._folder, "parent")
                volume.check()
                for chunk in volume.keys(SMALL.digest):
                    outcome = volume.read(SMALL.digest, chunk, into)
                    outcomes[outcome] += 1
                    if outcome is Outcome.OK and bytes(into) != truth(SMALL, chunk):
                        self._tally.num_wrong_chunks += 1
                volume.check()
                volume.close()
            except Exception:
                self._tally.crashes.append(f"kill -9: {traceback.format_exc()}")
            bad = next((outcome for outcome in outcomes if outcome is not Outcome.OK), Outcome.OK)
            self._tally.count("kill -9 in a write" if was_torn else "kill -9 between writes", bad)
            yield


class Child:
    """A process that writes and removes chunks until it is killed."""

    def __init__(self, folder: Path, writer: str, *, seed: int, piece_bytes: int) -> None:
        arguments = ["--child", str(folder), writer, str(seed), str(piece_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.fuzz_tier", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def kill(self, tally: Tally) -> None:
        self._process.kill()
        self._process.communicate(timeout=CHILD_TIMEOUT_S)
        if self._process.returncode != -9:
            tally.crashes.append(f"a writer ended by itself, with {self._process.returncode}")


def shared_volume(volume_class: type[Volume], folder: Path, writer: str, io: FaultyIo | None = None) -> Volume:
    """Its capacity is half of the chunks, so that both writers recycle all the time."""
    capacity_bytes = SharedStage.NUM_CHUNKS // 2 * chunk_file.chunk_file_bytes(SMALL.payload_bytes)
    volume = volume_class(folder, capacity_bytes=capacity_bytes, shared=True, writer=writer, io=io)
    volume.open()
    return volume


def child(folder: str, writer: str, seed: str, piece_bytes: str) -> None:
    """Write without end, in pieces of `piece_bytes`, so that a kill leaves half-written files."""
    piece = int(piece_bytes)
    io = FaultyIo(lambda op, path: Fault(num_bytes=piece) if piece and op is Operation.WRITE else None)
    volume = shared_volume(Volume, Path(folder), writer, io)
    print("ready", flush=True)
    seeded = random.Random(int(seed))
    buffers = {number: aligned_buffer(SMALL.payload_bytes) for number in range(SharedStage.NUM_CHUNKS)}
    for number, buffer in buffers.items():
        buffer[:] = truth(SMALL, shared_chunk(number))
    while True:
        number = seeded.randrange(SharedStage.NUM_CHUNKS)
        volume.write(SMALL.digest, shared_chunk(number), buffers[number])
        if seeded.random() < 0.2:
            volume.remove(SMALL.digest, shared_chunk(seeded.randrange(SharedStage.NUM_CHUNKS)))
        if seeded.random() < 0.02:
            volume.rescan()


def fuzz(
    num_mutations: int,
    folder: Path,
    results: Results,
    seed: int = 1,
    *,
    advance: Callable[[], None] = lambda: None,
    volume_class: type[Volume] = Volume,
) -> None:
    """Run all stages below `folder`, and add their counts. Raises BenchFailed where something is wrong."""
    begin_s = time.monotonic()
    tally = Tally()

    def look() -> None:
        if finding := tally.finding():
            raise BenchFailed(f"seed {seed}: {finding}")

    def add() -> None:
        by_cause = {cause: dict(sorted(outcomes.items())) for cause, outcomes in sorted(tally.by_cause.items())}
        seconds = round(time.monotonic() - begin_s, 1)
        results.add({"mutations": tally.num_mutations, "by_cause": by_cause, "seconds": seconds})

    for stage in _stages(num_mutations, folder, seed, tally, volume_class):
        try:
            for _ in stage:
                look()
                advance()
            look()
        finally:
            add()


def _stages(
    num_mutations: int, folder: Path, seed: int, tally: Tally, volume_class: type[Volume]
) -> Iterator[Iterator[None]]:
    """Yield the stages; each one yields after each mutation."""
    seeded = random.Random(seed)
    num_kills = min(num_mutations, max(MIN_KILLS, round(num_mutations * KILLS_SHARE)))
    yield KillStage(folder / "killed", seed, tally, volume_class).run(num_kills)
    num_shared = round(num_mutations * TWO_WRITERS_SHARE)
    yield SharedStage(folder / "shared", seed, tally, volume_class).run(num_shared)
    num_of_nodes = round(num_mutations * THREE_NODES_SHARE)
    yield NodesStage(folder / "nodes", seed, tally, volume_class).run(num_of_nodes)
    yield _damage(max(0, num_mutations - tally.num_mutations), folder, seeded, tally, volume_class)


def _damage(
    num_mutations: int, folder: Path, seeded: random.Random, tally: Tally, volume_class: type[Volume]
) -> Iterator[None]:
    stages = [
        Stage(folder / name, seeded, tally, volume_class, is_sealed=name == "sealed") for name in ("plain", "sealed")
    ]
    for i in range(num_mutations):
        # In turn, so that a short run tries all kinds.
        causes = stages[0].causes
        stages[seeded.random() < 0.35].mutate(causes[i % len(causes)])
        yield
    for stage in stages:
        stage.close()


def memory_folder() -> Path | None:
    """Return the system's folder in memory, if it is writable."""
    folder = Path("/dev/shm")
    return folder if os.access(folder, os.W_OK) else None


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="How it ended, by what was done", title_justify="left")
    table.add_column("")
    table.add_column("mutations", justify="right")
    table.add_column("outcomes")
    for cause, outcomes in results["by_cause"].items():
        listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items(), key=lambda i: -i[1]))
        table.add_row(cause, str(sum(outcomes.values())), listed)
    console.print(table)
    console.print(f"{results['mutations']:,} mutations in {results['seconds']} s, and nothing was wrong", style="green")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, help="on the drive to use (default: /dev/shm, or else the system's temporary folder)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return 0
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    if options.mutations < 1:
        console.print("fuzz-tier: at least one mutation", style="red")
        return 2
    # Each mutation causes a warning, as expected.
    logging.getLogger("kvferry_keeper.store").setLevel(logging.ERROR)
    folder = Path(tempfile.mkdtemp(prefix="kvferry-fuzz-", dir=options.folder or memory_folder()))
    columns = (TextColumn("mutations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    def measure(results: Results) -> None:
        results.add({"seed": options.seed, "machine": machine_line()})
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("mutations", total=options.mutations)
            fuzz(options.mutations, folder, results, options.seed, advance=lambda: bar.advance(task))
        show(results.figures, console)

    try:
        return run_benchmark("fuzz-tier", measure)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
