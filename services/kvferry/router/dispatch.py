"""An admitted request's life: place, prefill, decode, retry."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvferry.config import GatewayConfig
from kvferry.engine.base import (
    EngineOutput,
    EngineRequest,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TransferParams,
)
from kvferry.errors import (
    EngineDead,
    KvferryError,
    NoDecodeWorker,
    Overloaded,
    Quarantined,
    RequestError,
    UnavailableError,
    WorkerDraining,
    WorkerLost,
)
from kvferry.link.remote_request import OnOutput, OnText, RemoteRequest, transferred_pages
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.pages.keys import route_keys, seed_of
from kvferry.router.answer import AnswerSoFar, replayable
from kvferry.router.engine_losses import QUARANTINE_S, EngineLosses, Quarantine, RequestLosses
from kvferry.router.metrics import RouterMetrics
from kvferry.router.placement import Candidate, Placement, PlacementRequest, can_exchange
from kvferry.router.placer import Decision
from kvferry.router.policy import Measured, Policy
from kvferry.router.pricing import NO_VOLUMES, VolumeCosts
from kvferry.router.request_record import RequestRecord, set_answer_attributes
from kvferry.router.volume_pool import volume_of
from kvferry.router.worker_pool import WorkerPool
from kvferry.telemetry import FALLBACK_CAUSES
from kvferry.tracing import Span, end_after

log = logging.getLogger(__name__)

NUM_RECENT = 2048  # requests that `kvferry explain` can ask for
MAX_PREFILL_ATTEMPTS = 2  # then the decode worker computes the prompt
ROOM_PAUSE_S = 0.1  # until a continuation asks full workers again
MIN_STEPS = 8  # fewer say little about the time of a step

_NO_HINTS = TierHints()
_NOT_TRIED = f"the same request is not tried again for {QUARANTINE_S / 60:g} minutes"


@dataclass(frozen=True, slots=True)
class _Router:
    workers: WorkerPool
    policy: Policy
    metrics: RouterMetrics
    prefill_timeout_s: float
    worker_wait_s: float
    volumes: Callable[[], Mapping[str, VolumeCosts]]
    clock: Callable[[], float]
    attempt_numbers: Iterator[int]
    losses: EngineLosses


class Dispatcher:
    def __init__(
        self,
        workers: WorkerPool,
        policy: Policy,
        metrics: RouterMetrics,
        config: GatewayConfig,
        *,
        volumes: Callable[[], Mapping[str, VolumeCosts]] = lambda: NO_VOLUMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`, in seconds, must be the one that stamps the pool's candidates."""
        self._router = _Router(
            workers,
            policy,
            metrics,
            config.prefill_timeout_s,
            config.worker_wait_s,
            volumes,
            clock,
            itertools.count(1),
            EngineLosses(),
        )
        self._quarantine = Quarantine()
        self._recent: deque[RequestRecord] = deque(maxlen=NUM_RECENT)

    def recent(self, request_id: str) -> list[RequestRecord]:
        """Return recent requests whose id is, or begins with, `request_id`."""
        return [
            record
            for record in self._recent
            if record.request_id == request_id or record.request_id.startswith(f"{request_id}-")
        ]

    async def run(
        self,
        request: EngineRequest,
        record: RequestRecord,
        on_output: OnOutput,
        on_text: OnText | None = None,
        *,
        may_be_aggregated: bool = True,
    ) -> None:
        """Deliver outputs until one has a finish reason; `on_text` gets those of only tokens and text.

        Cancelling cancels the request on every worker. Without `may_be_aggregated` a prefill worker, if any, computes
        the prompt. Raises NoDecodeWorker, Quarantined, or the request's error.
        """
        record.request_id = request.request_id
        self._recent.append(record)
        router = self._router
        if self._quarantine.contains(request, router.clock()):
            router.metrics.quarantined.labels(when="again").inc()
            raise Quarantined(f"workers were lost while they computed this request; {_NOT_TRIED}")
        answer = AnswerSoFar(replayable(request), on_output, record, on_text)
        try:
            await _RequestRun(router, answer, record, may_be_aggregated=may_be_aggregated).run()
        except Quarantined as error:
            self._quarantine.add(request, router.clock())
            router.metrics.quarantined.labels(when="first").inc()
            log.error("request %s of tenant %s: %s", request.request_id, record.tenant, error.message)
            raise


