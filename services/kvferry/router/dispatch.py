"""The life of a request after admission: place, prefill, ferry, decode.

And what is done instead when one of these fails.

There are two ways a prompt gets computed:
- a prefill worker computes it and the decode worker's engine pulls its pages;
- the decode worker computes it, because that costs less, because there is no prefill worker, or because prefill workers
  failed or took too long.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from kvferry.config import GatewayConfig
from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TransferParams,
)
from kvferry.errors import (
    EngineError,
    KvferryError,
    NoDecodeWorker,
    Overloaded,
    RequestError,
    UnavailableError,
    WorkerDraining,
    WorkerLost,
)
from kvferry.link.worker_link import RemoteRequest, Sink, TextSink, WorkerLink, as_text_sink, transferred_pages
from kvferry.membership.base import MemberId, MemberKind
from kvferry.pages.keys import route_keys, seed_of
from kvferry.router.metrics import RouterMetrics
from kvferry.router.placement import Candidate, can_exchange
from kvferry.router.policy import Choice, Measured, Policy
from kvferry.router.pricing import NO_VOLUMES, Decision, PlacementRequest, VolumeView, WorkerView
from kvferry.router.volume_pool import volume_of
from kvferry.router.worker_pool import WorkerPool, candidate_of
from kvferry.telemetry import FALLBACK_CAUSES
from kvferry.tracing import Span, error_type

log = logging.getLogger(__name__)

NUM_RECENT = 2048  # requests that `kvferry explain` can ask for
MAX_CHOICES = 8  # kept per request
MAX_PREFILL_ATTEMPTS = 2  # then the decode worker computes the prompt
MIN_STEPS = 8  # fewer say little about the time of a step

_NO_HINTS = TierHints()


@dataclass(slots=True)
class Journey:
    """Where one request went; filled in as it goes, complete when its outputs ended."""

    request_id: str = ""
    tenant: str = ""
    reason: str = ""
    prefill_worker: MemberId | None = None
    decode_worker: MemberId | None = None
    prefill_failure: str = ""
    prefill_sources: PromptSources = field(default_factory=PromptSources)
    sources: PromptSources = field(default_factory=PromptSources)
    transferred_pages: int = 0
    transferred_bytes: int = 0
    continued_after: list[int] = field(default_factory=list)  # tokens given when a decode worker was lost
    choices: list[Choice] = field(default_factory=list)  # every decision about it, the last few
    trace: Span | None = None  # of the whole request, where it is traced: what is done for it are its children

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens nobody had to compute."""
        computed = self.sources.local_compute + min(
            self.prefill_sources.local_compute, self.sources.external_kv_transfer
        )
        return max(0, self.sources.total - computed)


@dataclass(frozen=True, slots=True)
class _Kept:
    """Pages that a prefill engine keeps for this request. `params` are good for one engine, once."""

    holder: Candidate
    params: TransferParams


