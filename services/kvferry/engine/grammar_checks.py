"""Tries grammars of structured outputs in a process of their own, before an engine gets them."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict

from kvferry.engine.base import Asker, CacheSalt
from kvferry.engine.deep_threads import STACK_BYTES
from kvferry.engine.fair_turns import FairTurns
from kvferry.engine.fork_process import WALL_PER_CPU, ForkProcess
from kvferry.engine.forks import ForkLimits, Outcome, Verdict
from kvferry.errors import InvalidRequest, KvferryError, Overloaded
from kvferry.observability.telemetry import FORK_OUTCOMES

MAX_WAITING = 64  # grammars that wait to be tried
NUM_FORKS = 2
MAX_GRAMMAR_BYTES = 1 << 20  # of all tools' schemas and their envelope
MAX_PASSED = 4096  # digests that are kept
_CPU_S = 2.0
LIMITS = ForkLimits(
    cpu_s=_CPU_S,
    wall_s=_CPU_S * WALL_PER_CPU,
    memory_bytes=128 << 20,  # engines have the same for each request, without a limit; an ordinary one takes 1 MiB
    stack_bytes=STACK_BYTES // 2,  # half of what engines have, whose stacks hold more beside the library's calls
)


class GrammarChecks:
    """Owns the grammar process until `close`. Use from one event loop."""

    def __init__(self, process: ForkProcess) -> None:
        self.outcomes = Counter(dict.fromkeys(FORK_OUTCOMES, 0))
        self._process = process
        complaint = f"{MAX_WAITING} grammars wait to be tried, the limit of this gateway"
        self._turns = FairTurns(NUM_FORKS, MAX_WAITING, complaint)
        # By salt: a tenant's requests must not tell by their time what others sent.
        self._passed: OrderedDict[tuple[CacheSalt, bytes], None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<GrammarChecks {self._turns!r} passed={len(self._passed)} {self._process!r}>"

    def start(self) -> None:
        """Start the process in the background."""
        self._process.start()

    async def check(self, grammar: str, asker: Asker) -> None:
        """Return if engines can follow the grammar, which is llguidance's.

        Raises InvalidRequest, Overloaded, or NotReady while there is no grammar process.
        """
        payload = grammar.encode(errors="surrogatepass")
        if len(payload) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"{len(payload)} bytes of grammar are too many; {MAX_GRAMMAR_BYTES} are the limit")
        key = asker.salt, hashlib.sha256(payload).digest()
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        # Its fork runs on after a client has left, and has its turn until then.
        verdict = await self._turns.run(asker.tenant, lambda: self._try(key, payload))
        if verdict.outcome is not Outcome.OK:
            raise self._refusal(verdict)

    async def _try(self, key: tuple[CacheSalt, bytes], payload: bytes) -> Verdict:
        if key in self._passed:  # an equal request has tried it meanwhile
            return Verdict(Outcome.OK)
        verdict = await self._process.ask(payload)
        self.outcomes[verdict.outcome] += 1
        if verdict.outcome is Outcome.OK:
            self._passed[key] = None
            if len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)
        return verdict

    async def close(self) -> None:
        await self._process.close()

    def _refusal(self, verdict: Verdict) -> KvferryError:
        limits = self._process.limits
        match verdict.outcome:
            case Outcome.REFUSED:
                return InvalidRequest(verdict.reason.strip() or "llguidance refuses it")
            case Outcome.CPU_TIME:
                return InvalidRequest(f"its grammar takes over {limits.cpu_s:g} s of CPU time, the limit")
            case Outcome.LATE:
                return Overloaded("this gateway is too busy to try the grammar")
            case _:
                return InvalidRequest(
                    f"its grammar takes over {limits.memory_bytes >> 20} MiB of memory, or nests too deeply"
                )
