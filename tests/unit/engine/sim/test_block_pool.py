from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.engine.base import PagesRemoved, PagesStored
from kvferry.pages.keys import pack_tokens
from kvferry_sim.block_pool import BlockPool, PageHash, PageId, chain_hash, root_hash

BLOCK_SIZE = 2


def hashes_of(token_ids: list[int], cache_salt: str = "", block_size: int = BLOCK_SIZE) -> list[PageHash]:
    parent, hashes = root_hash(cache_salt), []
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        parent = chain_hash(parent, pack_tokens(token_ids[start : start + block_size]))
        hashes.append(parent)
    return hashes


def compute(pool: BlockPool, token_ids: list[int], cache_salt: str = "") -> list[PageId]:
    """What an engine does with a prompt of full pages: reuse, allocate, store."""
    hashes = hashes_of(token_ids, cache_salt)
    found = pool.find_prefix(hashes)
    pool.touch(found)
    pages = found + pool.allocate(len(hashes) - len(found))
    pool.store(
        pages[len(found) :],
        hashes[len(found) :],
        token_ids[len(found) * BLOCK_SIZE :],
        parent_hash=hashes[len(found) - 1] if found else None,
        cache_salt=cache_salt,
    )
    return pages


def test_a_page_depends_on_everything_before_it_and_on_the_salt() -> None:
    same = hashes_of([1, 2, 3, 4])
    assert hashes_of([1, 2, 3, 4]) == same
    assert hashes_of([9, 2, 3, 4])[1] != same[1]
    assert hashes_of([1, 2, 3, 4], "salt")[0] != same[0]
    assert hashes_of([1, 2, 3, 4], "salt")[1] != same[1]
    assert hashes_of([1, 2, 3, 9])[0] == same[0]


def test_hashes_stay_what_they_are() -> None:
    """Engines of different releases must not find different pages under one hash, nor one page under two."""
    assert hashes_of([1, 2, 3, 4], "salt") == [0xE4F1E835BF4210E8, 0x6ED27F58A9288CC0]


def test_a_freed_prefix_is_found_again() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pages = compute(pool, [1, 2, 3, 4])
    pool.free(pages)
    assert pool.num_used == 0
    assert pool.find_prefix(hashes_of([1, 2, 3, 4, 5, 6])) == pages
    assert pool.find_prefix(hashes_of([1, 2, 9, 9])) == pages[:1]
    assert pool.find_prefix(hashes_of([9, 9, 3, 4])) == []


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pages = compute(pool, [1, 2, 3, 4])
    pool.free(pages)
    assert pool.allocate(1) == [pages[1]]
    assert pool.find_prefix(hashes_of([1, 2, 3, 4])) == [pages[0]]


def test_the_least_recently_used_prompt_is_forgotten_first() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    first, second = compute(pool, [1, 2]), compute(pool, [3, 4])
    pool.free(first)
    pool.free(second)
    pool.free(compute(pool, [1, 2]))  # used again
    blank = pool.allocate(1)
    assert not set(blank) & {*first, *second}
    assert pool.allocate(1) == second


def test_blank_pages_go_before_findable_ones() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pool.free(compute(pool, [1, 2]))
    blank = pool.allocate(1)
    pool.free(blank)
    assert pool.allocate(1) == blank
    assert pool.find_prefix(hashes_of([1, 2]))


def test_of_two_equal_pages_the_first_is_found() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    (first,), (second,) = pool.allocate(1), pool.allocate(1)
    for page in (first, second):
        pool.store([page], hashes_of([1, 2]), [1, 2], parent_hash=None)
    assert pool.find_prefix(hashes_of([1, 2])) == [first]
    assert len(pool.drain_events()) == 1
    pool.free([first])
    pool.free([second])
    pool.check()


def test_can_allocate_counts_found_pages_that_are_free() -> None:
    pool = BlockPool(3, BLOCK_SIZE)
    pool.free(compute(pool, [1, 2, 3, 4]))
    found = pool.find_prefix(hashes_of([1, 2, 3, 4]))
    assert pool.can_allocate(1, found)
    assert not pool.can_allocate(2, found)
    assert pool.can_allocate(3)


