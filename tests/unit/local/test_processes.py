"""Which processes belong to a cluster: real ones, orphaned, disguised, and those of strangers."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kvferry_local import processes
from kvferry_local.child import StartFailed
from kvferry_local.processes import (
    TOKEN_VARIABLE,
    Marks,
    ProcessesRemain,
    ProcessIdentity,
    _is_marked,
    belonging,
    end_all,
    wait_gone,
)
from kvferry_local.ray_process import _find_pillars, is_of_ray
from support.waiting import wait_until

# Of this test process alone: others run the same tests beside it.
TOKEN = secrets.token_hex(8)

# Says so once it is as disguised as asked, then waits. argv: what to do, separated by commas.
PROGRAM = """
import os, signal, subprocess, sys
orders = sys.argv[1].split(",")
if "untitled" in orders:
    # As setproctitle does: the new title runs over the old command line and the environment behind it.
    import setproctitle
    setproctitle.setproctitle("somebody-else" + " " * 100_000)
if "stubborn" in orders:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in orders:
    def leave(*_):
        open("left", "w").close()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
if "orphan" in orders:
    child = subprocess.Popen(
        [sys.executable, "-c", os.environ["PROGRAM"], ",".join(o for o in orders if o != "orphan")],
        start_new_session=True,
    )
    os._exit(0)
print(os.getpid(), flush=True)
signal.pause()
"""


@pytest.fixture
def marks(tmp_path: Path) -> Marks:
    folders = (tmp_path / "logs", tmp_path / "work")
    for folder in folders:
        folder.mkdir()
    return Marks(token=TOKEN, work_folder=tmp_path / "work", written_folders=folders)


Start = Callable[..., ProcessIdentity]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start PROGRAM; whatever of it still runs after the test is killed by identity."""
    started: list[ProcessIdentity] = []
    parents: list[subprocess.Popen[str]] = []

    def start_program(
        orders: str = "",
        *,
        cwd: Path | None = None,
        token: str | None = None,
        extra: tuple[str, ...] = (),
        **pipes: int,
    ) -> ProcessIdentity:
        environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        environ |= {"PROGRAM": PROGRAM, **({TOKEN_VARIABLE: token} if token else {})}
        parent = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, orders, *extra],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environ,
            **pipes,
        )
        parents.append(parent)
        assert parent.stdout is not None
        identity = ProcessIdentity.of(int(parent.stdout.readline()))
        started.append(identity)
        return identity

    yield start_program
    for identity in started:
        identity.send(signal.SIGKILL)
    for parent in parents:
        parent.kill()
        parent.communicate()
    assert wait_gone(started, timeout_s=10)


def test_the_environment_marks_a_process(start: Start, marks: Marks) -> None:
    process = start(token=TOKEN)
    assert belonging(marks) == (process,)


def test_another_clusters_token_does_not(start: Start, marks: Marks) -> None:
    start(token=TOKEN + "0")
    start(token="f" * 16)
    assert belonging(marks) == ()


def test_the_working_folder_marks_a_process(start: Start, marks: Marks) -> None:
    process = start(cwd=marks.work_folder)
    assert belonging(marks) == (process,)


def test_a_file_open_for_writing_marks_a_process(start: Start, marks: Marks) -> None:
    with (marks.written_folders[0] / "worker.log").open("w") as log:
        process = start(stderr=log.fileno())
    assert belonging(marks) == (process,)


@pytest.mark.parametrize("mark", ["cwd", "file"])
def test_an_orphan_that_wiped_title_and_environment_is_found(start: Start, marks: Marks, mark: str) -> None:
    with (marks.written_folders[0] / "worker.log").open("w") as log:
        process = start(
            "orphan,untitled",
            token=TOKEN,
            cwd=marks.work_folder if mark == "cwd" else None,
            **({"stderr": log.fileno()} if mark == "file" else {}),
        )
    assert TOKEN.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"somebody-else")
    assert belonging(marks) == (process,)


def test_a_removed_log_still_marks_its_writer(start: Start, marks: Marks) -> None:
    path = marks.written_folders[0] / "worker.log"
    with path.open("w") as log:
        process = start(stderr=log.fileno())
    path.unlink()
    assert belonging(marks) == (process,)


