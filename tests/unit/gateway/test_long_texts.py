from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway import long_texts
from kvferry.gateway.json_text import decode_json
from kvferry.gateway.long_texts import decode_in_steps
from kvferry.gateway.openai_bodies import read_chat, read_completion

# As they stand in JSON.
FRAGMENTS = [
    *(
        "a",
        " word",
        "é",
        "漢",
        "😀",
        "\\\\",
        '\\"',
        "\\n",
        "\\/",
        "\\u0041",
        "\\u00e9",
        "\\ud83d\\ude00",
        "\\uD83D\\uDE00",
    ),
    *("[1,2]", "{}", ":", ",", "0123456789abcdef", "u0041", "\\\\u0041", "\x7f", "\u00a0"),
]
FAULTS = ["\\ud83d", "\\ude00", "\\x", "\\u12", "\n", "\x00", '"', "\\"]


@st.composite
def texts(draw: st.DrawFn, *, faults: bool) -> bytes:
    """JSON texts of several slices, with few different fragments, so that every one meets a slice's end."""
    some = draw(st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=3))
    count = draw(st.integers(0, 300))
    seed = draw(st.integers(0, 2**32))
    chosen = random.Random(seed).choices(some, k=count)
    if faults:
        chosen.insert(draw(st.integers(0, len(chosen))), draw(st.sampled_from(FAULTS)))
    return f'"{"".join(chosen)}"'.encode()


@st.composite
def bodies(draw: st.DrawFn, *, faults: bool = False) -> bytes:
    parts = draw(st.lists(texts(faults=faults), min_size=1, max_size=4))
    nested = b",".join(b'{"k":[%b,1.5]}' % part for part in parts[1:])
    key = draw(st.sampled_from([b'"key"', b'"list"', parts[0]]))
    again = b',"key":%b' % parts[-1] if draw(st.booleans()) else b""
    return b'{%b:%b,"list":[%b],"end":null%b}' % (key, parts[0], nested, again)


def outcome(decode: Any, raw: bytes) -> tuple[Any, str]:
    try:
        return decode(raw), ""
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return None, f"{type(error).__name__}: {error}"


@given(bodies(), st.integers(16, 600))
def test_the_same_as_at_once(raw: bytes, slice_bytes: int) -> None:
    assert decode_in_steps(raw, decode_json, slice_bytes=slice_bytes) == decode_json(raw)


@given(bodies(faults=True), st.integers(16, 600))
def test_the_same_errors_as_at_once(raw: bytes, slice_bytes: int) -> None:
    ours = outcome(lambda raw: decode_in_steps(raw, decode_json, slice_bytes=slice_bytes), raw)
    assert ours == outcome(decode_json, raw)


@given(bodies(), st.integers(0, 2000), st.integers(0, 255), st.integers(16, 600))
def test_the_same_with_any_byte_changed(raw: bytes, at: int, byte: int, slice_bytes: int) -> None:
    changed = bytearray(raw)
    changed[at % len(raw)] = byte
    ours = outcome(lambda raw: decode_in_steps(raw, decode_json, slice_bytes=slice_bytes), bytes(changed))
    assert ours == outcome(decode_json, bytes(changed))


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_long_texts_are_cut(fragment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kind: no piece that is decoded at once is much longer than a slice."""
    text = (fragment * 400).encode()
    raw = b'{"before":["x"],"a":"%b","b":["%b"],"after":1}' % (text, text)
    sizes: list[int] = []
    decode_text = long_texts._decode_text

    def noting(piece: bytes) -> str:
        sizes.append(len(piece))
        return decode_text(piece)

    monkeypatch.setattr(long_texts, "_decode_text", noting)
    rest: list[int] = []

    def decode(raw: bytes) -> Any:
        rest.append(len(raw))
        return decode_json(raw)

    assert decode_in_steps(raw, decode, slice_bytes=64) == json.loads(raw)
    assert len(rest) == 1
    assert rest[0] < 700
    assert max(sizes) < 200
    assert sum(sizes) > 2 * (len(text) - 300)


def test_the_last_of_two_values_of_a_key_counts() -> None:
    raw = b'{"a":"short","b":"%b","a":"%b"}' % (b"x" * 1000, b"y" * 1000)
    assert decode_in_steps(raw, decode_json, slice_bytes=64) == {"a": "y" * 1000, "b": "x" * 1000}
    raw = b'{"a":"%b","b":"%b","a":"short"}' % (b"x" * 1000, b"y" * 1000)
    assert decode_in_steps(raw, decode_json, slice_bytes=64) == {"a": "short", "b": "y" * 1000}


def test_bodies_with_long_texts_are_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "ö\n" * 600_000
    longest = 0

    def noting(piece: bytes) -> str:
        nonlocal longest
        longest = max(longest, len(piece))
        return msgspec.json.decode(piece, type=str)

    monkeypatch.setattr(long_texts, "_decode_text", noting)
    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    assert read_chat(chat).messages[0]["content"] == text
    assert 0 < longest < 2 * long_texts.SLICE_BYTES
    assert read_completion(json.dumps({"model": "m", "prompt": text}).encode()).prompt == text
