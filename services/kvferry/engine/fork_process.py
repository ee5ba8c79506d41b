"""A process that works on untrusted input in forks (`engine/forks.py`), seen from the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from kvferry.engine.forks import LENGTH_BYTES, READY, Answered, Asked, ForkLimits, Verdict, frame
from kvferry.engine.hang_detector import HangDetector
from kvferry.errors import NotReady

log = logging.getLogger(__name__)

WALL_PER_CPU = 5.0  # of a fork's limits: the machine may be busy

_SLOW_START_S = 120.0  # from then on requests are refused, and do not wait for the start
# A start has no limit of time: on a machine whose cores others use, 15 s of CPU time take many minutes. One that waits
# for a core gets seconds of CPU time in that time; one that gets less than a second hangs, though a thread may poll.
_STILL_START_S = 600.0
_MOST_START_CPU_S = 600.0
_START_PERIOD_S = 1.0  # between two looks at a start
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_ANSWER_MARGIN_S = 60.0  # after a fork's deadline, until the process counts as hung

_PASSED_ON = frozenset({"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "HF_HOME"})
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment_of_process(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of an environment that a process of forks gets: no secrets."""
    passed = {
        name: value
        for name, value in environ.items()
        if name in _PASSED_ON or (name.startswith("VLLM_") and not any(secret in name for secret in _SECRETS))
    }
    return {
        **passed,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # The gateway has fetched what belongs to the model.
        "HF_HUB_OFFLINE": "1",
        # A fork has only the thread that forked: libraries must not start any before.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MALLOC_ARENA_MAX": "1",  # an arena per thread would count against the address space
    }


class InheritedFile:
    """A file in memory that processes of forks inherit; it is closed with its last reference."""

    def __init__(self, content: bytes) -> None:
        self.fd = os.memfd_create("inherited")
        weakref.finalize(self, os.close, self.fd)
        with os.fdopen(self.fd, "wb", closefd=False) as opened:
            opened.write(content)
        self.path = Path(f"/proc/self/fd/{self.fd}")  # here and in processes that inherit it


