"""Checks grammars of structured outputs in processes of their own, before an engine or this process reads them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from kvferry.engine.fork_process import ForkProcess
from kvferry.engine.forks import ForkLimits, Outcome, Verdict
from kvferry.errors import InvalidRequest, KvferryError, Overloaded

MAX_WAITING = 64  # grammars that wait for a process
MAX_SPEC_BYTES = 1 << 20  # of all tools' schemas and their envelope
MAX_VERDICTS = 4096
# Less than any thread of an engine has (8 MiB, or 2 where the stack is not limited): a grammar that passes here does
# not overflow a stack there.
STACK_BYTES = 1 << 20
# A library does not change its mind; a machine may have been slow.
KEPT_S: Mapping[Outcome, float] = {
    Outcome.OK: 3600.0,
    Outcome.REFUSED: 3600.0,
    Outcome.CPU_TIME: 300.0,
    Outcome.MEMORY: 300.0,
    Outcome.CRASHED: 300.0,
}


class GrammarChecks:
    """Owns the grammar process until `close`. Use from one event loop."""

    def __init__(self, command: Sequence[str], limits: ForkLimits, *, num_processes: int) -> None:
        """`command` and `limits` are those of a ForkProcess."""
        self.outcomes: Counter[str] = Counter()  # of checks that ran
        self.cpu_s = 0.0  # of those
        self._limits = limits
        self._process = ForkProcess(command, limits, "grammars cannot be compiled now")
        self._free = asyncio.Semaphore(num_processes)
        self._max_checks = num_processes + MAX_WAITING
        self._digest_to_verdict: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # with its end
        self._digest_to_check: dict[bytes, asyncio.Task[Verdict]] = {}

    def __repr__(self) -> str:
        return (
            f"<GrammarChecks checks={len(self._digest_to_check)} kept={len(self._digest_to_verdict)} {self._process!r}>"
        )

    def start(self) -> None:
        """Start the process in the background."""
        self._process.start()

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
                check = self._digest_to_check[digest] = asyncio.create_task(self._decide(digest, encoded))
                check.add_done_callback(lambda done: self._forget(digest, done))
            verdict = await asyncio.shield(check)
        if verdict.outcome is not Outcome.OK:
            raise self._refusal(verdict, param)

    async def close(self) -> None:
        checks = list(self._digest_to_check.values())
        for task in checks:
            task.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        await self._process.close()

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

    async def _decide(self, digest: bytes, spec: bytes) -> Verdict:
        async with self._free:
            verdict = await self._process.ask(spec)
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
            case Outcome.MEMORY:
                return InvalidRequest(
                    f"{where}compiling its grammar takes over {self._limits.memory_bytes >> 20} MiB of memory, "
                    "the limit",
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
