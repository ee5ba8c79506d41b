"""Every byte of an answer over HTTP, compared with a record: what clients get must not change by accident.

To record anew, after a change that is meant: `KVFERRY_RECORD=1 pytest tests/cluster/test_answer_bytes.py`, and read the
difference.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberKind

from .conftest import MODEL, SimCluster

RECORD = Path(__file__).with_name("answer_bytes.json")

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "tell me of the river"}],
    "temperature": 0,
    "max_tokens": 6,
}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "one two three four", "temperature": 0, "max_tokens": 6}
LENGTH = {"ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SEVERAL = {"n": 3, "temperature": 1, "seed": 7}

CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "chat streamed": ("chat/completions", {**CHAT, **LENGTH, "stream": True}, False),
    "chat streamed with usage": ("chat/completions", {**CHAT, **LENGTH, **USAGE}, False),
    "chat streamed with everything": (
        "chat/completions",
        {**CHAT, **LENGTH, **USAGE, **SEVERAL, "logprobs": True, "top_logprobs": 2},
        True,
    ),
    "chat streamed to a stop string": ("chat/completions", {**CHAT, "stream": True, "stop": ["a"]}, False),
    "chat streamed with debug only": ("chat/completions", {**CHAT, **LENGTH, "stream": True}, True),
    "chat whole": ("chat/completions", {**CHAT, **LENGTH}, False),
    "chat whole with everything": (
        "chat/completions",
        {**CHAT, **LENGTH, **SEVERAL, "logprobs": True, "top_logprobs": 2},
        True,
    ),
    "completion streamed": ("completions", {**COMPLETION, **LENGTH, "stream": True}, False),
    "completion streamed with everything": (
        "completions",
        {**COMPLETION, **LENGTH, **USAGE, **SEVERAL, "prompt": ["a b", "c"], "logprobs": 2},
        True,
    ),
    "completion whole": ("completions", {**COMPLETION, **LENGTH, "logprobs": 0}, False),
    "one token": ("completions", {**COMPLETION, **LENGTH, "max_tokens": 1, "stream": True}, False),
    "refused": ("completions", {**COMPLETION, "max_tokens": 10**6, "stream": True}, False),
}


def without_what_differs(text: str) -> str:
    """Ids, times and names of processes, made the same in every run."""
    text = re.sub(r"\b(chatcmpl|cmpl)-[0-9a-f]{24}", r"\1-ID", text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    text = re.sub(r"\b(prefill|decode)-[0-9a-f]{8}\b", r"\1-ID", text)
    return re.sub(r'"ttft_ms":[0-9.]+', '"ttft_ms":0', text)


def by_choice(text: str) -> str | dict[str, list[str]]:
    """Choices advance side by side in any order; each for itself keeps its own."""
    if not text.startswith("data: "):
        return text
    parts: dict[str, list[str]] = {}
    for event in text.split("\n\n"):
        choices = json.loads(event.removeprefix("data: ")).get("choices") if event.startswith("data: {") else None
        parts.setdefault(str(choices[0]["index"]) if choices else "rest", []).append(event)
    return parts


def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def compare(name: str, got: Any) -> None:
    if os.environ.get("KVFERRY_RECORD"):
        everything = {**recorded(), name: got}
        RECORD.write_text(json.dumps(everything, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    assert got == recorded()[name]


async def test_answers_are_the_same_as_ever(http: httpx.AsyncClient) -> None:
    for name, (path, body, debug) in CASES.items():  # in this order: later ones find pages of earlier ones
        answer = await http.post(f"/v1/{path}", json=body, headers={"x-kvferry-debug": "1"} if debug else {})
        headers = {key: without_what_differs(value) for key, value in answer.headers.items() if key != "date"}
        text = without_what_differs(answer.text)
        if not text.startswith("data: ") and "ttft_ms" in text:
            headers.pop("content-length")  # the time has as many digits as it has
        compare(name, {"status": answer.status_code, "headers": headers, "body": by_choice(text)})


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_an_error_after_the_first_token_is_the_same_as_ever(
    cluster: SimCluster, http: httpx.AsyncClient, path: str
) -> None:
    (decode,) = cluster.engines(MemberKind.DECODE)
    body = {**(CHAT if path.startswith("chat") else COMPLETION), "max_tokens": 5000, "stream": True, **LENGTH}
    async with http.stream("POST", f"/v1/{path}", json=body) as answer:
        pieces = answer.aiter_text()
        text = await anext(pieces)
        await decode.abort(RequestId(f"{answer.headers['x-request-id']}-0"))
        async for piece in pieces:
            text += piece
    *_, error, done, nothing = without_what_differs(text).split("\n\n")
    compare(f"error in {path}", [error, done, nothing])
