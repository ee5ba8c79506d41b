"""Processes that use gRPC start others, such as engines, etcd and commands; and one fork of a process with threads."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from kvferry.engine import forks
from kvferry.engine.forks import (
    LENGTH_BYTES,
    READY,
    Answered,
    Asked,
    ForkLimits,
    ForkServer,
    Outcome,
    Verdict,
    frame,
    run_in_fork,
)
from support.waiting import PATIENCE_S, wait_until

MEMORY_BYTES = 64 << 20

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
        [sys.executable, "-c", PROGRAM.format(package=package)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert ran.stdout == "[0]\n"


def limits(cpu_s: float = PATIENCE_S, wall_s: float = PATIENCE_S) -> ForkLimits:
    return ForkLimits(cpu_s=cpu_s, wall_s=wall_s, memory_bytes=MEMORY_BYTES)


def mapped(num_bytes: int) -> mmap.mmap:
    """Return new memory; `bytes` may come from memory that this process has free. Raises OSError."""
    return mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def filled(num_bytes: int = 1 << 20) -> list[mmap.mmap]:
    """Write to new memory until no more can be mapped, and keep it."""
    kept = []
    while True:
        try:
            kept.append(mapped(num_bytes))
        except OSError:
            return kept
        kept[-1].write(bytes(num_bytes))


def _pipe() -> int:
    """Return the pipe of this fork, whose other files are standard ones."""
    return next(fd for fd in range(3, 1 << 16) if Path(f"/proc/self/fd/{fd}").exists())


def _end(payload: bytes) -> bytes:
    match payload:
        case b"refuse":
            raise ValueError("not this")
        case b"loop":
            while True:
                pass
        case b"wait":
            threading.Event().wait()
        case b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"exit":
            os._exit(3)
        case b"null":
            ctypes.memset(0, 1, 1)
        case b"abort":
            os.abort()
        case b"signal 40":
            os.kill(os.getpid(), 40)
        case b"close the pipe":
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            threading.Event().wait()
        case b"leave a child with the pipe":
            if not os.fork():
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            threading.Event().wait()
        case b"no text in the verdict":
            said = b"\x81\xa7outcome\xa2\xff\xfe"
            os.write(_pipe(), len(said).to_bytes(LENGTH_BYTES, "little") + said)
            os._exit(0)
        case b"write without end":
            while True:
                os.write(_pipe(), bytes(1 << 20))
        case b"most of the memory":
            return bytes(MEMORY_BYTES - (8 << 20))
    return payload[::-1]


@pytest.mark.parametrize(
    ("payload", "outcome", "reason"),
    [
        (b"abc", Outcome.OK, ""),
        (b"refuse", Outcome.REFUSED, "not this"),
        (b"loop", Outcome.CPU_TIME, ""),
        (b"wait", Outcome.LATE, ""),
        (b"kill", Outcome.CRASHED, "SIGKILL"),
        (b"exit", Outcome.CRASHED, "no verdict"),
        (b"null", Outcome.CRASHED, "SIGSEGV"),
        (b"abort", Outcome.CRASHED, "SIGABRT"),
        (b"signal 40", Outcome.CRASHED, "signal 40"),
        (b"close the pipe", Outcome.CRASHED, "SIGKILL"),
        (b"leave a child with the pipe", Outcome.LATE, ""),
        (b"no text in the verdict", Outcome.CRASHED, "no verdict"),
        (b"write without end", Outcome.MEMORY, ""),
    ],
)
def test_one_fork_of_a_process_with_threads_ends_within_its_limits(
    payload: bytes, outcome: Outcome, reason: str
) -> None:
    num_threads = threading.active_count()
    wall_s = 1.0 if outcome is Outcome.LATE else PATIENCE_S
    cpu_s = 0.3 if payload == b"loop" else PATIENCE_S
    verdict = run_in_fork(_end, payload, limits(cpu_s, wall_s))
    assert (verdict.outcome, verdict.reason) == (outcome, reason)
    assert verdict.result == (b"cba" if outcome is Outcome.OK else b"")
    assert threading.active_count() == num_threads


# In a process of its own: Python cannot put back the handler that pytest has.
CRASH = """
import ctypes, signal
from kvferry.engine.forks import ForkLimits, run_in_fork

