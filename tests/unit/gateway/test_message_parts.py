"""gateway/bodies/message_parts.py: one sentence for each wrong part of a chat's message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.message_parts import check_part
from kvferry.gateway.bodies.openai_bodies import read_chat

WHERE = "messages[0].content[1]"
URL = {"url": "data:image/png;base64,AAAA"}
LONG = "x" * 100_000


def image(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": value, **more}


@pytest.mark.parametrize(
    ("part", "place", "words"),
    [
        (5, "", "expected an object, not a number"),
        (None, "", "expected an object, not null"),
        ("hi", "", "expected an object, not 'hi'"),
        ([], "", "expected an object, not an array"),
        ({}, ".type", "expected 'text' or 'image_url', not null"),
        ({"type": 5}, ".type", "expected 'text' or 'image_url', not a number"),
        ({"type": ["text"]}, ".type", "expected 'text' or 'image_url', not an array"),
        ({"type": "video_url", "video_url": URL}, ".type", "expected 'text' or 'image_url', not 'video_url'"),
        ({"type": "refusal", "refusal": "no"}, ".type", "expected 'text' or 'image_url', not 'refusal'"),
        ({"type": LONG}, ".type", f"expected 'text' or 'image_url', not '{'x' * 63}…'"),
        ({"type": "text"}, ".text", "expected a string, not null"),
        ({"type": "text", "text": 5}, ".text", "expected a string, not a number"),
        ({"type": "image_url"}, ".image_url", "expected an object with the key url, not null"),
        (image("https://a/b.png"), ".image_url", "expected an object with the key url, not 'https://a/b.png'"),
        (image({}), ".image_url.url", "expected a string, not null"),
        (image({"url": 5}), ".image_url.url", "expected a string, not a number"),
        (image({**URL, "detail": "original"}), ".image_url.detail", "expected one of auto, low, high, not 'original'"),
        (image({**URL, "detail": LONG}), ".image_url.detail", f"expected one of auto, low, high, not '{'x' * 63}…'"),
        (image({**URL, "detail": ["low"]}), ".image_url.detail", "expected one of auto, low, high, not an array"),
        (image({**URL, "size": 1}), ".image_url", "unknown key 'size'; expected url and detail"),
        (image({**URL, LONG: 1}), ".image_url", f"unknown key '{'x' * 63}…'; expected url and detail"),
        (image(URL, uuid="a"), "", "unknown key 'uuid'; expected type and image_url"),
    ],
)
def test_a_wrong_part_is_told_by_its_place_and_what_is_expected(part: Any, place: str, words: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}, part]}]}
    with pytest.raises(InvalidRequest) as refused:
        read_chat(json.dumps(body).encode())
    assert refused.value.message == f"{WHERE}{place}: {words}"
    assert refused.value.param == WHERE + place


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "", "cache_control": {"type": "ephemeral"}},
        image(URL),
        *[image({**URL, "detail": detail}) for detail in ("auto", "low", "high", None)],
    ],
)
def test_parts_of_text_and_images_are_taken(part: dict[str, Any]) -> None:
    check_part(WHERE, "user", part)


def test_only_users_have_images() -> None:
    with pytest.raises(InvalidRequest, match=r"only messages of users have images, not of system"):
        check_part(WHERE, "system", image(URL))


KEYS = st.sampled_from(["type", "text", "image_url", "url", "detail"]) | st.text()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(KEYS, parts, max_size=4),
)


def refusal(part: Any) -> str | None:
    try:
        check_part(WHERE, "user", part)
    except InvalidRequest as refused:
        return refused.message
    return None


@given(JSON, st.sampled_from(["text", "image_url"]))
def test_any_part_is_taken_or_refused_in_a_short_sentence(part: Any, kind: str) -> None:
    for value in (part, {"type": kind, kind: part}, image({**URL, "detail": part})):
        message = refusal(value)
        assert message is None or message.startswith(WHERE)
        assert len(message or "") < 300


@pytest.mark.parametrize("name", [None, 5, {"a": 1}])
def test_a_wrong_name_of_a_message_is_told_by_its_place(name: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi", "name": name}]}
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.name: expected a string, not [a-z ]+$"):
        read_chat(json.dumps(body).encode())


def test_a_wrong_role_is_shown_in_part() -> None:
    body = {"model": "m", "messages": [{"role": LONG, "content": "hi"}]}
    with pytest.raises(InvalidRequest) as refused:
        read_chat(json.dumps(body).encode())
    assert len(refused.value.message) < 200
