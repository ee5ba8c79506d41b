"""Page ids, page bytes and CPU tier copies of one simulator."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.base import KvEvent
from kvferry_sim.block_pool import BlockPool, PageId
from kvferry_sim.kv_transfer import LayoutDigest, PageMemory
from kvferry_sim.sequence import TokenSequence
from kvferry_sim.tier import SimTier


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
