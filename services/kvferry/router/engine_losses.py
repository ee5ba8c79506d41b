"""Engine deaths, hangs and lost links, counted against the requests that may have caused them.

An engine that is lost takes all its requests with it, and at most one of them is to blame: mostly one that never had an
output, because a bad prompt, grammar or parameter ends an engine before the first token. Such a request is a suspect.
It is tried once more, alone among the suspects of its worker, so that a second loss names it.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator

import msgspec
from msgspec import structs

from kvferry.engine.base import EngineRequest
from kvferry.membership.base import MemberId

# Then the request is refused, and not tried again.
MAX_LOSSES = 2
# Of a request that has given tokens, among others that have: any of them may be to blame. In a row without a further
# token, and in all.
MAX_LOSSES_WITHOUT_PROGRESS = 4
MAX_SHARED_LOSSES = 8

QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024

Engine = tuple[MemberId, int]  # a worker and the generation of the link to it


class RequestLosses:
    """Losses of one request, over all its attempts."""

    __slots__ = ("_num_shared", "_num_tokens", "_num_without_progress", "has_answered", "num_blamed", "workers")

    def __init__(self) -> None:
        self.has_answered = False
        self.num_blamed = 0
        self.workers: list[MemberId] = []
        self._num_tokens = 0
        self._num_shared = 0
        self._num_without_progress = 0

    def __repr__(self) -> str:
        return f"<RequestLosses {self.num_blamed} of {len(self.workers)}>"

    @property
    def is_suspect(self) -> bool:
        return self.num_blamed > 0 and not self.has_answered

    @property
    def are_too_many(self) -> bool:
        return (
            self.num_blamed >= MAX_LOSSES
            or self._num_without_progress >= MAX_LOSSES_WITHOUT_PROGRESS
            or self._num_shared >= MAX_SHARED_LOSSES
        )

    def add(self, worker: MemberId, suspects: frozenset[RequestLosses], num_tokens: int) -> None:
        """Count the loss of an engine. `suspects` are all requests on it that may be to blame."""
        self.workers.append(worker)
        if self not in suspects:
            return
        if not self.has_answered or len(suspects) == 1:
            self.num_blamed += 1
            return
        self._num_shared += 1
        self._num_without_progress = 1 if num_tokens > self._num_tokens else self._num_without_progress + 1
        self._num_tokens = num_tokens


class EngineLosses:
    """The requests of one gateway on every engine, and suspects on trial."""

    def __init__(self) -> None:
        self._in_flight: dict[Engine, set[RequestLosses]] = {}
        self._suspects: dict[Engine, frozenset[RequestLosses]] = {}  # of lost engines, until their requests have ended
        self._on_trial: dict[MemberId, RequestLosses] = {}
        self._trial_ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EngineLosses {len(self._in_flight)} engines, {len(self._on_trial)} on trial>"

    def begin(self, engine: Engine, losses: RequestLosses) -> None:
        self._in_flight.setdefault(engine, set()).add(losses)

    def lose(self, engine: Engine, losses: RequestLosses, num_tokens: int) -> None:
        """Count the loss of an engine against the request, which has `num_tokens` of its answer, if it is suspect."""
        suspects = self._suspects.get(engine)
        if suspects is None:
            # The first of its requests to hear of it: all the others are still in flight.
            lost = self._in_flight[engine]
            suspects = frozenset(each for each in lost if not each.has_answered) or frozenset(lost)
            self._suspects[engine] = suspects
        losses.add(engine[0], suspects, num_tokens)

    def end(self, engine: Engine, losses: RequestLosses) -> None:
        left = self._in_flight[engine]
        left.discard(losses)
        if not left:
            del self._in_flight[engine]
            self._suspects.pop(engine, None)

    # Trials

    def is_occupied(self, worker: MemberId, losses: RequestLosses) -> bool:
        """Return whether another suspect than this one is on trial on the worker."""
        return self._on_trial.get(worker, losses) is not losses

    @property
    def has_trials(self) -> bool:
        return bool(self._on_trial)

    def begin_trial(self, losses: RequestLosses, *workers: MemberId | None) -> None:
        for worker in workers:
            if worker is not None:
                self._on_trial[worker] = losses

    def end_trial(self, losses: RequestLosses) -> None:
        """Idempotent."""
        mine = [worker for worker, tried in self._on_trial.items() if tried is losses]
        for worker in mine:
            del self._on_trial[worker]
        if mine:
            self._trial_ended.set()
            self._trial_ended = asyncio.Event()

    async def trial_end(self) -> None:
        """Wait until any trial ends."""
        await self._trial_ended.wait()


class Quarantine:
    """Digests of the latest MAX_QUARANTINED requests that ended engines, each for QUARANTINE_S."""

    def __init__(self) -> None:
        self._digest_to_end_s: OrderedDict[bytes, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Quarantine of {len(self._digest_to_end_s)}>"

    def add(self, request: EngineRequest, now_s: float) -> None:
        digest = digest_of(request)
        self._digest_to_end_s[digest] = now_s + QUARANTINE_S
        self._digest_to_end_s.move_to_end(digest)
        while len(self._digest_to_end_s) > MAX_QUARANTINED:
            self._digest_to_end_s.popitem(last=False)

    def contains(self, request: EngineRequest, now_s: float) -> bool:
        for digest in list(self._ended(now_s)):
            del self._digest_to_end_s[digest]
        return bool(self._digest_to_end_s) and digest_of(request) in self._digest_to_end_s

    def _ended(self, now_s: float) -> Iterator[bytes]:
        for digest, end_s in self._digest_to_end_s.items():
            if end_s > now_s:
                return
            yield digest


def digest_of(request: EngineRequest) -> bytes:
    """Digest of tenant, prompt and parameters. Seeds are left out: the choices of one body differ in them."""
    digest = hashlib.sha256()
    sampling = structs.replace(request.sampling, seed=None)
    for part in (
        request.cache_salt.encode(),
        array("I", request.prompt_token_ids).tobytes(),
        msgspec.msgpack.encode(sampling),
        request.parse.request if request.parse is not None else b"",
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
