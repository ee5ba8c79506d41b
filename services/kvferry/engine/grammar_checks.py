"""Checks grammars of structured outputs in processes of their own, before an engine or this process reads them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.engine.grammar_forks import LENGTH_BYTES, READY, Answered, Asked, GrammarLimits, Outcome, Verdict, frame
from kvferry.errors import InvalidRequest, KvferryError, NotReady, Overloaded

log = logging.getLogger(__name__)

MAX_WAITING = 64  # grammars that wait for a process
MAX_SPEC_BYTES = 1 << 20  # of all tools' schemas and their envelope
MAX_VERDICTS = 4096
# A library does not change its mind; a machine may have been slow.
KEPT_S: Mapping[Outcome, float] = {
    Outcome.OK: 3600.0,
    Outcome.REFUSED: 3600.0,
    Outcome.CPU_TIME: 300.0,
    Outcome.MEMORY: 300.0,
    Outcome.CRASHED: 300.0,
}
WALL_PER_CPU = 5.0  # of a fork's limits: the machine may be busy

_START_TIMEOUT_S = 120.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_ANSWER_MARGIN_S = 10.0  # after a fork's deadline, until the process is taken for hung

_PASSED_ON = frozenset({"PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "HF_HOME"})
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment_of_process(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the part of an environment that the grammar process gets: no secrets."""
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


class GrammarChecks:
    """Owns the grammar process until `close`; starts it again when it ends. Use from one event loop."""

    def __init__(self, command: Sequence[str], limits: GrammarLimits, *, num_processes: int) -> None:
        """`command` runs a ForkServer on its standard input, with the limits as JSON for its last argument."""
        self.outcomes: Counter[str] = Counter()  # of checks that ran
        self.cpu_s = 0.0  # of those
        self._command = [*command, msgspec.json.encode(limits).decode()]
        self._limits = limits
        self._free = asyncio.Semaphore(num_processes)
        self._max_checks = num_processes + MAX_WAITING
        self._digest_to_verdict: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # with its end
        self._digest_to_check: dict[bytes, asyncio.Task[Verdict]] = {}
        self._process: _Process | None = None
        self._starting: asyncio.Task[_Process] | None = None
        self._num_failures = 0  # in a row
        self._not_before_s = 0.0
        self._is_closed = False

    def __repr__(self) -> str:
        return (
            f"<GrammarChecks checks={len(self._digest_to_check)} kept={len(self._digest_to_verdict)} {self._process!r}>"
        )

    def start(self) -> None:
        """Start the process, in seconds, in the background."""
        self._start()

    async def check(self, spec: str, *, param: str | None) -> None:
        """Return if engines can compile the grammar within the limits; `param` names the request's field.

        Raises InvalidRequest, Overloaded, or NotReady while there is no grammar process.
        """
        encoded = spec.encode(errors="surrogatepass")
        if len(encoded) > MAX_SPEC_BYTES:
            raise InvalidRequest(
                f"{len(encoded)} bytes of grammar are too many; at most {MAX_SPEC_BYTES} are allowed", param=param
            )
        digest = hashlib.sha256(encoded).digest()
        verdict = self._kept(digest)
        if verdict is None:
            check = self._digest_to_check.get(digest)
            if check is None:
                if len(self._digest_to_check) >= self._max_checks:
                    raise Overloaded(f"{MAX_WAITING} grammars wait to be compiled, the limit of this gateway")
                check = self._digest_to_check[digest] = asyncio.create_task(self._decide(digest, spec))
                check.add_done_callback(lambda done: self._forget(digest, done))
            verdict = await asyncio.shield(check)
        if verdict.outcome is not Outcome.OK:
            raise self._refusal(verdict, param)

    async def close(self) -> None:
        self._is_closed = True
        checks = [*self._digest_to_check.values(), *([self._starting] if self._starting is not None else [])]
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        if self._process is not None:
            process, self._process = self._process, None
            await process.end()

    def _kept(self, digest: bytes) -> Verdict | None:
        kept = self._digest_to_verdict.get(digest)
        if kept is None:
            return None
        verdict, end_s = kept
        if time.monotonic() >= end_s:
            del self._digest_to_verdict[digest]
            return None
        self._digest_to_verdict.move_to_end(digest)
        return verdict

    def _forget(self, digest: bytes, check: asyncio.Task[Verdict]) -> None:
        del self._digest_to_check[digest]
        if not check.cancelled():
            check.exception()  # all that asked may have left

    async def _decide(self, digest: bytes, spec: str) -> Verdict:
        async with self._free:
            process = await self._running()
            verdict = await process.ask(spec, self._limits.wall_s + _ANSWER_MARGIN_S)
        self.outcomes[verdict.outcome] += 1
        self.cpu_s += verdict.cpu_s
        kept_s = KEPT_S.get(verdict.outcome)
        if kept_s is not None:
            self._digest_to_verdict[digest] = verdict, time.monotonic() + kept_s
            if len(self._digest_to_verdict) > MAX_VERDICTS:
                self._digest_to_verdict.popitem(last=False)
        return verdict

    def _refusal(self, verdict: Verdict, param: str | None) -> KvferryError:
        where = f"{param}: " if param is not None else ""
        match verdict.outcome:
            case Outcome.REFUSED:
                text = verdict.reason.strip().splitlines() or ["the grammar library refuses it"]
                return InvalidRequest(f"{where}{text[0]}", param=param)
            case Outcome.CPU_TIME:
                return InvalidRequest(
                    f"{where}compiling its grammar takes over {self._limits.cpu_s:g} s of CPU time, the limit",
                    param=param,
                )
            case Outcome.LATE:
                return Overloaded("this gateway is too busy to compile the grammar")
            case _:
                return InvalidRequest(
                    f"{where}compiling its grammar takes over {self._limits.memory_bytes >> 20} MiB of memory, "
                    "or nests too deeply",
                    param=param,
                )

    async def _running(self) -> _Process:
        if self._process is not None and self._process.is_alive:
            return self._process
        return await asyncio.shield(self._start())

    def _start(self) -> asyncio.Task[_Process]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._started())
            self._starting.add_done_callback(self._settle)
        return self._starting

    def _settle(self, starting: asyncio.Task[_Process]) -> None:
        self._starting = None
        if not starting.cancelled() and (error := starting.exception()) is not None and self._num_failures == 1:
            log.error("no grammar can be compiled: %s", error)

    async def _started(self) -> _Process:
        if self._is_closed or time.monotonic() < self._not_before_s:
            raise NotReady("grammars cannot be compiled now: their process has ended and starts again soon")
        if self._process is not None:
            ended, self._process = self._process, None
            await ended.end()
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._num_failures)
        self._not_before_s = time.monotonic() + pause_s
        process = await _Process.started(self._command)
        try:
            await process.ask_ready(_START_TIMEOUT_S)
        except BaseException as error:
            self._num_failures += 1
            self._not_before_s = time.monotonic() + pause_s
            await process.end()
            if isinstance(error, _Ended | TimeoutError):
                raise NotReady("grammars cannot be compiled now: their process does not start") from None
            raise
        self._num_failures = 0
        self._process = process
        return process


