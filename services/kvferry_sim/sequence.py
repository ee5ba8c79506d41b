"""One request in the simulator: its admission and its state."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from array import array
from collections.abc import Container

from kvferry.engine.base import (
    CachedTokens,
    EngineOutput,
    EngineRequest,
    EngineTimes,
    PromptSources,
    RequestId,
    TransferParams,
    validate_adapter,
    validate_continuation,
)
from kvferry.errors import ContextLengthExceeded, InvalidRequest
from kvferry.observability.tracing import TraceContext
from kvferry.pages.keys import TOKEN_BYTES, pack_tokens, route_keys, seed_of
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry_sim.answer import Answer
from kvferry_sim.block_pool import PageHash, PageId, chain_hash, root_hash
from kvferry_sim.event_stream import SingleReaderQueue
from kvferry_sim.kv_transfer import KvTransferError, Ticket
from kvferry_sim.settings import SimConfig
from kvferry_sim.tier import PageRef
from kvferry_sim.tokenizer import SimTokenizer

log = logging.getLogger(__name__)


class TokenChain:
    """`packed` has TOKEN_BYTES per token; `page_hashes` covers full pages."""

    __slots__ = ("_block_size", "_page_bytes", "_root", "_route_keys", "_salt", "num_prompt", "packed", "page_hashes")

    def __init__(self, packed_prompt: bytearray, block_size: int, cache_salt: str) -> None:
        """The chain owns and extends `packed_prompt`."""
        self.packed = packed_prompt
        self.num_prompt = len(packed_prompt) // TOKEN_BYTES
        self.page_hashes: list[PageHash] = []
        self._block_size = block_size
        self._page_bytes = TOKEN_BYTES * block_size
        self._root = root_hash(cache_salt)
        self._salt = cache_salt
        self._route_keys: list[int] = []
        self.hash_pages(self.num_prompt // block_size)

    def append(self, token_id: int) -> None:
        self.packed += token_id.to_bytes(TOKEN_BYTES, "little")

    def hash_pages(self, num_pages: int) -> None:
        size = self._page_bytes
        parent = self.page_hashes[-1] if self.page_hashes else self._root
        for i in range(len(self.page_hashes), num_pages):
            parent = chain_hash(parent, self.packed[i * size : (i + 1) * size])
            self.page_hashes.append(parent)

    def tail_hash(self) -> PageHash:
        num_full = self.num_prompt // self._block_size
        parent = self.page_hashes[num_full - 1] if num_full else self._root
        return chain_hash(parent, self.packed[num_full * self._page_bytes : TOKEN_BYTES * self.num_prompt])

    def page_refs(self, first: int, end: int) -> list[PageRef]:
        keys = self._route_keys
        if len(keys) < end:
            parent = keys[-1] if keys else seed_of(self._salt)
            keys += route_keys(self._tokens(len(keys), end), self._block_size, parent)
        return [PageRef(self.page_hashes[i], keys[i]) for i in range(first, end)]

    def token_ids(self, first: int, end: int) -> list[int]:
        return self._tokens(first, end).tolist()

    def _tokens(self, first: int, end: int) -> array[int]:
        return array("I", bytes(self.packed[first * self._page_bytes : end * self._page_bytes]))


class Phase(enum.Enum):
    WAITING = enum.auto()  # queued, holds no pages
    FETCHING = enum.auto()  # holds pages for all known tokens; KV transfer or a tier fills them
    RUNNING = enum.auto()  # holds pages for its computed tokens and for the next one
    ENDED = enum.auto()  # its pages are freed or offered


class SequenceTimes:
    """EngineTimes of a sequence. Preemption resets nothing."""

    __slots__ = (
        "first_token_s", "kv_transfer", "kv_transfer_share", "load", "prefill_share", "queued_s", "scheduled_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queued_s = time.monotonic()
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.kv_transfer: tuple[float, float] | None = None
        self.load: tuple[float, float] | None = None
        self.prefill_share: float | None = None
        self.kv_transfer_share: float | None = None

    def scheduled(self) -> None:
        if not self.scheduled_s:
            self.scheduled_s = time.monotonic()

    def ended(self, *, with_first_token: bool) -> EngineTimes:
        last_s = self.first_token_s if with_first_token else time.monotonic()
        return EngineTimes(
            self.queued_s,
            self.scheduled_s,
            self.first_token_s,
            last_s,
            self.kv_transfer,
            self.load,
            self.prefill_share,
            self.kv_transfer_share,
        )


class TokenSequence:
    """Tokens [0, num_computed) have their KV; pages [0, num_stored) are cached."""

    __slots__ = (
        "answer", "block_size", "cached", "capacity", "chain", "due_ms", "fetch", "loading", "max_tokens_total",
        "num_computed", "num_prompt", "num_stored", "num_tokens", "outputs", "pages", "phase", "request", "sources",
        "ticket", "times", "trace",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        answer: Answer,
        packed: bytearray,
        block_size: int,
        max_tokens_total: int,
        ticket: Ticket | None,
        due_ms: float,
        trace: TraceContext | None,
    ) -> None:
        """Takes over `packed`, the prompt; `due_ms` and `trace` are those of Engine.generate."""
        self.request = request
        self.answer = answer
        self.chain = TokenChain(packed, block_size, request.page_salt)
        self.block_size = block_size
        self.max_tokens_total = max_tokens_total
        self.ticket = ticket
        self.due_ms = due_ms
        self.trace = trace
        self.num_prompt = self.num_tokens = len(request.prompt_token_ids)
        self.pages: list[PageId] = []
        self.capacity = 0  # tokens that `pages` have room for
        self.num_computed = 0
        self.num_stored = 0
        self.sources: PromptSources | None = None  # None until the sequence first gets pages
        self.cached = CachedTokens()
        self.loading: list[PageHash] = []  # pages that a load from slower tiers fills now
        self.phase = Phase.WAITING
        self.fetch: asyncio.Task[None] | None = None
        self.outputs: SingleReaderQueue[EngineOutput] = SingleReaderQueue()
        self.times = SequenceTimes()

    def __repr__(self) -> str:
        return (
            f"<TokenSequence {self.request.request_id} {self.phase.name} prompt={self.num_prompt} "
            f"computed={self.num_computed}/{self.num_tokens} pages={len(self.pages)}>"
        )

    @property
    def has_first_token(self) -> bool:
        return self.num_tokens > self.num_prompt

    @property
    def namespace(self) -> Namespace:
        return self.request.tier.namespace if self.request.tier is not None else DEFAULT_NAMESPACE

    def append(self, token_id: int) -> None:
        self.chain.append(token_id)
        self.num_tokens += 1

    def cacheable(self) -> list[PageHash]:
        """The last known token is always computed: it yields the next."""
        return self.chain.page_hashes[: (self.num_tokens - 1) // self.block_size]

    def volume_of(self, page: int) -> str | None:
        volumes = self.request.tier.volumes if self.request.tier is not None else {}
        return next((volume_id for volume_id, num_pages in volumes.items() if page < num_pages), None)


def to_sequence(
    request: EngineRequest,
    sim: SimConfig,
    tokenizer: SimTokenizer,
    *,
    block_size: int,
    max_tokens_total: int,
    seed: int,
    revision: str = "",
    due_ms: float = 0.0,
    trace: TraceContext | None = None,
) -> TokenSequence:
    continued = request.continued
    packed = bytearray(pack_tokens(request.prompt_token_ids))
    given = list(request.prompt_token_ids[-continued.num_tokens :]) if continued is not None else []
    answer = Answer(
        packed[: len(packed) - TOKEN_BYTES * len(given)],
        request.sampling,
        tokenizer,
        answer_tokens=sim.answer_tokens,
        default_seed=seed,
        revision=revision,
        adapter=request.adapter,
    )
    if continued is not None:
        answer.resume(given, continued.num_chars)
    ticket = ticket_of(request.transfer_params) if request.transfer_params is not None else None
    return TokenSequence(request, answer, packed, block_size, max_tokens_total, ticket, due_ms, trace)


def ticket_of(params: TransferParams) -> Ticket | None:
    """Return None, with a warning, unless a simulator made the parameters."""
    try:
        return Ticket.from_params(params)
    except KvTransferError as error:
        log.warning("a prompt is computed here: %s", error)
        return None


def validate_request(
    request: EngineRequest,
    sim: SimConfig,
    *,
    vocabulary_size: int,
    block_size: int,
    active: Container[RequestId],
    adapters: Container[str] = (),
) -> int:
    """Return the limit of prompt and answer together. Raises InvalidRequest."""
    sampling = request.sampling
    validate_adapter(request)
    validate_continuation(request)
    if request.keep_for_transfer and request.transfer_params is not None:
        raise InvalidRequest("a request is either kept for transfer or pulled, not both")
    if request.images:
        raise InvalidRequest("the sim engine takes no images", param="messages")
    if request.request_id in active:
        raise InvalidRequest(f"request {request.request_id} is running already")
    if request.adapter and request.adapter not in adapters:
        name = request.adapter.rpartition("@")[0]
        raise InvalidRequest(f"this engine has no adapter {name[:64]!r} with the files that were asked for")
    if sampling.structured_outputs:
        raise InvalidRequest("the sim engine writes plain text only", param="structured_outputs")
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
    _validate_prompt(request, sim.max_model_len, vocabulary_size)
    num_given = request.continued.num_tokens if request.continued is not None else 0
    total = min(len(request.prompt_token_ids) - num_given + sampling.max_tokens, sim.max_model_len)
    # The KV of the last token is never computed, so it needs no space.
    num_pages = math.ceil((total - 1) / block_size)
    if num_pages > sim.num_pages:
        raise InvalidRequest(
            f"prompt and answer may need {num_pages} pages of {block_size} tokens; this engine has "
            f"{sim.num_pages} in all",
            param="max_tokens",
        )
    return total


def _validate_prompt(request: EngineRequest, max_model_len: int, vocabulary_size: int) -> None:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("the prompt has no tokens", param="prompt")
    highest, lowest = max(request.prompt_token_ids), min(request.prompt_token_ids)
    if lowest < 0 or highest >= vocabulary_size:
        raise InvalidRequest(
            f"token ids go from 0 to {vocabulary_size - 1}; the prompt has {lowest} to {highest}", param="prompt"
        )
    if num_prompt >= max_model_len:
        raise ContextLengthExceeded(
            f"this model's context is {max_model_len} tokens; the prompt has {num_prompt} and leaves no room for an "
            "answer",
            param="prompt",
        )