signal.signal(signal.SIGSEGV, lambda number, frame: None)
limits = ForkLimits(cpu_s=1.0, wall_s=600.0, memory_bytes=64 << 20)
verdict = run_in_fork(lambda payload: ctypes.memset(0, 1, 1), b"", limits)
print(verdict.outcome, verdict.reason)
"""


def test_a_crash_is_left_to_no_handler_of_a_library() -> None:
    command = [sys.executable, "-c", CRASH]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout == "crashed SIGSEGV\n"


@pytest.mark.parametrize("payload", [b"abc", b"null"])
def test_memory_that_other_threads_map_meanwhile_does_not_count(
    payload: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, fork = [], os.fork

    def map_and_fork() -> int:
        kept.append(mapped(2 * MEMORY_BYTES))
        return fork()

    monkeypatch.setattr(os, "fork", map_and_fork)
    assert run_in_fork(_end, payload, limits()).outcome is (Outcome.OK if payload == b"abc" else Outcome.CRASHED)
    assert kept


def _use_some_memory(_: bytes) -> bytes:
    return b"".join([bytes(32 << 10) for _ in range(16)])[:3]


def test_memory_that_malloc_maps_and_does_not_use_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, malloc, free, kept = os.fork, ctypes.CDLL(None).malloc, ctypes.CDLL(None).free, []
    malloc.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def fill_heap_and_fork() -> int:
        """glibc has heaps of 64 MiB, at multiples of it, for all threads but the first one."""
        while not kept or kept[-1] % (64 << 20) < (64 << 20) - (256 << 10):
            kept.append(malloc(32 << 10))
        return fork()

    monkeypatch.setattr(os, "fork", fill_heap_and_fork)
    try:
        verdict = run_in_fork(_use_some_memory, b"", limits())
    finally:
        for address in kept:
            free(address)
    assert (verdict.outcome, verdict.result) == (Outcome.OK, bytes(3))


def _garbage(num_bytes: int) -> None:
    """Leave a cycle that owns memory. The caller has disabled garbage collection."""
    cycle: list[object] = [mapped(num_bytes)]
    cycle.append(cycle)


def test_a_fork_ends_nothing_that_the_process_has_as_garbage(tmp_path: Path) -> None:
    """Else a fork would delete the process's temporary files, as an example."""
    kept = tmp_path / "kept"
    kept.touch()

    class Owner:
        def __del__(self) -> None:
            kept.unlink()

    def collect(_: bytes) -> bytes:
        gc.collect()
        return str(kept.exists()).encode()

    gc.disable()
    try:
        owner = Owner()
        owner.itself = owner  # type: ignore[attr-defined]
        del owner
        verdict = run_in_fork(collect, b"", limits())
        assert kept.exists()
        gc.collect()
        assert not kept.exists()
    finally:
        gc.enable()
    assert verdict == Verdict(Outcome.OK, cpu_s=verdict.cpu_s, result=b"True")


def _exceed_memory(way: bytes) -> bytes:
    match way:
        case b"a failed allocation":
            try:
                return bytes(1 << 50)
            except MemoryError as error:
                raise ValueError("a library's own words") from error
        case b"a mapping that is not used":
            return str(mapped(2 * MEMORY_BYTES)).encode()
        case b"a mapping that is gone":
            mapped(2 * MEMORY_BYTES).close()
        case b"an error that does not mention memory":
            kept = mapped(2 * MEMORY_BYTES)
            raise ValueError(f"no image: {kept}")
        case b"a use of all of it":
            mapped(2 * MEMORY_BYTES).write(bytes(2 * MEMORY_BYTES))
            threading.Event().wait()
        case b"small mappings":
            filled(1 << 17)
            threading.Event().wait()
        case b"threads":
            # Each larger than any stack of the process's own threads, which a fork has too and would use again.
            threading.stack_size(MEMORY_BYTES)
            for _ in range(4):
                threading.Thread(target=threading.Event().wait).start()
    return b""


@pytest.mark.parametrize(
    "way",
    [
        b"a failed allocation",
        b"a mapping that is not used",
        b"a mapping that is gone",
        b"an error that does not mention memory",
        b"a use of all of it",
        b"small mappings",
        b"threads",
    ],
)
def test_a_fork_that_exceeds_its_memory_says_so(way: bytes) -> None:
    assert run_in_fork(_exceed_memory, way, limits()).outcome is Outcome.MEMORY


