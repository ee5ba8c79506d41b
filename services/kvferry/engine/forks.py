"""Works on untrusted input in forks of one process, which has a library loaded and runs nothing else."""

# A fork costs milliseconds and ends after one input: a grammar, or the images of a prompt. CPU time, memory and stack
# of a fork are limited, so that an input which exhausts them, or crashes the library, ends only its fork.
#
# A fork that exceeds its memory is killed. With RLIMIT_AS alone its allocations would fail, and libraries show that in
# many ways: by an error that does not mention memory, by an abort, or by a write to NULL, which looks like any crash.

from __future__ import annotations

import contextlib
import ctypes
import enum
import gc
import mmap
import os
import re
import resource
import selectors
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

LENGTH_BYTES = 4  # of a frame's length, little-endian

_MAX_REASON_CHARS = 1000
_WHERE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # time and place in the library's sources
_READ_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_NICENESS = 10  # a library may start as many threads as there are cores, which streams need
_LOOK_S = 0.01  # between two looks at the forks' memory and time
# Times its memory limit a fork may map between two looks (RLIMIT_AS). One that then crashes has written to more than
# half of it, if memory is the cause.
_HARD_LIMIT = 8
# glibc's malloc maps 128 MiB at once, of which it uses little, when the memory that a thread allocates from is full. It
# would count against the limit: 4 MiB are allocated before memory is measured, so that it maps them then.
_MALLOC_BYTES, _NUM_MALLOCS = 64 << 10, 64
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_MOST_MEMORY = struct.Struct("<QQ")
_MEMORY_LINES = re.compile(rb"^(\w+):\s*(\d+) kB$", re.MULTILINE)


class Outcome(enum.StrEnum):
    OK = "ok"
    REFUSED = "refused"  # by the library, with its reason
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    CRASHED = "crashed"
    LATE = "late"  # killed before its CPU time was used: the machine is busy


class ForkLimits(msgspec.Struct, frozen=True):
    """Limits of one fork. `memory_bytes` is what it may map at any time beyond the process it was forked from."""

    cpu_s: float
    wall_s: float
    memory_bytes: int
    stack_bytes: int = 8 << 20  # of each of its threads


class Verdict(msgspec.Struct, frozen=True):
    """The end of a fork. `result` is the work's, where the outcome is OK."""

    outcome: Outcome
    reason: str = ""
    cpu_s: float = 0.0
    result: bytes = b""


class Asked(msgspec.Struct, frozen=True, array_like=True):
    number: int
    payload: bytes


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """The first, with the number READY, says that the library is loaded."""

    number: int
    verdict: Verdict


READY = 0


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


_OUT_OF_MEMORY = frame(Verdict(Outcome.MEMORY))  # made before memory is short


class _MostMemory(NamedTuple):
    mapped_bytes: int
    resident_bytes: int


@dataclass(slots=True)
class _Fork:
    number: int
    pid: int
    deadline_s: float
    said: bytearray = field(default_factory=bytearray)  # its most memory, a frame with a verdict, and the result
    killed_for: Outcome | None = None

    @property
    def most_memory(self) -> _MostMemory | None:
        """None until the fork works."""
        return _MostMemory(*_MOST_MEMORY.unpack_from(self.said)) if len(self.said) >= _MOST_MEMORY.size else None


