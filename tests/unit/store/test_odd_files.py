"""Files on a volume that are no chunks: too large, pipes, sockets, folders, and files of another owner."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.errors import TierError
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import chunk_file, folder, fsck, paths, seal_counts
from kvferry_keeper.store.adoption import ADOPT_AFTER_S, REMOVE_AFTER_S, Adopter
from kvferry_keeper.store.direct_io import FaultyIo, Operation
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.outcome import Outcome, outcome_of_open
from kvferry_keeper.store.volume import Volume
from support.tier_chunks import CHUNK_BYTES, LAYOUT, SECRET, chunk, empty, payload
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
HUGE_BYTES = 1 << 40


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        yield open_volume


def put(volume: Volume, *numbers: int) -> None:
    assert [volume.write(DIGEST, chunk(n), payload(chunk(n))) for n in numbers] == [Outcome.OK] * len(numbers)


def get(volume: Volume, number: int) -> Outcome:
    return volume.read(DIGEST, chunk(number), empty())


def path_of(volume: Volume, number: int, writer: str) -> Path:
    file = volume.path / paths.chunk_path(writer, DIGEST, chunk(number))
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def make_huge(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    os.truncate(file, HUGE_BYTES)  # no block on the drive


@pytest.mark.parametrize("is_known", [True, False], ids=["layout known", "layout unknown"])
@pytest.mark.parametrize("where", ["chunks", "quarantine"])
def test_a_file_too_large_for_a_chunk_drives_no_good_one_out(opened: Opened, where: str, is_known: bool) -> None:
    volume = opened(chunks=8)
    if is_known:
        volume.add_layout(LAYOUT)
    put(volume, 1, 2, 3, 4)
    if where == "chunks":
        huge = path_of(volume, 5, "local")
    else:
        huge = volume.path / paths.quarantine_path("local", DIGEST, chunk(5), "truncated")
    volume.close()
    make_huge(huge)
    again = opened(chunks=8)
    assert [get(again, n) for n in (1, 2, 3, 4)] == [Outcome.OK] * 4
    assert not huge.exists()
    assert again.stats.bytes_used == 4 * CHUNK_BYTES


def test_a_pipe_with_a_chunks_name_is_a_miss(opened: Opened) -> None:
    volume = opened(shared=True, writer="a")
    put(volume, 2)
    os.mkfifo(path_of(volume, 1, "b"))
    assert get(volume, 1) is Outcome.MISSING
    volume.rescan()
    assert get(volume, 1) is not Outcome.OK
    ours = path_of(volume, 2, "a")
    ours.unlink()
    os.mkfifo(ours)
    assert get(volume, 2) in (Outcome.TRUNCATED, Outcome.UNREADABLE)  # pipes refuse O_DIRECT
    volume.close()


@pytest.mark.parametrize("name", [paths.LAYOUTS, paths.KEYS])
def test_a_pipe_among_layouts_or_seal_counts_keeps_nobody_waiting(opened: Opened, name: str) -> None:
    volume = opened(shared=True, writer="a", keyring=SecretsKeyring({"*": SECRET}))
    os.mkfifo(volume.path / name / "x.json")
    volume.rescan()
    opened(shared=True, writer="b").rescan()


def test_a_pipe_in_place_of_the_description_is_named(opened: Opened) -> None:
    volume = opened()
    volume.close()
    description = volume.path / paths.DESCRIPTION
    description.unlink()
    os.mkfifo(description)
    with pytest.raises(Exception, match=paths.DESCRIPTION):
        opened()


def as_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{os.open(file.parent, os.O_RDONLY)}/x")
    (file.parent / "x").rename(file)


@pytest.mark.parametrize("how", [as_socket, Path.mkdir], ids=["socket", "folder"])
def test_what_is_no_file_tells_nothing_of_the_drive(opened: Opened, how: Callable[[Path], None]) -> None:
    volume, other = opened(shared=True, writer="a"), opened(shared=True, writer="b")
    put(other, 1)
    other.close()
    volume.rescan()
    file = path_of(volume, 1, "b")
    file.unlink()
    how(file)
    assert get(volume, 1) in (Outcome.UNREADABLE, Outcome.TRUNCATED, Outcome.GONE)
    assert get(volume, 1) is not Outcome.IO_ERROR
    put(volume, 2)
    ours = path_of(volume, 2, "a")
    ours.unlink()
    how(ours)
    assert get(volume, 2) in (Outcome.UNREADABLE, Outcome.TRUNCATED, Outcome.GONE)
    volume.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_a_file_of_another_owner_is_passed_over_and_stays(opened: Opened, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents:
        if parent != Path("/") and parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(65534)
    try:
        volume, other = opened(shared=True, writer="a"), opened(shared=True, writer="b")
        put(other, 1)
        other.close()
        os.seteuid(0)
        file = path_of(volume, 1, "b")
        os.chown(file, 0, 0)
        os.seteuid(65534)
        volume.rescan()
        assert get(volume, 1) is Outcome.UNREADABLE
        assert get(volume, 1) is Outcome.MISSING
        volume.rescan()
        assert get(volume, 1) is Outcome.MISSING, "it is not offered again before it changes"
        assert file.exists()
        volume.check()
        volume.close()
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("error", ["EACCES", "EPERM", "ENXIO", "ENOTDIR", "EISDIR", "EINVAL"])
def test_faults_of_opening_one_file_are_its_own(error: str) -> None:
    assert outcome_of_open(OSError(getattr(errno, error), "")) is Outcome.UNREADABLE
    assert outcome_of_open(OSError(errno.EIO, "")) is Outcome.IO_ERROR


@pytest.mark.parametrize("fault", [OSError(errno.ENOMEM, ""), MemoryError()], ids=["ENOMEM", "MemoryError"])
@pytest.mark.parametrize("where", ["buffers", "sealing"])
def test_a_want_of_memory_leaves_nothing_reserved(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, fault: BaseException, where: str
) -> None:
    volume = opened(chunks=4, keyring=SecretsKeyring({"*": SECRET}))
    put(volume, 1)

    def fails(*_: object) -> None:
        raise fault

    outcomes: list[Outcome] = []

    def write() -> None:
        outcomes.extend(volume.write(DIGEST, chunk(number), payload(chunk(number))) for number in range(10, 20))

    with monkeypatch.context() as short:
        if where == "sealing":
            short.setattr(chunk_file, "seal", fails)
        else:
            short.setattr("kvferry_keeper.store.volume_files.aligned_buffer", fails)
        thread = threading.Thread(target=write)  # which has no buffers yet
        thread.start()
        thread.join()
    assert outcomes == [Outcome.NO_RESOURCES] * 10
    volume.check()
    put(volume, *(n for n in range(20, 23)))
    assert [get(volume, n) for n in range(20, 23)] == [Outcome.OK] * 3


def test_writes_without_descriptors_evict_nothing(opened: Opened) -> None:
    volume = opened(chunks=4)
    put(volume, *range(4))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open("/", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        outcomes = [volume.write(DIGEST, chunk(number), payload(chunk(number))) for number in range(10, 14)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert outcomes == [Outcome.NO_RESOURCES] * 4
    assert [get(volume, number) for number in range(4)] == [Outcome.OK] * 4


def test_a_recycled_file_keeps_its_bytes_under_other_names(opened: Opened) -> None:
    volume = opened(chunks=2, shared=True, writer="a")
    put(volume, 1, 2)
    os.link(path_of(volume, 1, "a"), path_of(volume, 1, "b"))
    put(volume, 3)
    assert not path_of(volume, 1, "a").exists()
    assert get(opened(shared=True, writer="b"), 1) is get(volume, 3) is Outcome.OK
    volume.check()


def test_a_negative_seal_count_is_no_count(opened: Opened) -> None:
    volume = opened(shared=True, writer="a", keyring=SecretsKeyring({"*": SECRET}))
    (volume.path / paths.KEYS / "other.json").write_text('{"00": -1000000000000}')
    volume.rescan()
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.REFUSED, (
        "a file that cannot be read stops sealing"
    )


@pytest.mark.parametrize("how", ["long name", "link loop as lock", "folder as lock"])
def test_one_odd_name_keeps_nobody_from_the_chunks_of_writers_that_are_gone(opened: Opened, how: str) -> None:
    now_s = [1000.0]
    living = opened(shared=True, writer="living", monotonic=lambda: now_s[0])
    gone = opened(shared=True, writer="zgone", monotonic=lambda: now_s[0])
    put(gone, 1, 2)
    gone.close()
    if how == "long name":
        (living.path / paths.CHUNKS / ("l" * 252)).mkdir()
    else:
        (living.path / paths.CHUNKS / "m").mkdir()
        lock = living.path / paths.TEMPORARY / "m.lock"
        lock.mkdir() if how == "folder as lock" else lock.symlink_to(lock)
    for seconds in (0.0, ADOPT_AFTER_S, ADOPT_AFTER_S, REMOVE_AFTER_S):
        now_s[0] += seconds
        living.rescan()
    assert living.stats.bytes_used == 2 * CHUNK_BYTES
    assert [get(living, n) for n in (1, 2)] == [Outcome.OK] * 2


def test_adoption_removes_no_foreign_files(opened: Opened) -> None:
    now_s = [1000.0]
    gone = opened(shared=True, writer="gone")
    put(gone, 1)
    gone.close()
    living = opened(shared=True, writer="living", monotonic=lambda: now_s[0])
    pages = living.path / paths.CHUNKS
    shutil.copytree(pages / "gone", pages / "saved" / "gone")  # put aside by hand
    notes = [pages / name / "notes.txt" for name in ("saved", "gone", f"gone/{DIGEST.hex()}")]
    for file in notes:
        file.write_text("mine")
    for _ in range(5):
        living.rescan()
        now_s[0] += ADOPT_AFTER_S
    assert living.stats.bytes_used == CHUNK_BYTES
    assert len(list((pages / "saved" / "gone").rglob("*.page"))) == 1
    assert [file.read_text() for file in notes] == ["mine"] * 3


def test_seal_counts_are_read_whatever_else_fails(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = SecretsKeyring({"*": SECRET})
    volume = opened(shared=True, writer="living", keyring=keyring)
    key = keyring.keys(chunk(1).namespace, volume.volume_id)[0]
    full = {chunk_file.fingerprint(key).hex(): seal_counts.MAX_SEALS}
    (volume.path / paths.KEYS / "other.json").write_text(json.dumps(full))

    def fails(self: Adopter, now_s: float) -> None:
        raise OSError(errno.EIO, "the drive")

    monkeypatch.setattr(Adopter, "run", fails)
    with pytest.raises(TierError):
        volume.rescan()
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.REFUSED


def test_uses_by_a_clock_that_was_ahead_are_not_the_latest(opened: Opened) -> None:
    volume = opened(chunks=3, shared=True, writer="a")
    put(volume, 1, 2, 3)
    ahead_ns = time.time_ns() + 365 * 86400 * 10**9
    os.utime(path_of(volume, 1, "a"), ns=(ahead_ns, time.time_ns()))
    volume.rescan()
    assert get(volume, 2) is get(volume, 3) is Outcome.OK
    volume.record()
    volume.rescan()
    put(volume, 4)
    assert [n for n in (1, 2, 3, 4) if volume.contains(DIGEST, chunk(n).key)] == [2, 3, 4]


def test_a_purge_finds_the_quarantine_of_a_writer_without_chunks(opened: Opened, tmp_path: Path) -> None:
    acme = Namespace("acme")
    volume = opened(shared=True, writer="gone")
    assert volume.write(DIGEST, chunk(1, acme), payload(chunk(1, acme))) is Outcome.OK
    with (volume.path / paths.chunk_path("gone", DIGEST, chunk(1, acme))).open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    assert volume.read(DIGEST, chunk(1, acme), empty()) is Outcome.CORRUPT_PAYLOAD
    volume.close()
    shutil.rmtree(volume.path / paths.CHUNKS / "gone")
    assert list((volume.path / paths.QUARANTINE).rglob("*.*"))
    fsck.purge(volume.path, "acme")
    assert not [file for file in (volume.path / paths.QUARANTINE).rglob("*") if file.is_file()]


def test_a_folder_among_unfinished_writes_keeps_no_keeper_from_starting(opened: Opened) -> None:
    volume = opened()
    put(volume, 1)
    (volume.path / paths.TEMPORARY / "local" / "folder").mkdir()
    volume.close()
    assert get(opened(), 1) is Outcome.OK


def test_seals_that_cannot_be_written_down_are_limited(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_counts, "MAX_UNSAVED", 10)
    volume = opened(chunks=2, keyring=SecretsKeyring({"*": SECRET}))

    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    outcomes = []
    with monkeypatch.context() as full_drive:
        full_drive.setattr(seal_counts, "_replace", full)
        for number in range(30):
            outcomes.append(volume.write(DIGEST, chunk(number), payload(chunk(number))))
            volume.record()
    assert outcomes == [Outcome.OK] * 10 + [Outcome.REFUSED] * 20
    volume.record()
    put(volume, 100)


def test_chunks_of_a_writer_that_is_back_stay(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that shows locks on one node only."""
    monkeypatch.setattr(folder, "lock", lambda file, *, shared: os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    now_s = [1000.0]
    io = FaultyIo(lambda operation, path: None)
    gone = opened(shared=True, writer="b", monotonic=lambda: now_s[0])
    put(gone, 1, 2, 3)
    gone.close()
    living = opened(shared=True, writer="a", monotonic=lambda: now_s[0], io=io)
    for _ in range(2):
        living.rescan()
        now_s[0] += ADOPT_AFTER_S
    back: list[Volume] = []

    def come_back(operation: Operation, path: str) -> None:
        if operation is Operation.RENAME and not back:
            back.append(opened(shared=True, writer="b", monotonic=lambda: now_s[0]))
            put(back[0], 7)

    io.choose = come_back
    living.rescan()
    assert get(back[0], 7) is Outcome.OK
    for volume in (living, back[0]):
        volume.close()


def facts_below(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {file: file.lstat() for file in folder.rglob("*")}
    return {
        file: (
            status.st_ino,
            status.st_mtime_ns,
            0 if file.is_dir() else status.st_atime_ns,
        )  # listing changes a folder's
        for file, status in found.items()
    }


@pytest.mark.parametrize("level", range(4), ids=["keys", "namespace", "layout", "writer"])
def test_nothing_goes_through_a_link_in_place_of_a_folder(opened: Opened, tmp_path: Path, level: int) -> None:
    """Neither reads, writes, evictions and times of use, nor the folders that a write makes."""
    outside, empty_one = tmp_path / "outside", tmp_path / "empty"
    empty_one.mkdir()
    volume = opened(chunks=4)
    put(volume, 1, 2)
    assert get(volume, 1) is Outcome.OK
    keys = path_of(volume, 1, "local").parent
    linked = [keys, *keys.parents][level]
    linked.rename(outside)
    before = facts_below(outside)

    def link(target: Path) -> None:
        shutil.rmtree(linked, ignore_errors=True)
        linked.symlink_to(target)

    link(outside)
    volume.record()
    assert get(volume, 1) is Outcome.GONE
    assert not linked.is_symlink()
    for target in (outside, empty_one):
        link(target)
        put(volume, 1)
        assert get(volume, 1) is Outcome.OK
        assert not linked.is_symlink()
        put(volume, 3, 4, 5, 6, 7)  # evicts it
        assert get(volume, 1) is Outcome.MISSING
    assert facts_below(outside) == before
    assert not list(empty_one.iterdir())


def test_a_folder_of_all_writers_may_be_a_link(opened: Opened, tmp_path: Path) -> None:
    """An operator may have put it on another drive."""
    volume = opened()
    volume.close()
    (volume.path / paths.CHUNKS).rename(tmp_path / "elsewhere")
    (volume.path / paths.CHUNKS).symlink_to(tmp_path / "elsewhere")
    volume = opened()
    put(volume, 1)
    assert get(volume, 1) is Outcome.OK
    assert (volume.path / paths.CHUNKS).is_symlink()
