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
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvferry.engine.base import EngineOutput, EngineRequest, PromptSources, RequestId, Sampling, TransferParams
from kvferry.errors import (
    KvferryError,
    NoDecodeWorker,
    Overloaded,
    RequestError,
    UnavailableError,
    WorkerDraining,
    WorkerLost,
)
from kvferry.membership.base import MemberId, MemberKind
from kvferry.router.link import WorkerLink, pages_of
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

    def __init__(self, roster: Roster, metrics: Metrics, *, prefill_timeout_s: float) -> None:
        self._roster = roster
        self._metrics = metrics
        self._placement = RoundRobin()
        self._prefill_timeout_s = prefill_timeout_s

    async def generate(self, request: EngineRequest, journey: Journey) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of the request, from whichever workers it takes. Closing the iterator cancels it on both.

        Raises NoDecodeWorker, or what the decode worker refused or failed with.
        """
        tried: set[MemberId] = set()
        kept: _Kept | None = None
        lost: KvferryError | None = None
        while True:
            placement, kept = self._place(tried, lost, kept)
            if kept is None:
                journey.reason = placement.reason.value
                self._metrics.placements.labels(reason=placement.reason.value).inc()
                if placement.prefill is not None and not journey.prefill_failure:
                    kept = await self._prefill(placement.prefill, request, journey)
            tried.add(placement.decode)
            decode = self._link(MemberKind.DECODE, placement.decode)
            if decode is None:
                lost = WorkerLost(f"worker {placement.decode} is gone")
                self._note_retry(request, lost)
                continue
            journey.decode_worker = placement.decode
            begun = False
            # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also reaches
            # the prefill engine, which holds pages for this request.
            remote = decode.submit(dataclasses.replace(request, transfer_params=kept.params if kept else None))
            try:
                async for output in remote:
                    begun = True
                    if output.sources is not None:
                        self._arrived(output.sources, decode, journey)
                    yield output
                return
            except (UnavailableError, Overloaded) as error:
                if begun:
                    raise
                if not isinstance(error, (WorkerDraining, Overloaded)):
                    # That engine may have pulled the pages, or release them any moment, and a reader of released pages
                    # reads another prompt's. The prefill worker has them cached and keeps them once more.
                    kept = None
                lost = error
                self._note_retry(request, lost)
            finally:
                remote.cancel()

    def _place(
        self, tried: set[MemberId], lost: KvferryError | None, kept: _Kept | None
    ) -> tuple[Placement, _Kept | None]:
        """Where to go next, and what is kept for it: with decode workers that can use the pages first."""
        decode = [_candidate(link) for link in self._roster.usable(MemberKind.DECODE)]
        decode = [candidate for candidate in decode if candidate.member_id not in tried]
        if kept is not None:
            exchanging = [candidate for candidate in decode if can_exchange(candidate, kept.holder)]
            decode, kept = (exchanging, kept) if exchanging else (decode, None)
        placement = self._placement.place(
            [_candidate(link) for link in self._roster.usable(MemberKind.PREFILL)], decode
        )
        if placement is not None:
            return placement, kept
        if isinstance(lost, Overloaded):
            raise lost
        why = f"; the last one failed: {lost.message}" if lost is not None else ""
        raise NoDecodeWorker(f"no decode worker is connected{why}")

    def _link(self, kind: MemberKind, member_id: MemberId) -> WorkerLink | None:
        return next((link for link in self._roster.usable(kind) if link.member.member_id == member_id), None)

    async def _prefill(self, worker: MemberId, request: EngineRequest, journey: Journey) -> _Kept | None:
        """Have a prefill worker compute the prompt. None when it could not; then the decode worker will."""
        prompt = dataclasses.replace(request, sampling=prompt_only(request.sampling), keep_for_transfer=True)
        try:
            link = self._link(MemberKind.PREFILL, worker)
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
        remote = link.submit(prompt)
        holder = _candidate(link)
        last = EngineOutput(token_ids=(), text="")
        try:
            async for output in remote:
                last = output
        finally:
            remote.cancel(lambda orphan: self._give_back(holder, prompt, orphan))
        return last

    def _give_back(self, holder: Candidate, prompt: EngineRequest, last: EngineOutput) -> None:
        """Release what a prefill engine keeps for a request that was cancelled just as its prompt was computed.

        Only a decode engine can: one is given the request and loses it at once. Without one the lease ends it.
        """
        if last.transfer_params is None:
            return
        for link in self._roster.usable(MemberKind.DECODE):
            if can_exchange(_candidate(link), holder):
                # An id of its own: the request itself may be running there by now.
                request_id = RequestId(f"{prompt.request_id}-release")
                unwanted = dataclasses.replace(
                    prompt, request_id=request_id, keep_for_transfer=False, transfer_params=last.transfer_params
                )
                link.submit(unwanted).cancel()
                return

    def _note_retry(self, request: EngineRequest, error: KvferryError) -> None:
        log.warning("request %s: %s; trying another decode worker", request.request_id, error.message)
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
