"""A request, its answer so far, and what workers are asked for in each attempt."""

# A request is made once and does not change. Each attempt composes one EngineRequest for each of its workers from the
# request, from the tokens that were answered, and from the placement.

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import structs

from kvferry.engine.base import (
    NO_SOURCES,
    CachedTokens,
    Continued,
    EngineOutput,
    EngineRequest,
    Parse,
    PromptImage,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TransferParams,
    Turn,
)
from kvferry.errors import EngineError
from kvferry.link.remote_request import OnOutput, OnText, as_on_text, transferred_pages
from kvferry.membership.base import Member, MemberId
from kvferry.observability.tracing import Span, TraceContext
from kvferry.pages.keys import ImageSpan, page_salt
from kvferry.router.keeper_volumes import volume_of
from kvferry.router.placement import Placement
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import NO_LOAD
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace

MAX_PLACEMENTS = 8  # kept per request


class RequestState(StrEnum):
    QUEUED = "queued"  # no worker has it
    PLACED = "placed"  # its workers are chosen
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class RequestRecord(msgspec.Struct):
    """One request's way, for `kvferry explain` and traces. Complete when its outputs ended."""

    request_id: str = ""
    state: RequestState = RequestState.QUEUED
    tenant: str = ""
    owner: str = ""  # the salt of tenant, epoch and group: another tenant of the same name has another one
    pool: str = ""
    adapter: str = ""  # NAME@DIGEST
    reason: str = ""
    prefill_worker: MemberId | None = None
    decode_worker: MemberId | None = None
    prefill_failure: str = ""
    unequal_pages: str = ""  # why prefill workers exchange no pages with the decode worker
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


MAX_NOTED: Final = 64  # continuations that a record names

# For prefill workers: the decode engine computes the prompt's last token itself, and samples from it. Nothing may end
# the request otherwise than by its length. (vLLM's pull connector keeps pages of stopped requests too.)
PROMPT_ONLY: Final = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


class Prompt(msgspec.Struct, frozen=True):
    """A rendered prompt, and what its pages are keyed by. Choices of one prompt share it."""

    token_ids: Sequence[int]  # an array, which halves the time of route keys
    cache_salt: str = ""
    adapter: str = ""  # of EngineInfo.adapters; empty: the model itself
    images: tuple[PromptImage, ...] = ()  # by offset; they do not overlap

    @property
    def page_salt(self) -> str:
        return page_salt(self.cache_salt, self.adapter)

    @property
    def image_spans(self) -> tuple[ImageSpan, ...]:
        return tuple(image.span for image in self.images)


class Contract(msgspec.Struct, frozen=True):
    """What is known of a request's tenant at workers."""

    turn: Turn | None = None  # None where tenants have no shares
    namespace: Namespace = DEFAULT_NAMESPACE


class Request(msgspec.Struct, frozen=True):
    """One choice that a client asks for."""

    request_id: RequestId
    prompt: Prompt
    sampling: Sampling
    parse: Parse | None = None
    contract: Contract = Contract()
    wanted_s: float | None = None  # as in TierHints
    deadline_s: float | None = None  # of `time.monotonic`
    pool: str = ""  # whose workers alone may have it; empty: the default one


