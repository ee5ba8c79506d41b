"""Frames: whatever pieces TCP makes of them, and what is not one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.link.frames import PREAMBLE, FrameDecoder, FrameError, encode_frames


@given(payloads=st.lists(st.binary(max_size=300), max_size=12), cuts=st.lists(st.integers(0, 4000), max_size=20))
def test_payloads_survive_any_cut(payloads: list[bytes], cuts: list[int]) -> None:
    data = PREAMBLE + encode_frames(payloads)
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    decoder = FrameDecoder()
    got = [payload for a, b in itertools.pairwise(places) for payload in decoder.feed(data[a:b])]
    assert got == payloads
    assert decoder.greeted


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", b"KVFERRY\x02", b"PRI * HTTP/2.0"])
def test_another_protocol_or_version_is_refused_at_its_first_bytes(data: bytes) -> None:
    with pytest.raises(FrameError, match="begins with"):
        list(FrameDecoder().feed(data))


def test_a_preamble_may_come_in_pieces() -> None:
    decoder = FrameDecoder()
    for i in range(len(PREAMBLE)):
        assert list(decoder.feed(PREAMBLE[i : i + 1])) == []
    assert decoder.greeted


def test_a_frame_over_the_limit_is_refused_before_it_is_there() -> None:
    decoder = FrameDecoder(max_frame_bytes=10)
    assert list(decoder.feed(PREAMBLE + encode_frames([b"x" * 10]))) == [b"x" * 10]
    with pytest.raises(FrameError, match="11 bytes; at most 10"):
        list(decoder.feed((11).to_bytes(4, "little")))


def test_the_limit_may_change_between_payloads() -> None:
    decoder = FrameDecoder(max_frame_bytes=4)
    got = []
    for payload in decoder.feed(PREAMBLE + encode_frames([b"abcd", b"x" * 100])):
        got.append(len(payload))
        decoder.max_frame_bytes = 100
    assert got == [4, 100]
