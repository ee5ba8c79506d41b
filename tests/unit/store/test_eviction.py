"""Which chunk goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.store.chunk_index import Kept
from kvferry.store.eviction import Lru
from kvferry.tenancy.namespace import Namespace
from support.tier_chunks import LAYOUT, chunk


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), st.integers(0, 9))))
def test_the_least_recently_used_goes_first(steps: list[tuple[str, int]]) -> None:
    chunks = [Kept(LAYOUT.digest, chunk(number), "local", 4096) for number in range(10)]
    lru = Lru()
    model: list[Kept] = []  # first to go, first
    for now_s, (verb, number) in enumerate(steps):
        kept = chunks[number]
        was_there = kept in model
        if was_there:
            model.remove(kept)
        if verb == "add":
            lru.add(kept, now_s)
            model.append(kept)
        elif verb == "touch":
            lru.touch(kept, now_s)
            if was_there:
                model.append(kept)
        else:
            lru.discard(kept)
        assert list(lru.victims(Namespace(), now_s)) == model
        assert len(lru) == len(model)
        assert lru.admits(Namespace(), 4096, now_s)
