"""Parts of a chat message's content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.chat_images import IMAGE_PART
from kvferry.gateway.bodies.json_text import json_type

_MAX_SHOWN_CHARS = 64  # of a client's own words
_IMAGE_KEYS = ("type", "image_url")  # with `uuid` vLLM would take one image for another
_URL_KEYS = ("url", "detail")
_DETAILS = ("auto", "low", "high")  # no effect: the model's processor decides


def check_part(where: str, role: str, part: object) -> None:
    """Raises InvalidRequest with the place in the body."""
    if not isinstance(part, dict):
        _refuse(where, "an object", part)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            _refuse(f"{where}.text", "a string", part.get("text"))
    elif kind == IMAGE_PART:
        _check_image(where, role, part)
    else:
        _refuse(f"{where}.type", f"'text' or '{IMAGE_PART}'", kind)


def _check_image(where: str, role: str, part: Mapping[str, Any]) -> None:
    if role != "user":
        raise InvalidRequest(f"{where}: only messages of users have images, not of {role}", param=where)
    _check_keys(where, part, _IMAGE_KEYS)
    image, place = part.get(IMAGE_PART), f"{where}.{IMAGE_PART}"
    if not isinstance(image, dict):
        _refuse(place, "an object with the key url", image)
    _check_keys(place, image, _URL_KEYS)
    if not isinstance(image.get("url"), str):
        _refuse(f"{place}.url", "a string", image.get("url"))
    detail = image.get("detail")
    if detail is not None and (not isinstance(detail, str) or detail not in _DETAILS):
        _refuse(f"{place}.detail", f"one of {', '.join(_DETAILS)}", detail)


def _check_keys(where: str, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in values:
        if key not in allowed:
            raise InvalidRequest(f"{where}: unknown key {_shown(key)}; expected {' and '.join(allowed)}", param=where)


def _refuse(where: str, expected: str, found: object) -> NoReturn:
    shown = _shown(found) if isinstance(found, str) else json_type(found)
    raise InvalidRequest(f"{where}: expected {expected}, not {shown}", param=where)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 1] + "…")
