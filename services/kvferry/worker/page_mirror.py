"""What the engine of this worker holds, as gateways need to know it: route keys by tier.

Fed with the engine's KvEventBatches. Pure: whoever owns it reads the events, takes deltas when it likes to send them,
and gives every gateway that asks a snapshot.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

from kvferry.engine.base import AllPagesCleared, KvEventBatch, PagesRemoved, PagesStored
from kvferry.pages.keys import route_keys, seed_of
from kvferry.residency.feed import Delta, SnapshotPart, snapshot_parts
from kvferry.residency.index import Tier

# What engines call their tiers.
_MEDIUM_TO_TIER = {"GPU": Tier.GPU, "CPU": Tier.CPU}
# VolumePool tell of volumes, and of one volume only one keeper: what an engine says of it here is not passed on.
_VOLUME_MEDIUM = "STORAGE"


class PageMirror:
    """Engine page hashes and their route keys, at most `max_pages` of both held and remembered ones.

    - A page is told under the key that follows from its tokens and its parent's key. Of a page whose parent is not
      known nothing is told: it is counted in `num_unknown`.
    - A hash stored twice is held once, and gone when it is removed once. (vLLM may cache equal pages twice: then less
      is told than there is, never more.)
    - A removed page is remembered: engines may announce to the CPU tier what has just left the GPU, by hash alone.
    - Beyond `max_pages` the remembered ones are forgotten first, then the pages stored longest ago; these are told as
      removed and counted in `num_forgotten`.
    - Lost batches make everything unknown: told as `cleared`, counted in `num_gaps`.
    """

    def __init__(self, block_size: int, max_pages: int) -> None:
        """Raises ValueError when a limit is below 1."""
        if block_size < 1 or max_pages < 1:
            raise ValueError(f"a mirror of {max_pages} pages of {block_size} tokens")
        self._block_size = block_size
        self._max_pages = max_pages
        # Oldest first. A page on two tiers is in two of them.
        self._tier_to_keys: dict[Tier, dict[int, int]] = {tier: {} for tier in _MEDIUM_TO_TIER.values()}
        self._remembered: dict[int, int] = {}
        # Key -> whether it is there now, for what changed since the last delta.
        self._changes: dict[Tier, dict[int, bool]] = {tier: {} for tier in self._tier_to_keys}
        self._cleared = False
        self._next_batch: int | None = None
        self._sequence = 0
        self.num_unknown = 0  # pages announced with an unknown parent, size or medium
        self.num_forgotten = 0  # pages held, and not told of for want of room here
        self.num_gaps = 0

    def __repr__(self) -> str:
        tiers = ", ".join(f"{len(held)} {tier.value}" for tier, held in self._tier_to_keys.items())
        return f"<PageMirror {tiers}, {len(self._remembered)} remembered, at {self._sequence}>"

    @property
    def num_pages(self) -> int:
        """Pages held, over all tiers."""
        return sum(map(len, self._tier_to_keys.values()))

    @property
    def sequence(self) -> int:
        """The number of the last delta taken."""
        return self._sequence

    def keys_of(self, tier: Tier) -> frozenset[int]:
        """A copy of what is held there."""
        return frozenset(self._tier_to_keys.get(tier, {}).values())

    def apply(self, batch: KvEventBatch) -> None:
        """Take the events of one engine step. O(pages named)."""
        if self._next_batch is not None and batch.sequence != self._next_batch:
            self.num_gaps += 1
            self._clear()
        self._next_batch = batch.sequence + 1
        for event in batch.events:
            match event:
                case PagesStored():
                    self._store(event)
                case PagesRemoved():
                    self._remove(event)
                case AllPagesCleared():
                    self._clear()
        self._evict_excess()

    def next_delta(self) -> Delta | None:
        """Everything since the last call, as the next delta; None when nothing changed."""
        if not self._cleared and not any(self._changes.values()):
            return None
        stored, removed = {}, {}
        for tier, changes in self._changes.items():
            stored_keys = [key for key, is_there in changes.items() if is_there]
            if stored_keys:
                stored[tier] = stored_keys
            # After a clear nothing is there that could be removed.
            if len(stored_keys) < len(changes) and not self._cleared:
                removed[tier] = [key for key, is_there in changes.items() if not is_there]
            changes.clear()
        self._sequence += 1
        delta = Delta(self._sequence, stored, removed, self._cleared)
        self._cleared = False
        return delta

    def snapshot(self, max_keys: int) -> Iterator[SnapshotPart]:
        """What is held now, in parts of at most `max_keys` keys, copied before the first part is given.

        It stands for the last delta taken; changes since then are in it and will be in the next delta too.
        """
        held = {tier: array("Q", keys.values()) for tier, keys in self._tier_to_keys.items() if keys}
        return snapshot_parts(self._sequence, held, max_keys)

    def check(self) -> None:
        """The laws of this class. Raises AssertionError naming the broken one."""
        total = self.num_pages + len(self._remembered)
        assert total <= self._max_pages, f"{total} pages are kept, {self._max_pages} allowed"
        for tier, held in self._tier_to_keys.items():
            both = held.keys() & self._remembered.keys()
            assert not both, f"{len(both)} pages are held on {tier.value} and remembered as removed"

    def _store(self, event: PagesStored) -> None:
        tier = _MEDIUM_TO_TIER.get(event.medium.upper())
        if tier is None:
            if event.medium.upper() != _VOLUME_MEDIUM:
                self.num_unknown += len(event.page_hashes)
            return
        held = self._tier_to_keys[tier]
        if event.route_keys is not None:
            new = dict(zip(event.page_hashes, event.route_keys, strict=True))
        else:
            new = self._keys_by_tokens(event) if event.token_ids else self._keys_by_hash(event.page_hashes)
        # Announced again is not stored again: what was told stays told, and its age starts anew.
        changed = new.keys() - held.keys() if not held.keys().isdisjoint(new) else new.keys()
        changes = self._changes[tier]
        if len(changed) == len(new):
            changes.update(dict.fromkeys(new.values(), True))
        else:
            changes.update({new[page_hash]: True for page_hash in new if page_hash in changed})
            for page_hash in new.keys() & held.keys():
                del held[page_hash]
        held.update(new)
        if self._remembered:
            for page_hash in self._remembered.keys() & new.keys():
                del self._remembered[page_hash]

    def _keys_by_tokens(self, event: PagesStored) -> dict[int, int]:
        """Hash -> key of the pages of an event that tells their tokens; empty when the chain before them is unknown."""
        if event.parent_hash is None:
            parent: int | None = seed_of(event.cache_salt or "")
        else:
            parent = self._key_of(event.parent_hash)
        if (
            parent is None
            or event.block_size != self._block_size
            or len(event.token_ids) != len(event.page_hashes) * self._block_size
        ):
            self.num_unknown += len(event.page_hashes)
            return {}
        return dict(zip(event.page_hashes, route_keys(event.token_ids, self._block_size, parent), strict=True))

    def _keys_by_hash(self, page_hashes: Sequence[int]) -> dict[int, int]:
        """Hash -> key of pages named by hash alone, as vLLM does for those that move from tier to tier."""
        new = {}
        for page_hash in page_hashes:
            key = self._key_of(page_hash)
            if key is None:
                self.num_unknown += 1
            else:
                new[page_hash] = key
        return new

    def _key_of(self, page_hash: int) -> int | None:
        for held in self._tier_to_keys.values():
            key = held.get(page_hash)
            if key is not None:
                return key
        return self._remembered.get(page_hash)

    def _remove(self, event: PagesRemoved) -> None:
        tier = _MEDIUM_TO_TIER.get(event.medium.upper())
        if tier is None:
            return
        held, changes = self._tier_to_keys[tier], self._changes[tier]
        others = [keys for other, keys in self._tier_to_keys.items() if other is not tier]
        for page_hash in event.page_hashes:
            key = held.pop(page_hash, None)
            # Unknown ones are those that were never told: nothing to take back.
            if key is not None:
                changes[key] = False
                if not any(page_hash in keys for keys in others):
                    self._remembered[page_hash] = key

    def _clear(self) -> None:
        for held in self._tier_to_keys.values():
            held.clear()
        for changes in self._changes.values():
            changes.clear()
        self._remembered.clear()
        self._cleared = True

    def _evict_excess(self) -> None:
        excess = self.num_pages + len(self._remembered) - self._max_pages
        if excess <= 0:
            return
        for page_hash in list(itertools.islice(self._remembered, excess)):
            del self._remembered[page_hash]
        excess = self.num_pages - self._max_pages
        while excess > 0:
            tier, held = max(self._tier_to_keys.items(), key=lambda item: len(item[1]))
            changes = self._changes[tier]
            # Half of the excess at a time, so that no tier gives more than its share.
            for page_hash in list(itertools.islice(held, (excess + 1) // 2)):
                changes[held.pop(page_hash)] = False
                self.num_forgotten += 1
                excess -= 1
