"""The contract between a worker and an engine.

An engine owns its KV pages. With `keep_for_transfer` a finished request's pages stay pinned until they are pulled or
released, the decode request is aborted, or the lease ends (see ADR 4). `transfer_params` never come from a client.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType, Protocol

import msgspec
from msgspec import structs

from kvferry.errors import InvalidRequest
from kvferry.observability.tracing import TraceContext
from kvferry.pages.exchange import ExchangeFields
from kvferry.pages.keys import ImageSpan, PageImages, page_salt
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.terms import TierTerms

RequestId = NewType("RequestId", str)
EngineId = NewType("EngineId", str)
TenantName = NewType("TenantName", str)  # whose turn it is, and whose limits count
CacheSalt = NewType("CacheSalt", str)  # what caches are keyed by; clients may part their tenant's with one of their own

TransferParams = Mapping[str, Any]


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters with the model's defaults applied.

    `structured_outputs` is JSON or empty; `logprobs` counts alternatives.
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

    def with_seed(self, seed: int | None) -> Sampling:
        return self if seed == self.seed else structs.replace(self, seed=seed)

    def without_logprobs(self) -> Sampling:
        return structs.replace(self, logprobs=None)


class Continued(msgspec.Struct, frozen=True):
    """The part of an answer that a lost engine generated: the prompt's last `num_tokens` ids.

    `num_chars` characters of their text were delivered. Limits, penalties and stop strings apply to the whole answer.
    """

    num_tokens: int
    num_chars: int
    sizes: Sequence[int] = ()  # tokens of each output, where it is parsed


class Parse(msgspec.Struct, frozen=True):
    """Asks for an answer parsed into content, reasoning and tool calls.

    `request` is private to renderer and engine.
    """

    request: bytes


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next piece of a tool call's JSON `arguments`. `id` and `name` come once, first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class AnswerDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TierHints(msgspec.Struct, frozen=True):
    """Namespace of a request's pages, and how many prompt pages, from the start, a volume may have.

    Missing pages are computed. `load` is False where computing costs less.
    """

    namespace: Namespace = DEFAULT_NAMESPACE
    volumes: Mapping[str, int] = msgspec.field(default_factory=dict)
    load: bool = True
    # For how long the client wants the pages after this use, up to MAX_WANTED_S; 0: its session ends. None: no hint.
    wanted_s: float | None = None


class Turn(msgspec.Struct, frozen=True):
    """Whose turn a request waits for at a worker."""

    tenant: str
    share: float  # of a saturated worker's time, to other tenants' shares
    missing_tokens: int | None = None  # of the prompt, that the worker is expected to compute; None: not known


class PromptImage(msgspec.Struct, frozen=True):
    """An image of a prompt, as the model's processor made it.

    Equal digests have equal `features`, which are private to renderer and engine.
    """

    digest: str
    offset: int
    num_tokens: int
    features: bytes

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(self.digest, self.offset, self.num_tokens)


class ChatImage(msgspec.Struct, frozen=True):
    """The file of an image in a chat; `where` is its place in the body, for errors."""

    data: bytes
    where: str


class EngineRequest(msgspec.Struct, frozen=True):
    """`keep_for_transfer` and `transfer_params` exclude each other."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    keep_for_transfer: bool = False
    transfer_params: TransferParams | None = None
    cache_salt: str = ""
    continued: Continued | None = None
    parse: Parse | None = None
    tier: TierHints | None = None  # None: the default namespace, no hints
    trace: TraceContext | None = None  # parent span; None if not sampled
    deadline_s: float | None = None  # of `time.monotonic` in this process
    is_suspect: bool = False  # an engine was lost under it before its first token
    is_resumed: bool = False  # it has given tokens, and lost its worker
    is_preemptible: bool = False  # its worker may give its slot to a tenant below its share
    turn: Turn | None = None  # None where tenants have no shares
    pool: str = ""  # whose workers alone may have it; empty: the default one
    adapter: str = ""  # of EngineInfo.adapters; empty: the model itself
    images: tuple[ImageSpan, ...] = ()  # by offset; they do not overlap
    # By image; none where pages come from another engine. The engine empties the list when it begins, so that nobody
    # who holds the request during its answer holds them.
    features: list[bytes] = []

    @property
    def page_salt(self) -> str:
        return page_salt(self.cache_salt, self.adapter)

    @property
    def num_image_bytes(self) -> int:
        return sum(map(len, self.features))


