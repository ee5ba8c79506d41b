"""A volume under many threads, under kill -9, and under another process on the same folder."""

from __future__ import annotations

import errno
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_reader
from kvferry_keeper.store.chunk_file import chunk_file_bytes
from kvferry_keeper.store.direct_io import DirectIo, Fault, FaultyIo, Operation
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from support.child_imports import import_environment
from support.tier_chunks import (
    CHUNK_BYTES,
    LARGER,
    LAYOUT,
    SECRET,
    SIZE,
    chunk,
    chunk_files,
    empty,
    payload,
    quarantined,
    truth,
)
from support.waiting import PATIENCE_S

DIGEST = LAYOUT.digest
NUM_THREADS = 4


class LedgerIo(FaultyIo):
    """Knows at every moment what lies on the drive: growth is counted before it happens, shrinking after."""

    def __init__(self) -> None:
        super().__init__(lambda operation, path: None)
        self._lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.bytes_now = 0
        self.bytes_peak = 0

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self._fd_to_path[fd]
        with self._lock:
            end = offset + sum(map(len, buffers))
            self._count(path, max(end, self.sizes.get(path, 0)))
        return super().pwritev(fd, buffers, offset)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            super().rename(source, target)
            size = self.sizes.get(source, 0)
            self._count(target, 0)
            self._count(source, 0)
            self._count(target, size)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        with self._lock:
            self._count(path, 0)

    def _count(self, path: str, size: int) -> None:
        self.bytes_now += size - self.sizes.pop(path, 0)
        if size:
            self.sizes[path] = size
        self.bytes_peak = max(self.bytes_peak, self.bytes_now)


