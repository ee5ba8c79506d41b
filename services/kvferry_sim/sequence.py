"""State of one request in the simulator."""

from __future__ import annotations

import asyncio
import enum
import time

from kvferry.engine.base import CachedTokens, EngineOutput, EngineRequest, EngineTimes, PromptSources
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry_sim.answer import Answer
from kvferry_sim.block_pool import PageHash, PageId
from kvferry_sim.kv_transfer import Ticket
from kvferry_sim.single_reader_queue import SingleReaderQueue
from kvferry_sim.token_chain import TokenChain


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
        "answer", "block_size", "cached", "capacity", "chain", "fetch", "loading", "max_tokens_total", "num_computed",
        "num_prompt", "num_stored", "num_tokens", "outputs", "pages", "phase", "request", "sources", "ticket", "times",
    )  # fmt: skip

    def __init__(
        self,
        request: EngineRequest,
        answer: Answer,
        packed: bytearray,
        block_size: int,
        max_tokens_total: int,
        ticket: Ticket | None,
    ) -> None:
        """Takes over `packed`, the prompt."""
        self.request = request
        self.answer = answer
        self.chain = TokenChain(packed, block_size, request.page_salt)
        self.block_size = block_size
        self.max_tokens_total = max_tokens_total
        self.ticket = ticket
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
