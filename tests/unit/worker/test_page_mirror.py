from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.base import AllPagesCleared, KvEvent, KvEventBatch, PagesRemoved, PagesStored
from kvferry.pages.keys import pack_tokens, route_keys, seed_of
from kvferry.residency.feed import Delta, ResidencyFollower
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry.worker.page_mirror import PageMirror
from kvferry_sim.block_pool import BlockPool, PageHash, PageId, chain_hash, root_hash

BLOCK_SIZE = 2
TOKENS = [11, 12, 13, 14, 15, 16]
KEYS = route_keys(TOKENS, BLOCK_SIZE, seed_of(""))
HASHES = [101, 102, 103]


def stored(first: int = 0, last: int = 3, medium: str = "GPU", cache_salt: str | None = None) -> PagesStored:
    """Pages [first, last) of the prompt TOKENS."""
    return PagesStored(
        HASHES[first:last],
        HASHES[first - 1] if first else None,
        TOKENS[first * BLOCK_SIZE : last * BLOCK_SIZE],
        BLOCK_SIZE,
        cache_salt,
        medium,
    )


class Published:
    """A mirror, and what its deltas say when applied one by one."""

    def __init__(self, max_pages: int = 1000) -> None:
        self.mirror = PageMirror(BLOCK_SIZE, max_pages)
        self.batches = 0
        self.held: dict[Tier, set[int]] = {Tier.GPU: set(), Tier.CPU: set()}

    def apply(self, *events: KvEvent) -> None:
        self.mirror.apply(KvEventBatch(self.batches, events))
        self.batches += 1
        self.mirror.check()

    def next_delta(self) -> Delta | None:
        delta = self.mirror.next_delta()
        if delta is not None:
            for tier, held in self.held.items():
                if delta.cleared:
                    held.clear()
                held -= set(delta.removed.get(tier, ()))
                held |= set(delta.stored.get(tier, ()))
        for tier, held in self.held.items():
            assert held == self.mirror.keys_of(tier)
        return delta


def test_pages_are_told_under_their_route_keys() -> None:
    published = Published()
    published.apply(stored(0, 2))
    assert published.next_delta() == Delta(1, stored={Tier.GPU: KEYS[:2]})
    published.apply(stored(2, 3))
    assert published.next_delta() == Delta(2, stored={Tier.GPU: KEYS[2:]})
    published.apply(PagesRemoved(HASHES[1:]))
    assert published.next_delta() == Delta(3, removed={Tier.GPU: KEYS[1:]})
    assert published.next_delta() is None
    assert published.mirror.sequence == 3


def test_the_salt_is_part_of_the_key() -> None:
    published = Published()
    published.apply(stored(0, 1, cache_salt="tenant"), stored(1, 3))
    assert published.mirror.keys_of(Tier.GPU) == set(route_keys(TOKENS, BLOCK_SIZE, seed_of("tenant")))


def test_changes_between_two_deltas_are_told_once() -> None:
    published = Published()
    published.apply(stored())
    published.apply(PagesRemoved(HASHES[2:]), stored(2, 3), PagesRemoved(HASHES[1:2]))
    delta = published.next_delta()
    assert delta is not None
    assert set(delta.stored[Tier.GPU]) == {KEYS[0], KEYS[2]}
    assert published.held[Tier.GPU] == {KEYS[0], KEYS[2]}


def test_a_page_stored_again_is_not_told_again() -> None:
    published = Published()
    published.apply(stored())
    published.next_delta()
    published.apply(stored(), stored(1, 3))
    assert published.next_delta() is None


def test_what_follows_an_unknown_page_is_not_told() -> None:
    published = Published()
    published.apply(stored(1, 3))
    assert published.next_delta() is None
    assert published.mirror.num_unknown == 2
    published.apply(PagesRemoved(HASHES))
    assert published.next_delta() is None


def test_pages_of_another_size_and_of_an_unknown_medium_are_not_told() -> None:
    published = Published()
    published.apply(PagesStored([1], None, [1, 2, 3], 3), stored(medium="TAPE"), PagesRemoved(HASHES, "TAPE"))
    assert published.next_delta() is None
    assert published.mirror.num_unknown == 4


def test_what_an_engine_says_of_volumes_is_left_to_their_keepers() -> None:
    published = Published()
    published.apply(stored(medium="STORAGE"), PagesRemoved(HASHES, "STORAGE"))
    assert published.next_delta() is None
    assert published.mirror.num_unknown == 0


