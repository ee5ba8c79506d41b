"""An admitted request's life: place, prefill, decode, retry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from kvferry.config import GatewayConfig
from kvferry.engine.base import NO_SOURCES, EngineOutput, EngineRequest
from kvferry.errors import (
    EngineDead,
    KvferryError,
    NoDecodeWorker,
    Overloaded,
    PagesNotMoved,
    Preempted,
    Quarantined,
    RequestError,
    UnavailableError,
    WorkerLost,
)
from kvferry.link.identity import CONTINUE
from kvferry.link.quarantine import QUARANTINE_S, to_wire
from kvferry.link.remote_request import OnOutput, OnText, RemoteRequest, transferred_pages
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import MemberId
from kvferry.observability.telemetry import FALLBACK_CAUSES
from kvferry.observability.tracing import Span, end_after
from kvferry.proof.certificates import EngineKind
from kvferry.router.engine_losses import digest_of
from kvferry.router.placement_policy import Measured, Policy
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import NO_VOLUMES, VolumeCosts
from kvferry.router.request import Answer, Request, RequestRecord, RequestState, set_answer_attributes
from kvferry.router.request_placer import (
    NOT_TRIED,
    PlacedAttempt,
    RequestPlacer,
    Router,
    RouterMetrics,
    no_decode_worker,
)
from kvferry.router.request_run import KeptPages, RequestRun, engine_of
from kvferry.router.room_queue import ASK_AGAIN_S
from kvferry.router.worker_pool import WorkerPool

log = logging.getLogger(__name__)

NUM_RECENT = 2048  # requests that `kvferry explain` can ask for
PREFILL_SHARE = 1 / 5  # of a request's time; then the decode worker computes the prompt itself
MIN_STEPS = 8  # fewer say little about the time of a step


class Dispatcher:
    def __init__(
        self,
        workers: WorkerPool,
        policy: Policy,
        metrics: RouterMetrics,
        config: GatewayConfig,
        *,
        volumes: Callable[[str], Mapping[str, VolumeCosts]] = lambda pool: NO_VOLUMES,
        may_transfer: Callable[[EngineKind, EngineKind, str, bool], bool] = lambda prefill, decode, pool, adapter: True,
    ) -> None:
        """`volumes` gives those that a pool's engines use; `may_transfer` is that of `Router`."""
        self._router = Router(
            workers,
            policy,
            metrics,
            config.request_timeout_s * PREFILL_SHARE,
            volumes,
            itertools.count(1),
            config.queue_timeout_s,
            may_transfer,
        )
        self.request_timeout_s = config.request_timeout_s
        self._telling: dict[bytes, asyncio.Task[None]] = {}  # the other gateways, of requests in quarantine
        self._recent: deque[RequestRecord] = deque(maxlen=NUM_RECENT)

    @property
    def num_queued(self) -> int:
        return len(self._router.workers.queues)

    def adapter_key(self, name: str, pool: str) -> str:
        """Raises NoDecodeWorker while no worker has the adapter."""
        key = self._router.workers.adapter_key(name, pool)
        if key is None:
            raise NoDecodeWorker(no_decode_worker(pool, name))
        return key

    def recent(self, request_id: str) -> list[RequestRecord]:
        """Return recent requests whose id is, or begins with, `request_id`."""
        return [
            record
            for record in self._recent
            if record.request_id == request_id or record.request_id.startswith(f"{request_id}-")
        ]

    async def run(
        self,
        request: Request,
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
        router, run = self._router, RequestRun(Answer(request, on_output, record, on_text), record)
        try:
            router.refuse_quarantined(request)
            await _Attempts(router, run, may_be_aggregated=may_be_aggregated).run()
        except KvferryError as error:
            record.error_code = error.code or ""
            if isinstance(error, Quarantined):
                if record.lost_workers:
                    self._put_in_quarantine(request)
                    log.error("request %s of tenant %s: %s", request.request_id, record.tenant, error.message)
                await self._until_told(request)
            raise
        finally:
            run.end()

    def _put_in_quarantine(self, request: Request) -> None:
        router, digest, now_s = self._router, digest_of(request), time.monotonic()
        if router.workers.quarantined.contains(digest, now_s):
            return  # a copy of this request was first
        router.metrics.quarantined.labels(when="first").inc()
        router.workers.quarantined.add(digest, now_s)
        told = router.workers.quarantine(to_wire({digest: now_s + QUARANTINE_S}, now_s))
        self._telling[digest] = task = asyncio.create_task(told)
        task.add_done_callback(lambda _: self._telling.pop(digest, None))

    async def _until_told(self, request: Request) -> None:
        # A client that has the answer may ask another gateway at once, which would lose a further engine.
        if self._telling and (task := self._telling.get(digest_of(request))) is not None:
            await asyncio.shield(task)


# A prompt is computed by a prefill worker, and the decode worker's engine pulls its pages; or it is computed by the
# decode worker, because that costs less, because there is no prefill worker, or because prefill workers failed or took
# too long.


class _Attempts:
    def __init__(self, router: Router, run: RequestRun, *, may_be_aggregated: bool) -> None:
        self._router = router
        self._run = run
        self._answer = run.answer
        self._record = run.record
        self._placer = RequestPlacer(router, run, may_be_aggregated=may_be_aggregated)

    async def run(self) -> None:
        try:
            while not await self._try_once():
                pass
        finally:
            self._placer.release_kept()
            self._answer.end_attempt()
            self._record.trace = None  # the record is remembered for longer than its request

    async def _try_once(self) -> bool:
        router, run, losses = self._router, self._run, self._run.losses
        if router.workers.losses.knows_blamed(time.monotonic()) and not losses.has_answered:
            router.workers.losses.adopt_blame(run.digest, losses)
        self._answer.begin_attempt(is_suspect=losses.is_suspect)
        attempt = await self._placer.place()
        try:
            if losses.is_suspect:
                router.refuse_quarantined(self._answer.request)  # a copy of it may have been the second one
                router.workers.losses.begin_trial(
                    run.digest, losses, attempt.placement.prefill, attempt.placement.decode
                )
            if attempt.placement.prefill is not None:
                await self._prefill(attempt)
                if self._record.state is RequestState.QUEUED:
                    return False
            decode = router.workers.link(attempt.placement.decode)
            if decode is None:
                run.lose_placement(WorkerLost(f"worker {attempt.placement.decode} is gone"))
                return False
            return await self._decode(attempt, decode)
        finally:
            if attempt.place is not None:
                attempt.place.release()
            router.workers.losses.end_trial(losses)
            router.policy.ended(attempt.id, time.monotonic(), attempt.num_generated)

    # Prefill

    async def _prefill(self, attempt: PlacedAttempt) -> None:
        worker = attempt.placement.prefill
        assert worker is not None
        span = self._record.begin_span("prefill", worker)
        trace = span.context if span is not None else None
        with end_after(span):
            prompt = self._answer.prompt_request(attempt.placement, trace)
            await self._prefill_on(worker, attempt, prompt, span)

    async def _prefill_on(
        self, worker: MemberId, attempt: PlacedAttempt, prompt: EngineRequest, span: Span | None
    ) -> None:
        router, run, record = self._router, self._run, self._record
        run.begin_prefill()
        began_s = time.monotonic()
        link = router.workers.link(worker)
        try:
            if link is None:
                raise WorkerLost("a worker is gone")
            holder, engine = link.member, engine_of(link)
            async with asyncio.timeout(router.prefill_timeout_s):
                last = await self._last_output(link, prompt)
        except TimeoutError:
            run.give_up_prefill()
            self._note_fallback(worker, "timeout", f"prefill took over {router.prefill_timeout_s:g} s", span)
            return
        except (RequestError, Quarantined):
            raise
        except Overloaded as error:
            run.refuse_prefill(error)
            if span is not None:
                span.fail(error.code or "overloaded")
            await self._pause_of_suspect(error)
            return
        except KvferryError as error:
            run.fail_prefill(link)
            cause = error.code if error.code in FALLBACK_CAUSES else "error"
            self._note_fallback(worker, cause, error.message, span)
            return
        if last.transfer_params is None:
            run.give_up_prefill()
            self._note_fallback(worker, "no_transfer", "the prefill engine kept nothing", span)
            return
        record.prefill_worker = worker
        record.prefill_sources = last.sources or NO_SOURCES
        now_s = time.monotonic()
        router.metrics.prefill_seconds.observe(now_s - began_s)
        router.policy.prefilled(attempt.id, now_s)
        if last.sources is not None:
            computed_tokens = last.sources.local_compute
            elapsed_ms = (now_s - began_s) * 1e3
            router.policy.learn_prefill(worker, computed_tokens, elapsed_ms, attempt.placement, last.durations)
        run.keep(KeptPages(holder, engine, last.transfer_params))

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
        losses, worker, engine = self._run.losses, link.member.member_id, engine_of(link)
        self._router.workers.losses.begin(engine, losses)
        try:
            yield
        except (WorkerLost, EngineDead) as error:
            self._run.note_loss(worker)
            has_vanished = isinstance(error, WorkerLost) and error.has_vanished
            is_blameless = isinstance(error, EngineDead) and error.is_blameless
            num_tokens, now_s = len(self._answer.token_ids), time.monotonic()
            if self._router.workers.losses.lose(
                engine, losses, num_tokens, now_s, has_vanished=has_vanished, is_blameless=is_blameless
            ):
                if isinstance(error, WorkerLost):
                    self._router.workers.losses.note_blamed(worker, self._run.digest, losses)
                if losses.is_suspect:
                    self._router.workers.losses.blame(self._run.digest, losses, now_s)
            if losses.are_too_many:
                # Which ones say the log and the record. Tenants learn no names of workers.
                log.warning("%s were lost under request %s", ", ".join(losses.workers), self._record.request_id)
                raise Quarantined(
                    f"{len(losses.workers)} workers were lost while they computed this request; {NOT_TRIED}; "
                    f"the last one: {error.message}"
                ) from None
            raise
        finally:
            self._router.workers.losses.end(engine, losses)

    def _note_fallback(self, worker: MemberId, cause: str, message: str, span: Span | None) -> None:
        request_id = self._answer.request_id
        log.warning("request %s: %s: %s; another worker computes the prompt", request_id, worker, message)
        self._router.metrics.prefill_fallbacks.labels(cause=cause).inc()
        self._record.prefill_failure = message
        if span is not None:
            span.fail(cause)

    # Decode

    async def _decode(self, attempt: PlacedAttempt, decode: WorkerLink) -> bool:
        self._run.begin_decode(decode)
        self._record.decode_worker = decode.member.member_id
        attempt.submitted_s = time.monotonic()
        attempt.num_tokens_before = len(self._answer.token_ids)
        self._answer.on_first_output(lambda: self._on_first_output(attempt, remote))
        span = self._record.begin_span("decode", decode.member.member_id)
        kept = self._run.kept
        request = self._answer.answer_request(
            attempt.placement,
            span.context if span is not None else None,
            transfer_params=kept.params if kept is not None else None,
            # A worker that preempts an answer is where it goes on, mostly.
            may_preempt=CONTINUE in decode.features,
        )
        remote: RemoteRequest | None = None
        try:
            with end_after(span):
                # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also
                # reaches the prefill engine, which holds pages for this request.
                remote = decode.submit(request, self._answer.on_output, self._answer.on_text, attempt.place)
                if kept is not None:
                    kept.is_given = True
                with self._on_engine(decode):
                    last = await remote.wait()
                attempt.num_generated = len(self._answer.token_ids)
                if span is not None:
                    set_answer_attributes(span, attempt.num_generated, last)
        except Preempted as error:
            self._run.preempt(decode, error)
            self._router.metrics.preempted_requests.inc()
            return False
        except (UnavailableError, Overloaded) as error:
            if remote is None:
                raise
            self._note_failed_decode(decode, error)
            await self._pause_of_suspect(error)
            return False
        finally:
            if remote is not None:
                remote.cancel()
        self._note_finished(attempt, decode, last)
        self._placer.queue.completions.add(time.monotonic())
        return True

    async def _pause_of_suspect(self, error: KvferryError) -> None:
        """Wait for the suspect of another gateway that a worker has."""
        if self._run.losses.is_suspect and isinstance(error, Overloaded):
            await asyncio.sleep(ASK_AGAIN_S)

    def _on_first_output(self, attempt: PlacedAttempt, remote: RemoteRequest | None) -> None:
        self._record.note_first_output(remote.sources if remote is not None else None)
        attempt.first_output_s = time.monotonic()
        run, losses = self._run, self._router.workers.losses
        if run.losses.is_suspect:
            losses.discharge(run.digest)
        run.losses.has_answered = True
        losses.end_trial(run.losses)
        self._router.policy.first_token(attempt.id, attempt.first_output_s)

    def _note_finished(self, attempt: PlacedAttempt, decode: WorkerLink, last: EngineOutput) -> None:
        if last.sources is not None:
            self._record.note_sources(last.sources, last, decode.member)
            self._router.metrics.transferred_pages.inc(self._record.transferred_pages)
        measured = self._measure(attempt, decode, last)
        self._router.policy.learn(decode.member.member_id, measured)

    def _measure(self, attempt: PlacedAttempt, decode: WorkerLink, last: EngineOutput) -> Measured:
        now_s, submitted_s, first_s = time.monotonic(), attempt.submitted_s, attempt.first_output_s
        if first_s is None:
            first_s = now_s
        num_steps = len(self._answer.token_ids) - attempt.num_tokens_before - 1
        placement = attempt.placement
        aggregated = placement if isinstance(placement, Decision) and placement.prefill is None else None
        return Measured(
            first_token_ms=(first_s - submitted_s) * 1e3,
            load_ms=aggregated.load_ms if aggregated is not None else 0.0,
            computed_tokens=last.sources.local_compute if last.sources is not None else 0,
            transferred_pages=transferred_pages(last, decode.member.block_size),
            queue_tokens=aggregated.queue_tokens if aggregated is not None else 0,
            step_ms=(now_s - first_s) * 1e3 / num_steps if num_steps >= MIN_STEPS else None,
            num_streams=max(1, decode.stats.num_running),
            durations=last.durations,
        )

    def _note_failed_decode(self, decode: WorkerLink, error: UnavailableError | Overloaded) -> None:
        if isinstance(error, PagesNotMoved) and self._run.kept is not None:
            self._router.metrics.prefill_fallbacks.labels(cause=PagesNotMoved.code).inc()
        self._run.fail_decode(decode, error)
        answer, metrics = self._answer, self._router.metrics
        where = f"after {len(answer.token_ids)} tokens" if answer.token_ids else "before its first token"
        level = logging.DEBUG if isinstance(error, Overloaded) else logging.WARNING  # asked again and again
        log.log(level, "request %s: %s, %s; trying another decode worker", answer.request_id, error.message, where)
        if answer.token_ids:
            metrics.continued_requests.inc()
        else:
            metrics.decode_retries.inc()


def _ignore(output: EngineOutput) -> None:
    pass


def _release_orphan(link: WorkerLink, last: EngineOutput) -> None:
    # The request was cancelled just as its prompt was computed. No decode engine was told of these pages, so none can
    # be reading them.
    if last.transfer_params is not None:
        link.release(last.transfer_params)