class ForkServer:
    """Answers `Asked` on a connection until its end, each in a fork. The connection's other end limits their number."""

    def __init__(self, connection: socket.socket, work: Callable[[bytes], bytes], limits: ForkLimits) -> None:
        """`work` returns a result, or raises an exception for an input that the library refuses."""
        self._connection = connection
        self._work = work
        self._limits = limits
        self._selector = selectors.DefaultSelector()
        self._pipe_to_fork: dict[int, _Fork] = {}
        self._unread = bytearray()
        self._unsent = bytearray()

    def __repr__(self) -> str:
        return f"<ForkServer {len(self._pipe_to_fork)} forks>"

    def run(self) -> None:
        """Serve until the other end closes or is lost."""
        self._selector.register(self._connection, selectors.EVENT_READ)
        try:
            self._answer(READY, Verdict(Outcome.OK))
            while True:
                for key, events in self._selector.select(_LOOK_S if self._pipe_to_fork else None):
                    if key.fileobj is not self._connection:
                        self._read_fork(key.fd)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._send_answers()
                    if events & selectors.EVENT_READ:
                        self._read_requests()
                self._kill_exceeding()
        except (EOFError, ConnectionError):
            pass
        finally:
            for fork in self._pipe_to_fork.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork.pid, signal.SIGKILL)

    def _answer(self, number: int, verdict: Verdict) -> None:
        self._unsent += frame(Answered(number, verdict))
        self._selector.modify(self._connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _send_answers(self) -> None:
        # Without waiting for the other end, which may be busy: forks have to be looked at meanwhile.
        with contextlib.suppress(BlockingIOError):
            del self._unsent[: self._connection.send(self._unsent, socket.MSG_DONTWAIT)]
        if not self._unsent:
            self._selector.modify(self._connection, selectors.EVENT_READ)

    def _read_requests(self) -> None:
        data = self._connection.recv(_READ_BYTES)
        if not data:
            raise EOFError
        self._unread += data
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES], "little")
            if len(self._unread) < end:
                return
            asked = msgspec.msgpack.decode(bytes(self._unread[LENGTH_BYTES:end]), type=Asked)
            del self._unread[:end]
            self._fork(asked)

    def _fork(self, asked: Asked) -> None:
        read_end, write_end = os.pipe()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            # The machine has no room for a process now. The input is not known to be bad.
            os.close(read_end)
            os.close(write_end)
            self._answer(asked.number, Verdict(Outcome.LATE))
            return
        if not pid:
            exit_status = 1
            try:
                # A fork frees no garbage of its process: that takes time, and finalizers would delete files.
                gc.freeze()
                _close_inherited(write_end)
                in_use = [bytearray(_MALLOC_BYTES) for _ in range(_NUM_MALLOCS)]
                # Here: other threads of the process that forks may map memory until it has forked.
                memory = _memory_of()
                mapped_again = _map_again(memory)
                most = _most_memory(memory, self._limits)
                _write(write_end, _MOST_MEMORY.pack(*most))
                _limit(self._limits, most.mapped_bytes, parent)
                verdict, result = self._work_on(asked.payload)
                if _memory_of().most_mapped_bytes > most.mapped_bytes:
                    _write(write_end, _OUT_OF_MEMORY)
                else:
                    _write(write_end, frame(verdict))
                    # Not encoded: that takes a copy, and where memory is short msgspec ends the process (SIGSEGV).
                    _write(write_end, result)
                del in_use, mapped_again
                exit_status = 0
            finally:
                os._exit(exit_status)
        os.close(write_end)
        self._pipe_to_fork[read_end] = _Fork(
            asked.number,
            pid,
            deadline_s=time.monotonic() + self._limits.wall_s,
        )
        self._selector.register(read_end, selectors.EVENT_READ)

    def _work_on(self, payload: bytes) -> tuple[Verdict, bytes]:
        try:
            return Verdict(Outcome.OK), self._work(payload)
        except Exception as error:
            if is_of_memory(error):
                return Verdict(Outcome.MEMORY), b""
            return Verdict(Outcome.REFUSED, _WHERE.sub("", str(error))[:_MAX_REASON_CHARS]), b""

    def _read_fork(self, pipe: int) -> None:
        fork = self._pipe_to_fork[pipe]
        data = os.read(pipe, _READ_BYTES)
        fork.said += data
        if len(fork.said) > self._limits.memory_bytes + _READ_BYTES:
            fork.killed_for = Outcome.MEMORY
        if not data or fork.killed_for is not None:
            self._reap(pipe)

    def _reap(self, pipe: int) -> None:
        """End a fork and answer. It may live on without its pipe, and a child of it may keep the pipe."""
        fork = self._pipe_to_fork.pop(pipe)
        self._selector.unregister(pipe)
        os.close(pipe)
        os.kill(fork.pid, signal.SIGKILL)  # one that exits keeps its status: it is set before its pipe is closed
        _, status, usage = os.wait4(fork.pid, 0)
        verdict = self._end_of(fork, status, usage)
        cpu_s = usage.ru_utime + usage.ru_stime
        self._answer(fork.number, msgspec.structs.replace(verdict, cpu_s=cpu_s))

    def _end_of(self, fork: _Fork, status: int, usage: resource.struct_rusage) -> Verdict:
        how = "no verdict"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number in (signal.SIGPROF, signal.SIGXCPU):
                return Verdict(Outcome.CPU_TIME)
            how = next((each.name for each in signal.Signals if each == number), f"signal {number}")
        if fork.killed_for is not None:
            return Verdict(fork.killed_for)  # what it said may be cut
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            said = fork.said[_MOST_MEMORY.size :]
            end = LENGTH_BYTES + int.from_bytes(said[:LENGTH_BYTES], "little")
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                verdict = msgspec.msgpack.decode(said[LENGTH_BYTES:end], type=Verdict)
                return msgspec.structs.replace(verdict, result=bytes(said[end:]))
        if (most := fork.most_memory) is not None and usage.ru_maxrss << 10 > most.resident_bytes:
            return Verdict(Outcome.MEMORY)
        return Verdict(Outcome.CRASHED, how)

    def _kill_exceeding(self) -> None:
        now_s = time.monotonic()
        for pipe, fork in list(self._pipe_to_fork.items()):
            if (most := fork.most_memory) is not None and _memory_of(fork.pid).most_mapped_bytes > most.mapped_bytes:
                fork.killed_for = Outcome.MEMORY
            elif now_s >= fork.deadline_s:
                fork.killed_for = Outcome.LATE
            else:
                continue
            self._reap(pipe)