@dataclass(slots=True)
class _KeptPages:
    """Pages that a prefill engine keeps. `params` are good for one engine, once."""

    holder: Member
    params: TransferParams
    is_given: bool = False  # to a decode engine


@dataclass(slots=True)
class _Attempt:
    id: RequestId
    placement: Placement
    submitted_s: float = 0.0  # to the decode worker
    first_output_s: float | None = None
    num_tokens_before: int = 0  # of the answer, from earlier attempts
    num_generated: int | None = None  # of the whole answer; None unless it ended by itself


class _FailedWorkers:
    """Workers that failed a request, by generation: a returned worker may be tried again."""

    def __init__(self) -> None:
        self._generations: set[tuple[MemberId, int]] = set()
        self._overloaded: set[MemberId] = set()
        self._num_prefill_failures = 0

    @property
    def may_prefill(self) -> bool:
        return self._num_prefill_failures < MAX_PREFILL_ATTEMPTS

    def add_prefill(self, link: WorkerLink | None) -> None:
        if link is not None:
            self.add(link)
        self._num_prefill_failures += 1

    def give_up_prefill(self) -> None:
        self._num_prefill_failures = MAX_PREFILL_ATTEMPTS

    def add(self, link: WorkerLink) -> None:
        self._generations.add((link.member.member_id, link.generation))

    def add_overloaded(self, link: WorkerLink) -> None:
        self._overloaded.add(link.member.member_id)

    @property
    def any_overloaded(self) -> bool:
        return bool(self._overloaded)

    def forgive_overloaded(self) -> None:
        """Let workers that were full be tried again."""
        self._generations = {each for each in self._generations if each[0] not in self._overloaded}
        self._overloaded.clear()

    def may_try(self, link: WorkerLink) -> bool:
        if not self._generations:
            return True
        member_id = link.member.member_id
        return member_id not in self._overloaded and (member_id, link.generation) not in self._generations


# A prompt is computed by a prefill worker, and the decode worker's engine pulls its pages; or it is computed by the
# decode worker, because that costs less, because there is no prefill worker, or because prefill workers failed or took
# too long.


