"""Which chunk goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.store.chunk_index import IndexEntry
from kvferry.store.eviction import Lru
from kvferry.tenancy.namespace import Namespace
from support.tier_chunks import LAYOUT, chunk


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), st.integers(0, 9))))
def test_the_least_recently_used_goes_first(steps: list[tuple[str, int]]) -> None:
    chunks = [IndexEntry(LAYOUT.digest, chunk(number), "local", 4096) for number in range(10)]
    lru = Lru()
    model: list[IndexEntry] = []  # first to go, first
    for now_s, (verb, number) in enumerate(steps):
        entry = chunks[number]
        was_there = entry in model
        if was_there:
            model.remove(entry)
        if verb == "add":
            lru.add(entry, now_s)
            model.append(entry)
        elif verb == "touch":
            lru.touch(entry, now_s)
            if was_there:
                model.append(entry)
        else:
            lru.discard(entry)
        assert list(lru.victims(Namespace(), now_s)) == model
        assert len(lru) == len(model)
        assert lru.admits(Namespace(), 4096, now_s)