class Dispatcher:
    """Runs requests over the links of a roster."""

    def __init__(
        self,
        roster: WorkerPool,
        policy: Policy,
        metrics: RouterMetrics,
        config: GatewayConfig,
        *,
        volumes: Callable[[], Mapping[str, VolumeView]] = lambda: NO_VOLUMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`volumes` are those that can be read now. `clock` in seconds; the same that the roster's views have."""
        self._roster = roster
        self._policy = policy
        self._metrics = metrics
        self._prefill_timeout_s = config.prefill_timeout_s
        self._worker_wait_s = config.worker_wait_s
        self._volumes = volumes
        self._clock = clock
        self._recent: deque[Journey] = deque(maxlen=NUM_RECENT)
        self._num_placed = 0

    def recent(self, request_id: str) -> list[Journey]:
        """The last requests of this gateway whose id is, or begins with, this one; one per choice of an answer."""
        return [
            journey
            for journey in self._recent
            if journey.request_id == request_id or journey.request_id.startswith(f"{request_id}-")
        ]

    async def run(
        self,
        request: EngineRequest,
        journey: Journey,
        sink: Sink,
        text_sink: TextSink | None = None,
        *,
        may_be_aggregated: bool = True,
    ) -> None:
        """Give the request's outputs to `sink`, from whichever workers it takes, until one has a finish reason.
        `text_sink`, where given, gets those that are tokens and text alone.

        A decode worker that is lost is replaced by another one, which goes on where it stopped; the sink sees one
        answer. Cancelling cancels the request on every worker. Raises NoDecodeWorker, or what the request was refused
        or failed with. Not `may_be_aggregated`: a prefill worker computes the prompt wherever there is one.
        """
        journey.request_id = request.request_id
        self._recent.append(journey)
        answer = _Answer(_replayable(request), sink, journey, text_sink)
        tried = _Tried()
        unused = _Unused(self._roster)
        try:
            await self._run(answer, tried, unused, journey, may_be_aggregated=may_be_aggregated)
        finally:
            unused.release()
            journey.trace = None  # remembered for longer than its request

    async def _run(
        self, answer: _Answer, tried: _Tried, unused: _Unused, journey: Journey, *, may_be_aggregated: bool
    ) -> None:
        kept: _Kept | None = None
        lost: KvferryError | None = None
        while True:
            attempt = answer.request()
            placed, kept = await self._place(attempt, tried, lost, kept, journey, may_be_aggregated=may_be_aggregated)
            if kept is None:
                unused.release()
            num_generated: int | None = None
            remote: RemoteRequest | None = None
            decode: WorkerLink | None = None
            span: Span | None = None
            try:
                if placed.choice.prefill is not None:
                    kept = await self._prefill(placed, attempt, journey, tried)
                    unused.kept = kept
                    if kept is None and tried.may_prefill:
                        continue
                decode = self._roster.link(placed.choice.decode)
                if decode is None:
                    lost = WorkerLost(f"worker {placed.choice.decode} is gone")
                    continue
                tried.add(decode)
                journey.decode_worker = decode.member.member_id
                submitted_s = self._clock()
                answer.begin(placed.id, self._policy, self._clock)
                if journey.trace is not None:
                    span = _begin_decode(journey.trace, decode)
                    attempt = dataclasses.replace(attempt, trace=span.context)
                # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also
                # reaches the prefill engine, which holds pages for this request.
                remote = decode.submit(
                    _with_hints(attempt, placed.choice)
                    if kept is None
                    else dataclasses.replace(attempt, transfer_params=kept.params),
                    answer.take,
                    answer.take_text,
                )
                unused.kept = None
                last = await remote.wait()
                num_generated = len(answer.token_ids)
                if span is not None:
                    _end_decode(span, num_generated, last)
                if last.sources is not None:
                    self._arrived(last.sources, last, decode, journey)
                self._policy.learn(decode.member.member_id, answer.measure(submitted_s, placed, decode, last))
                return
            except (UnavailableError, Overloaded) as error:
                if span is not None:
                    span.fail(error_type(error))
                if remote is None or decode is None:
                    raise
                if not isinstance(error, (WorkerDraining, Overloaded)):
                    # That engine may have pulled the pages, or release them any moment, and a reader of released pages
                    # reads another prompt's. The prefill worker has them cached and keeps them once more.
                    kept = None
                unused.kept = kept
                if isinstance(error, Overloaded):
                    tried.refuse(decode)
                lost = error
                self._note_retry(answer, error)
            except BaseException as error:
                if span is not None:
                    span.fail(error_type(error))
                raise
            finally:
                self._policy.ended(placed.id, self._clock(), num_generated)
                if remote is not None:
                    remote.cancel()
                if span is not None:
                    span.end()

    async def _place(
        self,
        attempt: EngineRequest,
        tried: _Tried,
        lost: KvferryError | None,
        kept: _Kept | None,
        journey: Journey,
        *,
        may_be_aggregated: bool,
    ) -> tuple[_Placed, _Kept | None]:
        """Where to go next, and what is kept for it: with decode workers that can use the pages first.

        A request that lost its worker waits for another one; a new request where there is none is refused at once.
        Whoever gets the answer calls `ended` of the policy.
        """
        placed = self._place_now(attempt, tried, kept, journey, may_be_aggregated=may_be_aggregated)
        if placed is None and lost is not None and not isinstance(lost, Overloaded):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._worker_wait_s):
                    while placed is None:
                        await self._roster.change()
                        placed = self._place_now(attempt, tried, kept, journey, may_be_aggregated=may_be_aggregated)
        if placed is not None:
            return placed
        if isinstance(lost, Overloaded):
            raise lost
        why = f"; the last one failed: {lost.message}" if lost is not None else ""
        raise NoDecodeWorker(f"no decode worker is connected{why}")

    def _place_now(
        self, attempt: EngineRequest, tried: _Tried, kept: _Kept | None, journey: Journey, *, may_be_aggregated: bool
    ) -> tuple[_Placed, _Kept | None] | None:
        """None when there is nobody to decode."""
        decode = [view for link, view in self._roster.views(MemberKind.DECODE) if tried.may_try(link)]
        if kept is not None:
            exchanging = [view for view in decode if can_exchange(view.candidate, kept.holder)]
            decode, kept = (exchanging, kept) if exchanging else (decode, None)
        if not decode:
            return None
        prefill: list[WorkerView] = []
        if kept is None and tried.may_prefill:
            prefill = [view for link, view in self._roster.views(MemberKind.PREFILL) if tried.may_try(link)]
        began_ns = time.perf_counter_ns()
        now_s = self._clock()
        self._num_placed += 1
        request = _placement_request(attempt, decode[0].candidate.block_size, self._num_placed)
        choice = self._policy.place(
            request, prefill, decode, now_s, volumes=self._volumes(), may_be_aggregated=may_be_aggregated
        )
        assert choice is not None
        self._policy.began(request, choice, now_s)
        journey.choices = [*journey.choices[-(MAX_CHOICES - 1) :], choice]
        if isinstance(choice, Decision) and choice.skipped_pages:
            self._metrics.skipped_volume_loads.inc()
        if kept is None:
            journey.reason = choice.reason.value
            self._metrics.placements.labels(reason=choice.reason.value).inc()
        took_ns = time.perf_counter_ns() - began_ns
        self._metrics.placement_seconds.observe(took_ns / 1e9)
        if journey.trace is not None:
            _record_route(journey.trace, choice, took_ns)
        return _Placed(request.request_id, choice), kept

    async def _prefill(self, placed: _Placed, request: EngineRequest, journey: Journey, tried: _Tried) -> _Kept | None:
        """Have a prefill worker compute the prompt. None when it could not; then another one, or the decode worker."""
        worker = placed.choice.prefill
        assert worker is not None
        prompt = dataclasses.replace(
            request,
            sampling=prompt_only(request.sampling),
            keep_for_transfer=True,
            continued=None,
            parse=None,
            tier=tier_hints(placed.choice, request.tier),
        )
        span: Span | None = None
        if journey.trace is not None:
            span = journey.trace.child("prefill", {"kvferry.worker": worker}, remote=True)
            prompt = dataclasses.replace(prompt, trace=span.context)
        try:
            return await self._prefill_on(worker, placed, prompt, journey, tried, span)
        except BaseException as error:
            if span is not None:
                span.fail(error_type(error))
            raise
        finally:
            if span is not None:
                span.end()

    async def _prefill_on(
        self,
        worker: MemberId,
        placed: _Placed,
        prompt: EngineRequest,
        journey: Journey,
        tried: _Tried,
        span: Span | None,
    ) -> _Kept | None:
        began_s = self._clock()
        link = self._roster.link(worker)
        try:
            if link is None:
                raise WorkerLost(f"worker {worker} is gone")
            holder = candidate_of(link.member)
            async with asyncio.timeout(self._prefill_timeout_s):
                last = await self._last_output(link, prompt)
        except TimeoutError:
            tried.give_up_prefill()
            self._note_fallback("timeout", f"prefill took over {self._prefill_timeout_s:g} s", prompt, journey, span)
            return None
        except RequestError:
            raise
        except KvferryError as error:
            tried.prefill_failed(link)
            cause = error.code if error.code in FALLBACK_CAUSES else "error"
            self._note_fallback(cause, error.message, prompt, journey, span)
            return None
        if last.transfer_params is None:
            tried.give_up_prefill()
            self._note_fallback("no_transfer", "the prefill engine kept nothing", prompt, journey, span)
            return None
        journey.prefill_worker = worker
        journey.prefill_sources = last.sources or PromptSources()
        now_s = self._clock()
        self._metrics.prefill_seconds.observe(now_s - began_s)
        self._policy.prefilled(placed.id, now_s)
        if last.sources is not None:
            self._policy.learn_prefill(worker, last.sources.local_compute, (now_s - began_s) * 1e3, placed.choice)
        return _Kept(holder, last.transfer_params)

    async def _last_output(self, link: WorkerLink, prompt: EngineRequest) -> EngineOutput:
        remote = link.submit(prompt, _unread)
        try:
            return await remote.wait()
        finally:
            remote.cancel(lambda orphan: _give_back(link, orphan))

    def _note_retry(self, answer: _Answer, error: KvferryError) -> None:
        where = f"after {len(answer.token_ids)} tokens" if answer.token_ids else "before its first token"
        log.warning("request %s: %s, %s; trying another decode worker", answer.request_id, error.message, where)
        if answer.token_ids:
            self._metrics.continued_requests.inc()
        else:
            self._metrics.decode_retries.inc()

    def _note_fallback(
        self, cause: str, message: str, request: EngineRequest, journey: Journey, span: Span | None
    ) -> None:
        log.warning("request %s: %s; the decode worker computes the prompt", request.request_id, message)
        self._metrics.prefill_fallbacks.labels(cause=cause).inc()
        journey.prefill_failure = message
        if span is not None:
            span.fail(cause)

    def _arrived(self, sources: PromptSources, last: EngineOutput, decode: WorkerLink, journey: Journey) -> None:
        journey.sources = sources
        journey.transferred_pages = transferred_pages(last, decode.member.block_size)
        journey.transferred_bytes = journey.transferred_pages * decode.member.page_bytes
        self._metrics.transferred_pages.inc(journey.transferred_pages)


