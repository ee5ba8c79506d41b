"""A whole cluster on this machine with the twin engine: up, status, down, and every way to be interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from kvferry.addresses import free_port
from kvferry.local.processes import ProcessIdentity, belonging, end_all, wait_gone
from kvferry.local.run_folder import RunFolder, run_folder
from kvferry.shared_memory import SHM_ROOT, SharedMemoryFile, held_by, recorded, write_record

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

UP_TIMEOUT_S = 240
DOWN_TIMEOUT_S = 90


@dataclass(frozen=True)
class Machine:
    """The command `kvferry` with a run folder and a port of its own."""

    folder: RunFolder
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up_arguments(self) -> tuple[str, ...]:
        return ("up", "--engine", "sim", "--http-port", str(self.port), "--timeout", str(UP_TIMEOUT_S))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Its output goes where a test may read it while it runs, outside the run folder."""
        return subprocess.Popen(
            [sys.executable, "-m", "kvferry.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KVFERRY_RUN_DIR": str(self.folder.path)},
        )

    def run(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # Asked first: an `up` that is killed outright leaves its cluster to the fixture.
            process.terminate()
            process.communicate()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def up(self, *more: str) -> subprocess.CompletedProcess[str]:
        return self.run(*self.up_arguments, *more, timeout_s=UP_TIMEOUT_S + 120)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.run("down", timeout_s=DOWN_TIMEOUT_S)

    def processes(self) -> tuple[ProcessIdentity, ...]:
        return belonging(self.folder.marks())


@pytest.fixture
def machine() -> Iterator[Machine]:
    root = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp")).resolve()
    machine = Machine(RunFolder(root / "r"), free_port())
    assert machine.folder == run_folder("kvferry", {"KVFERRY_RUN_DIR": str(root / "r")})
    yield machine
    with contextlib.suppress(Exception):
        machine.down()
    end_all(machine.folder.marks(), grace_s=0)
    shutil.rmtree(root, ignore_errors=True)


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def listening_ports(processes: tuple[ProcessIdentity, ...]) -> dict[int, str]:
    """port -> address of every listener of these processes."""
    ports = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in psutil.Process(process.pid).net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    ports[connection.laddr.port] = connection.laddr.ip
    return ports


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def assert_refused_without_token(port: int) -> None:
    """What Serve would unpickle and run for anyone who can connect is refused to who has no token."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=10)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def assert_nothing_left(machine: Machine, processes: tuple[ProcessIdentity, ...], ports: dict[int, str]) -> None:
    assert not machine.folder.path.exists()
    assert [process for process in processes if process.is_alive()] == []
    assert machine.processes() == ()
    assert [port for port in ports if can_connect(port)] == []


def shm_files() -> set[SharedMemoryFile]:
    return {SharedMemoryFile(path.lstat().st_ino, path.name) for path in SHM_ROOT.iterdir()}


def test_up_answers_and_down_leaves_nothing(machine: Machine) -> None:
    up = machine.up()
    assert up.returncode == 0, up.stdout + up.stderr

    # What a newcomer reads.
    for said in ("question", "answer", "TTFT", "prefilled", "decoded", "ferried", machine.url, "curl ", "make down"):
        assert said in up.stdout
    assert "prefill-" in up.stdout
    assert "decode-" in up.stdout
    assert "KV page" in up.stdout, "the first answer was not ferried"

    # The curl line works as it is printed.
    command = up.stdout[up.stdout.index("curl ") :].split("\n\n")[0]
    answer = subprocess.run(["bash", "-c", f"{command} -sS --max-time 60"], capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]

    # A second up says that one runs, and changes nothing.
    processes = machine.processes()
    again = machine.up()
    assert again.returncode == 1
    assert machine.url in again.stderr
    assert "already runs" in again.stderr
    assert "Traceback" not in again.stderr
    assert httpx.get(f"{machine.url}/readyz", trust_env=False).json()["ready"] is True

    # Status lists who is there.
    status = json.loads(machine.run("status", "--json", timeout_s=60).stdout)
    assert [member["kind"] for member in status["members"]] == ["prefill", "decode", "gateway"]
    prefill, decode, gateway = status["members"]
    assert prefill["load"]["num_pages"] > 0
    assert decode["load"]["prompt_tokens_ferried"] > 0
    assert decode["load"]["ferried_bytes"] > 0
    assert gateway["address"] == f"127.0.0.1:{machine.port}"
    table = machine.run("status", timeout_s=60).stdout
    for member in status["members"]:
        assert member["member_id"] in table
        assert member["address"] in table

    # Everything listens on loopback; Serve's replicas alone listen everywhere, behind Ray's token.
    ports = listening_ports(processes)
    assert machine.port in ports
    open_to_all = {port for port, ip in ports.items() if not ip.removeprefix("::ffff:").startswith("127.")}
    assert len(open_to_all) <= len(status["members"])
    for port in open_to_all:
        assert_refused_without_token(port)
    for process in processes:
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)

    held = held_by(process.pid for process in processes)
    down = machine.down()
    assert down.returncode == 0, down.stdout + down.stderr
    assert re.search(r"ended \d+ processes", down.stdout)
    assert_nothing_left(machine, processes, ports)
    # Other clusters may run meanwhile; of what this one's processes held, nothing is there.
    assert not held & shm_files()

    assert "nothing was running" in machine.down().stdout
    missing = machine.run("status", timeout_s=60)
    assert missing.returncode == 1
    assert "no cluster runs here" in missing.stderr


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("etcd", signal.SIGINT),
        ("ray", signal.SIGINT),
        ("ray", signal.SIGTERM),
        ("deploy", signal.SIGINT),
    ],
)
def test_an_interrupted_start_leaves_nothing(machine: Machine, moment: str, number: signal.Signals) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        log = machine.folder.logs / f"{moment}.log"
        wait_until(lambda: log.exists() or up.poll() is not None, timeout_s=120, what=f"{moment} being started")
        assert up.poll() is None
        processes = machine.processes()
        up.send_signal(number)
        # Impatience changes nothing.
        up.send_signal(number)
        _, err = up.communicate(timeout=DOWN_TIMEOUT_S)
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate()
    assert up.returncode == 130
    assert "interrupted; nothing is left running" in err
    assert "Traceback" not in err
    assert_nothing_left(machine, processes, {machine.port: "127.0.0.1"})


def test_down_interrupts_a_start(machine: Machine) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        wait_until(lambda: (machine.folder.logs / "ray.log").exists(), timeout_s=120, what="Ray being started")
        processes = machine.processes()
        busy = machine.up()
        assert busy.returncode == 1
        assert f"process {up.pid}" in busy.stderr
        assert machine.down().returncode == 0
        assert up.wait(DOWN_TIMEOUT_S) == 130
    finally:
        if up.poll() is None:
            up.kill()
        up.communicate()
    assert_nothing_left(machine, processes, {machine.port: "127.0.0.1"})


def test_after_a_kill_of_everything_down_cleans_and_up_starts_anew(machine: Machine) -> None:
    assert machine.up("--no-ask").returncode == 0
    processes = machine.processes()
    ports = listening_ports(processes)
    # What an engine would leave in shared memory: recorded by its worker, held by nobody after the kill.
    leaked = SHM_ROOT / f"kvferry-test-{os.getpid()}"
    leaked.write_bytes(b"page")
    try:
        write_record(machine.folder.path, "worker-x", [SharedMemoryFile(leaked.stat().st_ino, leaked.name)])
        kill_everything(machine)
        status = machine.run("status", timeout_s=60)
        assert status.returncode == 1
        assert "has died" in status.stderr
        assert machine.folder.record() is not None

        # Up cleans what is left by itself, and down does after another kill.
        again = machine.up("--no-ask")
        assert again.returncode == 0, again.stdout + again.stderr
        assert "cleaned up after a cluster that had died" in again.stdout
        assert not leaked.exists()
    finally:
        leaked.unlink(missing_ok=True)
    second = machine.processes()
    assert not set(second) & set(processes)
    ports |= listening_ports(second)
    left_recorded = recorded(machine.folder.path)
    kill_everything(machine)
    assert machine.down().returncode == 0
    assert_nothing_left(machine, second, ports)
    assert not left_recorded & shm_files()


def kill_everything(machine: Machine) -> None:
    deadline = time.monotonic() + 60
    while processes := machine.processes():
        assert time.monotonic() < deadline
        for process in processes:
            process.send(signal.SIGKILL)
        wait_gone(processes, timeout_s=10)


def test_orphans_of_a_killed_ray_are_ended(machine: Machine) -> None:
    assert machine.up("--no-ask").returncode == 0
    record = machine.folder.record()
    assert record is not None
    processes = machine.processes()
    for pillar in record.pillars:
        pillar.send(signal.SIGKILL)
    assert machine.down().returncode == 0
    assert_nothing_left(machine, processes, {machine.port: "127.0.0.1"})


def test_a_taken_port_is_named_with_its_owner_before_anything_starts(machine: Machine) -> None:
    listener = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen();"
            "print('listening', flush=True); sys.stdin.read()",
            str(machine.port),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listening\n"
        up = machine.up()
    finally:
        listener.kill()
        listener.communicate()
    assert up.returncode == 2
    for said in (f"127.0.0.1:{machine.port}", f"process {listener.pid}", "--http-port"):
        assert said in up.stderr
    assert not machine.folder.path.exists()


def test_an_etcd_that_cannot_be_reached_ends_the_start_at_once(machine: Machine) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    up = machine.up("--etcd", endpoint)
    assert up.returncode == 1
    assert f"etcd cannot be reached: {endpoint}" in up.stderr
    assert "Traceback" not in up.stderr
    assert machine.processes() == ()


def test_a_part_that_dies_ends_the_start_with_the_end_of_its_log(machine: Machine) -> None:
    up = machine.start(*machine.up_arguments)
    try:
        deploying = machine.folder.logs / "deploy.log"
        wait_until(lambda: deploying.exists() or up.poll() is not None, timeout_s=120, what="the application submitted")
        record = machine.folder.record()
        assert record is not None
        began = time.monotonic()
        for pillar in record.pillars:
            pillar.send(signal.SIGKILL)
        out, err = up.communicate(timeout=DOWN_TIMEOUT_S)
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate()
    assert up.returncode == 1
    assert "Ray died" in err or "killed by signal 9" in err
    assert "Traceback (most recent call last)" not in err.partition("\n")[0]
    assert time.monotonic() - began < 60
    assert machine.processes() == ()
    # The logs stay, and are named.
    assert str(machine.folder.logs) in out
    assert (machine.folder.logs / "etcd.log").exists()
    assert machine.down().returncode == 0
    assert not machine.folder.path.exists()
