"""The pages that an engine holds, by route key. Pure."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence

from kvferry.engine.base import AllPagesCleared, KvEventBatch, PagesRemoved, PagesStored
from kvferry.pages.keys import route_keys, seed_of
from kvferry.residency.feed import Delta, SnapshotPart, snapshot_parts
from kvferry.residency.index import Tier

# Medium names in engines' events.
_MEDIUM_TO_TIER = {"GPU": Tier.GPU, "CPU": Tier.CPU}
# Keepers publish volumes, one keeper per volume, so engines' events about them are ignored.
_VOLUME_MEDIUM = "STORAGE"


class PageMirror:
    """Maps an engine's page hashes to route keys, at most `max_pages` of held and remembered ones.

    - A page without a known parent is not published (`num_unknown`).
    - A hash stored twice is held once: too little may be published, never too much.
    - Removed pages are remembered: the CPU tier may announce them by hash alone.
    - Remembered pages are evicted first, then the oldest held ones (`num_forgotten`).
    - Lost batches clear everything (`num_gaps`).
    """

    def __init__(self, block_size: int, max_pages: int) -> None:
        """Raises ValueError when a limit is below 1."""
        if block_size < 1 or max_pages < 1:
            raise ValueError(f"a mirror of {max_pages} pages of {block_size} tokens")
        self._block_size = block_size
        self._max_pages = max_pages
        # Oldest first. A page on two tiers is in both dictionaries.
        self._tier_to_keys: dict[Tier, dict[int, int]] = {tier: {} for tier in _MEDIUM_TO_TIER.values()}
        self._remembered: dict[int, int] = {}
        # Keys changed since the last delta -> whether they are held now.
        self._changes: dict[Tier, dict[int, bool]] = {tier: {} for tier in self._tier_to_keys}
        self._cleared = False
        self._next_batch: int | None = None
        self._sequence = 0
        self.num_unknown = 0  # pages announced with an unknown parent, size or medium
        self.num_forgotten = 0  # held pages that were evicted from this mirror
        self.num_gaps = 0

    def __repr__(self) -> str:
        tiers = ", ".join(f"{len(held)} {tier.value}" for tier, held in self._tier_to_keys.items())
        return f"<PageMirror {tiers}, {len(self._remembered)} remembered, at {self._sequence}>"

    @property
    def num_pages(self) -> int:
        return sum(map(len, self._tier_to_keys.values()))

    @property
    def sequence(self) -> int:
        return self._sequence

    def keys_of(self, tier: Tier) -> frozenset[int]:
        return frozenset(self._tier_to_keys.get(tier, {}).values())

    def apply(self, batch: KvEventBatch) -> None:
        """O(pages named)."""
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

    def restart(self) -> None:
        """Forget all pages: batches will be numbered anew, from any number."""
        self._next_batch = None
        self._clear()

    def next_delta(self) -> Delta | None:
        """Return all changes since the last delta, or None."""
        if not self._cleared and not any(self._changes.values()):
            return None
        stored, removed = {}, {}
        for tier, changes in self._changes.items():
            stored_keys = [key for key, is_there in changes.items() if is_there]
            if stored_keys:
                stored[tier] = stored_keys
            # `cleared` already removes everything.
            if len(stored_keys) < len(changes) and not self._cleared:
                removed[tier] = [key for key, is_there in changes.items() if not is_there]
            changes.clear()
        self._sequence += 1
        delta = Delta(self._sequence, stored, removed, self._cleared)
        self._cleared = False
        return delta

    def snapshot(self, max_keys: int) -> Iterator[SnapshotPart]:
        """Copy the held keys, in parts of at most `max_keys`.

        It stands for the last delta; later changes are in the next delta too.
        """
        held = {tier: array("Q", keys.values()) for tier, keys in self._tier_to_keys.items() if keys}
        return snapshot_parts(self._sequence, held, max_keys)

    def check(self) -> None:
        total = self.num_pages + len(self._remembered)
        assert total <= self._max_pages, f"{total} pages are held or remembered, {self._max_pages} allowed"
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
        # Published pages stay published; their age restarts at zero.
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
        """Empty if the parent is unknown."""
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
        return dict(
            zip(event.page_hashes, route_keys(event.token_ids, self._block_size, parent, event.images), strict=True)
        )

    def _keys_by_hash(self, page_hashes: Sequence[int]) -> dict[int, int]:
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
            # Unknown pages were never published.
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
            # Half of the excess at a time, so that no tier loses more than its share.
            for page_hash in list(itertools.islice(held, (excess + 1) // 2)):
                changes[held.pop(page_hash)] = False
                self.num_forgotten += 1
                excess -= 1