class _Unused:
    """Pages that were kept for a request and that no decode engine was told of: given back unless one is."""

    def __init__(self, roster: WorkerPool) -> None:
        self._roster = roster
        self.kept: _Kept | None = None

    def release(self) -> None:
        kept, self.kept = self.kept, None
        if kept is not None and (link := self._roster.link(kept.holder.member_id)) is not None:
            link.release(kept.params)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A decision, and the id under which the policy keeps its account."""

    id: RequestId
    choice: Choice


def _placement_request(attempt: EngineRequest, block_size: int, number: int) -> PlacementRequest:
    tokens = attempt.prompt_token_ids
    return PlacementRequest(
        RequestId(f"{attempt.request_id}/{number}"),
        route_keys(tokens, block_size, seed_of(attempt.cache_salt)),
        len(tokens),
        block_size,
        attempt.sampling.max_tokens,
    )


class _Answer:
    """What a request gave so far, and how it goes on where its worker is lost.

    Most requests go on from prompt and tokens so far. An engine would begin grammars and penalties anew there: requests
    with a grammar, and greedy ones with penalties or bad words, are computed again from their prompt, and what comes
    again is compared and left out. Sampled ones with penalties go on with what the tokens so far cost as a bias.
    """

    def __init__(self, request: EngineRequest, sink: Sink, journey: Journey, text_sink: TextSink | None = None) -> None:
        self.request_id = request.request_id
        self.token_ids: list[int] = []
        self._request = request
        self._sink = sink
        self._text_sink = text_sink if text_sink is not None else as_text_sink(sink)
        self._journey = journey
        self._num_chars = 0
        self._attempt = 0
        # Of what an attempt gives, tokens and characters that were given before.
        self._num_again = 0
        self._num_chars_again = 0
        self._position = 0
        # Of the attempt that runs.
        self._on_first: Callable[[float], None] | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._first_s: float | None = None
        self._num_before = 0

    def begin(self, account: RequestId, policy: Policy, clock: Callable[[], float]) -> None:
        """An attempt is about to be sent; the policy is told of its first output."""
        self._on_first = functools.partial(policy.first_token, account)
        self._clock, self._first_s = clock, None
        self._num_before = len(self.token_ids)

    def measure(self, submitted_s: float, placed: _Placed, decode: WorkerLink, last: EngineOutput) -> Measured:
        """What the attempt that just ended took."""
        now_s = self._clock()
        first_s = self._first_s if self._first_s is not None else now_s
        num_steps = len(self.token_ids) - self._num_before - 1
        sources = last.sources or PromptSources()
        choice = placed.choice
        alone = choice if isinstance(choice, Decision) and choice.prefill is None else None
        return Measured(
            first_token_ms=(first_s - submitted_s) * 1e3,
            load_ms=alone.price.load_ms if alone is not None else 0.0,
            computed_tokens=sources.local_compute,
            transferred_pages=transferred_pages(last, decode.member.block_size),
            queue_tokens=alone.queue_tokens if alone is not None else 0,
            step_ms=(now_s - first_s) * 1e3 / num_steps if num_steps >= MIN_STEPS else None,
            num_streams=max(1, decode.stats.num_running),
        )

    def request(self) -> EngineRequest:
        """For the next attempt, under an id of its own: the lost worker may still know the first one's."""
        request, given = self._request, self.token_ids
        if not given:
            return request
        self._attempt += 1
        if self._journey.continued_after[-1:] != [len(given)]:
            self._journey.continued_after.append(len(given))
        request_id = RequestId(f"{request.request_id}-c{self._attempt}")
        if _begins_anew(request.sampling):
            self._num_again, self._num_chars_again, self._position = len(given), self._num_chars, 0
            return self._anew(request_id)
        # At least one token is left for the engine to give: it says how the answer ended.
        num_tokens = min(len(given), request.sampling.max_tokens - 1)
        self._num_again, self._position = len(given) - num_tokens, num_tokens
        if not num_tokens:
            self._num_chars_again = self._num_chars
            return self._anew(request_id)
        return dataclasses.replace(
            request,
            request_id=request_id,
            prompt_token_ids=array("I", [*request.prompt_token_ids, *given[:num_tokens]]),
            sampling=_with_penalties_of(given[:num_tokens], request.sampling),
            continued=Continued(num_tokens, self._num_chars),
        )

    def _anew(self, request_id: RequestId) -> EngineRequest:
        """The request from its prompt. Its worker parses from the start too, and tells only what is new."""
        parse = self._request.parse
        if parse is not None:
            parse = dataclasses.replace(parse, num_tokens_before=len(self.token_ids), num_chars_before=self._num_chars)
        return dataclasses.replace(self._request, request_id=request_id, parse=parse)

    def take(self, output: EngineOutput) -> None:
        if self._on_first is not None:
            self._first_s = self._clock()
            self._on_first(self._first_s)
            self._on_first = None
        if self._num_again or self._num_chars_again:
            output = self._without_what_came_before(output)
        self.token_ids.extend(output.token_ids)
        self._num_chars += len(output.text)
        self._sink(output)

    def take_text(self, token_ids: Sequence[int], text: str) -> None:
        """`take` of tokens and text alone."""
        if self._on_first is not None or self._num_again or self._num_chars_again:
            self.take(EngineOutput(token_ids, text))
            return
        self.token_ids.extend(token_ids)
        self._num_chars += len(text)
        self._text_sink(token_ids, text)

    def _without_what_came_before(self, output: EngineOutput) -> EngineOutput:
        num_tokens = min(self._num_again, len(output.token_ids))
        again = list(output.token_ids[:num_tokens])
        if again != self.token_ids[self._position : self._position + num_tokens]:
            raise EngineError("the worker was lost and another one does not give the same answer again")
        self._num_again -= num_tokens
        self._position += num_tokens
        num_chars = min(self._num_chars_again, len(output.text))
        self._num_chars_again -= num_chars
        return dataclasses.replace(
            output,
            token_ids=output.token_ids[num_tokens:],
            text=output.text[num_chars:],
            logprobs=output.logprobs[num_tokens:] if output.logprobs is not None else None,
        )


