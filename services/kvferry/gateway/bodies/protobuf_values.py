"""How many values a protobuf message has, before it is parsed: two bytes may make a message within it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.json_values import UNCOUNTED_BYTES

_FIELDS_AT_ONCE = 1000  # take a millisecond
_CONTINUED = bytes(range(128, 256))  # bytes of a varint that are not its last

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


async def check_num_values(raw: bytes, descriptor: Any, max_values: int) -> None:
    """Raises InvalidRequest for a large message that has more values or is malformed. Gives way to other tasks."""
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
