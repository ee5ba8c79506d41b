"""Processes that use gRPC start others, such as engines, etcd and commands; and one fork of a process with threads."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvferry.engine.forks import ForkLimits, ForkServer, Outcome, Verdict, run_in_fork

# As multiprocessing starts engines: without vfork, beside threads that are calling.
PROGRAM = """
import subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor

import {package}
import grpc

subprocess._USE_VFORK = False


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


server = grpc.server(ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.add_generic_rpc_handlers((Echo(),))
server.start()
echo = grpc.insecure_channel(f"127.0.0.1:{{port}}").unary_unary("/kvferry/Echo")
is_over = threading.Event()


def ask():
    while not is_over.is_set():
        echo(b"x")


threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
statuses = [subprocess.run(["true"], stderr=subprocess.DEVNULL).returncode for _ in range(150)]
is_over.set()
for thread in threads:
    thread.join()
server.stop(0)
print(sorted(set(statuses)))
"""


@pytest.mark.parametrize("package", ["kvferry", "kvferry_loadtest"])
def test_children_reach_their_program_beside_calls_of_grpc(package: str) -> None:
    """Without the setting of the package, 1 of 40 aborts."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(package=package)], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == "[0]\n"


def _end(payload: bytes) -> bytes:
    match payload:
        case b"refuse":
            raise ValueError("not this")
        case b"memory":
            try:
                return bytes(1 << 30)
            except MemoryError as error:
                raise ValueError("a library's own words") from error
        case b"loop":
            while True:
                pass
        case b"wait":
            threading.Event().wait()
        case b"crash":
            os.kill(os.getpid(), signal.SIGKILL)
    return payload[::-1]


@pytest.mark.parametrize(
    ("payload", "outcome", "reason"),
    [
        (b"abc", Outcome.OK, ""),
        (b"refuse", Outcome.REFUSED, "not this"),
        (b"memory", Outcome.MEMORY, ""),
        (b"loop", Outcome.CPU_TIME, ""),
        (b"wait", Outcome.LATE, ""),
        (b"crash", Outcome.CRASHED, "SIGKILL"),
    ],
)
def test_one_fork_of_a_process_with_threads_ends_within_its_limits(
    payload: bytes, outcome: Outcome, reason: str
) -> None:
    num_threads = threading.active_count()
    wall_s = 1.0 if payload == b"wait" else 60.0
    cpu_s = 0.3 if payload == b"loop" else 30.0  # memory costs CPU time, most on a busy machine
    verdict = run_in_fork(_end, payload, ForkLimits(cpu_s=cpu_s, wall_s=wall_s, memory_bytes=256 << 20))
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert verdict.result == (b"cba" if outcome is Outcome.OK else b"")
    assert threading.active_count() == num_threads


def test_a_fork_that_cannot_be_made_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: ForkServer) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ForkServer, "run", fails)
    verdict = run_in_fork(_end, b"", ForkLimits(cpu_s=1.0, wall_s=1.0, memory_bytes=1 << 20))
    assert verdict == Verdict(Outcome.LATE, "no fork could be made: [Errno 24] Too many open files")


def test_a_fork_keeps_no_connection_of_the_process_it_comes_from() -> None:
    """A connection ends for its client when the last process closes it."""
    client, server = socket.socketpair()

    def sockets(_: bytes) -> bytes:
        return b" ".join(bytes(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    with client, server:
        verdict = run_in_fork(sockets, b"", ForkLimits(cpu_s=30.0, wall_s=60.0, memory_bytes=256 << 20))
    assert verdict.outcome is Outcome.OK
    assert b"/dev/null" in verdict.result
    assert b"socket:" not in verdict.result
