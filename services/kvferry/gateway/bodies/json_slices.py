"""Walks JSON in slices, without decoding it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Slice(NamedTuple):
    """`masked` are the bytes from `start` to `end`, where every quote begins or ends a text."""

    start: int
    end: int
    masked: bytes
    begins_in_text: bool


def slices(raw: bytes, slice_bytes: int) -> Iterator[Slice]:
    """Yield all of `raw`. No slice ends after a backslash that escapes the next character."""
    start, in_text = 0, False
    while start < len(raw):
        end = min(len(raw), start + slice_bytes)
        piece = raw[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            end = min(len(raw), end + 1)
            piece = raw[start:end]
        masked = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        yield Slice(start, end, masked, in_text)
        in_text ^= masked.count(b'"') % 2 == 1
        start = end