def test_pages_that_bring_their_keys_need_nothing_before_them() -> None:
    published = Published()
    published.apply(PagesStored(HASHES[1:], None, (), 0, medium="CPU", route_keys=KEYS[1:]))
    assert published.next_delta() == Delta(1, stored={Tier.CPU: KEYS[1:]})
    # What follows one of them on another tier is known through it.
    published.apply(PagesStored([777], HASHES[2], [1, 2], BLOCK_SIZE))
    assert published.next_delta() == Delta(2, stored={Tier.GPU: route_keys([1, 2], BLOCK_SIZE, KEYS[2])})
    published.apply(PagesRemoved(HASHES[1:], "CPU"))
    assert published.next_delta() == Delta(3, removed={Tier.CPU: KEYS[1:]})


def test_a_page_may_be_on_two_tiers() -> None:
    published = Published()
    published.apply(stored(), stored(0, 2, medium="CPU"))
    assert published.next_delta() == Delta(1, stored={Tier.GPU: KEYS, Tier.CPU: KEYS[:2]})
    published.apply(PagesRemoved(HASHES))
    assert published.next_delta() == Delta(2, removed={Tier.GPU: KEYS})
    assert published.held[Tier.CPU] == set(KEYS[:2])
    # A page held on the CPU tier only is still a parent.
    published.apply(PagesStored([777], HASHES[1], [1, 2], BLOCK_SIZE))
    assert published.next_delta() == Delta(3, stored={Tier.GPU: route_keys([1, 2], BLOCK_SIZE, KEYS[1])})


def test_a_page_named_by_hash_alone_is_known_after_it_left_the_gpu() -> None:
    published = Published()
    published.apply(stored())
    published.apply(PagesRemoved(HASHES))
    published.next_delta()
    published.apply(PagesStored([*HASHES, 555], None, [], 0, None, "CPU"))
    assert published.next_delta() == Delta(2, stored={Tier.CPU: KEYS})
    assert published.mirror.num_unknown == 1


def test_a_gap_clears_everything_and_what_comes_after_is_told() -> None:
    published = Published()
    published.apply(stored(0, 2))
    published.next_delta()
    published.batches += 1
    published.apply(stored(2, 3))  # its parent is unknown now
    delta = published.next_delta()
    assert delta == Delta(2, cleared=True)
    assert (published.mirror.num_gaps, published.mirror.num_unknown) == (1, 1)
    published.apply(stored())
    assert published.next_delta() == Delta(3, stored={Tier.GPU: KEYS})


def test_a_cleared_engine_is_told_as_such() -> None:
    published = Published()
    published.apply(stored(), stored(medium="CPU"))
    published.next_delta()
    published.apply(AllPagesCleared(), stored(0, 1))
    assert published.next_delta() == Delta(2, stored={Tier.GPU: KEYS[:1]}, cleared=True)


def test_the_first_batch_may_have_any_number() -> None:
    mirror = PageMirror(BLOCK_SIZE, 10)
    mirror.apply(KvEventBatch(17, [stored()]))
    assert mirror.num_gaps == 0
    assert mirror.keys_of(Tier.GPU) == set(KEYS)


def test_beyond_its_limit_it_forgets_the_oldest_and_says_so() -> None:
    published = Published(max_pages=2)
    published.apply(stored(0, 2))
    published.next_delta()
    published.apply(stored(2, 3))
    assert published.next_delta() == Delta(2, stored={Tier.GPU: KEYS[2:]}, removed={Tier.GPU: KEYS[:1]})
    assert published.mirror.num_forgotten == 1
    published.apply(PagesRemoved(HASHES[:1]))
    assert published.next_delta() is None


def test_removed_pages_are_forgotten_before_held_ones() -> None:
    published = Published(max_pages=3)
    published.apply(stored(0, 3))
    published.apply(PagesRemoved(HASHES[2:]))
    published.apply(PagesStored([900], None, [1, 2], BLOCK_SIZE))
    assert published.mirror.num_forgotten == 0
    assert published.mirror.num_pages == 3
    published.apply(PagesStored([HASHES[2]], None, [], 0, None, "CPU"))
    assert published.mirror.num_unknown == 1


@pytest.mark.parametrize(("block_size", "max_pages"), [(0, 1), (1, 0)])
def test_limits_below_one_are_refused(block_size: int, max_pages: int) -> None:
    with pytest.raises(ValueError, match="a mirror of"):
        PageMirror(block_size, max_pages)