def test_descendants_belong_with_their_ancestor(marks: Marks, tmp_path: Path) -> None:
    # The child gives up every mark of its own; what is left is that its parent belongs.
    child = f"import os, subprocess, sys; subprocess.run([sys.executable, '-c', {PROGRAM!r}, ''], cwd='/', env={{}})"
    parent = subprocess.Popen(
        [sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, env={**os.environ, TOKEN_VARIABLE: TOKEN}
    )
    try:
        assert parent.stdout is not None
        grandchild = ProcessIdentity.of(int(parent.stdout.readline()))
        assert set(belonging(marks)) == {ProcessIdentity.of(parent.pid), grandchild}
        assert end_all(marks) == 2
    finally:
        parent.kill()
        parent.communicate()


def test_strangers_do_not_belong(start: Start, marks: Marks) -> None:
    log = marks.written_folders[0] / "worker.log"
    log.write_text("hello\n")
    # Named like ours and with our folder on its command line; reading our log; standing beside the work folder.
    start(extra=("kvferry", "ray::ServeReplica", str(marks.work_folder)))
    with log.open() as reading:
        start(stderr=reading.fileno())
    start(cwd=marks.work_folder.parent)
    assert belonging(marks) == ()


def test_a_folder_whose_name_only_begins_the_same_is_another(start: Start, marks: Marks) -> None:
    beside = marks.work_folder.with_name("work-2")
    beside.mkdir()
    start(cwd=beside)
    assert belonging(marks) == ()


def test_without_a_token_nobody_is_marked_by_an_empty_one(start: Start, marks: Marks) -> None:
    start(token="None")
    assert belonging(Marks(None, marks.work_folder, marks.written_folders)) == ()


def test_the_caller_and_its_ancestors_never_belong(marks: Marks) -> None:
    code = (
        "import pathlib, sys; from kvferry_local.processes import Marks, belonging;"
        "folder = pathlib.Path(sys.argv[1]); print(belonging(Marks(sys.argv[2], folder, (folder,))))"
    )
    # Parent and child both carry every mark; the child asks.
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, *sys.argv[1:]], check=True)"
    result = subprocess.run(
        [sys.executable, "-c", outer, str(marks.work_folder), TOKEN],
        capture_output=True,
        text=True,
        check=True,
        cwd=marks.work_folder,
        env={**os.environ, TOKEN_VARIABLE: TOKEN},
    )
    assert result.stdout.strip() == "()"


def test_end_all_asks_first(start: Start, marks: Marks) -> None:
    process = start("polite", cwd=marks.work_folder)
    assert end_all(marks, grace_s=600, deadline_s=900) == 1
    assert not process.is_alive()
    assert (marks.work_folder / "left").exists()


def test_end_all_kills_what_does_not_listen(start: Start, marks: Marks) -> None:
    stubborn = start("stubborn,orphan,untitled", cwd=marks.work_folder)
    assert end_all(marks, grace_s=0.3) == 1
    assert not stubborn.is_alive()
    assert belonging(marks) == ()


def test_end_all_waits_for_no_process_that_needs_no_grace(start: Start, marks: Marks) -> None:
    idle, worker = start("stubborn", token=TOKEN), start("polite", cwd=marks.work_folder)
    assert end_all(marks, grace_s=600, deadline_s=900, needs_no_grace=lambda process: process == idle) == 2
    assert not idle.is_alive()
    assert not worker.is_alive()
    assert (marks.work_folder / "left").exists()


def test_end_all_ends_a_stopped_process(start: Start, marks: Marks) -> None:
    process = start(token=TOKEN)
    process.send(signal.SIGSTOP)
    assert end_all(marks, grace_s=0.3) == 1
    assert not process.is_alive()


