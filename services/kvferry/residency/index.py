"""Index from prompt prefixes to workers and volumes."""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# The index keeps one set of route keys per holder. The alternative, one dictionary from key to a bit mask of holders,
# was measured too: it finds faster with hundreds of holders, but each stored or removed page costs 2.7 times as much,
# and with millions of pages the dictionary stops the gateway for 150 ms whenever it grows. Sets grow one holder at a
# time, are dropped whole, and are compared at the speed of C.
#
# A page takes 75 to 145 bytes with each of its holders. Python's collector visits every key in a full collection, 55 ms
# for a million keys: a process with a large index should make these rare (`gc.freeze`, a high third threshold).

# Depths that are tried before bisecting: the length of a system prompt, of a document and of the whole prompt.
_NUM_KNOWN = 3


class Tier(enum.StrEnum):
    """A worker owns its GPU and CPU tiers; a volume owns itself."""

    GPU = "gpu"
    CPU = "cpu"
    VOLUME = "volume"


class Holder(NamedTuple):
    """`owner` is a member id, or a volume id for VOLUME."""

    owner: str
    tier: Tier


@dataclass(frozen=True, slots=True)
class Found:
    """Number of pages held from the prompt's start, by owner; no zeros.

    `cpu` counts the GPU's pages and the CPU tier's that continue them, where these exceed `gpu`.
    """

    gpu: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, int] = field(default_factory=dict)
    volumes: dict[str, int] = field(default_factory=dict)


class ResidencyIndex:
    """Route keys by holder; every change is idempotent.

    A depth d > 0 means that page d - 1 of the prompt is held and page d is not: exact for holders of prefixes, perhaps
    too large for a holder with a hole.
    """

    def __init__(self) -> None:
        self._gpu: dict[str, set[int]] = {}
        self._cpu: dict[str, set[int]] = {}
        self._volumes: dict[str, set[int]] = {}
        self._blocks_per_chunk: dict[str, int] = {}  # of volumes, where it is not 1

    def __repr__(self) -> str:
        return (
            f"<ResidencyIndex {self.num_pages} pages: {len(self._gpu)} GPU, {len(self._cpu)} CPU tiers, "
            f"{len(self._volumes)} volumes>"
        )

    @property
    def num_pages(self) -> int:
        """A page on three holders counts three times."""
        return sum(len(held) for tier in Tier for held in self._of(tier).values())

    def holders(self) -> list[Holder]:
        return [Holder(owner, tier) for tier in Tier for owner in self._of(tier)]

    def keys_of(self, holder: Holder) -> frozenset[int]:
        """O(pages of the holder)."""
        return frozenset(self._of(holder.tier).get(holder.owner, ()))

    def store(self, holder: Holder, keys: Iterable[int]) -> None:
        """O(keys)."""
        owners = self._of(holder.tier)
        held = owners.get(holder.owner)
        if held is None:
            held = set(keys)
            if held:
                owners[holder.owner] = held
        else:
            held.update(keys)

    def remove(self, holder: Holder, keys: Iterable[int]) -> None:
        """O(keys)."""
        owners = self._of(holder.tier)
        held = owners.get(holder.owner)
        if held is not None:
            held.difference_update(keys)
            if not held:
                del owners[holder.owner]

    def clear(self, holder: Holder) -> None:
        """100,000 pages take about 2 ms."""
        self._of(holder.tier).pop(holder.owner, None)

    def drop_holder(self, owner: str) -> None:
        for tier in Tier:
            self._of(tier).pop(owner, None)

    def set_blocks_per_chunk(self, volume: str, blocks_per_chunk: int) -> None:
        """Set the engine pages per chunk of a volume, initially 1. Raises ValueError below 1."""
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}; at least 1 is allowed")
        if blocks_per_chunk == 1:
            self._blocks_per_chunk.pop(volume, None)
        else:
            self._blocks_per_chunk[volume] = blocks_per_chunk

    def find(self, keys: Sequence[int]) -> Found:
        """Return every owner's depth. Two probes where holders agree, else O(log(keys))."""
        if not keys:
            return Found()
        gpu = _depths(self._gpu, keys)
        cpu = _continued(self._cpu, keys, gpu) if self._cpu else {}
        return Found(gpu, cpu, self._depths_of_volumes(keys) if self._volumes else {})

    def check(self) -> None:
        for tier in Tier:
            for owner, held in self._of(tier).items():
                assert held, f"{owner} holds nothing on {tier.value} and is listed"
                for key in held:
                    assert isinstance(key, int), f"{owner} holds {key!r} on {tier.value}, which is no key"
                    assert 0 <= key < 1 << 64, f"{owner} holds {key} on {tier.value}, which is not 64 bits"

    def _depths_of_volumes(self, keys: Sequence[int]) -> dict[str, int]:
        if not self._blocks_per_chunk:
            return _depths(self._volumes, keys)
        size_to_owners: dict[int, dict[str, set[int]]] = {}
        for owner, held in self._volumes.items():
            size_to_owners.setdefault(self._blocks_per_chunk.get(owner, 1), {})[owner] = held
        depths: dict[str, int] = {}
        for blocks_per_chunk, owners in size_to_owners.items():
            if last := keys[blocks_per_chunk - 1 :: blocks_per_chunk]:
                depths |= {owner: depth * blocks_per_chunk for owner, depth in _depths(owners, last).items()}
        return depths

    def _of(self, tier: Tier) -> dict[str, set[int]]:
        if tier is Tier.GPU:
            return self._gpu
        return self._cpu if tier is Tier.CPU else self._volumes


