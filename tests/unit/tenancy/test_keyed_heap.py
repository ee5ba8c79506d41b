from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.keyed_heap import KeyedHeap

CHANGES = st.lists(st.tuples(st.sampled_from("abcdef"), st.one_of(st.none(), st.integers(0, 5))), max_size=300)


@given(CHANGES)
def test_the_smallest_key_comes_first(changes: list[tuple[str, int | None]]) -> None:
    heap, keys = KeyedHeap(), dict[str, tuple[int, int]]()
    for number, (tenant, key) in enumerate(changes):
        if key is None:
            heap.discard(tenant)
            keys.pop(tenant, None)
        else:
            heap.set(tenant, key)
            keys[tenant] = (key, number)
        expected = min(((entry, tenant) for tenant, entry in keys.items()), default=None)
        first = heap.first()
        assert first == (None if expected is None else (expected[0][0], expected[1]))
        assert len(heap) == len(keys)
        assert all(tenant in heap for tenant in keys)


def test_replaced_keys_are_cleared_away() -> None:
    heap = KeyedHeap()
    for key in range(10_000):
        heap.set("a", -float(key))
        heap.set("b", -float(key))
    assert len(heap._entries) < 100
