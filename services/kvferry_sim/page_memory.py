"""KV page bytes as a function of their tokens, so that every engine can verify them."""

from __future__ import annotations

import hashlib

import xxhash

from kvferry_sim.block_pool import PageHash, PageId

LayoutDigest = int


def layout_digest(model: str, block_size: int, page_bytes: int) -> LayoutDigest:
    """Digest of everything that gives a page's bytes their meaning."""
    return xxhash.xxh3_64_intdigest(f"{len(model)}:{model}:{block_size}:{page_bytes}".encode())


class PageMemory:
    def __init__(self, page_bytes: int, layout: LayoutDigest) -> None:
        self.page_bytes = page_bytes
        self.layout = layout
        # Of pages that were written: to clear megabytes took most of an engine's start.
        self._contents: dict[PageId, bytes] = {}
        self._blank = bytes(page_bytes)
        # A page is this fixed noise times an odd number that is the page's own: every byte depends on the tokens, and
        # a page costs one long multiplication (1-2 us for 4 KiB) instead of a generator run.
        noise = hashlib.shake_128(layout.to_bytes(8, "little")).digest(page_bytes)
        self._noise = int.from_bytes(noise, "little") | 1
        self._mask = (1 << (8 * page_bytes)) - 1

    def __repr__(self) -> str:
        return f"<PageMemory {len(self._contents)} pages of {self.page_bytes} bytes>"

    def expected(self, page_hash: PageHash) -> bytes:
        multiplier = xxhash.xxh3_64_intdigest(page_hash.to_bytes(8, "little"), self.layout) | 1
        return ((self._noise * multiplier) & self._mask).to_bytes(self.page_bytes, "little")

    def write(self, page: PageId, content: bytes) -> None:
        self._contents[page] = content

    def read(self, page: PageId) -> bytes:
        return self._contents.get(page, self._blank)
