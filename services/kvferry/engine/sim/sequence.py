"""One request inside the engine: its tokens, how far they are computed, and the pages that hold them."""

from __future__ import annotations

import asyncio
import enum
import time
from array import array

from kvferry.engine.base import CachedTokens, EngineOutput, EngineRequest, EngineTimes, PromptSources
from kvferry.engine.sim.answer import Answer
from kvferry.engine.sim.block_pool import PageHash, PageId, chain_hash, root_hash
from kvferry.engine.sim.kv_transfer import Ticket
from kvferry.engine.sim.mailbox import Mailbox
from kvferry.engine.sim.tier import Named
from kvferry.pages.keys import TOKEN_BYTES, route_keys, seed_of
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace


class Phase(enum.Enum):
    """Where a sequence is. The engine moves it, and whoever moves it moves the pages with it."""

    WAITING = enum.auto()  # in line, holds no pages
    PULLING = enum.auto()  # holds pages for all it knows, being filled from another engine or a slower tier
    RUNNING = enum.auto()  # holds pages for what is computed and for the next token
    ENDED = enum.auto()  # nowhere; its pages are given back or offered


class TokenSequence:
    """Prompt and answer so far.

    Tokens [0, num_computed) have their KV, and pages [0, num_stored) of it are findable. Tokens
    [num_computed, num_tokens) are known and still to compute. `packed` holds all known tokens, TOKEN_BYTES each.
    """

    __slots__ = (
        "_route_keys", "answer", "block_size", "bringing", "cached", "capacity", "first_token_s", "kv_transfer", "load",
        "mailbox", "max_tokens_total", "num_computed", "num_prompt", "num_stored", "num_tokens", "packed",
        "page_hashes", "pages", "phase", "pull", "queued_s", "request", "root", "scheduled_s", "sources", "ticket",
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
        """`packed` is the prompt; the sequence owns and grows it. `ticket` is for pages that wait elsewhere."""
        self.request = request
        self.answer = answer
        self.packed = packed
        self.block_size = block_size
        self.max_tokens_total = max_tokens_total
        self.ticket = ticket
        self.num_prompt = self.num_tokens = len(request.prompt_token_ids)
        self.root = root_hash(request.cache_salt)
        self.page_hashes: list[PageHash] = []
        self.pages: list[PageId] = []
        self.capacity = 0  # tokens that `pages` have room for
        self.num_computed = 0
        self.num_stored = 0
        self.sources: PromptSources | None = None  # known once the sequence was given pages
        self.cached = CachedTokens()  # the same, by tier
        self.bringing: list[PageHash] = []  # pages on their way from a slower tier
        self._route_keys: list[int] = []
        self.phase = Phase.WAITING
        self.pull: asyncio.Task[None] | None = None
        self.mailbox: Mailbox[EngineOutput] = Mailbox()
        # Of EngineTimes; of the first time where a sequence is preempted.
        self.queued_s = time.monotonic()
        self.scheduled_s = 0.0
        self.first_token_s = 0.0
        self.kv_transfer: tuple[float, float] | None = None
        self.load: tuple[float, float] | None = None
        self.extend_hashes(self.num_prompt // block_size)

    def __repr__(self) -> str:
        return (
            f"<TokenSequence {self.request.request_id} {self.phase.name} prompt={self.num_prompt} "
            f"computed={self.num_computed}/{self.num_tokens} pages={len(self.pages)}>"
        )

    def append(self, token_id: int) -> None:
        """One more token is known."""
        self.packed += token_id.to_bytes(TOKEN_BYTES, "little")
        self.num_tokens += 1

    def begin_computing(self) -> None:
        """Its pages are there, as far as they come from anywhere."""
        if not self.scheduled_s:
            self.scheduled_s = time.monotonic()

    def times(self) -> EngineTimes:
        """With its last token."""
        is_first = self.num_tokens == self.num_prompt + 1
        last_s = self.first_token_s if is_first else time.monotonic()
        return EngineTimes(self.queued_s, self.scheduled_s, self.first_token_s, last_s, self.kv_transfer, self.load)

    def extend_hashes(self, num_pages: int) -> None:
        """Know the hashes of the first `num_pages` pages, all of them full of known tokens."""
        step = TOKEN_BYTES * self.block_size
        parent = self.page_hashes[-1] if self.page_hashes else self.root
        for i in range(len(self.page_hashes), num_pages):
            parent = chain_hash(parent, self.packed[i * step : (i + 1) * step])
            self.page_hashes.append(parent)

    def findable(self) -> list[PageHash]:
        """Pages that may come from a cache: the last known token is always computed, to say what comes next."""
        return self.page_hashes[: (self.num_tokens - 1) // self.block_size]

    def tail_hash(self) -> PageHash:
        """Of the page that the prompt fills only in part, for its prompt tokens alone."""
        num_full = self.num_prompt // self.block_size
        parent = self.page_hashes[num_full - 1] if num_full else self.root
        start = TOKEN_BYTES * num_full * self.block_size
        return chain_hash(parent, self.packed[start : TOKEN_BYTES * self.num_prompt])

    @property
    def namespace(self) -> Namespace:
        return self.request.tier.namespace if self.request.tier is not None else DEFAULT_NAMESPACE

    def names(self, first: int, end: int) -> list[Named]:
        """Of pages [first, end), whose hashes are known."""
        known = self._route_keys
        if len(known) < end:
            parent = known[-1] if known else seed_of(self.request.cache_salt)
            step = TOKEN_BYTES * self.block_size
            tokens = array("I", bytes(self.packed[len(known) * step : end * step]))
            known += route_keys(tokens, self.block_size, parent)
        return [Named(self.page_hashes[i], known[i]) for i in range(first, end)]

    def volume_of(self, page: int) -> str | None:
        """Where a page of the prompt is said to lie."""
        volumes = self.request.tier.volumes if self.request.tier is not None else {}
        return next((volume_id for volume_id, num_pages in volumes.items() if page < num_pages), None)

    def tokens_of_pages(self, first: int, end: int) -> list[int]:
        step = TOKEN_BYTES * self.block_size
        return array("I", bytes(self.packed[first * step : end * step])).tolist()