class _Tried:
    """The workers that failed a request, each as it was then: one that came back may be tried again."""

    def __init__(self) -> None:
        self._generations: set[tuple[MemberId, int]] = set()
        self._refused: set[MemberId] = set()
        self._num_prefill_failures = 0

    @property
    def may_prefill(self) -> bool:
        """Whether a prefill worker may be asked (once more)."""
        return self._num_prefill_failures < MAX_PREFILL_ATTEMPTS

    def prefill_failed(self, link: WorkerLink | None) -> None:
        if link is not None:
            self.add(link)
        self._num_prefill_failures += 1

    def give_up_prefill(self) -> None:
        """Another one would not do better."""
        self._num_prefill_failures = MAX_PREFILL_ATTEMPTS

    def add(self, link: WorkerLink) -> None:
        self._generations.add((link.member.member_id, link.generation))

    def refuse(self, link: WorkerLink) -> None:
        self._refused.add(link.member.member_id)

    def may_try(self, link: WorkerLink) -> bool:
        if not self._generations:
            return True
        member_id = link.member.member_id
        return member_id not in self._refused and (member_id, link.generation) not in self._generations


def _begins_anew(sampling: Sampling) -> bool:
    """Whether an answer in the middle cannot go on exactly from its tokens."""
    if sampling.structured_outputs:
        return True
    counts_tokens = sampling.presence_penalty or sampling.frequency_penalty or sampling.bad_words
    return sampling.temperature == 0 and bool(counts_tokens)


