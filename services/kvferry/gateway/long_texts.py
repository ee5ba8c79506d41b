"""Decoding of JSON with long texts, in short steps."""

# A JSON decoder keeps the interpreter until its end: for a text of 8 MiB up to 20 ms. Here, long texts are cut out of
# the JSON, which is decoded with marks in their places, and decoded in pieces.

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

LONG_BYTES = 512 << 10  # shorter JSON is decoded at once
SLICE_BYTES = 128 << 10

_decode_text = msgspec.json.Decoder(str).decode

_CHARACTER = re.compile(rb"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB]")
# A slice may begin within the four digits of an escape.
_UNSURE_CHARACTERS = 5
_MAX_CHARACTERS = 64
_NUMBER_DIGITS = 6


def decode_in_steps(raw: bytes, decode: Callable[[bytes], Any], *, slice_bytes: int = SLICE_BYTES) -> Any:
    """Return or raise what `decode` does."""
    cuts = list(_cuts(raw, slice_bytes))
    if not cuts:
        return decode(raw)
    mark = secrets.token_hex(16)
    kept: list[bytes] = []
    texts: list[str] = []
    end = 0
    try:
        for cut in cuts:
            kept += [raw[end : cut[0]], f"{mark}{len(texts):0{_NUMBER_DIGITS}}".encode()]
            pieces = [_decode_text(b'"%b"' % raw[i:j]) for i, j in itertools.pairwise(cut)]
            texts.append("".join(pieces))
            end = cut[-1]
        value = decode(b"".join([*kept, raw[end:]]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return decode(raw)  # an error names its place in the whole
    filled = [value]
    # A mark may be in a key, or in a value that a second one of the same key replaced.
    return filled[0] if _fill(filled, mark, texts) == len(texts) else decode(raw)


def _fill(values: list[Any], mark: str, texts: list[str]) -> int:
    """Put the texts in place of their marks. Return how many there were."""
    num_filled = 0
    left: list[tuple[Any, Any]] = [(values, 0)]
    while left:
        parent, key = left.pop()
        value = parent[key]
        if type(value) is dict:
            left.extend((value, name) for name in value)
        elif type(value) is list:
            left.extend((value, index) for index in range(len(value)))
        elif type(value) is str and mark in value:
            before, *rest = value.split(mark)
            pieces = [before]
            for part in rest:
                pieces += texts[int(part[:_NUMBER_DIGITS])], part[_NUMBER_DIGITS:]
            parent[key] = "".join(pieces)
            num_filled += len(rest)
    return num_filled


def _cuts(raw: bytes, slice_bytes: int) -> Iterator[list[int]]:
    """Yield two or more positions in each long text where it may be cut."""
    cut: list[int] = []
    start, in_text = 0, False
    while start < len(raw):
        end = min(len(raw), start + slice_bytes)
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end += 1  # the character that the last backslash escapes
            piece = raw[start:end]
        num_quotes = piece.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
        position = _between_characters(raw, start, end) if in_text and not num_quotes else 0
        if position:
            cut.append(position)
        else:
            if len(cut) > 1:
                yield cut
            cut = []
        in_text ^= num_quotes % 2 == 1
        start = end
    if len(cut) > 1:
        yield cut


def _between_characters(raw: bytes, start: int, end: int) -> int:
    """Return a position in a text, outside escapes and pairs of surrogates; 0 if none is near."""
    position, is_high = start, False
    for number in range(_MAX_CHARACTERS):
        if number > _UNSURE_CHARACTERS and not is_high and position < end and not 0x80 <= raw[position] < 0xC0:
            return position
        character = _CHARACTER.match(raw, position, end)
        if character is None:
            break
        is_high = _HIGH_SURROGATE.match(character[0]) is not None
        position = character.end()
    return 0
