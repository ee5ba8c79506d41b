"""The heap against a dictionary that is sorted each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.indexed_heap import IndexedHeap


@given(st.lists(st.tuples(st.sampled_from(["put", "put", "remove"]), st.integers(0, 12), st.integers(0, 8))))
def test_the_smallest_key_is_first_after_any_change(steps: list[tuple[str, int, int]]) -> None:
    heap: IndexedHeap[int] = IndexedHeap()
    model: dict[int, int] = {}
    for verb, item, key in steps:
        if verb == "put":
            heap.put(item, key)
            model[item] = key
        else:
            heap.remove(item)
            model.pop(item, None)
        heap.check()
        assert set(heap) == model.keys()
        assert len(heap) == len(model)
        first = heap.first
        if model:
            assert first is not None
            assert model[first[1]] == first[0] == min(model.values())
        else:
            assert first is None