class Threads:
    """Random operations of several threads on one volume."""

    def __init__(self, volume: Volume, num_operations: int) -> None:
        self._volume = volume
        self._lock = threading.Lock()
        self._num_operations = num_operations
        self.wrong: list[ChunkId] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.reported: set[tuple[LayoutDigest, ChunkId]] = set()
        volume.on_change = self._told

    def run(self) -> None:
        threads = [threading.Thread(target=self._work, args=(seed,)) for seed in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _told(self, layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
        self.reported.update((layout, of) for of in added)
        self.reported.difference_update((layout, of) for of in removed)

    def _work(self, seed: int) -> None:
        seeded = random.Random(seed)
        volume = self._volume
        buffers = {layout: empty(layout) for layout in SIZE}
        truths = {
            (layout, number, epoch): payload(chunk(number, Namespace("t", epoch)), layout)
            for layout in SIZE
            for number in range(40)
            for epoch in range(2)
        }
        outcomes: Counter[Outcome] = Counter()
        for _ in range(self._num_operations // NUM_THREADS):
            layout = DIGEST if seeded.random() < 0.8 else LARGER.digest
            number, epoch = seeded.randrange(40), int(seeded.random() < 0.1)
            of = chunk_of(number, epoch)
            chance = seeded.random()
            if chance < 0.45:
                volume.write(layout, of, truths[layout, number, epoch])
            elif chance < 0.97:
                outcome = volume.read(layout, of, buffers[layout])
                outcomes[outcome] += 1
                if outcome is Outcome.OK and buffers[layout] != truths[layout, number, epoch]:
                    self.wrong.append(of)
            elif chance < 0.999:
                volume.remove(layout, of)
            else:
                volume.rescan()
        with self._lock:
            self.outcomes.update(outcomes)


_CHUNKS = {(number, epoch): chunk(number, Namespace("t", epoch)) for number in range(40) for epoch in range(2)}


def chunk_of(number: int, epoch: int) -> ChunkId:
    return _CHUNKS[number, epoch]


def test_capacity_is_kept_at_every_moment_of_100_000_operations(memory_path: Path) -> None:
    io = LedgerIo()
    capacity_bytes = 20 * CHUNK_BYTES + 777
    volume = Volume(memory_path / "v", capacity_bytes=capacity_bytes, io=io)
    volume.open()
    io.sizes.clear()
    io.bytes_now = io.bytes_peak = 0
    threads = Threads(volume, 100_000)
    threads.run()
    assert not threads.wrong
    assert io.bytes_peak <= capacity_bytes
    assert io.bytes_peak > capacity_bytes - chunk_file_bytes(LARGER.payload_bytes)
    assert set(threads.outcomes) <= {Outcome.OK, Outcome.MISSING, Outcome.WRONG_NAMESPACE, Outcome.GONE}
    assert threads.outcomes[Outcome.OK] > 5_000
    assert volume.stats.evicted > 5_000
    assert not quarantined(volume.path)
    volume.check()
    assert sum(io.sizes.values()) == volume.stats.bytes_used
    assert threads.reported == {(layout, of) for layout in volume.layouts() for of in volume.keys(layout)}
    volume.close()


def test_capacity_is_kept_on_a_drive_that_keeps_failing(tmp_path: Path) -> None:
    io = LedgerIo()
    seeded = random.Random(5)
    errors = (errno.EIO, errno.ENOSPC, errno.EDQUOT)

    def fail(operation: Operation, path: str) -> Fault | None:
        if seeded.random() > 0.1:
            return None
        num_bytes = seeded.choice((None, 512, 4096, 8192)) if operation in (Operation.READ, Operation.WRITE) else None
        return Fault(seeded.choice(errors), num_bytes) if seeded.random() < 0.7 else Fault(num_bytes=num_bytes)

    capacity_bytes = 20 * CHUNK_BYTES
    volume = Volume(tmp_path / "v", capacity_bytes=capacity_bytes, io=io)
    volume.open()
    io.sizes.clear()
    io.bytes_now = io.bytes_peak = 0
    io.choose = fail
    threads = Threads(volume, 10_000)
    threads.run()
    io.choose = lambda operation, path: None
    assert not threads.wrong
    assert io.bytes_peak <= capacity_bytes
    assert threads.outcomes[Outcome.OK]
    assert threads.outcomes[Outcome.IO_ERROR]
    volume.rescan()
    volume.check()
    assert threads.reported == {(layout, of) for layout in volume.layouts() for of in volume.keys(layout)}
    for number in range(30):
        of = chunk(number + 1000)
        assert volume.write(DIGEST, of, payload(of)) is Outcome.OK
        into = empty()
        assert volume.read(DIGEST, of, into) is Outcome.OK
        assert bytes(into) == truth(of)
    volume.close()


def writer_process(
    path: Path, writer: str, *, capacity: int, shared: bool, seed: int, steps: int
) -> subprocess.Popen[str]:
    arguments = [str(path), writer, str(capacity), str(int(shared)), str(seed), str(steps)]
    process = subprocess.Popen(
        [sys.executable, "-m", "support.tier_writer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=import_environment(),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_writer_killed_at_any_moment_leaves_whole_chunks(tmp_path: Path) -> None:
    """kill -9, again and again, of one who writes without pause; nothing it left is delivered as what it is not."""
    path = tmp_path / "v"
    seeded = random.Random(3)
    num_found = 0
    left_unfinished = 0
    for seed in range(12):
        process = writer_process(path, "local", capacity=10, shared=False, seed=seed, steps=0)
        # Not a wait for something: the moment of the kill is what is tried.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=seeded.uniform(0.001, 0.06))
        killed(process)
        left_unfinished += bool(list((path / "tmp" / "local").iterdir()))
        volume = Volume(path, capacity_bytes=10 * CHUNK_BYTES)
        volume.open()
        volume.check()
        for of in volume.keys(DIGEST):
            into = empty()
            # A kill tears no single write of the kernel: what has its name is whole. A power cut may tear it.
            assert volume.read(DIGEST, of, into) is Outcome.OK
            assert bytes(into) == truth(of)
            num_found += 1
        volume.check()
        volume.close()
    assert num_found
    assert not quarantined(path)


def test_two_processes_that_write_and_remove_the_same_chunks_do_each_other_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "v"
    processes = [
        writer_process(path, writer, capacity=8, shared=True, seed=seed, steps=3000)
        for seed, writer in enumerate(("a", "b"))
    ]
    for process in processes:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ok"]
    for process in processes:
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    # What both wrote is readable by a third.
    volume = Volume(path, capacity_bytes=8 * CHUNK_BYTES, shared=True, writer="c")
    volume.open()
    assert volume.keys(DIGEST)
    for of in volume.keys(DIGEST):
        into = empty()
        assert volume.read(DIGEST, of, into) is Outcome.OK
        assert bytes(into) == truth(of)
    assert volume.stats.bytes_used == 0
    volume.close()


def test_on_a_shared_volume_everyone_reads_what_anyone_wrote(tmp_path: Path) -> None:
    a, b = (Volume(tmp_path, capacity_bytes=8 * CHUNK_BYTES, shared=True, writer=writer) for writer in "ab")
    a.open()
    b.open()
    assert a.volume_id == b.volume_id
    assert a.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.OK
    reported: list[ChunkId] = []
    b.on_change = lambda layout, added, removed: reported.extend(added)
    into = empty()
    assert not b.contains(DIGEST, chunk(1).key)
    assert b.read(DIGEST, ChunkId(chunk(1).key), into) is Outcome.OK  # before any rescan
    assert bytes(into) == truth(chunk(1))
    assert reported == [chunk(1)]
    assert b.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.EXISTS
    assert a.write(DIGEST, chunk(2), payload(chunk(2))) is Outcome.OK
    b.rescan()
    assert reported == [chunk(1), chunk(2)]
    assert b.stats.bytes_used == 0
    assert b.remove(DIGEST, chunk(1))
    assert a.read(DIGEST, chunk(1), into) is Outcome.GONE
    assert a.remove(DIGEST, chunk(2))
    b.rescan()
    assert b.keys(DIGEST) == []
    for volume in (a, b):
        volume.check()
        volume.close()


@pytest.mark.parametrize("of_b", [{"*": bytes(32)}, {"other": bytes(32)}, None])
def test_a_chunk_sealed_with_another_key_stays_with_its_writer(tmp_path: Path, of_b: dict[str, bytes] | None) -> None:
    keyrings = SecretsKeyring({"*": SECRET}), None if of_b is None else SecretsKeyring(of_b)
    a, b = (
        Volume(tmp_path, capacity_bytes=16 * CHUNK_BYTES, shared=True, writer=writer, keyring=keyring)
        for writer, keyring in zip("ab", keyrings, strict=True)
    )
    a.open()
    chunks = [chunk(number) for number in range(10)]
    for each in chunks:
        assert a.write(DIGEST, each, payload(each)) is Outcome.OK
    b.open()
    into = empty()
    for _ in range(2):
        for each in chunks:
            assert b.read(DIGEST, each, into) in (Outcome.UNDECRYPTABLE, Outcome.MISSING)
        b.rescan()
    assert b.stats.quarantined == 0
    if of_b != {"other": bytes(32)}:  # else its keyring has none for this tenant, and no file is opened
        assert b.keys(DIGEST) == [], "what cannot be opened is not offered"
        assert b.write(DIGEST, chunks[0], payload(chunks[0])) is Outcome.OK
        assert b.read(DIGEST, chunks[0], into) is Outcome.OK
    for each in chunks:
        assert a.read(DIGEST, each, into) is Outcome.OK
        assert bytes(into) == truth(each)
    # A file that its writer replaced is looked at again.
    assert a.remove(DIGEST, chunks[1])
    a.close()
    a = Volume(tmp_path, capacity_bytes=16 * CHUNK_BYTES, shared=True, writer="a", keyring=keyrings[1])
    a.open()
    written = a.write(DIGEST, chunks[1], payload(chunks[1]))
    b.rescan()
    assert b.contains(DIGEST, chunks[1].key) == (written is Outcome.OK)
    for volume in (a, b):
        volume.check()
        volume.close()


def test_the_files_that_are_remembered_as_foreign_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_reader, "MAX_FOREIGN", 3)
    a = Volume(
        tmp_path, capacity_bytes=16 * CHUNK_BYTES, shared=True, writer="a", keyring=SecretsKeyring({"*": SECRET})
    )
    b = Volume(tmp_path, capacity_bytes=16 * CHUNK_BYTES, shared=True, writer="b")
    for volume in (a, b):
        volume.open()
    for number in range(8):
        assert a.write(DIGEST, chunk(number), payload(chunk(number))) is Outcome.OK
        assert b.read(DIGEST, chunk(number), empty()) is Outcome.UNDECRYPTABLE
    assert len(b._chunk_reader._foreign) == 3
    for volume in (a, b):
        volume.close()


def test_a_bad_chunk_of_another_writer_is_quarantined_within_ones_own_capacity(tmp_path: Path) -> None:
    a, b = (Volume(tmp_path, capacity_bytes=1 * CHUNK_BYTES, shared=True, writer=writer) for writer in "ab")
    a.open()
    b.open()
    into = empty()
    for number in range(2):
        of = chunk(number)
        assert a.write(DIGEST, of, payload(of)) is Outcome.OK
        b.rescan()
        [file] = chunk_files(tmp_path)
        file.write_bytes(bytes(CHUNK_BYTES))
        assert b.read(DIGEST, of, into) is Outcome.CORRUPT_HEADER
        assert a.read(DIGEST, of, into) is Outcome.GONE
        b.check()
        a.check()
    assert len(quarantined(tmp_path)) == 1
    a.close()
    b.close()


def test_a_chunk_that_its_writer_recycles_while_another_reads_it_is_gone(tmp_path: Path) -> None:
    a = Volume(tmp_path, capacity_bytes=CHUNK_BYTES, shared=True, writer="a")
    a.open()
    assert a.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.OK

    def recycle(operation: Operation, path: str) -> Fault | None:
        if operation is Operation.READ and path.endswith(".page") and not a.contains(DIGEST, chunk(2).key):
            assert a.write(DIGEST, chunk(2), payload(chunk(2))) is Outcome.OK
        return None

    io: DirectIo = FaultyIo(recycle)
    b = Volume(tmp_path, capacity_bytes=CHUNK_BYTES, shared=True, writer="b", io=io)
    b.open()
    assert b.read(DIGEST, chunk(1), empty()) is Outcome.GONE
    assert not quarantined(tmp_path)
    into = empty()
    assert b.read(DIGEST, chunk(2), into) is Outcome.OK
    assert bytes(into) == truth(chunk(2))
    for volume in (a, b):
        volume.check()
        volume.close()
