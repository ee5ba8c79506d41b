"""The command `kvferry` on this machine, with a run folder and a port of its own, and what may be left of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvferry.util.shared_memory import SHM_ROOT, SharedMemoryFile
from kvferry_local.child import tail
from kvferry_local.processes import ProcessIdentity, belonging, end_all
from kvferry_local.run_folder import RunFolder, run_folder
from support.waiting import PATIENCE_S, wait_until


@dataclass(frozen=True)
class Machine:
    """The command `kvferry` with a run folder and a port of its own."""

    folder: RunFolder
    port: int
    engine: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up_arguments(self) -> tuple[str, ...]:
        return (
            "up",
            "--engine",
            self.engine,
            "--http-port",
            str(self.port),
            "--grpc-port",
            "0",
            "--timeout",
            str(PATIENCE_S),
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Its output goes where a test may read it while it runs, outside the run folder."""
        return subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KVFERRY_RUN_DIR": str(self.folder.path)},
            # As from a terminal: where tests run in the background, Ctrl-C is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            # Asked first: an `up` that is killed outright leaves its cluster to the fixture.
            logs = [f"{log.name}:\n{tail(log)}" for log in self._logs()]
            process.terminate()
            out, err = process.communicate()
            pytest.fail("\n".join([f"{arguments} did not end within {PATIENCE_S:g} s", out, err, *logs]))
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def _logs(self) -> list[Path]:
        of_ray = self.folder.ray / "session_latest" / "logs"
        return [
            *sorted(self.folder.logs.glob("*.log")),
            *(of_ray / name for name in ("gcs_server.out", "raylet.out", "dashboard.log")),
            *sorted(of_ray.glob("serve/*.log")),
            *sorted(of_ray.glob("worker-*.err")),
        ]

    def prove(self) -> None:
        """Wait until gateways use the KV transfer between the engines."""
        proven = self.run("prove")
        assert proven.returncode == 0, proven.stdout + proven.stderr

    def up(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run(*self.up_arguments, *more)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.run("down")

    def processes(self) -> tuple[ProcessIdentity, ...]:
        return belonging(self.folder.marks())


@contextlib.contextmanager
def a_machine(engine: str) -> Iterator[Machine]:
    """A machine that nothing runs on yet, and on which nothing runs any more afterwards."""
    root = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp")).resolve()
    machine = Machine(RunFolder(root / "r"), _port_of_its_own(), engine)
    assert machine.folder == run_folder("kvferry", {"KVFERRY_RUN_DIR": str(root / "r")})
    try:
        yield machine
    finally:
        with contextlib.suppress(Exception):
            machine.down()
        end_all(machine.folder.marks(), grace_s=0)
        shutil.rmtree(root, ignore_errors=True)


def listening_ports(processes: tuple[ProcessIdentity, ...]) -> dict[int, str]:
    """port -> address of every listener of these processes."""
    ports = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr.port] = connection.laddr.ip
    return ports


def _port_of_its_own() -> int:
    """Return a port that neither the system nor `free_port` gives to others."""
    while can_connect(port := 10_000 + secrets.randbelow(10_000)):
        pass
    return port


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def may_be_of(machine: Machine, port: int) -> bool:
    """Return whether a process that listens on the port may be of the machine's cluster, not of another test."""
    for listener in psutil.net_connections("tcp"):
        if listener.status == psutil.CONN_LISTEN and listener.laddr.port == port and listener.pid is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(listener.pid)
                if folder := process.environ().get("KVFERRY_RUN_DIR"):
                    return folder == str(machine.folder.path)
                # Other processes of pytest-xdist, and what they start, have the same parent as this one.
                return os.getppid() not in (parent.pid for parent in process.parents())
    return False


def assert_nothing_left(machine: Machine, processes: tuple[ProcessIdentity, ...], ports: dict[int, str]) -> None:
    assert not machine.folder.path.exists(), (sorted(machine.folder.path.rglob("*")), machine.processes())
    assert [process for process in processes if process.is_alive()] == []
    assert machine.processes() == ()
    # Another test may listen on a port by now.
    assert [port for port in ports if can_connect(port) and may_be_of(machine, port)] == []


def shm_files() -> set[SharedMemoryFile]:
    return {SharedMemoryFile(path.lstat().st_ino, path.name) for path in SHM_ROOT.iterdir()}


def kill_everything(machine: Machine) -> None:
    def all_ended() -> bool:
        for process in machine.processes():
            process.send(signal.SIGKILL)
        return not machine.processes()

    wait_until(all_ended, what="all processes of the cluster have ended")
