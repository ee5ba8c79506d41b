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
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvferry.engine.base import EngineOutput, EngineRequest, PromptSources, TransferParams
from kvferry.errors import (
    EngineDead,
    KvferryError,
    NoDecodeWorker,
    RequestError,
    UnavailableError,
    WorkerLost,
)
from kvferry.membership.base import MemberId, MemberKind
from kvferry.router.link import WorkerLink, pages_of
from kvferry.router.placement import Candidate, Placement, RoundRobin
from kvferry.router.roster import Roster
from kvferry.telemetry import Metrics

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


class Dispatcher:
    """Runs requests over the links of a roster."""

    def __init__(self, roster: Roster, metrics: Metrics, *, prefill_timeout_s: float) -> None:
        self._roster = roster
        self._metrics = metrics
        self._placement = RoundRobin()
        self._prefill_timeout_s = prefill_timeout_s

    async def generate(self, request: EngineRequest, journey: Journey) -> AsyncIterator[EngineOutput]:
        """Outputs of the request, from whichever workers it takes. Closing the iterator cancels it on both.

        Raises NoDecodeWorker, or what the decode worker refused or failed with.
        """
        tried: set[MemberId] = set()
        transfer: TransferParams | None = None
        placement = self._place(tried)
        journey.reason = placement.reason.value
        self._metrics.placements.labels(reason=placement.reason.value).inc()
        if placement.prefill is not None:
            transfer = await self._prefill(placement.prefill, request, journey)
        while True:
            decode = self._link(MemberKind.DECODE, placement.decode)
            tried.add(placement.decode)
            journey.decode_worker = placement.decode
            begun = False
            try:
                # Between the end of the prefill and this submit nothing is awaited: once submitted, a cancel also
                # reaches the prefill engine, which holds pages for this request.
                if decode is None:
                    raise WorkerLost(f"worker {placement.decode} is gone")
                remote = decode.submit(dataclasses.replace(request, transfer_params=transfer))
                try:
                    async for output in remote:
                        begun = True
                        if output.sources is not None:
                            self._arrived(output.sources, decode, journey)
                        yield output
                    return
                finally:
                    remote.cancel()
            except (WorkerLost, EngineDead, UnavailableError) as error:
                if begun:
                    raise
                log.warning("request %s: %s; trying another decode worker", request.request_id, error.message)
                self._metrics.decode_retries.inc()
                placement = self._place(tried, lost=error)

    def _place(self, tried: set[MemberId], lost: KvferryError | None = None) -> Placement:
        placement = self._placement.place(
            [_candidate(link) for link in self._roster.usable(MemberKind.PREFILL)],
            [_candidate(link) for link in self._roster.usable(MemberKind.DECODE) if link.member.member_id not in tried],
        )
        if placement is None:
            why = f"; the last one failed: {lost.message}" if lost is not None else ""
            raise NoDecodeWorker(f"no decode worker is connected{why}")
        return placement

    def _link(self, kind: MemberKind, member_id: MemberId) -> WorkerLink | None:
        return next((link for link in self._roster.usable(kind) if link.member.member_id == member_id), None)

    async def _prefill(self, worker: MemberId, request: EngineRequest, journey: Journey) -> TransferParams | None:
        """Have a prefill worker compute the prompt. None when it could not; then the decode worker will."""
        one_token = dataclasses.replace(
            request.sampling,
            max_tokens=1,
            min_tokens=0,
            logprobs=None,
            stop=(),
            stop_token_ids=(),
            structured_outputs="",
            bad_words=(),
        )
        prompt = dataclasses.replace(request, sampling=one_token, keep_for_transfer=True)
        try:
            link = self._link(MemberKind.PREFILL, worker)
            if link is None:
                raise WorkerLost(f"worker {worker} is gone")
            async with asyncio.timeout(self._prefill_timeout_s):
                last = await _last_output(link, prompt)
        except TimeoutError:
            self._note_fallback("timeout", f"prefill took over {self._prefill_timeout_s:g} s", request, journey)
            return None
        except RequestError:
            raise
        except KvferryError as error:
            self._note_fallback(error.code or "error", error.message, request, journey)
            return None
        if last.transfer_params is None:
            self._note_fallback("no_transfer", "the prefill engine kept nothing", request, journey)
            return None
        journey.prefill_worker = worker
        journey.prefill_sources = last.sources or PromptSources()
        return last.transfer_params

    def _note_fallback(self, cause: str, message: str, request: EngineRequest, journey: Journey) -> None:
        log.warning("request %s: %s; the decode worker computes the prompt", request.request_id, message)
        self._metrics.prefill_fallbacks.labels(cause=cause).inc()
        journey.prefill_failure = message

    def _arrived(self, sources: PromptSources, decode: WorkerLink, journey: Journey) -> None:
        journey.sources = sources
        journey.ferried_pages = pages_of(sources, decode.member.block_size)
        journey.ferried_bytes = journey.ferried_pages * decode.member.page_bytes
        self._metrics.ferried_pages.inc(journey.ferried_pages)


async def _last_output(link: WorkerLink, request: EngineRequest) -> EngineOutput:
    remote = link.submit(request)
    last = EngineOutput(token_ids=(), text="")
    try:
        async for output in remote:
            last = output
    finally:
        remote.cancel()
    return last


def _candidate(link: WorkerLink) -> Candidate:
    member = link.member
    return Candidate(member.member_id, member.model, member.block_size, member.kv_cache_dtype)