def test_too_many_pages_and_double_frees_are_errors() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    with pytest.raises(IndexError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(pages)


def test_events_say_what_was_stored_and_removed_in_order() -> None:
    pool = BlockPool(2, BLOCK_SIZE)
    pool.free(compute(pool, [1, 2, 3, 4], "salt"))
    first, second = hashes_of([1, 2, 3, 4], "salt")
    assert pool.drain_events() == [
        PagesStored([first, second], None, [1, 2, 3, 4], BLOCK_SIZE, cache_salt="salt"),
    ]
    compute(pool, [5, 6])
    assert pool.drain_events() == [
        PagesRemoved([second]),
        PagesStored(hashes_of([5, 6]), None, [5, 6], BLOCK_SIZE),
    ]
    assert pool.drain_events() == []


def test_a_run_with_known_pages_in_it_becomes_two_events() -> None:
    pool = BlockPool(8, BLOCK_SIZE)
    hashes = hashes_of([1, 2, 3, 4, 5, 6])
    (middle,) = pool.allocate(1)
    pool.store([middle], hashes[1:2], [3, 4], parent_hash=hashes[0])
    pool.drain_events()
    pages = pool.allocate(3)
    pool.store(pages, hashes, [1, 2, 3, 4, 5, 6], parent_hash=None, cache_salt="salt")
    assert pool.drain_events() == [
        PagesStored(hashes[:1], None, [1, 2], BLOCK_SIZE, cache_salt="salt"),
        PagesStored(hashes[2:], hashes[1], [5, 6], BLOCK_SIZE),
    ]


def test_repr_shows_state() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pages = compute(pool, [1, 2, 3, 4])
    pool.free(pages[1:])
    assert repr(pool) == "<BlockPool 1/4 used, 2 cached, 2 tokens a page>"


class PoolBesideReference(RuleBasedStateMachine):
    """Prompts come and go, over a small alphabet so that they share prefixes; a reference says what must be found."""

    NUM_PAGES = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.NUM_PAGES, BLOCK_SIZE)
        self.held: list[list[PageId]] = []
        # The reference: hash -> when its page was last given back, for pages nobody holds; None while held.
        self.hash_to_freed_at: dict[PageHash, int | None] = {}
        self.hash_holders: list[list[PageHash | None]] = []
        self.listener: set[int] = set()
        self.now = 0

    @rule(
        pages=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=4),
        tail=st.booleans(),
        cache_salt=st.sampled_from(["", "a"]),
    )
    def begin(self, pages: list[tuple[int, int]], tail: bool, cache_salt: str) -> None:
        token_ids = [token_id for page in pages for token_id in page]
        hashes = hashes_of(token_ids, cache_salt)
        num_known = 0
        while num_known < len(hashes) and hashes[num_known] in self.hash_to_freed_at:
            num_known += 1
        found = self.pool.find_prefix(hashes)
        assert len(found) == num_known
        num_new = len(hashes) - num_known + tail
        num_idle = sum(1 for page_hash in hashes[:num_known] if self.hash_to_freed_at[page_hash] is not None)
        assert self.pool.can_allocate(num_new, found) == (num_new + num_idle <= self.pool.num_free)
        if not self.pool.can_allocate(num_new, found):
            return
        self.pool.touch(found)
        for page_hash in hashes[:num_known]:
            self.hash_to_freed_at[page_hash] = None
        new = self.pool.allocate(num_new)
        held = found + new
        for page in held:
            assert self.pool.page_refs[page] >= 1
        self._forget_as_the_pool_did()
        # Stored only where nobody else stored the same in between: a page deeper in the chain may still be known.
        owned: list[PageHash | None] = list(hashes[:num_known])
        for page_hash in hashes[num_known:]:
            owned.append(None if page_hash in self.hash_to_freed_at else page_hash)
        self.pool.store(
            held[num_known : len(hashes)],
            hashes[num_known:],
            token_ids[num_known * BLOCK_SIZE :],
            parent_hash=hashes[num_known - 1] if num_known else None,
            cache_salt=cache_salt,
        )
        for page_hash in owned[num_known:]:
            if page_hash is not None:
                self.hash_to_freed_at[page_hash] = None
        self.held.append(held)
        self.hash_holders.append(owned + [None] * tail)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free(self.held.pop(i))
        given_back = self.hash_holders.pop(i)
        still_held = {page_hash for holder in self.hash_holders for page_hash in holder}
        for page_hash in reversed(given_back):
            if page_hash is not None and page_hash not in still_held:
                self.now += 1
                self.hash_to_freed_at[page_hash] = self.now

    def _forget_as_the_pool_did(self) -> None:
        """Whatever the pool forgot to make room, nothing freed earlier may have stayed."""
        gone = [page_hash for page_hash in self.hash_to_freed_at if page_hash not in self.pool.hash_to_page]
        times = [self.hash_to_freed_at.pop(page_hash) for page_hash in gone]
        assert None not in times, "a held page was given away"
        stayed = [freed_at for freed_at in self.hash_to_freed_at.values() if freed_at is not None]
        if times and stayed:
            assert max(time for time in times if time is not None) < min(stayed)

    @invariant()
    def laws_hold(self) -> None:
        self.pool.check()
        assert self.pool.num_used == len({page for pages in self.held for page in pages})
        assert set(self.pool.hash_to_page) == set(self.hash_to_freed_at)

    @invariant()
    def a_listener_knows_what_is_findable(self) -> None:
        for event in self.pool.drain_events():
            if isinstance(event, PagesStored):
                assert not self.listener & set(event.page_hashes)
                self.listener |= set(event.page_hashes)
            elif isinstance(event, PagesRemoved):
                assert set(event.page_hashes) <= self.listener
                self.listener -= set(event.page_hashes)
        assert self.listener == set(self.pool.hash_to_page)


PoolBesideReference.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolBesideReference = PoolBesideReference.TestCase
