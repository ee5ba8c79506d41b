"""Route keys: a 64-bit xxh3 chain over token ids, seeded from a salt.

key[i] = xxh3_64(tokens of page i as little-endian u32, seed=key[i - 1])

Where images have tokens of page i, their digests and places are hashed into the seed first.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

# Route keys are hints. They are 64 bits of a hash that is not cryptographic: two prompts may share one by accident, and
# a client that chooses tokens may look for such a pair. An engine's own page hash decides which bytes are read: a wrong
# route key costs a detour, never a wrong page.

TOKEN_BYTES = 4
KEY_BYTES = 8

# Any constant. It keeps the seed of a salt apart from the plain xxh3 of the same text.
_SEED_OF_SALTS = 0x6B76666572727932

# The same for images: it keeps their digests apart from a page of the same bytes.
_SEED_OF_IMAGES = 0x6B76666572727933

_BIG_ENDIAN = sys.byteorder == "big"


class ImageSpan(NamedTuple):
    """The place of an image in a prompt: `num_tokens` placeholder tokens from `offset` on."""

    digest: str
    offset: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens


# Images by page, for pages that have tokens of images: digest, and offset from the page's first token (may be < 0).
PageImages = Mapping[int, Sequence[tuple[str, int]]]


def page_images(images: Iterable[ImageSpan], block_size: int, num_pages: int) -> PageImages:
    """Return the images of the first `num_pages` pages, as vLLM does. `images` are ordered by offset."""
    found: dict[int, list[tuple[str, int]]] = {}
    for digest, offset, num_tokens in images:
        last = min(num_pages - 1, (offset + num_tokens - 1) // block_size)
        for page in range(offset // block_size, last + 1):
            found.setdefault(page, []).append((digest, offset - page * block_size))
    return found


def page_salt(cache_salt: str, adapter: str) -> str:
    """Return the salt with which requests of different adapters share no page, in engines and routers."""
    # Salts have no NUL, nor have adapters: no two pairs have the same text.
    return f"{cache_salt}\0{adapter}" if adapter else cache_salt


def seed_of(salt: str) -> int:
    """Prompts with different salts share no key."""
    return xxhash.xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), _SEED_OF_SALTS)


def route_keys(token_ids: Sequence[int], block_size: int, parent: int, images: PageImages | None = None) -> list[int]:
    """Return one key per full page of `block_size` tokens; fastest for an `array("I")`.

    `images` are counted from the first of these pages. `parent` is `seed_of(salt)` or the previous page's key. Raises
    ValueError for a block size below 1, OverflowError or TypeError for ids that are not u32.
    """
    if block_size < 1:
        raise ValueError(f"a page of {block_size} tokens")
    num_pages = len(token_ids) // block_size
    packed = pack_tokens(token_ids)
    # Unpacking cuts all pages in one call: slicing them one by one costs as much again as hashing them.
    cut = _pages_of(num_pages, block_size * TOKEN_BYTES)
    digest = xxhash.xxh3_64_intdigest
    if images:
        keys = []
        for i, page in enumerate(cut.unpack_from(packed)):
            if i in images:
                parent = digest(_pack_images(images[i]), parent ^ _SEED_OF_IMAGES)
            parent = digest(page, parent)
            keys.append(parent)
        return keys
    return [parent := digest(page, parent) for page in cut.unpack_from(packed)]


def _pack_images(images: Iterable[tuple[str, int]]) -> bytes:
    packed = []
    for name, offset in images:
        raw = name.encode("utf-8", "surrogatepass")
        packed += [struct.pack("<Iq", len(raw), offset), raw]
    return b"".join(packed)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    packed = token_ids if isinstance(token_ids, array) and token_ids.typecode == "I" else array("I", token_ids)
    if _BIG_ENDIAN:
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def pack_keys(keys: Iterable[int]) -> bytes:
    """Keys as little-endian u64."""
    packed = array("Q", keys)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(packed: bytes | bytearray | memoryview) -> array[int]:
    """Raises ValueError for a length that is no multiple of KEY_BYTES."""
    keys = array("Q")
    keys.frombytes(packed)
    if _BIG_ENDIAN:
        keys.byteswap()
    return keys


@functools.lru_cache(maxsize=1024)
def _pages_of(num_pages: int, page_bytes: int) -> struct.Struct:
    return struct.Struct(f"{page_bytes}s" * num_pages)
