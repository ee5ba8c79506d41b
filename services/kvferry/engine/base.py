"""The contract between a worker and whatever computes tokens.

Who owns what:
- An `Engine` owns its KV pages. A prefill request with `keep_for_transfer` leaves its pages pinned after it finished;
  they are released when a decode engine has pulled them, when that decode request is aborted, by `release`, or when the
  lease runs out.
- `transfer_params` are opaque outside the engine that made them: they are carried from the prefill engine's last output
  to the decode engine's request and never looked into, and never taken from a client.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, Protocol

import msgspec

from kvferry.errors import InvalidRequest
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry.tracing import TraceContext

RequestId = NewType("RequestId", str)
EngineId = NewType("EngineId", str)

TransferParams = Mapping[str, Any]


class FinishReason(enum.StrEnum):
    """Why a request ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sampling(msgspec.Struct, frozen=True):
    """Resolved sampling parameters: every default of the model already applied.

    Field for field the `Sampling` message of worker.proto (a test compares them). `structured_outputs` is JSON, empty
    when unconstrained; `logprobs` is how many alternatives beside the sampled token, None for none at all.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    structured_outputs: str = ""


@dataclass(frozen=True, slots=True)
class Continued:
    """What a request had given before its engine was lost: the answer goes on from there.

    The last `num_tokens` ids of the prompt are tokens of the answer; their first `num_chars` characters were delivered.
    Whatever counts from the answer's start (limits, penalties, stop strings, text held back) counts them.
    """

    num_tokens: int
    num_chars: int


@dataclass(frozen=True, slots=True)
class Parse:
    """The answer is to be taken apart into content, reasoning and tool calls, by the engine's own parser.

    `request` is JSON between a renderer and its engine; nobody else looks into it. Of an answer that is computed again
    from its start, the first `num_tokens_before` tokens and `num_chars_before` characters were parsed and delivered:
    what they make is not told again.
    """

    request: bytes
    num_tokens_before: int = 0
    num_chars_before: int = 0


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """More of one tool call: `id` and `name` come once, first; `arguments` is the next piece of their JSON."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output adds to a parsed answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class TierHints:
    """Where a request's pages belong, and where they are said to lie on volumes.

    `volumes` are hints: volume id -> how many pages of the prompt, from its start, lie there. An engine may ask its
    keeper for pages that only a hint names; pages that are not there after all are computed. Not `load`: computing them
    costs less, and nothing is to be loaded from volumes.
    """

    namespace: Namespace = DEFAULT_NAMESPACE
    volumes: Mapping[str, int] = field(default_factory=dict)
    load: bool = True


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to compute. `keep_for_transfer` and `transfer_params` exclude each other."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    keep_for_transfer: bool = False
    transfer_params: TransferParams | None = None
    cache_salt: str = ""
    continued: Continued | None = None
    parse: Parse | None = None
    tier: TierHints | None = None  # None: the default namespace, and nothing known of volumes
    trace: TraceContext | None = None  # whose child anything done for it is; None: nobody traces it


