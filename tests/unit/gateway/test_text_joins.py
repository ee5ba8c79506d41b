from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.bodies.long_texts import join_in_steps

CHARACTERS = ["a", "\x7f", "\x80", "é", "ÿ", "\u0100", "漢", "\ud83d", "\uffff", "\U00010000", "😀", "\U0010ffff"]


@given(st.lists(st.text(st.sampled_from(CHARACTERS), max_size=5), max_size=8))
def test_the_same_text_as_at_once(pieces: list[str]) -> None:
    at_once = "".join(pieces)
    ours = join_in_steps(pieces, at_once_chars=0)
    assert ours == at_once
    assert hash(ours) == hash(at_once)
    assert ours.isascii() == at_once.isascii()
    copy = (at_once + "x")[:-1]
    if len(copy) > 1:  # Python keeps one object for each short text, with its UTF-8
        # Python compares and hashes texts by their kind: it must be the narrowest one.
        assert sys.getsizeof(ours) == sys.getsizeof(copy)
    assert (ours + "x")[:-1] == at_once


@pytest.mark.parametrize("last", CHARACTERS)
def test_long_texts_are_released(last: str) -> None:
    pieces = ["a" * 1000] * 300 + [last]
    ours, at_once = join_in_steps(pieces), "".join(pieces)
    assert sys.getrefcount(ours) == sys.getrefcount(at_once)
    assert ours == at_once