# In transfer parameters of pages that were computed with an adapter.
ADAPTER_PARAMETER = "kvferry_adapter"


def name_adapter(params: TransferParams, request: EngineRequest) -> TransferParams:
    return {**params, ADAPTER_PARAMETER: request.adapter} if request.adapter else params


def validate_adapter(request: EngineRequest) -> None:
    """Raises InvalidRequest for pages that were computed with another adapter, or with none."""
    if request.transfer_params is not None:
        of_pages = str(request.transfer_params.get(ADAPTER_PARAMETER, ""))
        if of_pages != request.adapter:
            raise InvalidRequest(
                f"the pages were computed with adapter {of_pages[:100]!r}, and the request is for {request.adapter!r}"
            )


MAX_IMAGES = 128  # of one prompt
MAX_DIGEST_CHARS = 128


def validate_images(request: EngineRequest) -> None:
    """Raises InvalidRequest."""
    images, features = request.images, request.features
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"the prompt has {len(images)} images; the limit is {MAX_IMAGES}")
    before, num_tokens = 0, len(request.prompt_token_ids)
    for number, image in enumerate(images):
        if not 0 < len(image.digest) <= MAX_DIGEST_CHARS:
            raise InvalidRequest(
                f"image {number} has a digest of {len(image.digest)} characters; 1 to {MAX_DIGEST_CHARS} are allowed"
            )
        if image.num_tokens < 1 or not before <= image.offset <= image.end <= num_tokens:
            raise InvalidRequest(
                f"image {number} has tokens {image.offset} to {image.end} of a prompt of {num_tokens}; images come in "
                "order, and do not overlap"
            )
        before = image.end
        if request.transfer_params is None and not any(features[number : number + 1]):
            raise InvalidRequest(f"image {number} has no features, and the prompt's pages come from no other engine")
    if before == num_tokens and images:
        # A decode engine computes the last token itself, and would need the image for it.
        raise InvalidRequest("an image is the end of the prompt: text must follow the last image")


def validate_continuation(request: EngineRequest) -> None:
    """Raises InvalidRequest if no prompt or no answer remains."""
    if request.continued is None:
        return
    num_given, num_all = request.continued.num_tokens, len(request.prompt_token_ids)
    if not 0 < num_given < min(num_all, request.sampling.max_tokens):
        raise InvalidRequest(
            f"a request cannot go on after {num_given} tokens of its answer: the prompt has {num_all} with them, "
            f"the answer {request.sampling.max_tokens} at most"
        )


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """Garbage collections pass it over: a long answer has 100,000."""

    token_id: int
    text: str
    logprob: float


class PromptSources(msgspec.Struct, frozen=True):
    """vLLM's `prompt_tokens_by_source`. The sum is the prompt's length."""

    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0

    @property
    def total(self) -> int:
        return self.local_compute + self.local_cache_hit + self.external_kv_transfer

    def __add__(self, other: PromptSources) -> PromptSources:
        return PromptSources(*map(operator.add, structs.astuple(self), structs.astuple(other)))


NO_SOURCES = PromptSources()


class CachedTokens(msgspec.Struct, frozen=True):
    """vLLM's `prompt_tokens_cached_by_source`, counted at admission."""

    device: int = 0  # in the engine's own memory
    cpu: int = 0  # in its CPU tier
    volume: int = 0  # on NVMe, through the CPU tier
    kv_transfer: int = 0  # in another engine

    def by_tier(self) -> dict[str, int]:
        return {"device": self.device, "cpu": self.cpu, "volume": self.volume, "ferry": self.kv_transfer}

    def __add__(self, other: CachedTokens) -> CachedTokens:
        return CachedTokens(*map(operator.add, structs.astuple(self), structs.astuple(other)))


NO_CACHED_TOKENS = CachedTokens()


