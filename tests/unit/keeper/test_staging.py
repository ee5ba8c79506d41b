"""Memory lent in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_keeper.remote.staging import Staging

CHUNK = 4096


def test_what_is_given_back_becomes_one_again() -> None:
    staging = Staging(4 * CHUNK)
    starts = [staging.allocate(CHUNK) for _ in range(4)]
    assert starts == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert staging.allocate(1) is None
    for start in (CHUNK, 3 * CHUNK, 2 * CHUNK):
        staging.free(start)
        staging.check()
    assert staging.allocate(4 * CHUNK) is None
    assert staging.allocate(3 * CHUNK) == CHUNK
    staging.free(CHUNK)
    staging.free(0)
    assert staging.allocate(4 * CHUNK) == 0


def test_twice_is_once_too_often() -> None:
    staging = Staging(4 * CHUNK)
    start = staging.allocate(100)
    assert start is not None
    staging.free(start)
    with pytest.raises(KeyError):
        staging.free(start)


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 10 * CHUNK)), max_size=100))
def test_no_piece_overlaps_another(steps: list[tuple[bool, int]]) -> None:
    staging, taken = Staging(16 * CHUNK), {}
    for is_take, number in steps:
        if is_take:
            start = staging.allocate(number)
            if start is not None:
                assert start % CHUNK == 0
                taken[start] = number
        elif taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            staging.free(start)
        staging.check()
        pieces = sorted((start, start + size) for start, size in taken.items())
        assert all(end <= following for (_, end), (following, _) in itertools.pairwise(pieces))
