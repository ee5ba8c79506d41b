"""The tokens of a sequence, with page hashes and route keys."""

from __future__ import annotations

from array import array

from kvferry.pages.keys import TOKEN_BYTES, route_keys, seed_of
from kvferry_sim.block_pool import PageHash, chain_hash, root_hash
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
