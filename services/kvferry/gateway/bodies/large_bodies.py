"""Large bodies: how many values they have, before they are parsed, and work on them in a thread."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvferry.errors import InvalidRequest


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


# An upper bound is counted first: texts inside may hold commas and brackets. Where that is too much, texts are left
# out.

MAX_VALUES = 50_000  # of a body; parsing takes up to 0.3 us each
MAX_BACKSLASHES = 2_000_000  # escapes in texts take 7 ns each
UNCOUNTED_BYTES = 64 << 10  # has at most half as many values

MAX_NUMBER_CHARS = 1024

_SLICE_BYTES = 64 << 10  # of short texts these take a millisecond or two

# A decoder keeps the interpreter for all of a number: 8 MiB of digits take 20 ms. A number that is several times too
# long shows in samples at this distance, in which digits that follow each other are rare.
_STRIDE_BYTES = MAX_NUMBER_CHARS
_PERHAPS_LONG = re.compile(rb"[0-9]{3}")
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (MAX_NUMBER_CHARS + 1))


async def check_num_values(raw: bytes, max_values: int) -> None:
    """Raises InvalidRequest for a body with more values, or too many escapes. Gives way to other tasks."""
    if len(raw) <= UNCOUNTED_BYTES:
        return
    num_values = num_backslashes = 0
    for start in range(0, len(raw), _SLICE_BYTES):
        end = start + _SLICE_BYTES
        num_values += num_values_at_most(raw, start, end)
        num_backslashes += raw.count(b"\\", start, end)
        await asyncio.sleep(0)
    if _PERHAPS_LONG.search(raw[::_STRIDE_BYTES]) and await _has_long_number(raw):
        raise InvalidRequest(f"a number has more than {MAX_NUMBER_CHARS} characters")
    if num_backslashes > MAX_BACKSLASHES:
        raise InvalidRequest(f"the body has too many backslashes; at most {MAX_BACKSLASHES} are allowed")
    if num_values > max_values and await _num_values_outside_texts(raw, max_values) > max_values:
        raise InvalidRequest(f"the body has too many values; at most {max_values} are allowed")


def num_values_at_most(text: bytes, start: int = 0, end: int | None = None) -> int:
    """Every value but the first follows a comma, an opening bracket or an opening brace (or a key, which does)."""
    return sum(text.count(character, start, end) for character in (b",", b"[", b"{"))


async def _has_long_number(raw: bytes) -> bool:
    """May miss numbers of less than two slices."""
    for piece in slices(raw, _SLICE_BYTES):
        for found in _LONG_NUMBER.finditer(piece.masked):
            is_in_text = piece.begins_in_text ^ (piece.masked.count(b'"', 0, found.start()) % 2 == 1)
            if not is_in_text:
                return True
        await asyncio.sleep(0)
    return False


async def _num_values_outside_texts(raw: bytes, max_values: int) -> int:
    """Stops counting somewhere above `max_values`."""
    num_values = 0
    for piece in slices(raw, _SLICE_BYTES):
        parts = piece.masked.split(b'"')
        num_values += num_values_at_most(b" ".join(parts[1::2] if piece.begins_in_text else parts[::2]))
        if num_values > max_values:
            break
        await asyncio.sleep(0)
    return num_values


_FIELDS_AT_ONCE = 1000  # take a millisecond
_CONTINUED = bytes(range(128, 256))  # bytes of a varint that are not its last

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


async def check_num_message_values(raw: bytes, descriptor: Any, max_values: int) -> None:
    """Raises InvalidRequest for a large message that has more values or is malformed."""
    if len(raw) <= UNCOUNTED_BYTES:
        return
    num_values = num_fields = 0
    unread: list[tuple[int, int, Any]] = [(0, len(raw), descriptor)]
    while unread:
        position, end, kind = unread.pop()
        while position < end:
            number, wire_type, begin, position = _field_at(raw, position, end, descriptor.name)
            num_values += 1
            field = kind.fields_by_number.get(number)
            if wire_type == _BYTES and field is not None:
                if field.message_type is not None:
                    unread.append((begin, position, field.message_type))
                elif field.type not in (field.TYPE_STRING, field.TYPE_BYTES):  # packed
                    num_values += len(raw[begin:position].translate(None, _CONTINUED))
            if num_values > max_values:
                raise InvalidRequest(
                    f"the message has too many values; at most {max_values} are allowed", param="message"
                )
            num_fields += 1
            if not num_fields % _FIELDS_AT_ONCE:
                await asyncio.sleep(0)


def fields_of_bytes(raw: bytes, position: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each value of a string or message field of a well-formed message."""
    while position < end:
        found, wire_type, begin, position = _field_at(raw, position, end, "message")
        if found == number and wire_type == _BYTES:
            yield begin, position


def _field_at(raw: bytes, position: int, end: int, name: str) -> tuple[int, int, int, int]:
    """Return number, wire type, and begin and end of the value of the field at `position`."""
    try:
        tag, position = read_varint(raw, position)
        begin = position
        match tag & 7:
            case wire_type if wire_type == _VARINT:
                _, position = read_varint(raw, position)
            case wire_type if wire_type == _FIXED64:
                position += 8
            case wire_type if wire_type == _BYTES:
                length, begin = read_varint(raw, position)
                position = begin + length
            case wire_type if wire_type == _FIXED32:
                position += 4
            case _:
                raise IndexError  # groups: kvferry.inference.v1 has none
    except IndexError:
        position = end + 1
    if position > end:
        raise InvalidRequest(f"the message is no {name} of kvferry.inference.v1")
    return tag >> 3, wire_type, begin, position


def read_varint(raw: bytes, position: int) -> tuple[int, int]:
    """Return the number and the position after it. Raises IndexError at the end, or for one of more than ten bytes."""
    value = shift = 0
    while shift < 70:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise IndexError


_T = TypeVar("_T")

READ_IN_LOOP_BYTES = 16 << 10  # of a body: reading these takes a few milliseconds at most

JOIN_IN_LOOP_BYTES = 1 << 20  # from here on Python joins bytes without holding the interpreter


async def in_thread_if_large(read: Callable[[], _T], num_bytes: int) -> _T:
    """Return or raise what `read` does."""
    return read() if num_bytes <= READ_IN_LOOP_BYTES else await asyncio.to_thread(read)


async def join(pieces: Sequence[bytes], num_bytes: int) -> bytes:
    return b"".join(pieces) if num_bytes < JOIN_IN_LOOP_BYTES else await asyncio.to_thread(b"".join, pieces)
