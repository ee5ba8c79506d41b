"""A pool of KV pages with a prefix cache. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NewType

import xxhash

from kvferry.engine.base import KvEvent, PagesRemoved, PagesStored

PageId = NewType("PageId", int)
PageHash = NewType("PageHash", int)

# Any constant: it only keeps a page of an unsalted prompt apart from the plain xxh3 of the same bytes.
_ROOT_SEED = 0x6B76666572727931


def root_hash(cache_salt: str) -> PageHash:
    return PageHash(xxhash.xxh3_64_intdigest(cache_salt.encode("utf-8", "surrogatepass"), _ROOT_SEED))


def chain_hash(parent: PageHash, packed_tokens: bytes | bytearray) -> PageHash:
    return PageHash(xxhash.xxh3_64_intdigest(packed_tokens, parent))


class BlockPool:
    """A page is held by `page_refs[page]` holders, free and cached (`find_prefix` finds it), or free and blank."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.num_pages = num_pages
        self.block_size = block_size
        self.page_refs = [0] * num_pages
        self.page_to_hash: list[PageHash | None] = [None] * num_pages
        self.hash_to_page: dict[PageHash, PageId] = {}
        # Oldest first. Blank pages come before all cached ones: using them costs no hit.
        self._free: OrderedDict[PageId, None] = OrderedDict((PageId(page), None) for page in range(num_pages))
        self._events: list[KvEvent] = []
        self._removed: list[PageHash] = []

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.num_used}/{self.num_pages} used, {len(self.hash_to_page)} cached, "
            f"{self.block_size} tokens a page>"
        )

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def find_prefix(self, page_hashes: Iterable[PageHash]) -> list[PageId]:
        """Return the longest cached run. `touch` it before allocating."""
        found = []
        for page_hash in page_hashes:
            page = self.hash_to_page.get(page_hash)
            if page is None:
                break
            found.append(page)
        return found

    def touch(self, pages: Iterable[PageId]) -> None:
        for page in pages:
            if self.page_refs[page] == 0:
                del self._free[page]
            self.page_refs[page] += 1

    def can_allocate(self, num_pages: int, found: Sequence[PageId] = ()) -> bool:
        idle = sum(1 for page in found if self.page_refs[page] == 0)
        return num_pages + idle <= len(self._free)

    def allocate(self, num_pages: int) -> list[PageId]:
        """Take blank pages, then cached ones, least recently used first. Raises IndexError."""
        if num_pages > len(self._free):
            raise IndexError(f"{num_pages} pages wanted, {len(self._free)} free")
        taken = []
        for _ in range(num_pages):
            page, _nothing = self._free.popitem(last=False)
            page_hash = self.page_to_hash[page]
            if page_hash is not None:
                self.page_to_hash[page] = None
                del self.hash_to_page[page_hash]
                self._removed.append(page_hash)
            self.page_refs[page] = 1
            taken.append(page)
        return taken

    def store(
        self,
        pages: Sequence[PageId],
        page_hashes: Sequence[PageHash],
        token_ids: Sequence[int],
        *,
        parent_hash: PageHash | None,
        cache_salt: str = "",
    ) -> None:
        """Cache full, held pages; of two with the same tokens, the first."""
        new: list[int] = []
        for i, (page, page_hash) in enumerate(zip(pages, page_hashes, strict=True)):
            if page_hash not in self.hash_to_page:
                self.hash_to_page[page_hash] = page
                self.page_to_hash[page] = page_hash
                new.append(i)
        self._flush_removed()
        # One event per run of neighbours.
        start = 0
        for end in range(1, len(new) + 1):
            if end < len(new) and new[end] == new[end - 1] + 1:
                continue
            first, last = new[start], new[end - 1]
            parent = page_hashes[first - 1] if first else parent_hash
            self._events.append(
                PagesStored(
                    page_hashes=list(page_hashes[first : last + 1]),
                    parent_hash=parent,
                    token_ids=list(token_ids[first * self.block_size : (last + 1) * self.block_size]),
                    block_size=self.block_size,
                    # As vLLM does: only where a chain begins; later pages name their parent.
                    cache_salt=cache_salt or None if parent is None else None,
                )
            )
            start = end

    def free(self, pages: Sequence[PageId]) -> None:
        """Give up one hold on each page; the last page is evicted first."""
        for page in reversed(pages):
            if self.page_refs[page] <= 0:
                raise ValueError(f"page {page} was freed twice")
            self.page_refs[page] -= 1
            if self.page_refs[page] == 0:
                self._free[page] = None
                if self.page_to_hash[page] is None:
                    self._free.move_to_end(page, last=False)

    def drain_events(self) -> list[KvEvent]:
        self._flush_removed()
        events, self._events = self._events, []
        return events

    def _flush_removed(self) -> None:
        if self._removed:
            self._events.append(PagesRemoved(self._removed))
            self._removed = []

    def check(self) -> None:
        free = set(self._free)
        for page in range(self.num_pages):
            refs = self.page_refs[page]
            assert refs >= 0, f"page {page} has {refs} holders"
            assert (refs == 0) == (page in free), f"page {page} has {refs} holders and is free: {page in free}"
        held = sum(1 for refs in self.page_refs if refs)
        assert held + len(free) == self.num_pages, "held and free pages are not all pages"
        for page_hash, page in self.hash_to_page.items():
            assert self.page_to_hash[page] == page_hash, f"page {page} is found under a hash that is not its own"
        num_cached = sum(1 for page_hash in self.page_to_hash if page_hash is not None)
        assert num_cached == len(self.hash_to_page), "a page has a hash under which it cannot be found"
        blanks_over = False
        for page in self._free:
            blank = self.page_to_hash[page] is None
            assert not (blank and blanks_over), f"blank page {page} stands behind a cached one"
            blanks_over = blanks_over or not blank