def _depths(owners: dict[str, set[int]], keys: Sequence[int]) -> dict[str, int]:
    num_pages, first = len(keys), keys[0]
    backwards = keys[::-1]
    depths: dict[str, int] = {}
    # Holders of a shared prefix mostly end at the same page: the last depth is the first guess, and the few depths
    # before it are the next guesses.
    guess, last, after = num_pages, keys[-1], None
    known = [num_pages]
    # A probe is one or two cache misses and costs more than all else here. Until a holder is found only the first page
    # is probed; then the page where the guess ends is probed instead of it.
    seen = False
    for owner, held in owners.items():
        if seen and last in held:
            if after is None or after not in held:
                depths[owner] = guess
                continue
            low, high = guess + 1, num_pages
        elif first in held:
            low, high = 1, guess - 1 if seen else num_pages
            seen = True
        else:
            continue
        depths[owner] = guess = _depth(held, keys, backwards, low, high, known)
        last, after = keys[guess - 1], keys[guess] if guess < num_pages else None
    return depths


def _depth(held: set[int], keys: Sequence[int], backwards: Sequence[int], low: int, high: int, known: list[int]) -> int:
    """Return the depth between `low` (page held) and `high` (next page absent)."""
    for depth in known:
        if low <= depth <= high:
            if depth > low and keys[depth - 1] not in held:
                high = depth - 1
            elif depth < high and keys[depth] in held:
                low = depth + 1
            else:
                return depth
    # Bisect on the reversed keys: held pages are at their end, which is the order that bisect needs.
    num_pages = len(keys)
    depth = num_pages - bisect_left(backwards, True, num_pages - high, num_pages - low, key=held.__contains__)
    known.insert(0, depth)
    del known[_NUM_KNOWN:]
    return depth


def _continued(owners: dict[str, set[int]], keys: Sequence[int], before: dict[str, int]) -> dict[str, int]:
    num_pages = len(keys)
    backwards = keys[::-1]
    known = [num_pages]
    reaches: dict[str, int] = {}
    for owner, held in owners.items():
        start = before.get(owner, 0)
        if start < num_pages and keys[start] in held:
            reaches[owner] = _depth(held, keys, backwards, start + 1, num_pages, known)
    return reaches