def validate_continuation(request: EngineRequest) -> None:
    """Raises InvalidRequest for a continuation that leaves no prompt, or no answer."""
    if request.continued is None:
        return
    num_given, num_all = request.continued.num_tokens, len(request.prompt_token_ids)
    if not 0 < num_given < min(num_all, request.sampling.max_tokens):
        raise InvalidRequest(
            f"a request cannot go on after {num_given} tokens of its answer: the prompt has {num_all} with them, "
            f"the answer {request.sampling.max_tokens} at most"
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptSources:
    """Where prompt tokens came from; the three add up to the prompt's length (vLLM's `prompt_tokens_by_source`)."""

    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0

    @property
    def total(self) -> int:
        return self.local_compute + self.local_cache_hit + self.external_kv_transfer

    def __add__(self, other: PromptSources) -> PromptSources:
        return PromptSources(
            self.local_compute + other.local_compute,
            self.local_cache_hit + other.local_cache_hit,
            self.external_kv_transfer + other.external_kv_transfer,
        )


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Prompt tokens whose pages were there already, by where (vLLM's `prompt_tokens_cached_by_source`).

    Counted when a request is admitted: what then fails to arrive is computed, and counted here nevertheless.
    """

    device: int = 0  # in the engine's own memory
    cpu: int = 0  # in its CPU tier
    volume: int = 0  # on NVMe, through the CPU tier
    kv_transfer: int = 0  # in another engine

    def by_tier(self) -> dict[str, int]:
        """Token counts under the public names of the tiers: those of the metrics' label `tier`."""
        return {"device": self.device, "cpu": self.cpu, "volume": self.volume, "ferry": self.kv_transfer}

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(
            self.device + other.device,
            self.cpu + other.cpu,
            self.volume + other.volume,
            self.kv_transfer + other.kv_transfer,
        )


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """When what happened to a request, in seconds of `time.monotonic` on this machine.

    `ferry` and `load` are begin and end of waiting for pages: of another engine, and of slower tiers.
    """

    queued_s: float
    scheduled_s: float  # its prompt, or what was left of it, began to be computed
    first_token_s: float
    last_token_s: float
    kv_transfer: tuple[float, float] | None = None
    load: tuple[float, float] | None = None


@dataclass(slots=True)
class EngineOutput:
    """What one engine step added to one request: new tokens and new text only, never the whole.

    `logprobs[i]` belongs to `token_ids[i]`: the sampled token first, then the alternatives, most likely first.
    `text` may lag behind `token_ids` (a character may need several tokens; a stop string may still be matching).
    `finish_reason`, `stop_reason`, `sources`, `cached`, `transfer_params` and `times` are set on the last output only;
    `cached` says of the tokens that `sources` does not call computed where they were, and `times` never leaves the
    worker.
    `delta` is what the parser made of the text, for requests with `parse`; `text` is then still the raw text.
    """

    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[Sequence[TokenLogprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    sources: PromptSources | None = None
    cached: CachedTokens | None = None
    transfer_params: TransferParams | None = None
    delta: AnswerDelta | None = None
    times: EngineTimes | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change while an engine lives."""

    engine_id: EngineId  # fresh on every start: peers tell a restarted engine from the one they knew
    model: str
    max_model_len: int
    block_size: int  # tokens per KV page
    page_bytes: int  # bytes of one KV page over all layers
    num_pages: int
    kv_cache_dtype: str
    num_cpu_pages: int = 0  # that fit in its CPU tier


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of an engine, and its totals since it started."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages_used: int = 0
    num_pages: int = 0
    prompt_tokens: PromptSources = PromptSources()
    cached_tokens: CachedTokens = CachedTokens()
    transferred_bytes: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0  # finished; one that stands still while requests wait is an engine that hangs


@dataclass(frozen=True, slots=True)
class KvTransferStats:
    """Transfers of pages from other engines to this one, since it started."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # summed
    num_failed: Mapping[str, int] = field(default_factory=dict)  # by cause (telemetry.KV_TRANSFER_FAILURES)


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages became findable by prefix.

    `token_ids` holds block_size ids per page; `parent_hash` is None at a prompt's start. Where `route_keys` are given,
    one per page, they stand instead of tokens, size, parent and salt: pages that came from slower tiers may come in any
    order, without what is before them.
    """

    page_hashes: Sequence[int]
    parent_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    cache_salt: str | None = None
    medium: str = "GPU"
    route_keys: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    page_hashes: Sequence[int]
    medium: str = "GPU"


@dataclass(frozen=True, slots=True)
class AllPagesCleared:
    pass


KvEvent = PagesStored | PagesRemoved | AllPagesCleared


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events of one step. `sequence` counts up by one; a gap means that batches were lost."""

    sequence: int
    events: Sequence[KvEvent]


class Engine(Protocol):
    """Computes requests. Both implementations pass tests/contract/test_engine_contract.py."""

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    async def start(self) -> None:
        """Load and warm up. Raises UnsupportedEngine when it cannot be built as configured."""
        ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of one request, ending with one whose `finish_reason` is set.

        Closing the iterator early aborts the request and releases its pages. A request that names pages of another
        engine and cannot get them computes the prompt itself. The deltas of a request with `parse` begin after what
        was delivered before, whether it is continued or computed again. Raises InvalidRequest for what this engine
        cannot do, EngineDead once the engine is gone, EngineError for an answer that its parser cannot read.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """End a request: its iterator yields a last output with ABORT. Unknown and finished ids are ignored."""
        ...

    async def release(self, transfer_params: TransferParams) -> None:
        """Give back pages that this engine keeps for a request no decode engine was ever told of.

        Only then: a decode engine that reads pages while they are released reads another prompt's. May be repeated;
        parameters that this engine does not know, any more or at all, are ignored. Never raises. The pages may be free
        only after the next step.
        """
        ...

    def stats(self) -> EngineStats: ...

    def kv_transfer_stats(self) -> KvTransferStats: ...

    def own_metrics(self) -> Iterable[Any]:
        """Prometheus metric families that the engine makes itself, outside our catalogue. May be slow to make."""
        ...

    async def check_health(self) -> None:
        """Raises EngineDead once the engine is gone for good."""
        ...

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Events from now on, for one listener at a time; never crosses a machine's border."""
        ...

    async def stop(self) -> None:
        """Release everything; may be repeated."""
        ...


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A body turned into what an engine takes; `text` is set where a completion prompt came as text.

    `parse` is set where the answer is to be parsed.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    text: str | None = None
    parse: Parse | None = None


class Renderer(Protocol):
    """Turns OpenAI bodies into token ids and resolved sampling parameters, once; needs no engine.

    `body` is a validated JSON object (gateway/openai_bodies.py). Raises InvalidRequest for what the model cannot do and
    ContextLengthExceeded.
    """

    async def render_chat(self, body: Mapping[str, Any]) -> RenderedPrompt: ...

    async def render_completion(self, body: Mapping[str, Any]) -> Sequence[RenderedPrompt]:
        """One RenderedPrompt per prompt of the body, in order."""
        ...

    def max_model_len(self) -> int: ...