class _RequestRun:
    def __init__(self, router: _Router, answer: AnswerSoFar, record: RequestRecord, *, may_be_aggregated: bool) -> None:
        self._router = router
        self._answer = answer
        self._record = record
        self._may_be_aggregated = may_be_aggregated
        self._failed = _FailedWorkers()
        self._losses = RequestLosses()
        self._wait_ends_s: float | None = None  # of waiting for a worker since the last loss
        self._kept: _KeptPages | None = None
        self._last_error: KvferryError | None = None

    async def run(self) -> None:
        try:
            while not await self._try_once():
                pass
        finally:
            self._release_kept()
            self._answer.end_attempt()
            self._record.trace = None  # the record is remembered for longer than its request

    async def _try_once(self) -> bool:
        router, request = self._router, self._answer.next_request()
        attempt = await self._place(request)
        if self._losses.is_suspect:
            router.losses.begin_trial(self._losses, attempt.placement.prefill, attempt.placement.decode)
        try:
            if attempt.placement.prefill is not None:
                self._kept = await self._prefill(attempt, request)
                if self._kept is None and self._failed.may_prefill:
                    return False
            decode = router.workers.link(attempt.placement.decode)
            if decode is None:
                self._last_error = WorkerLost(f"worker {attempt.placement.decode} is gone")
                return False
            return await self._decode(attempt, request, decode)
        finally:
            router.losses.end_trial(self._losses)
            router.policy.ended(attempt.id, router.clock(), attempt.num_generated)

    # Placing

    async def _place(self, request: EngineRequest) -> _Attempt:
        """Place the request; the caller calls the policy's `ended`.

        A new request does not wait for workers or for room; one that lost its worker does.
        """
        attempt, error = self._place_now(request), self._last_error
        while attempt is None and self._losses.is_suspect and self._router.losses.has_trials:
            # Other suspects occupy the workers that are left.
            await self._router.losses.trial_end()
            attempt = self._place_now(request)
        if attempt is None and error is not None and (self._losses.workers or not isinstance(error, Overloaded)):
            attempt = await self._wait_for_worker(request)
        if attempt is not None:
            return attempt
        if isinstance(error, Overloaded):
            raise error
        why = f"; the last one failed: {error.message}" if error is not None else ""
        raise NoDecodeWorker(f"no decode worker is connected{why}")

    async def _wait_for_worker(self, request: EngineRequest) -> _Attempt | None:
        """Place the request when a worker comes or has room again; None after `worker_wait_s` since its last loss."""
        clock = self._router.clock
        if self._wait_ends_s is None:
            self._wait_ends_s = clock() + self._router.worker_wait_s
        attempt: _Attempt | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, self._wait_ends_s - clock())):
                while attempt is None:
                    if self._failed.any_overloaded:
                        await asyncio.sleep(ROOM_PAUSE_S)
                        self._failed.forgive_overloaded()
                    else:
                        await self._router.workers.change()
                    attempt = self._place_now(request)
        return attempt

    def _place_now(self, request: EngineRequest) -> _Attempt | None:
        """Prefer decode workers that can use the kept pages; None without any."""
        router, kept = self._router, self._kept
        decode = self._candidates(MemberKind.DECODE)
        if kept is not None:
            exchanging = [candidate for candidate in decode if can_exchange(candidate.member, kept.holder)]
            decode, kept = (exchanging, kept) if exchanging else (decode, None)
        if not decode:
            return None
        prefill = self._candidates(MemberKind.PREFILL) if kept is None and self._failed.may_prefill else []
        began_ns = time.perf_counter_ns()
        now_s = router.clock()
        to_place = _placement_request(request, decode[0].member.block_size, next(router.attempt_numbers))
        placement = router.policy.place(
            to_place,
            prefill,
            decode,
            now_s,
            volumes=router.volumes(),
            may_be_aggregated=self._may_be_aggregated,
        )
        assert placement is not None
        router.policy.began(to_place, placement, now_s)
        if isinstance(placement, Decision) and placement.load.skipped_pages:
            router.metrics.skipped_volume_loads.inc()
        if kept is None:
            self._release_kept()
            self._record.reason = placement.reason.value
            router.metrics.placements.labels(reason=placement.reason.value).inc()
        took_ns = time.perf_counter_ns() - began_ns
        router.metrics.placement_seconds.observe(took_ns / 1e9)
        self._record.note_placement(placement, took_ns)
        return _Attempt(to_place.request_id, placement)

    def _candidates(self, kind: MemberKind) -> list[Candidate]:
        """Return workers that did not fail this request; for a suspect those without another one on trial."""
        router, losses = self._router, self._losses
        candidates = [each for each in router.workers.candidates(kind) if self._failed.may_try(each[0])]
        if losses.is_suspect:
            candidates = [
                each for each in candidates if not router.losses.is_occupied(each[0].member.member_id, losses)
            ]
        return [candidate for _, candidate in candidates]

    # Prefill

    async def _prefill(self, attempt: _Attempt, request: EngineRequest) -> _KeptPages | None:
        worker = attempt.placement.prefill
        assert worker is not None
        prompt = dataclasses.replace(
            request,
            sampling=prompt_only(request.sampling),
            keep_for_transfer=True,
            continued=None,
            parse=None,
            tier=tier_hints(attempt.placement, request.tier),
        )
        span = self._record.begin_span("prefill", worker)
        if span is not None:
            prompt = dataclasses.replace(prompt, trace=span.context)
        with end_after(span):
            return await self._prefill_on(worker, attempt, prompt, span)

    async def _prefill_on(
        self, worker: MemberId, attempt: _Attempt, prompt: EngineRequest, span: Span | None
    ) -> _KeptPages | None:
        router, record = self._router, self._record
        began_s = router.clock()
        link = router.workers.link(worker)
        try:
            if link is None:
                raise WorkerLost(f"worker {worker} is gone")
            holder = link.member
            async with asyncio.timeout(router.prefill_timeout_s):
                last = await self._last_output(link, prompt)
        except TimeoutError:
            self._failed.give_up_prefill()
            self._note_fallback("timeout", f"prefill took over {router.prefill_timeout_s:g} s", prompt, span)
            return None
        except (RequestError, Quarantined):
            raise
        except KvferryError as error:
            self._failed.add_prefill(link)
            cause = error.code if error.code in FALLBACK_CAUSES else "error"
            self._note_fallback(cause, error.message, prompt, span)
            return None
        if last.transfer_params is None:
            self._failed.give_up_prefill()
            self._note_fallback("no_transfer", "the prefill engine kept nothing", prompt, span)
            return None
        record.prefill_worker = worker
        record.prefill_sources = last.sources or PromptSources()
        now_s = router.clock()
        router.metrics.prefill_seconds.observe(now_s - began_s)
        router.policy.prefilled(attempt.id, now_s)
        if last.sources is not None:
            computed_tokens = last.sources.local_compute
            router.policy.learn_prefill(worker, computed_tokens, (now_s - began_s) * 1e3, attempt.placement)
        return _KeptPages(holder, last.transfer_params)

    async def _last_output(self, link: WorkerLink, prompt: EngineRequest) -> EngineOutput:
        remote = link.submit(prompt, _ignore)
        try:
            with self._on_engine(link):
                return await remote.wait()
        finally:
            remote.cancel(lambda orphan: _release_orphan(link, orphan))

    @contextlib.contextmanager
    def _on_engine(self, link: WorkerLink) -> Iterator[None]:
        """Count the loss of the worker's engine while the request is on it. Raises Quarantined for one too many."""
        losses, worker = self._losses, link.member.member_id
        engine = (worker, link.generation)
        self._router.losses.begin(engine, losses)
        try:
            yield
        except (WorkerLost, EngineDead) as error:
            self._wait_ends_s = None
            self._router.losses.lose(engine, losses, len(self._answer.token_ids))
            self._record.lost_workers.append(worker)
            if losses.are_too_many:
                lost = ", ".join(losses.workers)
                raise Quarantined(
                    f"{len(losses.workers)} workers were lost while they computed this request ({lost}); {_NOT_TRIED}; "
                    f"the last one: {error.message}"
                ) from None
            raise
        finally:
            self._router.losses.end(engine, losses)

    def _note_fallback(self, cause: str, message: str, request: EngineRequest, span: Span | None) -> None:
        log.warning("request %s: %s; another worker computes the prompt", request.request_id, message)
        self._router.metrics.prefill_fallbacks.labels(cause=cause).inc()
        self._record.prefill_failure = message
        if span is not None:
            span.fail(cause)

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is None or kept.is_given:
            return
        link = self._router.workers.link(kept.holder.member_id)
        if link is not None:
            link.release(kept.params)

    # Decode

    async def _decode(self, attempt: _Attempt, request: EngineRequest, decode: WorkerLink) -> bool:
        self._failed.add(decode)
        self._record.decode_worker = decode.member.member_id
        attempt.submitted_s = self._router.clock()
        attempt.num_tokens_before = len(self._answer.token_ids)
        self._answer.begin_attempt(lambda: self._on_first_output(attempt))
        span = self._record.begin_span("decode", decode.member.member_id)
        if span is not None:
            request = dataclasses.replace(request, trace=span.context)
        remote: RemoteRequest | None = None
        try:
            with end_after(span):
                # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also
                # reaches the prefill engine, which holds pages for this request.
                remote = decode.submit(
                    self._decode_request(attempt, request), self._answer.on_output, self._answer.on_text
                )
                if self._kept is not None:
                    self._kept.is_given = True
                with self._on_engine(decode):
                    last = await remote.wait()
                attempt.num_generated = len(self._answer.token_ids)
                if span is not None:
                    set_answer_attributes(span, attempt.num_generated, last)
        except (UnavailableError, Overloaded) as error:
            if remote is None:
                raise
            self._note_failed_decode(decode, error)
            return False
        finally:
            if remote is not None:
                remote.cancel()
        self._note_finished(attempt, decode, last)
        return True

    def _decode_request(self, attempt: _Attempt, request: EngineRequest) -> EngineRequest:
        if self._kept is not None:
            return dataclasses.replace(request, transfer_params=self._kept.params)
        if attempt.placement.prefill is not None:
            return request
        hints = tier_hints(attempt.placement, request.tier)
        return request if hints is request.tier else dataclasses.replace(request, tier=hints)

    def _on_first_output(self, attempt: _Attempt) -> None:
        attempt.first_output_s = self._router.clock()
        self._losses.has_answered = True
        self._router.losses.end_trial(self._losses)
        self._router.policy.first_token(attempt.id, attempt.first_output_s)

    def _note_finished(self, attempt: _Attempt, decode: WorkerLink, last: EngineOutput) -> None:
        if last.sources is not None:
            self._record.note_sources(last.sources, last, decode.member)
            self._router.metrics.transferred_pages.inc(self._record.transferred_pages)
        measured = self._measure(attempt, decode, last)
        self._router.policy.learn(decode.member.member_id, measured)

    def _measure(self, attempt: _Attempt, decode: WorkerLink, last: EngineOutput) -> Measured:
        now_s, submitted_s, first_s = self._router.clock(), attempt.submitted_s, attempt.first_output_s
        if first_s is None:
            first_s = now_s
        num_steps = len(self._answer.token_ids) - attempt.num_tokens_before - 1
        placement = attempt.placement
        aggregated = placement if isinstance(placement, Decision) and placement.prefill is None else None
        return Measured(
            first_token_ms=(first_s - submitted_s) * 1e3,
            load_ms=aggregated.price.load_ms if aggregated is not None else 0.0,
            computed_tokens=last.sources.local_compute if last.sources is not None else 0,
            transferred_pages=transferred_pages(last, decode.member.block_size),
            queue_tokens=aggregated.queue_tokens if aggregated is not None else 0,
            step_ms=(now_s - first_s) * 1e3 / num_steps if num_steps >= MIN_STEPS else None,
            num_streams=max(1, decode.stats.num_running),
        )

    def _note_failed_decode(self, decode: WorkerLink, error: UnavailableError | Overloaded) -> None:
        if not isinstance(error, (WorkerDraining, Overloaded)):
            # That engine may have pulled the pages, or release them any moment, and a reader of released pages reads
            # another prompt's. The prefill worker has them cached and keeps them once more.
            self._kept = None
        elif self._kept is not None:
            self._kept.is_given = False
        if isinstance(error, Overloaded):
            self._failed.add_overloaded(decode)
        self._last_error = error
        answer, metrics = self._answer, self._router.metrics
        where = f"after {len(answer.token_ids)} tokens" if answer.token_ids else "before its first token"
        level = logging.DEBUG if isinstance(error, Overloaded) else logging.WARNING  # asked again and again
        log.log(level, "request %s: %s, %s; trying another decode worker", answer.request_id, error.message, where)
        if answer.token_ids:
            metrics.continued_requests.inc()
        else:
            metrics.decode_retries.inc()


