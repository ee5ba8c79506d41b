"""The heap against a dictionary that is sorted each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.keyed_heap import KeyedHeap

STEPS = st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 9)), max_size=600)


@given(STEPS)
def test_the_smallest_key_is_first_and_of_equal_ones_the_oldest(steps: list[tuple[int, int | None]]) -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    model: dict[int, tuple[int, int]] = {}
    for number, (item, key) in enumerate(steps):
        if key is None:
            heap.remove(item)
            model.pop(item, None)
        else:
            heap.put(item, key)
            model[item] = (key, number)
        heap.check()
        first = min(model.items(), key=lambda entry: entry[1], default=None)
        assert heap.first == (None if first is None else (first[1][0], first[0]))
        assert set(heap) == model.keys()
        assert len(heap) == len(model)
        assert (item in heap) == (item in model)
        assert heap.key_of(item) == (model[item][0] if item in model else None)


def test_removed_and_replaced_entries_are_let_go() -> None:
    heap: KeyedHeap[int] = KeyedHeap()
    for item in range(10_000):
        heap.put(item, 0.0)
    for item in range(9_990):
        heap.remove(item)
    for key in range(10_000):
        heap.put(9_999, -key)
    heap.check()
    assert len(heap._entries) < 100