class Answer:
    """The answer to a request so far. It continues where a worker was lost, or gave its slot to another tenant."""

    def __init__(
        self, request: Request, on_output: OnOutput, record: RequestRecord, on_text: OnText | None = None
    ) -> None:
        self.request = request
        self.request_id = request.request_id  # of the attempt
        self.token_ids: list[int] = []
        self._deliver = on_output
        self._deliver_text = on_text if on_text is not None else as_on_text(on_output)
        self._record = record
        self._num_chars = 0
        self._sizes: list[int] | None = [] if request.parse is not None else None  # tokens of each output
        self._num_continuations = 0
        self.all_token_ids: Sequence[int] = request.prompt.token_ids  # with those answered before the attempt
        self._continued: Continued | None = None
        self._is_suspect = False
        self._on_first_output: Callable[[], None] | None = None

    def begin_attempt(self, *, is_suspect: bool = False) -> None:
        """Begin where the answer stands, with a new id then: the lost worker may know the old one.

        Raises EngineError for an answer that has all its tokens and did not end.
        """
        request, given = self.request, self.token_ids
        self._is_suspect = is_suspect
        if not given:
            return
        if len(given) >= request.sampling.max_tokens:
            raise EngineError("a worker gave all tokens of the answer, and was lost before it told how it ended")
        self._num_continuations += 1
        self.request_id = RequestId(f"{request.request_id}-c{self._num_continuations}")
        noted = self._record.resumed_after
        if noted[-1:] != [len(given)] and len(noted) < MAX_NOTED:
            noted.append(len(given))
        self.all_token_ids = array("I", [*request.prompt.token_ids, *given])
        self._continued = Continued(len(given), self._num_chars, tuple(self._sizes or ()))

    def prompt_request(self, placement: Placement, trace: TraceContext | None) -> EngineRequest:
        """Return what a prefill worker is asked for: the pages of all tokens so far."""
        return self._engine_request(PROMPT_ONLY, placement, trace, keep_for_transfer=True)

    def answer_request(
        self,
        placement: Placement,
        trace: TraceContext | None,
        *,
        transfer_params: TransferParams | None = None,
        may_preempt: bool = False,
    ) -> EngineRequest:
        """Return what a decode worker is asked for; it pulls the pages that `transfer_params` name."""
        computes = placement.prefill is None and transfer_params is None
        return self._engine_request(
            self.request.sampling,
            placement if computes else None,
            trace,
            transfer_params=transfer_params,
            continued=self._continued,
            parse=self.request.parse,
            is_preemptible=may_preempt and self.request.contract.turn is not None,
        )

    def _engine_request(
        self,
        sampling: Sampling,
        computing: Placement | None,
        trace: TraceContext | None,
        *,
        transfer_params: TransferParams | None = None,
        **of_kind: Any,
    ) -> EngineRequest:
        """`computing` is the placement where the worker computes the prompt, or loads it."""
        request, prompt = self.request, self.request.prompt
        decision, turn = computing if isinstance(computing, Decision) else None, request.contract.turn
        if turn is not None and decision is not None:
            turn = Turn(turn.tenant, turn.share, decision.missing_tokens)
        return EngineRequest(
            *(self.request_id, self.all_token_ids, sampling),
            transfer_params=transfer_params,
            cache_salt=prompt.cache_salt,
            tier=_tier_hints(request, decision),
            trace=trace,
            deadline_s=request.deadline_s,
            is_suspect=self._is_suspect,
            is_resumed=self._continued is not None,
            turn=turn,
            pool=request.pool,
            adapter=prompt.adapter,
            images=prompt.image_spans,
            features=[image.features for image in prompt.images] if transfer_params is None else [],
            **of_kind,
        )

    def on_first_output(self, called: Callable[[], None]) -> None:
        """`called` is called once, before the attempt's first output is delivered."""
        self._on_first_output = called

    def end_attempt(self) -> None:
        """Drop the callback, which may refer back to this answer: a cycle would keep the prompt."""
        self._on_first_output = None

    def on_output(self, output: EngineOutput) -> None:
        if self._on_first_output is not None:
            self._on_first_output()
            self._on_first_output = None
        self._note(output.token_ids, output.text)
        self._deliver(output)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        if self._on_first_output is not None:
            self.on_output(EngineOutput(token_ids, text))
            return
        self._note(token_ids, text)
        self._deliver_text(token_ids, text)

    def _note(self, token_ids: Sequence[int], text: str) -> None:
        self.token_ids.extend(token_ids)
        self._num_chars += len(text)
        if self._sizes is not None and token_ids:
            self._sizes.append(len(token_ids))


def _tier_hints(request: Request, decision: Decision | None) -> TierHints | None:
    contract, load = request.contract, decision.load if decision is not None else NO_LOAD
    volumes = {volume_of(load.volume): load.num_pages} if load.volume else {}
    may_load = bool(volumes) or not load.skipped_pages
    is_default = contract.namespace == DEFAULT_NAMESPACE and request.wanted_s is None
    if is_default and may_load and not volumes:
        return None
    return TierHints(contract.namespace, volumes, may_load, request.wanted_s)
