from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.bodies import long_texts
from kvferry.gateway.bodies.json_text import decode_json
from kvferry.gateway.bodies.long_texts import SLICE_BYTES, SLICES_AT_ONCE, decode_in_steps
from kvferry.gateway.bodies.openai_bodies import read_chat, read_completion

# As they stand in JSON.
FRAGMENTS = [
    fragment.encode()
    for fragment in (
        *("a", " word", "é", "漢", "😀", "\\\\", '\\"', "\\n", "\\/", "\\u0041", "\\u00e9"),
        *("\\ud83d\\ude00", "\\uD83D\\uDE00", "[1,2]", "{}", ":", ",", "0123456789abcdef", "u0041", "\\\\u0041"),
        *("\x7f", "\u00a0"),
    )
]
FAULTS = [
    *(b"\\ud83d", b"\\ude00", b"\\ud83d\\ud83d", b"\\x", b"\\u12", b"\n", b"\x00", b'"', b"\\"),
    *(b"\xff", b"\x80", b"\xc3", b"\xe6\x97", b"\xed\xa0\x80", b"\xf0\x9f\x98"),
]
OUTSIDE = [b"", b"", b"x", b"\xff", b"1,", b"]", b'"', b"\\", b"1e999,", b"[" * 5000]
KEY = "kéy" * 40


@st.composite
def texts(draw: st.DrawFn, *, faults: bool) -> bytes:
    """JSON texts of several slices, with few different fragments, so that every one meets a slice's end."""
    some = draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=3))
    count = draw(st.integers(0, 300))
    seed = draw(st.integers(0, 2**32))
    chosen = random.Random(seed).choices(some, k=count)
    for fault in draw(st.lists(st.sampled_from(FAULTS), max_size=3)) if faults else ():
        chosen.insert(draw(st.integers(0, len(chosen))), fault)
    return b'"%b"' % b"".join(chosen)


@st.composite
def bodies(draw: st.DrawFn, *, faults: bool = False) -> bytes:
    parts = draw(st.lists(texts(faults=faults), min_size=1, max_size=4))
    outside = draw(st.sampled_from(OUTSIDE)) if faults else b""
    nested = b",".join(b'{"k":[%b,1.5]}' % part for part in parts[1:])
    key = draw(st.sampled_from([b'"key"', b'"list"', parts[0]]))
    again = b',"key":%b' % parts[-1] if draw(st.booleans()) else b""
    body = [b'{%b:%b,"list":[%b],"end":null' % (key, parts[0], nested), b"%b}" % again]
    body.insert(draw(st.integers(0, 2)), outside)
    return b"".join(body)


@st.composite
def repeated_keys(draw: st.DrawFn) -> bytes:
    """Equal keys, of which those with escapes are long enough to be cut."""
    escaped = KEY.encode("utf-16-be").hex(" ", 2).split(" ")
    names = [KEY.encode(), b"".join(b"\\u" + unit.encode() for unit in escaped), b"other"]
    pairs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=5))
    return b"{%b}" % b",".join(b'"%b":{"%b":%d}' % (name, names[1], number) for number, name in enumerate(pairs))


def outcome(decode: Any, raw: bytes) -> tuple[Any, str]:
    try:
        return decode(raw), ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return None, f"{type(error).__name__}: {error}"


@given(bodies(), st.integers(16, 600))
def test_the_same_as_at_once(raw: bytes, slice_bytes: int) -> None:
    assert decode_in_steps(raw, decode_json, slice_bytes=slice_bytes) == decode_json(raw)


@given(bodies(faults=True), st.integers(16, 600))
def test_the_same_errors_as_at_once(raw: bytes, slice_bytes: int) -> None:
    ours = outcome(lambda raw: decode_in_steps(raw, decode_json, slice_bytes=slice_bytes), raw)
    assert ours == outcome(decode_json, raw)


@given(repeated_keys(), st.integers(16, 900))
def test_the_same_value_of_repeated_keys(raw: bytes, slice_bytes: int) -> None:
    ours = decode_in_steps(raw, decode_json, slice_bytes=slice_bytes)
    assert ours == decode_json(raw)
    assert list(ours) == list(decode_json(raw))


@given(bodies(), st.integers(0, 2000), st.integers(0, 255), st.integers(16, 600))
def test_the_same_with_any_byte_changed(raw: bytes, at: int, byte: int, slice_bytes: int) -> None:
    changed = bytearray(raw)
    changed[at % len(raw)] = byte
    ours = outcome(lambda raw: decode_in_steps(raw, decode_json, slice_bytes=slice_bytes), bytes(changed))
    assert ours == outcome(decode_json, bytes(changed))


