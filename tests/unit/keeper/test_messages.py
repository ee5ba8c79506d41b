"""Frames between an engine and its keeper."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.keeper import messages
from support.tier_rows import key_of

SOME = [
    messages.Store(1, "t", 2, b"k" * 36, [7], [0]),
    messages.Load(2, "t", 2, b"k" * 36, [3], {"v": [0]}),
    messages.Touch(b"k" * 36),
    messages.Touch(b"k" * 36, 0.0),
    messages.Store(3, "t", 2, b"k" * 36, [7], [0], 3600.0),
    messages.Hello(messages.PROTOCOL, "e", b"{}", 4, 4096),
]
ANSWERS = [
    messages.Welcome("k", 1),
    messages.SnapshotKeys(3, 0, 1, b""),
    messages.ChangedKeys(4, b"k" * 36, b""),
    messages.Done(1, {0: "io_error"}, 17),
    messages.Pulse(),
    messages.Bye("so"),
]


@given(st.lists(st.integers(1, 40), min_size=1), st.randoms())
def test_messages_survive_any_cut_of_the_stream(cuts: list[int], random: object) -> None:
    stream = b"".join(map(messages.encode, SOME))
    reader, got, at = messages.FrameReader(), [], 0
    for size in cuts * len(stream):
        if at >= len(stream):
            break
        got += [messages.decode_to_keeper(payload) for payload in reader.feed(stream[at : at + size])]
        at += size
    assert got == SOME


def test_answers_are_themselves_again() -> None:
    reader = messages.FrameReader()
    stream = b"".join(map(messages.encode, ANSWERS))
    assert [messages.decode_to_engine(payload) for payload in reader.feed(stream)] == ANSWERS


def test_a_frame_beyond_the_limit_is_refused_at_its_length() -> None:
    with pytest.raises(messages.ProtocolError, match="at most"):
        list(messages.FrameReader().feed((messages.MAX_FRAME_BYTES + 1).to_bytes(4, "little")))


@pytest.mark.parametrize(
    "payload", [b"\x92\xa2\xff\xff\xc0", b"", b"\xc1", b"\x93\x01\x02\x03", messages.encode(messages.Pulse())[4:]]
)
def test_what_no_engine_says_is_refused(payload: bytes) -> None:
    with pytest.raises(messages.ProtocolError):
        messages.decode_to_keeper(payload)


def test_keys_are_packed_and_cut() -> None:
    keys = [key_of(i) for i in range(5)]
    assert list(messages.unpack_chunk_keys(messages.pack_chunk_keys(keys))) == keys
    assert list(messages.unpack_chunk_keys(b"")) == []
    with pytest.raises(messages.ProtocolError, match="37 bytes"):
        messages.unpack_chunk_keys(bytes(37))


class _OldStore(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """As before `wanted_s`."""

    job: int
    tenant: str
    epoch: int
    keys: bytes
    route_keys: list[int]
    rows: list[int]


def test_an_end_without_hints_and_one_with_them_read_each_other() -> None:
    old = _OldStore(1, "t", 2, b"k" * 36, [7], [0])
    assert messages.decode_to_keeper(msgspec.msgpack.encode(old)) == messages.Store(1, "t", 2, b"k" * 36, [7], [0])
    new = messages.encode(messages.Store(1, "t", 2, b"k" * 36, [7], [0], 60.0))[4:]
    assert msgspec.msgpack.decode(new, type=_OldStore) == old


@pytest.mark.parametrize("wanted_s", [-1.0, 86401.0, float("nan"), float("inf")])
def test_a_time_that_no_client_may_name_is_refused(wanted_s: float) -> None:
    for message in (messages.Touch(b"", wanted_s), messages.Store(1, "t", 2, b"", [], [], wanted_s)):
        with pytest.raises(messages.ProtocolError, match="wanted for"):
            messages.check_wanted(message)
