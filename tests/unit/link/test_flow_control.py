"""Both ends' counts of one link agree, and never bring it to rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.link.flow_control import (
    ACK_EVERY_BYTES,
    ACK_EVERY_MESSAGES,
    MAX_UNREAD_BYTES,
    MAX_UNREAD_MESSAGES,
    AckCounter,
    Credit,
)


def test_credit_ends_with_many_messages() -> None:
    credit = Credit()
    for _ in range(MAX_UNREAD_MESSAGES):
        assert credit.is_left
        credit.spend(1)
    assert not credit.is_left
    credit.restore(1, 1)
    assert credit.is_left


def test_credit_ends_with_many_bytes() -> None:
    credit = Credit()
    credit.spend(MAX_UNREAD_BYTES)
    assert not credit.is_left
    credit.restore(1, MAX_UNREAD_BYTES)
    assert credit.is_left


@pytest.mark.parametrize(("num_messages", "num_bytes"), [(3, 10), (2, 21), (0, 5), (1, 4)])
def test_what_cannot_have_been_read_is_refused(num_messages: int, num_bytes: int) -> None:
    credit = Credit()
    credit.spend(10)
    credit.spend(10)
    credit.restore(1, 5)
    with pytest.raises(ValueError, match="does not fit <Credit unread=1 messages, 15 bytes>"):
        credit.restore(num_messages, num_bytes)
    credit.restore(1, 5)  # an acknowledgement of nothing new is none too much
    assert repr(credit) == "<Credit unread=1 messages, 15 bytes>"


def test_a_gateway_speaks_seldom() -> None:
    counter = AckCounter()
    due = [counter.count(100) for _ in range(ACK_EVERY_MESSAGES)]
    assert due == [False] * (ACK_EVERY_MESSAGES - 1) + [True]
    counter.acknowledged()
    assert not counter.count(ACK_EVERY_BYTES - 1)
    assert counter.count(1)


@given(st.lists(st.integers(0, 3 * MAX_UNREAD_BYTES), max_size=200))
def test_a_link_whose_gateway_reads_everything_never_comes_to_rest(sizes: list[int]) -> None:
    credit, counter = Credit(), AckCounter()
    for size in sizes:
        assert credit.is_left
        credit.spend(size)
        if counter.count(size):
            counter.acknowledged()
            credit.restore(counter.num_messages, counter.num_bytes)