def _with_penalties_of(given: Sequence[int], sampling: Sampling) -> Sampling:
    """What the tokens given so far cost, which to the next engine are prompt, as a bias.

    Exact for the frequency penalty; a presence penalty counts twice for a token that comes once more.
    """
    if not (sampling.presence_penalty or sampling.frequency_penalty):
        return sampling
    bias = dict(sampling.logit_bias)
    for token_id, count in Counter(given).items():
        cost = sampling.presence_penalty + sampling.frequency_penalty * count
        bias[token_id] = bias.get(token_id, 0.0) - cost
    return structs.replace(sampling, logit_bias=bias)


def _replayable(request: EngineRequest) -> EngineRequest:
    """A request that, computed again, gives the same answer, where it may have to be."""
    sampling = request.sampling
    if not sampling.structured_outputs or sampling.seed is not None or sampling.temperature == 0:
        return request
    return dataclasses.replace(request, sampling=structs.replace(sampling, seed=secrets.randbits(63)))


def tier_hints(choice: Choice, known: TierHints | None) -> TierHints | None:
    """For the worker that computes the prompt: `known`, which says whose pages they are, with what the choice adds."""
    if not isinstance(choice, Decision):
        return known
    if choice.volume:
        return dataclasses.replace(known or _NO_HINTS, volumes={volume_of(choice.volume): choice.volume_pages})
    return dataclasses.replace(known or _NO_HINTS, load=False) if choice.skipped_pages else known


