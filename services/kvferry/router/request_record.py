"""The record of one request's way, for `kvferry explain` and traces."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import structs

from kvferry.engine.base import NO_SOURCES, CachedTokens, EngineOutput, PromptSources
from kvferry.link.remote_request import transferred_pages
from kvferry.membership.base import Member, MemberId
from kvferry.observability.tracing import Span
from kvferry.router.placement import Placement

MAX_PLACEMENTS = 8  # kept per request


class RequestRecord(msgspec.Struct):
    """Filled in as the request goes; complete when its outputs ended."""

    request_id: str = ""
    tenant: str = ""
    owner: str = ""  # the salt of tenant, epoch and group: another tenant of the same name has another one
    pool: str = ""
    adapter: str = ""  # NAME@DIGEST
    reason: str = ""
    prefill_worker: MemberId | None = None
    decode_worker: MemberId | None = None
    prefill_failure: str = ""
    unequal_pages: str = ""  # what keeps prefill workers from exchanging pages with the decode worker
    prefill_sources: PromptSources = NO_SOURCES
    sources: PromptSources = NO_SOURCES
    cached: CachedTokens | None = None  # in the decode worker's tiers, and transferred to it; None: it did not say
    transferred_pages: int = 0
    transferred_bytes: int = 0
    lost_workers: Sequence[MemberId] = ()  # whose engine or link was lost under the request
    error_code: str = ""  # of the error that ended it, if one did
    # Tokens given when a decode worker was lost, or preempted it. Choices have the same list.
    resumed_after: list[int] = msgspec.field(default_factory=list)
    num_preemptions: int = 0
    has_output: bool = False
    num_cached_at_first: int = 0  # prompt tokens that no worker computed for the attempt that gave the first output
    placements: Sequence[Placement] = ()  # every decision about it, the last few
    trace: Span | None = None  # of the whole request, where it is traced: what is done for it are its children

    @property
    def is_computed(self) -> bool:
        # Whether a worker is known to have computed or accepted the prompt.
        return self.has_output or self.prefill_worker is not None

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that no worker had to compute; before the first output, those that the prefill worker had."""
        if self.has_output:
            return self.num_cached_at_first
        return self.prefill_sources.total - self.prefill_sources.local_compute

    def note_first_output(self, sources: PromptSources | None) -> None:
        # Later attempts find the prompt cached that the first one computed.
        if sources is not None and not self.has_output:
            self._count_cached(sources)
        self.has_output = True

    def _count_cached(self, sources: PromptSources) -> None:
        moved = min(self.prefill_sources.local_compute, sources.external_kv_transfer)
        self.num_cached_at_first = max(0, sources.total - sources.local_compute - moved)

    def note_placement(self, placement: Placement, took_ns: int) -> None:
        self.placements = (*self.placements[-(MAX_PLACEMENTS - 1) :], placement)
        if self.trace is None:
            return
        now_ns = time.time_ns()
        self.trace.record(
            "route",
            now_ns - took_ns,
            now_ns,
            {
                "kvferry.reason": placement.reason.value,
                "kvferry.prefill_worker": placement.prefill,
                "kvferry.decode_worker": placement.decode,
            },
        )

    def note_sources(self, sources: PromptSources, last: EngineOutput, decode: Member) -> None:
        if not self.resumed_after:  # also of an answer whose first output was its last
            self._count_cached(sources)
        self.sources, self.cached = sources, last.cached
        self.transferred_pages = transferred_pages(last, decode.block_size)
        self.transferred_bytes = self.transferred_pages * decode.page_bytes

    def begin_span(self, name: str, worker: MemberId) -> Span | None:
        """Begin a span for another process's work. None if the request is not sampled."""
        return self.trace.child(name, {"kvferry.worker": worker}, remote=True) if self.trace is not None else None


def set_answer_attributes(span: Span, num_generated: int, last: EngineOutput) -> None:
    sources = structs.asdict(last.sources or NO_SOURCES)
    span.set(
        {
            "gen_ai.usage.output_tokens": num_generated,
            **{f"kvferry.prompt_tokens.{source}": num for source, num in sources.items()},
        }
    )
