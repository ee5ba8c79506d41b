"""Engine deaths, hangs and lost links, counted against the requests that may have caused them."""

# An engine that is lost takes all its requests with it, and at most one of them is to blame: mostly one that never had
# an output, because a bad prompt, grammar or parameter ends an engine before the first token. Such a request is a
# suspect. It is tried once more, alone among the requests without an output of its worker (link/engine_admission.py),
# so that a second loss names it.

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvferry.membership.base import MemberId
from kvferry.router.request import Request

# Then the request is refused, and not tried again.
MAX_LOSSES = 2
# Losses of a request that has given tokens, on engines where other requests had too: any of them may be to blame. In a
# row without a further token, and in all.
MAX_LOSSES_WITHOUT_PROGRESS = 4
MAX_SHARED_LOSSES = 8
# A request's losses that requests of any gateway are blamed for, and its own: it may end each engine after some tokens.
MAX_BLAMELESS_LOSSES = 4
# In a row without a further token, with those that were forgiven: a request may hang each engine for a while only.
MAX_LOSSES_IN_A_ROW = 6

# A worker that goes away without a word may have been killed by its machine or its operator. While others go away too,
# on which the request was not, a second such loss of it is unclear: it counts as that of a request among others, and
# with the first one towards MAX_LOSSES_WITHOUT_PROGRESS.
UNRELATED_S = 60.0
MAX_VANISHED = 256

BLAMED_S = 60.0
MAX_BLAMED = 1024

Engine = tuple[MemberId, int]  # a worker and the generation of the link to it


class _Blamed(NamedTuple):
    num_losses: int
    ends_s: float


class _Trial(NamedTuple):
    digest: bytes
    losses: RequestLosses


class RequestLosses:
    """Losses of one request, over all its attempts."""

    __slots__ = (
        "_num_blameless",
        "_num_in_a_row",
        "_num_shared",
        "_num_tokens",
        "_num_unclear",
        "_num_without_progress",
        "has_answered",
        "num_blamed",
        "workers",
    )

    def __init__(self) -> None:
        self.has_answered = False
        self.num_blamed = 0
        self.workers: list[MemberId] = []
        self._num_tokens = 0
        self._num_blameless = 0
        self._num_in_a_row = 0
        self._num_shared = 0
        self._num_without_progress = 0
        self._num_unclear = 0  # of those without progress

    def __repr__(self) -> str:
        return f"<RequestLosses {self.num_blamed} of {len(self.workers)}>"

    @property
    def is_suspect(self) -> bool:
        return self.num_blamed > 0 and not self.has_answered

    @property
    def are_too_many(self) -> bool:
        return (
            self.num_blamed >= MAX_LOSSES
            or self.num_blamed + self._num_unclear >= MAX_LOSSES_WITHOUT_PROGRESS
            or self._num_without_progress >= MAX_LOSSES_WITHOUT_PROGRESS
            or self._num_shared >= MAX_SHARED_LOSSES
            or self._num_in_a_row >= MAX_LOSSES_IN_A_ROW
            or self.num_blamed + self._num_blameless >= MAX_BLAMELESS_LOSSES
        )

    def add(
        self, worker: MemberId, suspects: frozenset[RequestLosses], num_tokens: int, *, are_others_lost: bool
    ) -> bool:
        """Count the loss of an engine. `suspects` are all requests on it that may be to blame.

        Return whether this one is blamed.
        """
        self.workers.append(worker)
        if self not in suspects:
            return False
        if num_tokens > self._num_tokens:
            self._num_tokens = num_tokens
            self._num_in_a_row = self._num_without_progress = self._num_unclear = 0
        self._num_in_a_row += 1
        is_shared = self.has_answered and len(suspects) > 1
        if not is_shared and not (are_others_lost and self.num_blamed == MAX_LOSSES - 1):
            self.num_blamed += 1
            return True
        self._num_shared += 1
        self._num_without_progress += 1
        self._num_unclear += not is_shared
        return False

    def add_blameless(self, worker: MemberId) -> None:
        self.workers.append(worker)
        self._num_blameless += 1

    def adopt(self, num_blamed: int) -> None:
        """Be as suspect as a copy of this request."""
        self.num_blamed = max(self.num_blamed, num_blamed)