class EngineDurations(msgspec.Struct, frozen=True):
    """Time that the parts of one request took in its engine. None: unknown, or there was no such part.

    A share, above 0 and at most 1, is the part of that time spent on this request, where the engine computed other
    prompts or pulled other requests' pages at the same time.
    """

    queue_ms: float | None = None  # until the engine began to fetch pages or to compute
    prefill_ms: float | None = None  # without fetching pages
    kv_transfer_ms: float | None = None
    load_ms: float | None = None
    prefill_share: float | None = None
    kv_transfer_share: float | None = None


class EngineTimes(msgspec.Struct, frozen=True):
    """Seconds of `time.monotonic`. `kv_transfer` and `load` are begin and end of waiting for pages.

    The shares are those of EngineDurations.
    """

    queued_s: float
    scheduled_s: float  # computing began, after any fetch of pages
    first_token_s: float
    last_token_s: float
    kv_transfer: tuple[float, float] | None = None
    load: tuple[float, float] | None = None
    prefill_share: float | None = None
    kv_transfer_share: float | None = None

    @property
    def begun_s(self) -> float:
        """When the engine began to fetch pages or to compute."""
        return min(wait[0] for wait in (self.kv_transfer, self.load, (self.scheduled_s,)) if wait is not None)

    def durations(self) -> EngineDurations:
        return EngineDurations(
            _elapsed_ms((self.queued_s, self.begun_s)),
            _elapsed_ms((self.scheduled_s, self.first_token_s)),
            _elapsed_ms(self.kv_transfer),
            _elapsed_ms(self.load),
            self.prefill_share,
            self.kv_transfer_share,
        )


def _elapsed_ms(interval: tuple[float, float] | None) -> float | None:
    return max(0.0, interval[1] - interval[0]) * 1e3 if interval is not None else None


class EngineOutput(msgspec.Struct):
    """What one step added to one request.

    `logprobs[i]` belongs to `token_ids[i]`: the sampled token first, then alternatives, most likely first. `text` may
    lag behind `token_ids`; `delta` is its parsed form. `sources` are set on the first output (a link has them
    apart) and on the last, all other fields on the last output only; of `times` a gateway gets the `durations`.
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
    durations: EngineDurations | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    engine_id: EngineId  # new on every start, so that peers recognize a restart
    model: str
    max_model_len: int
    block_size: int  # tokens per KV page
    page_bytes: int  # bytes of one KV page over all layers and ranks, copies included
    num_pages: int
    kv_cache_dtype: str
    num_cpu_pages: int = 0  # capacity of the CPU tier
    without_tiers: str = ""  # why it has none, though tiers are configured
    exchange: ExchangeFields = ()
    device: str = ""  # that it computes on, with driver and number of ranks
    # Memory of all pages. Layers with windows share block ids, so it may be less than num_pages * page_bytes. 0: equal.
    pool_bytes: int = 0
    # LoRA adapters that it can load, as NAME@DIGEST. Engines with equal ones compute the same.
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Backlogs:
    """Prompts that wait for their turns at a worker, in ms of its engine."""

    by_tenant: Mapping[str, tuple[float, float]]  # ms and share, of those with the most
    others: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # as BacklogCurve.buckets


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_running: int = 0
    num_waiting: int = 0
    # Running and waiting requests whose prompts are not computed yet: no streams. 0 where tenants have no shares.
    num_prompts: int = 0
    num_pages_used: int = 0
    num_pages: int = 0
    prompt_tokens: PromptSources = NO_SOURCES
    cached_tokens: CachedTokens = NO_CACHED_TOKENS
    transferred_bytes: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0  # finished; does not grow while the engine hangs
    # Prompt tokens of requests inside the engine without a first token, cached ones included. None: not counted.
    queued_prompt_tokens: int | None = None
    backlogs: Backlogs | None = None  # None: nothing waits for its turn
    loaded_adapters: frozenset[str] = frozenset()  # of EngineInfo.adapters, those in its memory


@dataclass(frozen=True, slots=True)
class KvTransferStats:
    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # summed
    num_failed: Mapping[str, int] = field(default_factory=dict)  # by cause (telemetry.KV_TRANSFER_FAILURES)


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages entered the prefix cache or a tier.

    `token_ids` has block_size ids per page; `parent_hash` is None at a prompt's start. `cache_salt` is the request's
    `page_salt`, `images` are of the pages that have some, by their places in `page_hashes`. Pages from slower tiers
    come in any order, with `route_keys` instead of tokens, size, parent, salt and images.
    """

    page_hashes: Sequence[int]
    parent_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    cache_salt: str | None = None
    medium: str = "GPU"
    route_keys: Sequence[int] | None = None
    images: PageImages = field(default_factory=dict)


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
    """Events of one step. A gap in `sequence` means lost batches."""

    sequence: int
    events: Sequence[KvEvent]


