"""State of one request in the simulator."""

from __future__ import annotations

import asyncio
import enum
import time
from array import array

from kvferry.engine.base import CachedTokens, EngineOutput, EngineRequest, EngineTimes, PromptSources
from kvferry.observability.tracing import TraceContext
from kvferry.pages.keys import TOKEN_BYTES, route_keys, seed_of
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry_sim.answer import Answer
from kvferry_sim.block_pool import PageHash, PageId, chain_hash, root_hash
from kvferry_sim.event_stream import SingleReaderQueue
from kvferry_sim.kv_transfer import Ticket
from kvferry_sim.tier import PageRef


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
