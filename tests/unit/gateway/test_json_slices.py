from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.bodies.large_bodies import slices


@given(st.lists(st.text(st.sampled_from('a"\\é,:')), max_size=5), st.integers(1, 20))
def test_every_quote_begins_or_ends_a_text(texts: list[str], slice_bytes: int) -> None:
    raw = json.dumps(texts, ensure_ascii=False).encode()
    found = list(slices(raw, slice_bytes))
    assert [(found[0].start, found[-1].end)] == [(0, len(raw))]
    assert all(one.end == next_one.start for one, next_one in pairwise(found))
    assert all(len(one.masked) == one.end - one.start <= slice_bytes + 1 for one in found)
    masked = b"".join(one.masked for one in found)
    assert [len(part) for part in masked.split(b'"')[1::2]] == [
        len(json.dumps(text, ensure_ascii=False).encode()) - 2 for text in texts
    ]
    assert all(one.begins_in_text == masked.count(b'"', 0, one.start) % 2 for one in found)


def test_a_backslash_ends_the_bytes() -> None:
    assert [one[:2] for one in slices(b'"a\\', 3)] == [(0, 3)]