def _placement_request(request: EngineRequest, block_size: int, number: int) -> PlacementRequest:
    tokens = request.prompt_token_ids
    return PlacementRequest(
        RequestId(f"{request.request_id}/{number}"),
        route_keys(tokens, block_size, seed_of(request.cache_salt)),
        len(tokens),
        block_size,
        request.sampling.max_tokens,
    )


def _ignore(output: EngineOutput) -> None:
    pass


def _release_orphan(link: WorkerLink, last: EngineOutput) -> None:
    # The request was cancelled just as its prompt was computed. No decode engine was told of these pages, so none can
    # be reading them.
    if last.transfer_params is not None:
        link.release(last.transfer_params)


def tier_hints(placement: Placement, known: TierHints | None) -> TierHints | None:
    if not isinstance(placement, Decision):
        return known
    load = placement.load
    if load.volume:
        return dataclasses.replace(known or _NO_HINTS, volumes={volume_of(load.volume): load.num_pages})
    return dataclasses.replace(known or _NO_HINTS, load=False) if load.skipped_pages else known


def prompt_only(sampling: Sampling) -> Sampling:
    # Everything that could end the request otherwise than by its length is off: the decode engine finds out whether the
    # token ends the text. (vLLM's pull connector keeps pages of stopped requests too.)
    return structs.replace(
        sampling,
        max_tokens=1,
        min_tokens=0,
        logprobs=None,
        stop=(),
        stop_token_ids=(),
        ignore_eos=True,
        structured_outputs="",
        bad_words=(),
        logit_bias={},
        allowed_token_ids=(),
    )