@pytest.mark.parametrize(
    ("work", "payload", "outcome"),
    [
        (_end, b"abc", Outcome.OK),
        (_end, b"null", Outcome.CRASHED),
        (_exceed_memory, b"a mapping that is not used", Outcome.MEMORY),
        (_exceed_memory, b"a mapping that is gone", Outcome.MEMORY),
        (_exceed_memory, b"a use of all of it", Outcome.MEMORY),
    ],
)
def test_memory_that_is_gone_before_the_fork_works_counts_neither_for_it_nor_against_it(
    work: Callable[[bytes], bytes], payload: bytes, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ended with the other threads of the process, as an example; here it is garbage."""
    fork = os.fork

    def fork_and_collect() -> int:
        if not (pid := fork()):
            gc.collect()
        return pid

    gc.disable()
    try:
        _garbage(4 * MEMORY_BYTES)
        monkeypatch.setattr(os, "fork", fork_and_collect)
        verdict = run_in_fork(work, payload, limits())
    finally:
        gc.enable()
    assert verdict.outcome is outcome


def _exhaust_memory(way: bytes) -> bytes:
    stack = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[stack]"))
    kept = filled()
    match way:
        case b"write to NULL":
            ctypes.memset(0, 1, 1)
        case b"abort":
            os.abort()
        case b"exit":
            os._exit(3)
        case b"stack":
            # Its next page. The kernel maps it where it may, and else sends SIGSEGV.
            ctypes.memset(int(stack.split("-")[0], 16) - mmap.PAGESIZE, 1, 1)
    return str(kept).encode()


@pytest.mark.parametrize("way", [b"write to NULL", b"abort", b"exit", b"stack"])
def test_a_fork_that_uses_all_memory_between_two_looks_and_crashes_says_so(
    way: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_LOOK_S", PATIENCE_S)
    assert run_in_fork(_exhaust_memory, way, limits()).outcome is Outcome.MEMORY


def test_a_result_may_take_most_of_the_memory() -> None:
    """msgspec's encoder ends a process that has no memory for its copy."""
    verdict = run_in_fork(_end, b"most of the memory", limits())
    assert verdict.outcome is Outcome.OK
    assert len(verdict.result) == MEMORY_BYTES - (8 << 20)


def _be_large_or_wait(payload: bytes) -> bytes:
    if payload == b"large":
        return bytes(8 << 20)
    Path(payload.decode()).touch()
    threading.Event().wait()
    return b""


def test_forks_are_limited_while_the_other_end_reads_nothing(tmp_path: Path) -> None:
    """A gateway may be busy, and an answer longer than a socket's buffer."""
    others = set(psutil.Process().children())
    begun = tmp_path / "begun"
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as answers:
        server = threading.Thread(target=ForkServer(theirs, _be_large_or_wait, limits(wall_s=10.0)).run)
        server.start()
        ours.sendall(frame(Asked(1, b"large")) + frame(Asked(2, str(begun).encode())))
        wait_until(begun.exists)
        wait_until(lambda: set(psutil.Process().children()) <= others)
        number_to_end = {}
        while len(number_to_end) < 3:
            length = int.from_bytes(answers.read(LENGTH_BYTES), "little")
            answered = msgspec.msgpack.decode(answers.read(length), type=Answered)
            number_to_end[answered.number] = answered.verdict.outcome, len(answered.verdict.result)
        ours.shutdown(socket.SHUT_RDWR)
        server.join()
    assert number_to_end == {READY: (Outcome.OK, 0), 1: (Outcome.OK, 8 << 20), 2: (Outcome.LATE, 0)}


def test_a_fork_that_cannot_be_made_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: ForkServer) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(ForkServer, "run", fails)
    verdict = run_in_fork(_end, b"", limits())
    assert verdict == Verdict(Outcome.LATE, "no fork could be made: [Errno 24] Too many open files")


def test_a_fork_keeps_no_connection_of_the_process_it_comes_from() -> None:
    """A connection ends for its client when the last process closes it."""
    client, server = socket.socketpair()

    def sockets(_: bytes) -> bytes:
        return b" ".join(bytes(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())

    with client, server:
        verdict = run_in_fork(sockets, b"", limits())
    assert verdict.outcome is Outcome.OK
    assert b"/dev/null" in verdict.result
    assert b"socket:" not in verdict.result
