"""JSON that stands as text in a field of a body or message."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.errors import InvalidRequest


def object_of(field: str, text: str) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises InvalidRequest that names the field."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"{field}: not valid JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: expected a JSON object, not {json_type(value)}", param=field)
    return value


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