def test_end_all_looks_again_when_it_finds_nothing(start: Start, marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(token=TOKEN)
    unseen: list[tuple[ProcessIdentity, ...]] = [()]
    monkeypatch.setattr(processes, "belonging", lambda marks: unseen.pop() if unseen else belonging(marks))
    assert end_all(marks) == 1
    assert not process.is_alive()


def test_end_all_spares_strangers(start: Start, marks: Marks) -> None:
    stranger = start(token="f" * 16)
    start(token=TOKEN)
    assert end_all(marks) == 1
    assert stranger.is_alive()


def test_end_all_shows_processes_while_they_live(start: Start, marks: Marks) -> None:
    process = start(token=TOKEN)
    seen: list[tuple[tuple[ProcessIdentity, ...], bool]] = []
    end_all(marks, before_signal=lambda found: seen.append((found, process.is_alive())))
    assert seen == [((process,), True)]


def test_end_all_with_nothing_to_do(marks: Marks) -> None:
    assert end_all(marks) == 0


def test_end_all_says_what_remains(start: Start, marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(token=TOKEN)
    monkeypatch.setattr(ProcessIdentity, "send", lambda *_: False)
    with pytest.raises(ProcessesRemain, match=str(process.pid)):
        end_all(marks, grace_s=0.1, deadline_s=0.3)
    monkeypatch.undo()


def test_a_pid_that_passed_on_is_not_signalled(start: Start) -> None:
    process = start()
    before_it = ProcessIdentity(process.pid, process.start_ticks - 1)
    assert not before_it.is_alive()
    assert before_it.send(signal.SIGKILL) is False
    assert before_it.wait(0) is True
    assert process.is_alive()


def test_a_zombie_has_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(parent.pid)
    assert identity.is_alive()
    parent.kill()
    # Not reaped yet: it stays as a zombie until the parent asks.
    assert identity.wait(10) is True
    assert not identity.is_alive()
    parent.communicate()
    assert identity.send(signal.SIGTERM) is False
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(parent.pid)


def test_wait_gone_says_whether_all_ended(start: Start) -> None:
    first, second = start(), start()
    first.send(signal.SIGKILL)
    assert wait_gone([first], timeout_s=10)
    assert not wait_gone([first, second], timeout_s=0.05)


def test_a_stranger_deep_in_folders_hides_nobody(start: Start, marks: Marks, tmp_path: Path) -> None:
    """Its working folder's path is longer than the kernel gives."""
    marked = start(token=TOKEN)
    child = os.fork()
    if not child:
        os.chdir(tmp_path)
        for _ in range(20):
            Path("d" * 250).mkdir()
            os.chdir("d" * 250)
        os.execv("/bin/sleep", ["sleep", "60"])
    try:
        wait_until(lambda: Path(f"/proc/{child}/comm").read_text() == "sleep\n")
        with pytest.raises(OSError, match="too long"):
            Path(f"/proc/{child}/cwd").readlink()
        assert not _is_marked(child, marks)
        assert marked in belonging(marks)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_an_empty_entry_in_the_environment_hides_nothing(marks: Marks) -> None:
    """As a process leaves it that overwrites a part of its environment."""
    child = os.fork()
    if not child:
        os.chdir("/")
        entries = (ctypes.c_char_p * 4)(b"A=1", b"", f"{TOKEN_VARIABLE}={TOKEN}".encode(), None)
        ctypes.CDLL(None).execve(b"/bin/sleep", (ctypes.c_char_p * 3)(b"sleep", b"60", None), entries)
        os._exit(1)
    try:
        # The name changes before the environment can be read.
        wait_until(lambda: Path(f"/proc/{child}/environ").read_bytes().startswith(b"A=1\0"))
        assert _is_marked(child, Marks(TOKEN, Path("/nonexistent/work"), ()))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("ray::ServeController", True),
        ("/lib/ray/core/src/ray/raylet/raylet", True),
        ("ray::ServeReplica:kvferry:decode", False),
        ("kvferry.gateway", False),
    ],
)
def test_processes_of_ray_itself_are_told_from_replicas(start: Start, title: str, expected: bool) -> None:
    assert is_of_ray(start(extra=(title,))) is expected


def test_ray_runs_while_both_of_its_pillars_do(tmp_path: Path, marks: Marks) -> None:
    folder: Any = SimpleNamespace(marks=lambda: marks, ray=tmp_path / "ray")
    started = []
    try:
        for name in ("gcs_server", "raylet", "dashboard"):
            shutil.copy("/bin/sleep", tmp_path / name)
            program = [tmp_path / name, "60"]
            started.append(subprocess.Popen(program, env={TOKEN_VARIABLE: TOKEN}))
            wait_until(lambda name=name, pid=started[-1].pid: psutil.Process(pid).name() == name)
        expected = {ProcessIdentity.of(process.pid) for process in started[:2]}
        assert set(_find_pillars(folder)) == expected
        started[1].kill()
        started[1].wait()
        with pytest.raises(StartFailed, match=f"Ray started and ended again; see {tmp_path}/ray"):
            _find_pillars(folder)
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_process_that_is_gone_is_not_of_ray() -> None:
    assert not is_of_ray(ProcessIdentity(pid=1 << 30, start_ticks=0))