def _with_hints(attempt: EngineRequest, choice: Choice) -> EngineRequest:
    if choice.prefill is not None:
        return attempt
    hints = tier_hints(choice, attempt.tier)
    return attempt if hints is attempt.tier else dataclasses.replace(attempt, tier=hints)


def _record_route(trace: Span, choice: Choice, took_ns: int) -> None:
    now_ns = time.time_ns()
    trace.record(
        "route",
        now_ns - took_ns,
        now_ns,
        {
            "kvferry.reason": choice.reason.value,
            "kvferry.prefill_worker": choice.prefill,
            "kvferry.decode_worker": choice.decode,
        },
    )


def _begin_decode(trace: Span, decode: WorkerLink) -> Span:
    return trace.child("decode", {"kvferry.worker": decode.member.member_id}, remote=True)


def _end_decode(span: Span, num_generated: int, last: EngineOutput) -> None:
    sources = last.sources or PromptSources()
    span.set(
        {
            "gen_ai.usage.output_tokens": num_generated,
            **{f"kvferry.prompt_tokens.{source}": num for source, num in dataclasses.asdict(sources).items()},
        }
    )
    span.end()


def _unread(output: EngineOutput) -> None:
    pass


def _give_back(link: WorkerLink, last: EngineOutput) -> None:
    """Release what a prefill engine keeps for a request that was cancelled just as its prompt was computed.

    No decode engine was told of these pages, so none can be reading them.
    """
    if last.transfer_params is not None:
        link.release(last.transfer_params)


def prompt_only(sampling: Sampling) -> Sampling:
    """Parameters that compute a prompt and nothing else.

    Whatever could end the request otherwise than by its length is off: its one token is thrown away, and whether it is
    the end of the text is for the decode engine to find. (vLLM's pull connector keeps pages of stopped requests too.)
    """
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
    )