def is_of_memory(error: BaseException | None) -> bool:
    """Return whether memory was short, which libraries tell as other faults."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def run_in_fork(work: Callable[[bytes], bytes], payload: bytes, limits: ForkLimits) -> Verdict:
    """Return the end of one fork of this process, which may have threads: `work` needs none of them."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        failures: list[str] = []

        def serve() -> None:
            with theirs:  # whose end ends the wait
                try:
                    ForkServer(theirs, work, limits).run()
                except OSError as error:
                    failures.append(str(error))

        server = threading.Thread(target=serve, name="fork")
        server.start()
        with ours.makefile("rb") as answers:
            try:
                ours.sendall(frame(Asked(1, payload)))
                while True:
                    length = int.from_bytes(answers.read(LENGTH_BYTES), "little")
                    answered = msgspec.msgpack.decode(answers.read(length), type=Answered)
                    if answered.number != READY:
                        break
            except (OSError, msgspec.DecodeError):
                server.join()
                return Verdict(Outcome.LATE, f"no fork could be made: {''.join(failures)}")
        ours.shutdown(socket.SHUT_RDWR)
        server.join()
    return answered.verdict


def _close_inherited(kept: int) -> None:
    # A fork could answer for others on the connection, and keeps those of a serving process open after it closed them.
    # Libraries complain of inputs on the output for errors, which is the gateway's log, and clients would fill it.
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


class _Memory(NamedTuple):
    most_mapped_bytes: int  # this and the next since it was forked
    most_resident_bytes: int
    mapped_bytes: int


def _memory_of(pid: int | str = "self") -> _Memory:
    """Return zeros for a process that has ended."""
    # Not psutil: it does not read peaks, and its import would count in each fork.
    lines = _MEMORY_LINES.findall(Path(f"/proc/{pid}/status").read_bytes())
    found = {name: int(kib) << 10 for name, kib in lines}
    mapped_bytes, resident_bytes = found.get(b"VmSize", 0), found.get(b"VmRSS", 0)
    # Not every kernel has the peaks.
    return _Memory(found.get(b"VmPeak", mapped_bytes), found.get(b"VmHWM", resident_bytes), mapped_bytes)


def _map_again(memory: _Memory) -> mmap.mmap | None:
    """Map as many bytes as this fork had and has no longer, such as stacks of threads that it does not have.

    Nothing can be read or written there. The peak shows no mapping beyond the limit that stays below it.
    """
    gone = memory.most_mapped_bytes - memory.mapped_bytes
    return mmap.mmap(-1, gone, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0) if gone > 0 else None


def _most_memory(memory: _Memory, limits: ForkLimits) -> _MostMemory:
    return _MostMemory(
        mapped_bytes=memory.most_mapped_bytes + limits.memory_bytes,
        resident_bytes=memory.most_resident_bytes + _HARD_LIMIT // 2 * limits.memory_bytes,
    )


def _write(pipe: int, payload: bytes) -> None:
    rest = memoryview(payload)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _limit(limits: ForkLimits, most_mapped_bytes: int, parent: int) -> None:
    """Limit this process, and end it with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.nice(_NICENESS)
    address_space = most_mapped_bytes + (_HARD_LIMIT - 1) * limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (limits.stack_bytes, limits.stack_bytes))
    threading.stack_size(limits.stack_bytes)
    whole_s = int(limits.cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
    # With vLLM's imports comes a handler of SIGSEGV, which uses more memory than a fork may have.
    for number in _CRASHES:
        signal.signal(number, signal.SIG_DFL)
    # RLIMIT_CPU counts whole seconds. Its default action ends the process, whatever the library is doing.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
