"""Memory lent in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tier.staging import Staging

PAGE = 4096


def test_what_is_given_back_becomes_one_again() -> None:
    staging = Staging(4 * PAGE)
    starts = [staging.take(PAGE) for _ in range(4)]
    assert starts == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert staging.take(1) is None
    for start in (PAGE, 3 * PAGE, 2 * PAGE):
        staging.give_back(start)
        staging.check()
    assert staging.take(4 * PAGE) is None
    assert staging.take(3 * PAGE) == PAGE
    staging.give_back(PAGE)
    staging.give_back(0)
    assert staging.take(4 * PAGE) == 0


def test_twice_is_once_too_often() -> None:
    staging = Staging(4 * PAGE)
    start = staging.take(100)
    assert start is not None
    staging.give_back(start)
    with pytest.raises(KeyError):
        staging.give_back(start)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 10 * PAGE)), max_size=100))
def test_no_piece_overlaps_another(steps: list[tuple[bool, int]]) -> None:
    staging, taken = Staging(16 * PAGE), {}
    for is_take, number in steps:
        if is_take:
            start = staging.take(number)
            if start is not None:
                assert start % PAGE == 0
                taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            staging.give_back(start)
        staging.check()
        pieces = sorted((start, start + size) for start, size in taken.items())
        assert all(end <= following for (_, end), (following, _) in itertools.pairwise(pieces))
