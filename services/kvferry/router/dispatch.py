"""The life of a request after admission: place, prefill, ferry, decode.

And what is done instead when one of these fails.

There are three ways a prompt gets computed:
- a prefill worker computes it and the decode worker's engine pulls its pages;
- the prefill worker fails, is lost or takes too long: the decode worker computes it;
- there is no prefill worker: the decode worker computes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from dataclasses import dataclass, field

from kvferry.config import GatewayConfig
from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    PromptSources,
    RequestId,
    Sampling,
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
from kvferry.membership.base import MemberId, MemberKind
from kvferry.router.link import Sink, WorkerLink, pages_of
from kvferry.router.placement import Candidate, Placement, RoundRobin, can_exchange
from kvferry.router.roster import Roster
from kvferry.telemetry import FALLBACK_CAUSES, Metrics

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Journey:
    """Where one request went; filled in as it goes, complete when its outputs ended."""

    reason: str = ""
    prefill_worker: MemberId | None = None
    decode_worker: MemberId | None = None
    prefill_failure: str = ""
    prefill_sources: PromptSources = field(default_factory=PromptSources)
    sources: PromptSources = field(default_factory=PromptSources)
    ferried_pages: int = 0
    ferried_bytes: int = 0
    continued_after: list[int] = field(default_factory=list)  # tokens given when a decode worker was lost

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

    def __init__(self, roster: Roster, metrics: Metrics, config: GatewayConfig) -> None:
        self._roster = roster
        self._metrics = metrics
        self._placement = RoundRobin()
        self._prefill_timeout_s = config.prefill_timeout_s
        self._worker_wait_s = config.worker_wait_s

    async def run(self, request: EngineRequest, journey: Journey, sink: Sink) -> None:
        """Give the request's outputs to `sink`, from whichever workers it takes, until one has a finish reason.

        A decode worker that is lost is replaced by another one, which goes on where it stopped; the sink sees one
        answer. Cancelling cancels the request on every worker. Raises NoDecodeWorker, or what the request was refused
        or failed with.
        """
        answer = _Answer(_replayable(request), sink, journey)
        tried = _Tried()
        kept: _Kept | None = None
        lost: KvferryError | None = None
        while True:
            placement, kept = await self._place(tried, lost, kept)
            attempt = answer.request()
            if kept is None:
                journey.reason = placement.reason.value
                self._metrics.placements.labels(reason=placement.reason.value).inc()
                if placement.prefill is not None and not journey.prefill_failure:
                    kept = await self._prefill(placement.prefill, attempt, journey)
            decode = self._roster.link(placement.decode)
            if decode is None:
                lost = WorkerLost(f"worker {placement.decode} is gone")
                continue
            tried.add(decode)
            journey.decode_worker = placement.decode
            # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also reaches
            # the prefill engine, which holds pages for this request.
            remote = decode.submit(
                dataclasses.replace(attempt, transfer_params=kept.params if kept else None), answer.take
            )
            try:
                last = await remote.wait()
                if last.sources is not None:
                    self._arrived(last.sources, decode, journey)
                return
            except (UnavailableError, Overloaded) as error:
                if not isinstance(error, (WorkerDraining, Overloaded)):
                    # That engine may have pulled the pages, or release them any moment, and a reader of released pages
                    # reads another prompt's. The prefill worker has them cached and keeps them once more.
                    kept = None
                if isinstance(error, Overloaded):
                    tried.refuse(decode)
                lost = error
                self._note_retry(answer, error)
            finally:
                remote.cancel()

    async def _place(
        self, tried: _Tried, lost: KvferryError | None, kept: _Kept | None
    ) -> tuple[Placement, _Kept | None]:
        """Where to go next, and what is kept for it: with decode workers that can use the pages first.

        A request that lost its worker waits for another one; a new request where there is none is refused at once.
        """
        try:
            async with asyncio.timeout(self._worker_wait_s):
                while True:
                    links = self._roster.usable(MemberKind.DECODE)
                    decode = [_candidate(link) for link in links if tried.may_try(link)]
                    still_kept = kept
                    if kept is not None:
                        exchanging = [candidate for candidate in decode if can_exchange(candidate, kept.holder)]
                        decode, still_kept = (exchanging, kept) if exchanging else (decode, None)
                    prefill = [_candidate(link) for link in self._roster.usable(MemberKind.PREFILL)]
                    placement = self._placement.place(prefill, decode)
                    if placement is not None:
                        return placement, still_kept
                    if lost is None or isinstance(lost, Overloaded):
                        break
                    await self._roster.change()
        except TimeoutError:
            pass
        if isinstance(lost, Overloaded):
            raise lost
        why = f"; the last one failed: {lost.message}" if lost is not None else ""
        raise NoDecodeWorker(f"no decode worker is connected{why}")

    async def _prefill(self, worker: MemberId, request: EngineRequest, journey: Journey) -> _Kept | None:
        """Have a prefill worker compute the prompt. None when it could not; then the decode worker will."""
        prompt = dataclasses.replace(
            request, sampling=prompt_only(request.sampling), keep_for_transfer=True, continued=None
        )
        try:
            link = self._roster.link(worker)
            if link is None:
                raise WorkerLost(f"worker {worker} is gone")
            holder = _candidate(link)
            async with asyncio.timeout(self._prefill_timeout_s):
                last = await self._last_output(link, prompt)
        except TimeoutError:
            self._note_fallback("timeout", f"prefill took over {self._prefill_timeout_s:g} s", request, journey)
            return None
        except RequestError:
            raise
        except KvferryError as error:
            cause = error.code if error.code in FALLBACK_CAUSES else "error"
            self._note_fallback(cause, error.message, request, journey)
            return None
        if last.transfer_params is None:
            self._note_fallback("no_transfer", "the prefill engine kept nothing", request, journey)
            return None
        journey.prefill_worker = worker
        journey.prefill_sources = last.sources or PromptSources()
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

    def _note_fallback(self, cause: str, message: str, request: EngineRequest, journey: Journey) -> None:
        log.warning("request %s: %s; the decode worker computes the prompt", request.request_id, message)
        self._metrics.prefill_fallbacks.labels(cause=cause).inc()
        journey.prefill_failure = message

    def _arrived(self, sources: PromptSources, decode: WorkerLink, journey: Journey) -> None:
        journey.sources = sources
        journey.ferried_pages = pages_of(sources, decode.member.block_size)
        journey.ferried_bytes = journey.ferried_pages * decode.member.page_bytes
        self._metrics.ferried_pages.inc(journey.ferried_pages)


class _Answer:
    """What a request gave so far, and how it goes on where its worker is lost.

    Most requests go on from prompt and tokens so far. Where a grammar constrains the answer, the engine would begin the
    grammar anew: such a request is computed again from its prompt, and what comes again is compared and left out.
    """

    def __init__(self, request: EngineRequest, sink: Sink, journey: Journey) -> None:
        self.request_id = request.request_id
        self.token_ids: list[int] = []
        self._request = request
        self._sink = sink
        self._journey = journey
        self._num_chars = 0
        self._attempt = 0
        # Of what an attempt gives, tokens and characters that were given before.
        self._num_again = 0
        self._num_chars_again = 0
        self._position = 0

    def request(self) -> EngineRequest:
        """For the next attempt, under an id of its own: the lost worker may still know the first one's."""
        request, given = self._request, self.token_ids
        if not given:
            return request
        self._attempt += 1
        if self._journey.continued_after[-1:] != [len(given)]:
            self._journey.continued_after.append(len(given))
        request_id = RequestId(f"{request.request_id}-c{self._attempt}")
        if request.sampling.structured_outputs:
            self._num_again, self._num_chars_again, self._position = len(given), self._num_chars, 0
            return dataclasses.replace(request, request_id=request_id)
        # At least one token is left for the engine to give: it says how the answer ended.
        num_tokens = min(len(given), request.sampling.max_tokens - 1)
        self._num_again, self._position = len(given) - num_tokens, num_tokens
        if not num_tokens:
            self._num_chars_again = self._num_chars
            return dataclasses.replace(request, request_id=request_id)
        return dataclasses.replace(
            request,
            request_id=request_id,
            prompt_token_ids=[*request.prompt_token_ids, *given[:num_tokens]],
            continued=Continued(num_tokens, self._num_chars),
        )

    def take(self, output: EngineOutput) -> None:
        if self._num_again or self._num_chars_again:
            output = self._without_what_came_before(output)
        self.token_ids.extend(output.token_ids)
        self._num_chars += len(output.text)
        self._sink(output)

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

    def add(self, link: WorkerLink) -> None:
        self._generations.add((link.member.member_id, link.generation))

    def refuse(self, link: WorkerLink) -> None:
        self._refused.add(link.member.member_id)

    def may_try(self, link: WorkerLink) -> bool:
        member_id = link.member.member_id
        return member_id not in self._refused and (member_id, link.generation) not in self._generations


def _replayable(request: EngineRequest) -> EngineRequest:
    """A request that, computed again, gives the same answer, where it may have to be."""
    sampling = request.sampling
    if not sampling.structured_outputs or sampling.seed is not None or sampling.temperature == 0:
        return request
    return dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=secrets.randbits(63)))


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
    return dataclasses.replace(
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


def _candidate(link: WorkerLink) -> Candidate:
    member = link.member
    return Candidate(member.member_id, member.model, member.block_size, member.kv_cache_dtype)