class ForkProcess:
    """Owns a process of forks until `close`; starts it again when it ends. Use from one event loop."""

    def __init__(
        self, command: Sequence[str], limits: ForkLimits, complaint: str, inherited: Sequence[InheritedFile] = ()
    ) -> None:
        """`command` runs a ForkServer on its standard input, with the limits as JSON for its last argument.

        `complaint` begins errors while there is no process: "grammars cannot be tried now".
        """
        self.limits = limits
        self._command = [*command, msgspec.json.encode(limits).decode()]
        self._complaint = complaint
        self._inherited = inherited
        self._process: _Process | None = None
        self._starting: asyncio.Task[_Process] | None = None
        self._start_began_s = 0.0
        self._start_cpu_s = 0.0
        self._num_failures = 0  # in a row
        self._not_before_s = 0.0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ForkProcess {self.pid}>"

    @property
    def pid(self) -> int | None:
        return self._process.popen.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process in the background, in seconds where the machine is not busy."""
        self._start()

    async def ask(self, payload: bytes) -> Verdict:
        """Work on an input in a fork. Waits for a start, but not for a slow one. Callers limit how many ask.

        Raises NotReady while there is no process.
        """
        process = await self._running()
        try:
            return await process.ask(payload, self.limits.wall_s + _ANSWER_MARGIN_S)
        except (_Ended, TimeoutError):
            raise NotReady(f"{self._complaint}: their process ended or hangs") from None

    async def close(self) -> None:
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    async def _running(self) -> _Process:
        if self._process is not None and self._process.is_alive:
            return self._process
        starting = self._start()
        left_s = self._start_began_s + _SLOW_START_S - time.monotonic()
        await asyncio.wait([starting], timeout=max(0.0, left_s))
        if not starting.done():
            raise NotReady(f"{self._complaint}: {self._start_so_far()}")
        return starting.result()

    def _start(self) -> asyncio.Task[_Process]:
        if self._starting is None:
            self._start_began_s = time.monotonic()
            self._start_cpu_s = 0.0
            self._starting = asyncio.create_task(self._started())
            self._starting.add_done_callback(self._settle)
        return self._starting

    def _settle(self, starting: asyncio.Task[_Process]) -> None:
        self._starting = None
        if not starting.cancelled() and (error := starting.exception()) is not None and self._num_failures == 1:
            log.error("%s", error)

    async def _started(self) -> _Process:
        if self._is_closed or time.monotonic() < self._not_before_s:
            raise NotReady(f"{self._complaint}: their process has ended and starts again soon")
        if self._process is not None:
            ended, self._process = self._process, None
            await ended.end()
            log.warning("%s: their process (%d) ended and starts again", self._complaint, ended.popen.pid)
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failures)
        self._not_before_s = time.monotonic() + pause_s
        process = await _Process.started(self._command, [file.fd for file in self._inherited])
        try:
            await self._wait_ready(process)
        except BaseException as error:
            self._num_failures += 1
            self._not_before_s = time.monotonic() + pause_s
            await process.end()
            if isinstance(error, _Ended):
                why = str(error) or "it ended"
                raise NotReady(f"{self._complaint}: their process does not start: {why}") from None
            raise
        self._num_failures = 0
        self._process = process
        return process

    async def _wait_ready(self, process: _Process) -> None:
        """Raises _Ended, also for a start that hangs."""
        hang_detector = HangDetector(_STILL_START_S)
        is_slow = False
        while not await process.is_ready(within_s=_START_PERIOD_S):
            self._start_cpu_s = process.cpu_s()
            if hang_detector.is_hung(time.monotonic(), int(self._start_cpu_s), busy=True):
                raise _Ended(f"it used less than 1 s of CPU time in {_STILL_START_S:g} s")
            if self._start_cpu_s >= _MOST_START_CPU_S:
                raise _Ended(f"it used {self._start_cpu_s:.1f} s of CPU time")
            if not is_slow and time.monotonic() >= self._start_began_s + _SLOW_START_S:
                is_slow = True
                log.warning("%s: %s", self._complaint, self._start_so_far())
        if is_slow:
            log.info("a process (%d) started after %.0f s", process.popen.pid, time.monotonic() - self._start_began_s)

    def _start_so_far(self) -> str:
        age_s = time.monotonic() - self._start_began_s
        return f"their process has been starting for {age_s:.0f} s and had {self._start_cpu_s:.1f} s of CPU time"


class _Ended(Exception):
    pass


@dataclass(slots=True, eq=False)
class _Process:
    popen: subprocess.Popen[bytes]
    writer: asyncio.StreamWriter
    reading: asyncio.Task[None]
    number_to_answer: dict[int, asyncio.Future[Verdict]]
    last_number: int = READY

    @classmethod
    async def started(cls, command: Sequence[str], inherited: Sequence[int]) -> _Process:
        ours, theirs = socket.socketpair()
        starting = asyncio.create_task(asyncio.to_thread(_popen, command, theirs, inherited))
        try:
            popen = await asyncio.shield(starting)
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            # The thread goes on where this is cancelled, and its process would be left behind.
            await asyncio.wait([starting])
            ours.close()
            if starting.exception() is None:
                starting.result().kill()
                await asyncio.to_thread(starting.result().wait)
            raise
        finally:
            theirs.close()
        number_to_answer = {READY: asyncio.get_running_loop().create_future()}
        reading = asyncio.create_task(_read_answers(reader, number_to_answer))
        return cls(popen, writer, reading, number_to_answer)

    @property
    def is_alive(self) -> bool:
        return not self.reading.done()

    async def is_ready(self, *, within_s: float) -> bool:
        """Raises _Ended."""
        ready = self.number_to_answer[READY]
        await asyncio.wait([ready], timeout=within_s)
        if ready.done():
            ready.result()
        return ready.done()

    def cpu_s(self) -> float:
        """Return the CPU time of the process and of the children that it waited for. Raises _Ended."""
        try:
            times = psutil.Process(self.popen.pid).cpu_times()
        except psutil.NoSuchProcess:
            raise _Ended from None
        return times.user + times.system + times.children_user + times.children_system

    async def ask(self, payload: bytes, timeout_s: float) -> Verdict:
        """Raises _Ended or TimeoutError."""
        self.last_number += 1
        number = self.last_number
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.number_to_answer[number] = answer
        try:
            if not self.is_alive:
                raise _Ended
            self.writer.write(frame(Asked(number, payload)))
            async with asyncio.timeout(timeout_s):
                return await answer
        except (_Ended, TimeoutError):
            self.reading.cancel()  # `is_alive` is false from now on
            raise
        finally:
            self.number_to_answer.pop(number, None)

    async def end(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
        self.popen.kill()
        await asyncio.to_thread(self.popen.wait)


def _popen(command: Sequence[str], connection: socket.socket, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=connection.fileno(),
        stdout=subprocess.DEVNULL,
        env=environment_of_process(),
        pass_fds=inherited,
    )


async def _read_answers(reader: asyncio.StreamReader, number_to_answer: dict[int, asyncio.Future[Verdict]]) -> None:
    decoder = msgspec.msgpack.Decoder(Answered)
    try:
        while True:
            length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
            answered = decoder.decode(await reader.readexactly(length))
            waiting = number_to_answer.get(answered.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answered.verdict)
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        for waiting in number_to_answer.values():
            if not waiting.done():
                waiting.set_exception(_Ended())
                waiting.exception()
