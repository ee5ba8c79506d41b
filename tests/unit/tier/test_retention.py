"""Which page goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tier_pages import LAYOUT, page

from kvferry.tier.books import Kept
from kvferry.tier.layout import Namespace
from kvferry.tier.retention import Lru


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), st.integers(0, 9))))
def test_the_least_recently_used_goes_first(steps: list[tuple[str, int]]) -> None:
    pages = [Kept(LAYOUT.digest, page(number), "local", 4096) for number in range(10)]
    lru = Lru()
    model: list[Kept] = []  # first to go, first
    for now_s, (verb, number) in enumerate(steps):
        kept = pages[number]
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