class Calls:
    """Sizes of what was decoded in one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[int] = []
        self.rest: list[int] = []
        self.whole: list[bytes] = []
        self._decode_text = long_texts._decode_text
        monkeypatch.setattr(long_texts, "_decode_text", self.decode_text)

    def decode_text(self, piece: bytes) -> str:
        self.pieces.append(len(piece))
        return self._decode_text(piece)

    def decode(self, raw: bytes) -> Any:
        self.rest.append(len(raw))
        self.whole.append(raw)
        return decode_json(raw)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_long_texts_are_cut(fragment: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind: no piece that is decoded at once is much longer than a few slices."""
    calls = Calls(monkeypatch)
    text = fragment * 4000
    raw = b'{"before":["x"],"a":"%b","b":["%b"],"after":1}' % (text, text)
    assert decode_in_steps(raw, calls.decode, slice_bytes=64) == json.loads(raw)
    assert len(calls.rest) == 1
    assert calls.rest[0] < 800
    assert max(calls.pieces) < 64 * (SLICES_AT_ONCE + 2)
    assert sum(calls.pieces) > 2 * (len(text) - 300)


def test_of_many_texts_little_is_decoded_with_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    raw = b"[%b]" % b",".join([b'"%b"' % ("é" * (32 << 10)).encode()] * 64)
    assert decode_in_steps(raw, calls.decode) == decode_json(raw)
    assert len(calls.rest) == 1
    assert calls.rest[0] < len(raw) / 5


TEXT = "é".encode() * 100_000


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'["%b"]x' % TEXT, "trailing characters (byte 200005)"),
        (b'["%b", nul]' % TEXT, "(byte "),
        (b'x["%b"]' % TEXT, "(byte 0)"),
        (b'["%b\\ud800abcdef"]' % TEXT, "utf-16 surrogate pair (byte 200008)"),
        (b'["%b\\ud800%b"]' % (TEXT, TEXT), "utf-16 surrogate pair (byte 200008)"),
        (b'["%b\n%b"]' % (TEXT, TEXT), "invalid character (byte 200002)"),
        (b'["%b\xff%b","%b\xff"]' % (TEXT, TEXT, TEXT), "byte 0xff in position 200000: invalid start byte"),
        (b'["%b\xff%b\\x%b"]' % (TEXT, TEXT, TEXT), "invalid escape character in string (byte 400005)"),
        (b'["%b' % TEXT, "truncated"),
        (b'["%b",1e999]' % TEXT, "out of range"),
    ],
)
def test_a_fault_is_found_in_short_steps(raw: bytes, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    ours = outcome(lambda raw: decode_in_steps(raw, calls.decode, slice_bytes=100), raw)
    assert ours == outcome(decode_json, raw)
    assert reason in ours[1]
    assert len(calls.rest) == 1
    assert max(calls.pieces) < 100 * (SLICES_AT_ONCE + 2)


@pytest.mark.parametrize("num_before", range(90, 120))
def test_a_broken_escape_is_cut(num_before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    raw = b'["%b","%b\\u12zz%b"]' % (TEXT, b"a" * num_before, TEXT)
    ours = outcome(lambda raw: decode_in_steps(raw, calls.decode, slice_bytes=100), raw)
    assert ours == outcome(decode_json, raw)
    assert raw not in calls.whole


def test_bytes_that_are_no_utf_8_do_not_leave_all_to_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    raw = b'["\\n%b"]' % (b"a\xff" * 100_000)
    ours = outcome(lambda raw: decode_in_steps(raw, calls.decode, slice_bytes=100), raw)
    assert ours == outcome(decode_json, raw)
    assert len(calls.rest) == 1
    assert calls.rest[0] < 100 * (SLICES_AT_ONCE + 8)


def test_the_last_of_two_values_of_a_key_counts() -> None:
    raw = b'{"a":"short","b":"%b","a":"%b"}' % (b"x" * 1000, b"y" * 1000)
    assert decode_in_steps(raw, decode_json, slice_bytes=64) == {"a": "y" * 1000, "b": "x" * 1000}
    raw = b'{"a":"%b","b":"%b","a":"short"}' % (b"x" * 1000, b"y" * 1000)
    assert decode_in_steps(raw, decode_json, slice_bytes=64) == {"a": "short", "b": "y" * 1000}


def test_bodies_with_long_texts_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ö\n" * 600_000
    calls = Calls(monkeypatch)
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    assert read_chat(chat).messages[0]["content"] == text
    assert 0 < max(calls.pieces) < (SLICES_AT_ONCE + 2) * SLICE_BYTES
    assert read_completion(json.dumps({"model": "m", "prompt": text}).encode()).prompt == text
