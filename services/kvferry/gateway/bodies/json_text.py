"""JSON of clients: bodies, and texts in their fields."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.large_bodies import MAX_NUMBER_CHARS, MAX_VALUES, num_values_at_most
from kvferry.gateway.bodies.long_texts import LONG_BYTES, decode_in_steps


def _float(digits: str) -> float:
    """Raises ValueError for a number that is none of a float's."""
    if len(digits) > MAX_NUMBER_CHARS:
        raise ValueError(f"a number has more than {MAX_NUMBER_CHARS} characters")
    if -math.inf < (number := float(digits)) < math.inf:
        return number
    raise ValueError("a number is out of range")


# msgspec's own conversion takes 8 us for a number such as -1.5e300: 7.5 s for a body of 8 MiB.
decode_json = msgspec.json.Decoder(float_hook=_float).decode

_SURROGATE = re.compile(rb"\\u[dD]([89a-fA-F][0-9a-fA-F]{2})")
_ESCAPE_BYTES = 6
_SLICE_BYTES = 64 << 10  # searched in up to 0.3 ms
_MAX_ESCAPES = 1000  # that are looked at for the fault
_LOOK_BACK_BYTES = 256  # for the backslashes before an escape
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")


def object_of(field: str, text: str) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises InvalidRequest that names the field."""
    require_few_values(field, text)
    try:
        is_long = len(text) >= LONG_BYTES
        value = decode_in_steps(b"".join(_utf_8(text)), decode_json) if is_long else decode_json(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = surrogate_fault(b"".join(_utf_8(text))) or str(error)
        raise InvalidRequest(f"{field}: not valid JSON: {reason}", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: expected a JSON object, not {json_type(value)}", param=field)
    return value


def surrogate_fault(raw: bytes) -> str:
    """Return what is wrong with the first lone surrogate in a JSON text that cannot be decoded, or "".

    msgspec calls such a text truncated.
    """
    if b"\\" not in raw:
        return ""
    is_escaped_low = False  # the next escape is a low surrogate's whose high one came right before it
    for escape in itertools.islice(_surrogates(raw), _MAX_ESCAPES):
        before = raw[max(0, escape.start() - _LOOK_BACK_BYTES) : escape.start()]
        if (len(before) - len(before.rstrip(b"\\"))) % 2:
            continue  # an escaped backslash before a u
        is_high = escape[1][:1] in b"89abAB"
        if is_escaped_low:
            is_escaped_low = False
        elif is_high and _LOW_SURROGATE.match(raw, escape.end()):
            is_escaped_low = True
        else:
            return f"a lone surrogate \\ud{escape[1].decode()} at byte {escape.start()}"
    return ""


def _surrogates(raw: bytes) -> Iterator[re.Match[bytes]]:
    for start in range(0, len(raw), _SLICE_BYTES):
        yield from _SURROGATE.finditer(raw, start, start + _SLICE_BYTES + _ESCAPE_BYTES - 1)


def require_few_values(field: str, *texts: str) -> None:
    """Raises InvalidRequest for JSON texts with more values than a body may have, together."""
    num_values = sum(num_values_at_most(piece) for text in texts for piece in _utf_8(text))
    if num_values > MAX_VALUES:
        raise InvalidRequest(
            f"{field}: {num_values} values are too many; at most {MAX_VALUES} are allowed", param=field
        )


def _utf_8(text: str) -> Iterator[bytes]:
    for start in range(0, len(text), _SLICE_BYTES):
        yield text[start : start + _SLICE_BYTES].encode(errors="surrogatepass")


def json_type(value: object) -> str:
    """Return JSON's name of a decoded value's type, with its article."""
    names: dict[type, str] = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")
