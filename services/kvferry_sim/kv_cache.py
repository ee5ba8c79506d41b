"""Page ids, page bytes and CPU tier copies of one simulator, and pages that it fetches from others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from kvferry.engine.base import CachedTokens, KvEvent, KvTransferStats, PromptSources
from kvferry.engine.time_shares import TransferShares
from kvferry.residency.index import Tier
from kvferry.util.task_set import TaskSet
from kvferry_sim.block_pool import BlockPool, PageHash, PageId
from kvferry_sim.kv_transfer import (
    PULL_TIMEOUT_S,
    KvTransferError,
    LayoutDigest,
    PageMemory,
    Ticket,
    pull_pages,
    release_offer,
)
from kvferry_sim.sequence import Phase, TokenSequence
from kvferry_sim.settings import SimConfig
from kvferry_sim.tier import SimTier

log = logging.getLogger(__name__)


class KvCache:
    """The owner stops `tier`."""

    def __init__(self, num_pages: int, block_size: int, page_bytes: int, layout: LayoutDigest) -> None:
        self.pool = BlockPool(num_pages, block_size)
        self.memory = PageMemory(page_bytes, layout)
        self.tier: SimTier | None = None
        self._block_size = block_size

    def store_computed(self, sequence: TokenSequence) -> None:
        first, end = sequence.num_stored, sequence.num_computed // self._block_size
        sequence.chain.hash_pages(end)
        for page, page_hash in zip(sequence.pages[first:end], sequence.chain.page_hashes[first:end], strict=True):
            self.memory.write(page, self.memory.expected(page_hash))
        self.store_written(sequence, end)

    def store_written(self, sequence: TokenSequence, end: int, *, transferred: bool = False) -> None:
        """Cache the pages up to `end`, and copy them to the tiers.

        The prefill engine's keeper stores `transferred` pages on volumes.
        """
        first, chain = sequence.num_stored, sequence.chain
        self.pool.store(
            sequence.pages[first:end],
            chain.page_hashes[first:end],
            chain.token_ids(first, end),
            parent_hash=chain.page_hashes[first - 1] if first else None,
            cache_salt=sequence.request.page_salt,
        )
        sequence.num_stored = end
        if self.tier is not None:
            refs, pages = chain.page_refs(first, end), sequence.pages[first:end]
            self.tier.store(
                [(ref, self.memory.read(page)) for ref, page in zip(refs, pages, strict=True)],
                sequence.namespace,
                on_volumes=not transferred,
            )

    def detach_prompt(self, sequence: TokenSequence) -> tuple[list[PageId], int]:
        """Return the removed pages, and how many tokens they hold."""
        num_full, num_tail = divmod(sequence.num_prompt, self._block_size)
        # A partial last page that also holds answer tokens does not match the hash of its prompt tokens.
        with_tail = num_tail > 0 and sequence.num_computed == sequence.num_prompt
        if with_tail:
            self.memory.write(sequence.pages[num_full], self.memory.expected(sequence.chain.tail_hash()))
        num_pages = num_full + with_tail
        detached, sequence.pages = sequence.pages[:num_pages], sequence.pages[num_pages:]
        return detached, sequence.num_prompt if with_tail else num_full * self._block_size

    def end_in_tier(self, sequence: TokenSequence) -> int:
        """End of the run of pages, after the stored ones, that slower tiers have."""
        end = sequence.num_stored
        if self.tier is None:
            return end
        cacheable = sequence.cacheable()
        hints = sequence.request.tier
        from_volumes = hints is None or hints.load
        while end < len(cacheable) and self.tier.has(
            cacheable[end], sequence.volume_of(end), from_volumes=from_volumes
        ):
            end += 1
        return end

    def free(self, pages: Sequence[PageId]) -> None:
        self.pool.free(pages)

    def drain_events(self) -> list[KvEvent]:
        events = self.pool.drain_events()
        if self.tier is not None:
            events += self.tier.drain_events()
        return events

    def check(self, *, with_tier: bool) -> None:
        self.pool.check()
        if self.tier is not None and with_tier:
            self.tier.check()


class KvFetcher:
    """One task per sequence. Each fetch ends with `on_fetched`, unless its sequence was removed; each ticket is
    released.
    """

    def __init__(
        self,
        cache: KvCache,
        sim: SimConfig,
        *,
        tier_timeout_s: float,
        sleep: Callable[[float], Awaitable[None]],
        on_fetched: Callable[[TokenSequence], None],
    ) -> None:
        self._cache = cache
        self._sim = sim
        self._tier_timeout_s = tier_timeout_s
        self._sleep = sleep
        self._on_fetched = on_fetched
        self._tasks = TaskSet()
        self._is_closed = False
        self._num_transfers = 0
        self._num_bytes = 0
        self._num_failed = 0
        self._seconds = 0.0
        self._shares = TransferShares()
        self.num_wrong_pages = 0  # brought by a tier, and computed instead

    @property
    def stats(self) -> KvTransferStats:
        return KvTransferStats(self._num_transfers, self._num_bytes, self._seconds, {"transfer": self._num_failed})

    def start(self, sequence: TokenSequence, is_first_placement: bool) -> bool:
        if sequence.ticket is not None:
            sequence.fetch = self._tasks.spawn(self._pull(sequence, sequence.ticket))
            return True
        tier, first = self._cache.tier, sequence.num_stored
        if tier is not None and (end := self._cache.end_in_tier(sequence)) > first:
            sequence.loading = sequence.chain.page_hashes[first:end]
            sequence.fetch = self._tasks.spawn(self._load(tier, sequence, is_first=is_first_placement))
            return True
        return False

    def release(self, ticket: Ticket | None) -> None:
        if ticket is not None and not self._is_closed:
            self._tasks.spawn(release_offer(ticket))

    def close(self) -> None:
        self._is_closed = True
        self._tasks.cancel()

    async def wait_closed(self) -> None:
        await self._tasks.wait()

    async def _pull(self, sequence: TokenSequence, ticket: Ticket) -> None:
        # From here on the pull releases the offer; a task that is cancelled before its first step never comes here.
        sequence.ticket = None
        first, memory = sequence.num_stored, self._cache.memory
        expected, num_offered = self._expected_pages(sequence, ticket)
        num_wanted = max(0, len(expected) - first)
        num_pulled = 0
        began_s = time.monotonic()
        self._shares.begin(sequence.request.request_id, began_s)
        is_complete = False
        try:
            pulled = pull_pages(
                ticket, memory.layout, page_bytes=self._sim.page_bytes, first_page=first, num_pages=num_wanted
            )
            async with asyncio.timeout(PULL_TIMEOUT_S), contextlib.aclosing(pulled) as contents:
                async for content in contents:
                    self._num_bytes += len(content)
                    at = first + num_pulled
                    if content != memory.expected(expected[at]):
                        raise KvTransferError(f"page {at} does not hold the tokens of this prompt")
                    memory.write(sequence.pages[at], content)
                    num_pulled += 1
            is_complete = True
        except (asyncio.CancelledError, KvTransferError, OSError) as error:
            self.release(ticket)  # on a new connection: the pull's own may be broken, or was never made
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning(
                "request %s computes its prompt: %s", sequence.request.request_id, str(error) or type(error).__name__
            )
        finally:
            ended_s = time.monotonic()
            sequence.times.kv_transfer = (began_s, ended_s)
            [sequence.times.kv_transfer_share] = self._shares.end({sequence.request.request_id: num_pulled}, ended_s)
            if is_complete:
                self._num_transfers += 1
                self._seconds += ended_s - began_s
            else:
                self._num_failed += 1
            # After any error: nothing else takes the sequence out of FETCHING.
            if sequence.phase is Phase.FETCHING:
                self._end_pull(sequence, first, num_pulled, num_offered)

    def _expected_pages(self, sequence: TokenSequence, ticket: Ticket) -> tuple[list[PageHash], int]:
        block_size, chain = sequence.block_size, sequence.chain
        num_offered = min(ticket.num_tokens, sequence.num_prompt)
        expected = chain.page_hashes[: num_offered // block_size]
        if num_offered % block_size:
            if num_offered == sequence.num_prompt:
                expected.append(chain.tail_hash())
            else:
                # The last page of a shorter prompt lacks tokens that this prompt has on the same page.
                num_offered = len(expected) * block_size
        return expected, num_offered

    def _end_pull(self, sequence: TokenSequence, first: int, num_pulled: int, num_offered: int) -> None:
        block_size = sequence.block_size
        num_cached = first * block_size
        num_covered = max(num_cached, min((first + num_pulled) * block_size, num_offered))
        num_full = num_covered // block_size
        if num_full > first:
            self._cache.store_written(sequence, num_full, transferred=True)
        sequence.sources = PromptSources(sequence.num_prompt - num_covered, num_cached, num_covered - num_cached)
        sequence.cached = CachedTokens(device=num_cached, kv_transfer=num_covered - num_cached)
        sequence.num_computed = min(num_covered, sequence.num_prompt - 1)
        self._on_fetched(sequence)

    async def _load(self, tier: SimTier, sequence: TokenSequence, *, is_first: bool) -> None:
        first, memory = sequence.num_stored, self._cache.memory
        refs = sequence.chain.page_refs(first, first + len(sequence.loading))
        pages = [(ref, sequence.volume_of(first + i)) for i, ref in enumerate(refs)]
        num_loaded = {Tier.CPU: 0, Tier.VOLUME: 0}
        began_s = time.monotonic()
        try:
            loaded = await tier.load(pages, sequence.namespace, timeout_s=self._tier_timeout_s, trace=sequence.trace)
            await self._sleep(len(loaded) * self._sim.tier_page_ms / 1000)
            for ref, page, (content, source) in zip(refs, sequence.pages[first:], loaded, strict=False):
                if content != memory.expected(ref.page_hash):
                    self.num_wrong_pages += 1
                    log.error("request %s: a wrong page came from %s", sequence.request.request_id, source.value)
                    break
                memory.write(page, content)
                num_loaded[source] += 1
        finally:
            sequence.loading = []
            if is_first:
                sequence.times.load = (began_s, time.monotonic())
            # After any error: nothing else takes the sequence out of FETCHING.
            if sequence.phase is Phase.FETCHING:
                self._end_load(sequence, num_loaded, is_first=is_first)

    def _end_load(self, sequence: TokenSequence, num_loaded: dict[Tier, int], *, is_first: bool) -> None:
        block_size = sequence.block_size
        num_pages = sum(num_loaded.values())
        if is_first and sequence.sources is not None:
            sequence.sources += PromptSources(-num_pages * block_size, 0, num_pages * block_size)
            sequence.cached += CachedTokens(
                cpu=num_loaded[Tier.CPU] * block_size, volume=num_loaded[Tier.VOLUME] * block_size
            )
        end = sequence.num_stored + num_pages
        if num_pages:
            self._cache.store_written(sequence, end)
        sequence.num_computed = end * block_size
        self._on_fetched(sequence)
