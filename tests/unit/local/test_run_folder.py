"""The run folder: private, short, locked, and removed without touching what is not ours."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import ConfigError, LocalError
from kvferry_local import run_folder as module
from kvferry_local.processes import ProcessIdentity
from kvferry_local.run_folder import (
    PATH_LIMIT_BYTES,
    ClusterBusy,
    ClusterRecord,
    RunFolder,
    named_folder,
    run_folder,
)


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    # Not tmp_path: its names are longer than a run folder may be.
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as short:
        yield RunFolder(Path(short).resolve() / "run")


RECORD = ClusterRecord(
    name="kvferry",
    ready=True,
    started_unix_s=1.5,
    url="http://127.0.0.1:8000",
    etcd_endpoints=("127.0.0.1:2379",),
    ray_address="127.0.0.1:6379",
    pillars=(ProcessIdentity(12, 34),),
    config={"name": "kvferry"},
)

HOLD_LOCK = """
import sys
from pathlib import Path
from kvferry_local.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked("up"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(folder: RunFolder) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.communicate()


def test_the_variable_chooses_the_folder() -> None:
    assert run_folder("x", {"KVFERRY_RUN_DIR": "/tmp/chosen"}).path == Path("/tmp/chosen").resolve()


def test_a_name_that_is_given_is_that_of_the_chosen_folders_cluster(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_RUN_DIR", str(folder.path))
    assert named_folder("anything", "kvferry") == folder, "no cluster is there"
    folder.prepare()
    folder.write_record(RECORD)
    assert named_folder("kvferry", "kvferry") == named_folder(None, "other") == folder
    with pytest.raises(LocalError, match="has the cluster 'kvferry', and not 'nope'"):
        named_folder("nope", "kvferry")


def test_the_default_is_below_tmp_by_user_and_name() -> None:
    assert run_folder("mine", {}).path == Path("/tmp").resolve() / f"kvferry-{os.getuid()}" / "mine"
    assert run_folder("mine", {"KVFERRY_RUN_DIR": ""}) == run_folder("mine", {})


def test_long_names_get_short_folders_of_their_own() -> None:
    first, second = (run_folder("a" * 30 + end, {}) for end in "xy")
    assert first != second
    for chosen in (first, second):
        assert len(os.fsencode(chosen.path)) <= PATH_LIMIT_BYTES


def test_the_longest_socket_of_ray_fits(folder: RunFolder) -> None:
    longest = RunFolder(Path("/" + "x" * (PATH_LIMIT_BYTES - 1)))
    path = longest.ray / "session_2026-11-21_09-26-02_634962_4194304" / "sockets" / "plasma_store"
    assert len(os.fsencode(path)) == 107
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(FileNotFoundError):
        probe.bind(str(path))


def test_a_path_that_is_too_long_is_refused_before_anything_is_made(folder: RunFolder) -> None:
    long = RunFolder(folder.path / ("x" * PATH_LIMIT_BYTES))
    with pytest.raises(ConfigError, match=r"KVFERRY_RUN_DIR: .* longer than"):
        long.prepare()
    assert not folder.path.exists()


def test_the_folder_is_private(folder: RunFolder) -> None:
    folder.prepare()
    for path in (folder.path, *folder.process_folders, folder.shm):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_folder_that_exists_keeps_its_mode_and_what_is_made_in_it_is_private(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.path.chmod(0o755)
    folder.prepare()
    folder.new_tokens()
    with folder.locked("up"):
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o700, 0o600}


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused_and_stays(folder: RunFolder, mode: int) -> None:
    folder.path.mkdir()
    folder.path.chmod(mode)
    with pytest.raises(ConfigError, match=r"KVFERRY_RUN_DIR: .* other users may write to it; .*chmod go-w"):
        folder.prepare()
    assert stat.S_IMODE(folder.path.stat().st_mode) == mode
    assert not list(folder.path.iterdir())


def test_a_folder_of_somebody_else_is_refused(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.path.mkdir()
    monkeypatch.setattr(module.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid()}"):
        folder.prepare()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_is_no_folder_is_refused(folder: RunFolder, kind: str) -> None:
    if kind == "link":
        target = folder.path.with_name("target")
        target.mkdir()
        folder.path.symlink_to(target)
    else:
        folder.path.write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        folder.prepare()


def test_tokens_are_fresh_and_private(folder: RunFolder) -> None:
    folder.prepare()
    assert folder.token() is None
    first = folder.new_tokens()
    assert folder.token() == first
    assert folder.new_tokens() != first
    for file in (folder.token_file, folder.ray_token_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert folder.marks().token == folder.token()


def test_a_record_comes_back_as_it_was(folder: RunFolder) -> None:
    folder.prepare()
    assert folder.record() is None
    folder.write_record(RECORD)
    assert folder.record() == RECORD


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": 1}'])
def test_a_damaged_record_is_none(folder: RunFolder, content: str) -> None:
    folder.prepare()
    folder.record_file.write_text(content)
    assert folder.record() is None


def test_two_cannot_hold_the_lock(folder: RunFolder, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(ClusterBusy, match=f"process {holder.pid}"), folder.locked("down"):
        pass
    assert folder.lock_holder("up") == ProcessIdentity.of(holder.pid)
    assert folder.lock_holder("down") is None


def test_a_killed_holder_holds_nothing(folder: RunFolder, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert folder.lock_holder() is None
    with folder.locked("up"):
        pass


def test_a_program_started_under_the_lock_does_not_hold_it(folder: RunFolder) -> None:
    with folder.locked("up"):
        child = subprocess.Popen(
            [sys.executable, "-c", "print('started', flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            close_fds=False,
        )
        # The kernel closes descriptors a moment after the parent goes on.
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
    try:
        with folder.locked("down"):
            pass
    finally:
        child.kill()
        child.communicate()


def test_the_lock_can_be_taken_again_after_the_folder_went(folder: RunFolder) -> None:
    with folder.locked("down"):
        folder.remove_if_empty()
    assert not folder.path.exists()
    with folder.locked("up"):
        assert folder.lock_file.exists()


def fill(folder: RunFolder) -> None:
    folder.prepare()
    folder.new_tokens()
    folder.write_record(RECORD)
    folder.write_config("name: kvferry\n")
    (folder.logs / "etcd.log").write_text("log\n")
    session = folder.ray / "session_2026-11-21_09-26-02_634962_1" / "logs"
    session.mkdir(parents=True)
    (session / "raylet.out").write_text("raylet\n")
    (folder.path / "engine-ab12").mkdir()


def test_clearing_removes_all_of_ours(folder: RunFolder) -> None:
    with folder.locked("down"):
        fill(folder)
        folder.clear(keep_logs=False)
        folder.remove_if_empty()
    assert not folder.path.exists()


def test_clearing_keeps_logs_when_asked(folder: RunFolder) -> None:
    fill(folder)
    folder.clear(keep_logs=True)
    assert [path.name for path in folder.path.iterdir()] == ["logs"]
    assert (folder.logs / "etcd.log").read_text() == "log\n"
    assert (folder.logs / "ray-0" / "raylet.out").read_text() == "raylet\n"


def test_clearing_leaves_what_is_not_ours(folder: RunFolder) -> None:
    with folder.locked("down"):
        fill(folder)
        (folder.path / "thesis.tex").write_text("mine")
        folder.clear(keep_logs=False)
        folder.remove_if_empty()
    assert (folder.path / "thesis.tex").read_text() == "mine"


def test_clearing_twice_is_fine(folder: RunFolder) -> None:
    fill(folder)
    folder.clear(keep_logs=False)
    folder.clear(keep_logs=False)