class _Ended(Exception):
    pass


@dataclass(slots=True, eq=False)
class _Process:
    """A grammar process and the connection to it."""

    popen: subprocess.Popen[bytes]
    writer: asyncio.StreamWriter
    reading: asyncio.Task[None]
    number_to_answer: dict[int, asyncio.Future[Verdict]]
    last_number: int = READY

    @classmethod
    async def started(cls, command: Sequence[str]) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = await asyncio.to_thread(_popen, command, theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        number_to_answer = {READY: asyncio.get_running_loop().create_future()}
        reading = asyncio.create_task(_read_answers(reader, number_to_answer))
        return cls(popen, writer, reading, number_to_answer)

    def __repr__(self) -> str:
        return f"<grammar process {self.popen.pid}>"

    @property
    def is_alive(self) -> bool:
        return not self.reading.done()

    async def ask_ready(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            await self.number_to_answer[READY]

    async def ask(self, spec: str, timeout_s: float) -> Verdict:
        """Raises NotReady if the process ends or hangs meanwhile."""
        self.last_number += 1
        number = self.last_number
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self.number_to_answer[number] = answer
        try:
            if not self.is_alive:
                raise _Ended
            self.writer.write(frame(Asked(number, spec)))
            async with asyncio.timeout(timeout_s):
                return await answer
        except (_Ended, TimeoutError):
            self.reading.cancel()  # `is_alive` is false from now on
            raise NotReady("grammars cannot be compiled now: their process ended or hangs") from None
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


def _popen(command: Sequence[str], connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=connection.fileno(), stdout=subprocess.DEVNULL, env=environment_of_process())


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