class EngineLosses:
    """The requests of one gateway on every engine, and suspects on trial."""

    def __init__(self, on_trial_end: Callable[[], None] = lambda: None) -> None:
        self._in_flight: dict[Engine, set[RequestLosses]] = {}
        self._suspects: dict[Engine, frozenset[RequestLosses]] = {}  # of lost engines, until their requests have ended
        self._on_trial: dict[MemberId, _Trial] = {}
        # Requests that were blamed and have not answered since: copies of them are suspects too.
        self._blamed: OrderedDict[bytes, _Blamed] = OrderedDict()
        self._blamed_for: dict[MemberId, dict[RequestLosses, bytes]] = {}  # by the worker that was lost last
        self._vanished: OrderedDict[MemberId, float] = OrderedDict()  # of workers that went away without a word
        self._trial_ended = asyncio.Event()
        self._on_trial_end = on_trial_end

    def __repr__(self) -> str:
        return f"<EngineLosses {len(self._in_flight)} engines, {len(self._on_trial)} on trial>"

    def begin(self, engine: Engine, losses: RequestLosses) -> None:
        self._in_flight.setdefault(engine, set()).add(losses)

    def lose(
        self,
        engine: Engine,
        losses: RequestLosses,
        num_tokens: int,
        now_s: float,
        *,
        has_vanished: bool = False,
        is_blameless: bool = False,
    ) -> bool:
        """Count the loss of an engine against the request, which has `num_tokens` of its answer, if it is suspect.

        `has_vanished`: its worker went away without a word. Return whether the request is blamed.
        """
        if is_blameless:
            losses.add_blameless(engine[0])
            return False
        suspects = self._suspects.get(engine)
        if suspects is None:
            # The first of its requests to hear of it: all the others are still in flight.
            lost = self._in_flight[engine]
            suspects = frozenset(each for each in lost if not each.has_answered) or frozenset(lost)
            self._suspects[engine] = suspects
        are_others_lost = False
        if has_vanished:
            self.note_vanished(engine[0], now_s)
            unrelated = self._vanished.keys() - {engine[0], *losses.workers}
            are_others_lost = any(now_s - self._vanished[worker] < UNRELATED_S for worker in unrelated)
        return losses.add(engine[0], suspects, num_tokens, are_others_lost=are_others_lost)

    def note_vanished(self, worker: MemberId, now_s: float) -> None:
        """Note that a worker, with or without requests, went away without a word."""
        self._vanished[worker] = now_s
        self._vanished.move_to_end(worker)
        while len(self._vanished) > MAX_VANISHED:
            self._vanished.popitem(last=False)

    def end(self, engine: Engine, losses: RequestLosses) -> None:
        left = self._in_flight[engine]
        left.discard(losses)
        if not left:
            del self._in_flight[engine]
            self._suspects.pop(engine, None)

    # Copies of a request: choices of one body, or a client that tries again

    def knows_blamed(self, now_s: float) -> bool:
        while self._blamed and next(iter(self._blamed.values())).ends_s <= now_s:
            self._blamed.popitem(last=False)
        return bool(self._blamed)

    def note_blamed(self, worker: MemberId, digest: bytes, losses: RequestLosses) -> None:
        blamed = self._blamed_for.setdefault(worker, {})
        blamed[losses] = digest
        if len(blamed) > MAX_BLAMED:
            del blamed[next(iter(blamed))]
        if len(self._blamed_for) > MAX_BLAMED:
            del self._blamed_for[next(iter(self._blamed_for))]

    def forgive(self, worker: MemberId) -> None:
        """Take back the blame for a worker whose engine lives: only the link to it was lost."""
        for losses, digest in self._blamed_for.pop(worker, {}).items():
            losses.num_blamed = max(0, losses.num_blamed - 1)
            if not losses.num_blamed:
                self.discharge(digest)

    def blame(self, digest: bytes, losses: RequestLosses, now_s: float) -> None:
        self._blamed[digest] = _Blamed(losses.num_blamed, now_s + BLAMED_S)
        self._blamed.move_to_end(digest)
        while len(self._blamed) > MAX_BLAMED:
            self._blamed.popitem(last=False)

    def adopt_blame(self, digest: bytes, losses: RequestLosses) -> None:
        blamed = self._blamed.get(digest)
        if blamed is not None and not losses.has_answered:
            losses.adopt(blamed.num_losses)

    def discharge(self, digest: bytes) -> None:
        """A copy of the request has answered. Unknown digests are ignored."""
        self._blamed.pop(digest, None)

    def is_copy_on_trial(self, digest: bytes, losses: RequestLosses) -> bool:
        return any(trial.digest == digest and trial.losses is not losses for trial in self._on_trial.values())

    # Trials

    def is_occupied(self, worker: MemberId, losses: RequestLosses) -> bool:
        """Return whether another request is on trial on the worker: no other may be lost with it."""
        trial = self._on_trial.get(worker)
        return trial is not None and trial.losses is not losses

    @property
    def has_trials(self) -> bool:
        return bool(self._on_trial)

    def begin_trial(self, digest: bytes, losses: RequestLosses, *workers: MemberId | None) -> None:
        trial = _Trial(digest, losses)
        for worker in workers:
            if worker is not None:
                self._on_trial[worker] = trial

    def end_trial(self, losses: RequestLosses) -> None:
        """Idempotent."""
        mine = [worker for worker, trial in self._on_trial.items() if trial.losses is losses]
        for worker in mine:
            del self._on_trial[worker]
        if mine:
            self._trial_ended.set()
            self._trial_ended = asyncio.Event()
            self._on_trial_end()

    async def trial_end(self) -> None:
        """Wait until any trial ends."""
        await self._trial_ended.wait()


def digest_of(request: Request) -> bytes:
    """Digest of tenant, prompt, parameters, adapter and images.

    Seeds are left out: the choices of one body differ in them.
    """
    digest, prompt = hashlib.sha256(), request.prompt
    for part in (
        prompt.cache_salt.encode(),
        array("I", prompt.token_ids).tobytes(),
        msgspec.msgpack.encode(request.sampling.with_seed(None)),
        request.parse.request if request.parse is not None else b"",
        # Without an adapter and images the digest is what earlier releases have.
        *([prompt.adapter.encode()] if prompt.adapter else []),
        *([msgspec.msgpack.encode(prompt.image_spans)] if prompt.images else []),
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
