"""Pages that requests in flight will leave, by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId
from kvferry.router.prices.expected_pages import ExpectedPages, expected_depth

A, B = RequestId("a"), RequestId("b")
P, D = MemberId("p"), MemberId("d")
KEYS = list(range(100, 110))


def test_pages_are_expected_where_they_are_computed_then_where_they_are_transferred() -> None:
    pages = ExpectedPages(grace_s=2.0)
    pages.begin(A, KEYS, P, D, 0.0)
    assert expected_depth(pages.of(P).computed, KEYS, 0) == 10
    assert expected_depth(pages.of(D).arriving, KEYS, 0) == 10
    assert not pages.of(D).computed
    pages.first_token(A, 1.0)
    assert not pages.of(D).arriving
    assert expected_depth(pages.of(D).computed, KEYS, 0) == 10
    pages.end(A)
    pages.check()
    pages.expire(2.9)
    assert pages.of(P).computed
    pages.expire(3.0)
    assert pages.is_idle


def test_a_request_that_fails_leaves_no_pages_and_takes_no_others() -> None:
    pages = ExpectedPages(grace_s=2.0)
    pages.begin(A, KEYS, P, D, 0.0)
    pages.begin(B, KEYS, P, D, 0.0)
    pages.end(A)
    assert expected_depth(pages.of(P).computed, KEYS, 0) == 10
    pages.end(B)
    assert pages.is_idle


@given(num_keys=st.integers(0, 40), num_common=st.integers(0, 40), held=st.integers(0, 40))
def test_a_sibling_is_credited_with_at_most_three_pages_less_than_it_will_find(
    num_keys: int, num_common: int, held: int
) -> None:
    keys = list(range(num_keys))
    held, num_common = min(held, num_keys), min(num_common, num_keys)
    pages = ExpectedPages(grace_s=2.0)
    pages.begin(A, [*keys[:num_common], *range(1000, 1010)], None, D, 0.0)
    depth = expected_depth(pages.of(D).computed, keys, held)
    assert depth == max(held, num_common // 4 * 4)


def test_check_names_what_is_broken() -> None:
    pages = ExpectedPages(grace_s=2.0)
    pages.begin(A, KEYS, P, D, 0.0)
    pages.of(D).computed[1] = 1
    with pytest.raises(AssertionError, match="d expects pages that no request brings"):
        pages.check()
