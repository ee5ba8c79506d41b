from __future__ import annotations

import pytest

from kvferry.gateway import json_text
from kvferry.gateway.json_text import surrogate_fault


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
