"""One request over all its attempts: its state, and what each event changes. Without I/O."""

# `dispatch.py` reports events, and `request_placer.py` asks what may be tried next.

from __future__ import annotations

import functools
from dataclasses import dataclass

from kvferry.engine.base import TransferParams
from kvferry.errors import KvferryError, Overloaded, PagesNotMoved, Preempted, UnavailableError, WorkerDraining
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import Member, MemberId
from kvferry.router.engine_losses import Engine, RequestLosses, digest_of
from kvferry.router.request import Answer, RequestRecord, RequestState

WORKER_WAIT_S = 60.0  # of a request that lost its decode worker, for another one
MAX_PREFILL_ATTEMPTS = 2  # then the decode worker computes the prompt

# ENDED follows all.
_FOLLOWING = {
    RequestState.QUEUED: {RequestState.PLACED},
    RequestState.PLACED: {RequestState.PREFILLING, RequestState.DECODING, RequestState.QUEUED},
    RequestState.PREFILLING: {RequestState.PLACED, RequestState.QUEUED},
    RequestState.DECODING: {RequestState.QUEUED},
    RequestState.ENDED: set(),
}


@dataclass(slots=True)
class KeptPages:
    """Pages that a prefill engine keeps. `params` are good for one engine, once."""

    holder: Member
    engine: Engine  # the holder's
    params: TransferParams
    is_given: bool = False  # to a decode engine


def engine_of(link: WorkerLink) -> Engine:
    return link.member.member_id, link.generation


class RequestRun:
    """`kept` are pages of the prompt that a prefill worker keeps. An engine that failed is not tried again."""

    def __init__(self, answer: Answer, record: RequestRecord) -> None:
        self.answer = answer
        self.record = record
        self.losses = RequestLosses()
        self.kept: KeptPages | None = None
        self.last_error: KvferryError | None = None
        self._failed: set[Engine] = set()
        self._num_prefill_failures = 0
        self._must_wait = False
        self._loss_wait_ends_s: float | None = None
        self._line_ends_s: float | None = None

    def __repr__(self) -> str:
        return f"<RequestRun {self.answer.request_id} {self.record.state}, {self.losses!r}>"

    # What may be tried

    @functools.cached_property
    def digest(self) -> bytes:
        return digest_of(self.answer.request)

    @property
    def has_begun(self) -> bool:
        """Whether a worker had it before: it goes before new requests."""
        return bool(self.answer.token_ids or self.losses.workers or self.record.num_preemptions)

    @property
    def may_prefill(self) -> bool:
        return self._num_prefill_failures < MAX_PREFILL_ATTEMPTS

    def may_try(self, link: WorkerLink) -> bool:
        return not self._failed or engine_of(link) not in self._failed

    def begin_placing(self) -> bool:
        """Return whether to wait for news of room first: its last worker would refuse it again."""
        if self.has_begun:
            self._line_ends_s = None  # an answer that is preempted waits anew
        must_wait, self._must_wait = self._must_wait, False
        return must_wait

    def loss_wait_ends_s(self, now_s: float) -> float:
        if self._loss_wait_ends_s is None:
            self._loss_wait_ends_s = now_s + WORKER_WAIT_S
        return self._loss_wait_ends_s

    def line_ends_s(self, now_s: float, queue_timeout_s: float) -> float:
        if self.losses.workers:
            ends_s = self.loss_wait_ends_s(now_s)
        else:
            ends_s = self._line_ends_s = self._line_ends_s or now_s + queue_timeout_s
        deadline_s = self.answer.request.deadline_s
        return ends_s if deadline_s is None else min(ends_s, deadline_s)

    # Events

    def place(self) -> None:
        self._become(RequestState.PLACED)

    def lose_placement(self, error: KvferryError) -> None:
        self.last_error = error
        self._become(RequestState.QUEUED)

    def refuse_place(self, link: WorkerLink, error: Overloaded | UnavailableError) -> None:
        # The worker reserved no place. One that is full is asked again.
        self.last_error = error
        if not isinstance(error, Overloaded):
            self._failed.add(engine_of(link))

    def begin_prefill(self) -> None:
        self._become(RequestState.PREFILLING)

    def keep(self, kept: KeptPages) -> None:
        self.kept = kept
        self._become(RequestState.PLACED)

    def fail_prefill(self, link: WorkerLink | None) -> None:
        # Another prefill worker is tried, or at last the decode worker computes the prompt.
        self._count_prefill_failure(engine_of(link) if link is not None else None)
        self._become(RequestState.QUEUED if self.may_prefill else RequestState.PLACED)

    def give_up_prefill(self) -> None:
        self._num_prefill_failures = MAX_PREFILL_ATTEMPTS
        self._become(RequestState.PLACED)

    def refuse_prefill(self, error: Overloaded) -> None:
        # Full is not failed: the link says so until the worker has room, and nothing was computed.
        self.last_error = error
        self._note_full()
        self._become(RequestState.QUEUED)

    def begin_decode(self, link: WorkerLink) -> None:
        self._failed.add(engine_of(link))  # unless this attempt says that it may be tried again
        self._become(RequestState.DECODING)

    def preempt(self, link: WorkerLink, error: Preempted) -> None:
        self.kept = None  # the engine may have pulled the pages
        self._failed.discard(engine_of(link))
        self.last_error = error
        self.record.num_preemptions += 1
        self._become(RequestState.QUEUED)

    def fail_decode(self, link: WorkerLink, error: UnavailableError | Overloaded) -> None:
        kept = self.kept
        if isinstance(error, PagesNotMoved) and kept is not None:
            # Another prefill worker computes the prompt; the decode worker did nothing wrong.
            self._count_prefill_failure(kept.engine)
            self._failed.discard(engine_of(link))
        if not isinstance(error, (WorkerDraining, Overloaded)):
            # That engine may have pulled the pages, or release them any moment, and a reader of released pages reads
            # another prompt's. The prefill worker has them cached and keeps them once more.
            self.kept = None
        elif kept is not None:
            kept.is_given = False
        self.last_error = error
        if isinstance(error, Overloaded):
            self._failed.discard(engine_of(link))
            self._note_full()
        self._become(RequestState.QUEUED)

    def note_loss(self, worker: MemberId) -> None:
        # The time to wait for another worker begins anew.
        self._loss_wait_ends_s = None
        self.record.lost_workers = (*self.record.lost_workers, worker)

    def end(self) -> None:
        self.record.state = RequestState.ENDED

    def drop_kept(self) -> KeptPages | None:
        """Return the pages to release: those that no decode engine was given."""
        kept, self.kept = self.kept, None
        return kept if kept is not None and not kept.is_given else None

    def _become(self, state: RequestState) -> None:
        assert state in _FOLLOWING[self.record.state], f"{state} after {self.record.state}"
        self.record.state = state

    def _count_prefill_failure(self, engine: Engine | None) -> None:
        if engine is not None:
            self._failed.add(engine)
        self._num_prefill_failures += 1

    def _note_full(self) -> None:
        # A new request is not sent there again before the worker tells of room; one that goes on would be.
        self._must_wait = self._must_wait or bool(self.answer.token_ids)
