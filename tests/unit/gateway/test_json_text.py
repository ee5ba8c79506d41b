from __future__ import annotations

import pytest

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies import json_text
from kvferry.gateway.bodies.json_text import decode_json, object_of, surrogate_fault
from kvferry.gateway.bodies.large_bodies import MAX_VALUES
from kvferry.gateway.bodies.long_texts import LONG_BYTES


@pytest.mark.parametrize("num_before", range(16))
@pytest.mark.parametrize(
    ("escapes", "fault"),
    [
        (b"\\ud83d\\ude00", ""),
        (b"\\\\ud83d", ""),
        (b"\\uD83D", "\\ud83D"),
        (b"\\ude00", "\\ude00"),
        (b"\\ud83d\\ude00\\ud83e", "\\ud83e"),
    ],
)
def test_a_lone_surrogate_is_found_wherever_a_slice_ends(
    num_before: int, escapes: bytes, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "_SLICE_BYTES", 8)
    raw = b'["%b%b "]' % (b"a" * num_before, escapes)
    found = surrogate_fault(raw)
    if fault:
        assert found == f"a lone surrogate {fault} at byte {raw.lower().index(fault.lower().encode())}"
    else:
        assert not found


def outcome(text: str) -> tuple[object, str]:
    try:
        return object_of("field", text), ""
    except InvalidRequest as error:
        return None, error.message


@pytest.mark.parametrize(
    "text",
    [
        '{"a": "%s", "b": ["%s"]}',
        '{"a": "%s😀", "b": "%s"}',
        '{"a": "%s", "b": "%s"',
        '{"a": "%s", "b": "%s"}}',
        '{"a": "%s\\ud800%s"}',
        '{"a": "%s\n%s"}',
        '["%s", "%s"]',
        '{"a": "%s\ud800", "b": ["%s"]}',
    ],
)
def test_a_long_text_is_decoded_as_a_short_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = text % ("é" * 200_000, "x" * LONG_BYTES)
    calls: list[int] = []

    def decode(raw: bytes | str) -> object:
        calls.append(len(raw))
        return decode_json(raw)

    monkeypatch.setattr(json_text, "decode_json", decode)
    ours = outcome(filled)
    assert len(calls) == 1
    assert calls[0] < LONG_BYTES / 4 or ours[0] is None  # after a fault in a text, nothing is cut out
    monkeypatch.setattr(json_text, "LONG_BYTES", 1 << 40)
    at_once = outcome(filled)
    assert ours[0] == at_once[0]
    # Python's reason for a lone surrogate differs between texts and bytes.
    assert ours[1] == at_once[1] or "\ud800" in filled


def test_values_of_long_texts_are_counted() -> None:
    texts = ["é" * LONG_BYTES + "," * MAX_VALUES, "😀" * LONG_BYTES]
    json_text.require_few_values("field", *texts)
    with pytest.raises(InvalidRequest, match=f"field: {MAX_VALUES + 1} values are too many"):
        json_text.require_few_values("field", *texts, "[")