def test_a_snapshot_stands_for_the_last_delta_and_may_be_ahead_of_it() -> None:
    published = Published()
    published.apply(stored(0, 2))
    published.next_delta()
    published.apply(stored(2, 3))
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    parts = list(published.mirror.snapshot(2))
    assert {part.sequence for part in parts} == {1}
    assert all(len(part.keys) <= 2 for part in parts)
    for part in parts:
        follower.apply_part(part)
    assert index.keys_of(Holder("w", Tier.GPU)) == set(KEYS)
    delta = published.next_delta()
    assert delta is not None
    assert follower.apply_delta(delta)
    assert index.keys_of(Holder("w", Tier.GPU)) == set(KEYS)


# --- the simulator's real events, through mirror and follower, into the index


class Prompts:
    """An engine's page pool under random prompts that share beginnings; knows the route key of every page it made."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = BlockPool(self.random.choice([8, 16, 64]), BLOCK_SIZE)
        self.running: list[list[PageId]] = []
        self.hash_to_key: dict[PageHash, int] = {}

    def step(self) -> list[KvEvent]:
        for _ in range(self.random.randrange(4)):
            if self.running and self.random.random() < 0.5:
                self.pool.free(self.running.pop(self.random.randrange(len(self.running))))
            else:
                self._begin()
        return self.pool.drain_events()

    def keys(self) -> set[int]:
        return {self.hash_to_key[page_hash] for page_hash in self.pool.hash_to_page}

    def _begin(self) -> None:
        salt = self.random.choice(["", "tenant"])
        token_ids = [self.random.randrange(2) for _ in range(BLOCK_SIZE * self.random.randrange(1, 7))]
        hashes: list[PageHash] = []
        for start in range(0, len(token_ids), BLOCK_SIZE):
            parent = hashes[-1] if hashes else root_hash(salt)
            hashes.append(chain_hash(parent, pack_tokens(token_ids[start : start + BLOCK_SIZE])))
        self.hash_to_key.update(zip(hashes, route_keys(token_ids, BLOCK_SIZE, seed_of(salt)), strict=True))
        found = self.pool.find_prefix(hashes)
        new = len(hashes) - len(found)
        if not self.pool.can_allocate(new, found):
            return
        self.pool.touch(found)
        pages = found + self.pool.allocate(new)
        self.pool.store(
            pages[len(found) :],
            hashes[len(found) :],
            token_ids[len(found) * BLOCK_SIZE :],
            parent_hash=hashes[len(found) - 1] if found else None,
            cache_salt=salt,
        )
        self.running.append(pages)


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=60)
def test_the_index_holds_what_the_engines_pool_holds(seed: int) -> None:
    engine = Prompts(seed)
    seeded = engine.random
    mirror = PageMirror(BLOCK_SIZE, 1000)
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    for batch in range(40):
        mirror.apply(KvEventBatch(batch, engine.step()))
        if seeded.random() < 0.5:
            delta = mirror.next_delta()
            # One in eight is lost on its way.
            if delta is not None and seeded.random() < 0.875:
                follower.apply_delta(delta)
        if follower.needs_snapshot:
            for part in mirror.snapshot(seeded.randrange(1, 20)):
                follower.apply_part(part)
        mirror.check()
        index.check()
        assert mirror.keys_of(Tier.GPU) == engine.keys()
    last = mirror.next_delta()
    if last is None or not follower.apply_delta(last):
        for part in mirror.snapshot(5):
            follower.apply_part(part)
    assert follower.sequence == mirror.sequence
    assert index.keys_of(Holder("w", Tier.GPU)) == engine.keys()
    assert (mirror.num_unknown, mirror.num_gaps, mirror.num_forgotten) == (0, 0, 0)


@given(st.integers(0, 1 << 32), st.integers(1, 30))
@settings(deadline=None, max_examples=60)
def test_a_mirror_with_gaps_and_little_room_tells_less_than_there_is_and_never_more(seed: int, max_pages: int) -> None:
    engine = Prompts(seed)
    published = Published(max_pages)
    for _ in range(40):
        events = engine.step()
        if engine.random.random() < 0.05:
            published.batches += 1  # lost between engine and mirror
        else:
            published.apply(*events)
            published.next_delta()
            assert published.held[Tier.GPU] <= engine.keys()
            assert published.mirror.num_pages <= max_pages