class Engine(Protocol):
    """Every implementation passes tests/contract/test_engine_contract.py."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None:
        """Raises UnsupportedEngine for a configuration that cannot run."""
        ...

    def generate(
        self, request: EngineRequest, *, due_ms: float = 0.0, trace: TraceContext | None = None
    ) -> AsyncIterator[EngineOutput]:
        """Yield outputs, the last with a `finish_reason`. Closing the iterator early aborts the request.

        `due_ms`: when the worker's fair queue expects the prompt to be done, in virtual ms; an engine computes the
        earliest first. `trace`: the span that the engine's work belongs to. The engine empties `features`.
        Pages that cannot be pulled are computed. Deltas begin after the delivered part. Raises InvalidRequest,
        EngineDead, and EngineError for an answer that its parser cannot read or an adapter that cannot be loaded.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """End the request with a last output ABORT. Ignores unknown ids."""
        ...

    async def decline(self, request: EngineRequest) -> None:
        """Release the pages that another engine keeps for a request which `generate` never got."""
        ...

    async def release(self, transfer_params: TransferParams) -> None:
        """Free kept pages whose parameters no decode engine received: it could read reused pages.

        Idempotent; ignores unknown parameters; never raises. May take effect after the next step.
        """
        ...

    def stats(self) -> EngineStats: ...

    def kv_transfer_stats(self) -> KvTransferStats: ...

    def tenant_usages(self) -> Mapping[str, Mapping[str, TenantUsage]]:
        """Return what tenants hold, in pages, by tier and tenant; empty for an engine that keeps no contracts."""
        ...

    async def set_terms(self, terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        """Replace terms of these tenants, by tier and tenant. A tenant without terms has the default contract.

        They hold when it returns, also in an idle engine. One that keeps no contracts, or has died, ignores them.
        """
        ...

    def own_metrics(self) -> Iterable[Any]:
        """Prometheus metric families. May be slow."""
        ...

    async def check_health(self) -> None: ...

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Events from now on, for one listener; they never leave the machine."""
        ...

    async def stop(self) -> None:
        """End all requests, with EngineDead or a last output ABORT. Idempotent."""
        ...


class RenderedPrompt(msgspec.Struct, frozen=True):
    token_ids: Sequence[int]
    sampling: Sampling
    parse: Parse | None = None
    images: tuple[PromptImage, ...] = ()


class RenderOutcomes(msgspec.Struct, frozen=True):
    """Counts of a renderer by outcome, with the labels of telemetry."""

    grammars: Mapping[str, int] = {}
    image_chats: Mapping[str, int] = {}
    images: Mapping[str, int] = {}


class Asker(NamedTuple):
    # No client can choose the tenant.
    tenant: TenantName
    salt: CacheSalt


# Where nobody has to say who they are.
ANYBODY = Asker(TenantName(DEFAULT_NAMESPACE.tenant), CacheSalt(""))


class Renderer(Protocol):
    """Turns validated OpenAI bodies into prompts. Raises InvalidRequest and ContextLengthExceeded."""

    @property
    def takes_images(self) -> bool: ...

    async def render_chat(
        self, body: Mapping[str, Any], images: Sequence[ChatImage] = (), *, asker: Asker = ANYBODY
    ) -> RenderedPrompt:
        """`images` are those of the parts of type `image_url`, which have no URLs."""
        ...

    async def render_completion(
        self, body: Mapping[str, Any], *, asker: Asker = ANYBODY
    ) -> Sequence[RenderedPrompt]: ...

    def max_model_len(self) -> int: ...

    @property
    def outcomes(self) -> RenderOutcomes: ...

    def start(self) -> None:
        """Start what runs in the background, on the event loop that will render."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
