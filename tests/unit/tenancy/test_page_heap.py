"""A heap of pages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.page_heap import PageHeap


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 9)), max_size=600))
def test_the_smallest_key_is_first_whatever_changed(steps: list[tuple[bool, int, int]]) -> None:
    heap: PageHeap[int] = PageHeap()
    model: dict[int, tuple[float, int]] = {}
    for is_put, page, used_s in steps:
        if is_put:
            model[page] = (float(used_s), page)
            heap.put(page, model[page])
        else:
            model.pop(page, None)
            heap.remove(page)
        heap.check()
        first = min(model.items(), key=lambda item: item[1], default=None)
        assert heap.first == (None if first is None else (first[1], first[0]))
        assert set(heap) == model.keys()
        assert len(heap) == len(model)
        assert heap.key_of(page) == model.get(page)
        assert (page in heap) == (page in model)


def test_removed_pages_are_let_go() -> None:
    heap: PageHeap[int] = PageHeap()
    for page in range(10_000):
        heap.put(page, (0.0, page))
    for page in range(9_990):
        heap.remove(page)
    heap.check()
    assert len(heap._entries) < 100
