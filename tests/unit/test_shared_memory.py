"""Recording what a process tree holds in /dev/shm, and removing what was abandoned."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.util.shared_memory import SHM_ROOT, held_by, record_shared_memory, recorded, remove_abandoned

pytestmark = pytest.mark.skipif(not SHM_ROOT.is_dir(), reason="needs /dev/shm")

# Holds the file named by argv[1] as argv[2] says, tells so, and ends when its input does.
HOLDER = """
import mmap, os, subprocess, sys
path, how = sys.argv[1:]
if how == "child":
    child = subprocess.Popen([sys.executable, "-c", os.environ["HOLDER"], path, "map"], stdin=subprocess.PIPE)
else:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.truncate(fd, 4096)
    if how != "open":
        memory = mmap.mmap(fd, 4096)
        os.close(fd)
    if how == "unlinked":
        os.unlink(path)
    print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shm_path() -> Iterator[Path]:
    path = SHM_ROOT / f"kvferry-test-{secrets.token_hex(6)}"
    yield path
    path.unlink(missing_ok=True)


Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, how: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOLDER": HOLDER},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def names(run_dir: Path) -> set[str]:
    return {file.name for file in recorded(run_dir)}


@pytest.mark.parametrize("how", ["map", "open", "child"])
def test_what_a_process_or_its_child_holds_is_recorded(tmp_path: Path, shm_path: Path, hold: Hold, how: str) -> None:
    process = hold(shm_path, how)
    new = record_shared_memory(tmp_path, "worker-1", process.pid)
    assert shm_path.name in {file.name for file in new}
    assert shm_path.name in names(tmp_path)
    assert (tmp_path / "shm" / "worker-1.txt").is_file()


def test_what_is_unlinked_already_needs_no_record(tmp_path: Path, shm_path: Path, hold: Hold) -> None:
    process = hold(shm_path, "unlinked")
    record_shared_memory(tmp_path, "worker-1", process.pid)
    assert shm_path.name not in names(tmp_path)


def test_a_semaphore_is_recorded_under_the_name_it_has(tmp_path: Path) -> None:
    # Linked to its name from another one: to its holder it looks deleted.
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    new = record_shared_memory(tmp_path, "worker-1", os.getpid())
    name = f"sem.{semaphore._semlock.name.removeprefix('/')}"  # type: ignore[attr-defined]
    assert name in {file.name for file in new}
    assert remove_abandoned(tmp_path) == ()


def test_recording_again_adds_only_what_is_new(tmp_path: Path, shm_path: Path, hold: Hold) -> None:
    process = hold(shm_path, "map")
    assert record_shared_memory(tmp_path, "worker-1", process.pid)
    assert record_shared_memory(tmp_path, "worker-1", process.pid) == frozenset()
    lines = (tmp_path / "shm" / "worker-1.txt").read_text().splitlines()
    assert len(lines) == len(set(lines))


def test_what_somebody_holds_stays(tmp_path: Path, shm_path: Path, hold: Hold) -> None:
    process = hold(shm_path, "map")
    record_shared_memory(tmp_path, "worker-1", process.pid)
    assert remove_abandoned(tmp_path) == ()
    assert shm_path.exists()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, shm_path: Path, hold: Hold) -> None:
    process = hold(shm_path, "map")
    record_shared_memory(tmp_path, "worker-1", process.pid)
    process.kill()
    process.wait()
    assert [file.name for file in remove_abandoned(tmp_path)] == [shm_path.name]
    assert not shm_path.exists()
    assert remove_abandoned(tmp_path) == ()


def test_a_strangers_file_of_the_same_name_stays(tmp_path: Path, shm_path: Path, hold: Hold) -> None:
    process = hold(shm_path, "map")
    record_shared_memory(tmp_path, "worker-1", process.pid)
    process.kill()
    process.wait()
    # Made before the first is gone, so that the inode cannot be the same.
    stranger = shm_path.with_name(f"{shm_path.name}-stranger")
    stranger.write_bytes(b"theirs")
    stranger.rename(shm_path)
    assert remove_abandoned(tmp_path) == ()
    assert shm_path.read_bytes() == b"theirs"


def test_a_record_cannot_lead_out_of_shared_memory(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "shm").mkdir()
    escape = f"../..{victim}"
    (tmp_path / "shm" / "w.txt").write_text(f"{victim.stat().st_ino} {escape}\n")
    assert remove_abandoned(tmp_path) == ()
    assert victim.exists()


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "w.txt").write_text("\nnonsense\n12\nx y\n")
    assert recorded(tmp_path) == frozenset()


@pytest.mark.parametrize("name", ["", "a/b", ".."])
def test_a_record_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="single path component"):
        record_shared_memory(tmp_path, name, os.getpid())


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert held_by([process.pid]) == frozenset()
    assert record_shared_memory(tmp_path, "worker-1", process.pid) == frozenset()
