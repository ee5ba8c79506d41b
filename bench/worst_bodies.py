"""The worst bodies that a client may send: each is as large or as deep as something allows, or far beyond it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = "bench"
MAX_BODY_BYTES = 8 << 20  # gateway.max_body_bytes

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class WorstBody:
    """`status` is what a gateway before simulated engines answers: they refuse grammars that it accepts.

    `simulated` is its answer with the simulator's renderer.
    """

    name: str
    path: str
    build: Callable[[], bytes]
    status: int = 400
    simulated: int | None = None

    def expected(self, *, simulated: bool) -> int:
        return self.simulated if simulated and self.simulated is not None else self.status


def _chat(**fields: Any) -> bytes:
    values = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode()


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}, separators=(",", ":")).encode()


def _filled(field: str, value: bytes, *, num: int | None = None, chat: bool = True) -> bytes:
    """Return a body with `num` times `value` in the list `field`, or as often as fits."""
    head, tail = b'"%b":[' % field.encode(), b"]}"
    base = _chat() if chat else _completion()
    base = base.replace(b'"%b":' % field.encode(), b'"user":')[:-1] + b","
    if num is None:
        num = (MAX_BODY_BYTES - len(base) - len(head) - len(tail)) // (len(value) + 1)
    return base + head + b",".join([value] * num) + tail


def _text(piece: bytes, *, chat: bool = True) -> bytes:
    """Return a body whose only text is `piece`, in JSON, as often as fits."""
    body = _chat(messages=[{"role": "user", "content": "\x01"}]) if chat else _completion(prompt="\x01")
    return body.replace(b"\\u0001", piece * ((MAX_BODY_BYTES - len(body)) // len(piece)))


def _keys() -> bytes:
    num = MAX_BODY_BYTES // 16
    return _chat()[:-1] + b"," + b",".join(b'"k%07d":0' % i for i in range(num)) + b"}"


def chain(length: int) -> dict[str, Any]:
    links = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _schema(schema: dict[str, Any]) -> bytes:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _strings(num: int, **bounds: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string", **{name: n + i for name, n in bounds.items()}} for i in range(num)}
    return {"type": "object", "properties": properties}


def _tools(num: int, num_properties: int) -> bytes:
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": _strings(num_properties)}} for i in range(num)
    ]
    return _chat(tools=tools, tool_choice="none")


def _nested(depth: int) -> bytes:
    return _chat()[:-1] + b',"metadata":' + b"[" * depth + b"]" * depth + b"}"


_EMPTY = {"role": "user", "content": ""}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TAG = {"type": "structural_tag", "triggers": ["<a>"]}

WORST_BODIES: tuple[WorstBody, ...] = (
    WorstBody("token ids, 8 MiB", COMPLETIONS, lambda: _filled("prompt", b"0", chat=False)),
    WorstBody("token ids, as many as values", COMPLETIONS, lambda: _filled("prompt", b"123", num=49_900, chat=False)),
    WorstBody("prompts of one token, 8 MiB", COMPLETIONS, lambda: _filled("prompt", b"[1]", chat=False)),
    WorstBody("512 prompts", COMPLETIONS, lambda: _filled("prompt", b'"hi"', num=512, chat=False), status=200),
    WorstBody("unknown keys, 8 MiB", CHAT, _keys),
    WorstBody("an unknown key of objects, 8 MiB", CHAT, lambda: _filled("unknown", b'{"a":0}')),
    WorstBody("an ignored key of empty lists, 8 MiB", CHAT, lambda: _filled("metadata", b"[]")),
    WorstBody("numbers with exponents, 8 MiB", CHAT, lambda: _filled("metadata", b"-1.5e300")),
    WorstBody("numbers with exponents, 60 KiB", CHAT, lambda: _filled("metadata", b"-1.5e300", num=6_600), status=200),
    WorstBody("numbers, as many as values", CHAT, lambda: _filled("metadata", b"-1.5e300", num=49_900), status=200),
    WorstBody("objects, as many as values", CHAT, lambda: _filled("metadata", b'{"a":0}', num=20_000), status=200),
    WorstBody("a number of 8 Mi digits", CHAT, lambda: _filled("metadata", b"1" * (MAX_BODY_BYTES - 200), num=1)),
    WorstBody(
        "a fraction of 8 Mi digits", CHAT, lambda: _filled("metadata", b"1." + b"1" * (MAX_BODY_BYTES - 200), num=1)
    ),
    WorstBody("lists in lists, 8 MiB", CHAT, lambda: _nested((MAX_BODY_BYTES - 200) // 2)),
    WorstBody("messages, 8 MiB of empty ones", CHAT, lambda: _filled("messages", b'{"role":"user","content":""}')),
    WorstBody("messages, 4,096 empty ones", CHAT, lambda: _chat(messages=[_EMPTY] * 4096)),
    WorstBody(
        "messages, 4,096 parts",
        CHAT,
        lambda: _chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 4096}]),
        status=200,
    ),
    WorstBody(
        "messages, 4,096 tool calls",
        CHAT,
        lambda: _chat(messages=[{"role": "assistant", "tool_calls": [_CALL] * 4096}]),
        status=200,
        simulated=400,
    ),
    WorstBody("messages, one of 4 Mi keys", CHAT, lambda: _chat(messages=[{**_EMPTY, "k": [{}] * (1 << 21)}])),
    WorstBody("text, 8 MiB", CHAT, lambda: _text(b"word ")),
    WorstBody("text, 8 MiB of emoji", CHAT, lambda: _text("😀 ".encode())),
    WorstBody("text, 8 MiB of escapes", CHAT, lambda: _text(b'\\"')),
    WorstBody("text, 8 MiB of escaped surrogates", CHAT, lambda: _text(b"\\ud83d\\ude00 ")),
    WorstBody("text, 8 MiB of commas", COMPLETIONS, lambda: _text(b", ", chat=False)),
    WorstBody("text, 8 MiB of JSON", COMPLETIONS, lambda: _text(b'{\\"a\\":[1,2]}, ', chat=False)),
    WorstBody("text that fits just not", COMPLETIONS, lambda: _completion(prompt="word " * 30_000)),
    WorstBody("JSON that breaks off after 8 MiB", CHAT, lambda: _text(b"word ")[:-3]),
    WorstBody("bytes that are not UTF-8, 8 MiB", CHAT, lambda: _text(b"\xff")),
    WorstBody("stop_token_ids, 8 MiB", CHAT, lambda: _filled("stop_token_ids", b"12345")),
    WorstBody("bad_words, 8 MiB", CHAT, lambda: _filled("bad_words", b'"a"')),
    WorstBody("logit_bias, 60,000", CHAT, lambda: _chat(logit_bias={str(i): 1 for i in range(60_000)})),
    WorstBody(
        "all lists at their limits",
        CHAT,
        lambda: _chat(
            logit_bias={str(i): 1 for i in range(1024)},
            stop_token_ids=list(range(1024)),
            allowed_token_ids=list(range(1024)),
            bad_words=["word" * 64] * 128,
            stop=["x" * 4096] * 4,
        ),
        status=200,
    ),
    WorstBody("a schema of 10,000 chained $refs", CHAT, lambda: _schema(chain(10_000))),
    WorstBody(
        "a schema of 300 long strings",
        CHAT,
        lambda: _schema(_strings(300, minLength=100_000, maxLength=900_000)),
    ),
    WorstBody("a schema of 1,000 properties", CHAT, lambda: _schema(_strings(1000))),
    WorstBody("a schema of 5,000 values", CHAT, lambda: _schema({"enum": [f"value {i}" for i in range(5000)]})),
    WorstBody("a pattern of 10,000", CHAT, lambda: _schema({"type": "string", "pattern": "a{1,10000}"})),
    WorstBody("a pattern of 2,000", CHAT, lambda: _schema({"type": "string", "pattern": "^[a-z0-9]{1,2000}$"})),
    WorstBody(
        "a structural tag of 10,000 chained $refs",
        CHAT,
        lambda: _chat(
            response_format={**_TAG, "structures": [{"begin": "<a>", "schema": chain(10_000), "end": "</a>"}]}
        ),
    ),
    WorstBody(
        "1,024 choices",
        CHAT,
        lambda: _chat(structured_outputs={"choice": [f"text {i}" for i in range(1024)]}),
    ),
    WorstBody(
        "chat_template_kwargs, 128 KiB", CHAT, lambda: _chat(chat_template_kwargs={"a": [[]] * 20_000}), status=200
    ),
    WorstBody("tools, 128 of 4 KiB", CHAT, lambda: _tools(128, 38), status=200, simulated=400),
    WorstBody("128 answers", CHAT, lambda: _chat(n=128, max_tokens=32, ignore_eos=True), status=200),
    WorstBody(
        "log-probabilities, 4,096 x 20",
        CHAT,
        lambda: _chat(logprobs=True, top_logprobs=20, max_tokens=4096, ignore_eos=True),
        status=200,
    ),
    WorstBody(
        "log-probabilities, 24 x 512 x 20",
        COMPLETIONS,
        lambda: _completion(n=24, logprobs=20, max_tokens=512, ignore_eos=True),
        status=400,
    ),
    WorstBody(
        "log-probabilities, 12 x 1,024 x 20",
        COMPLETIONS,
        lambda: _completion(n=12, logprobs=20, max_tokens=1024, ignore_eos=True),
        status=200,
    ),
    WorstBody(
        "log-probabilities, 64 x 1,200 x 1",
        CHAT,
        lambda: _chat(n=64, logprobs=True, top_logprobs=0, max_tokens=1200, ignore_eos=True),
        status=200,
    ),
    WorstBody(
        "209 prompts of 8,000 words",
        COMPLETIONS,
        lambda: _completion(prompt=["word " * 8000] * 209, max_tokens=1),
        status=200,
    ),
    WorstBody(
        "text of a system, 8 MiB and one emoji",
        CHAT,
        lambda: _chat(messages=[{"role": "system", "content": "a" * (MAX_BODY_BYTES - 200) + "😀"}]),
        simulated=200,
    ),
    WorstBody(
        "texts of 130 KB, 8 MiB",
        CHAT,
        lambda: _chat(messages=[{"role": "system", "content": "é" * 65_000}] * 64),
        simulated=200,
    ),
)
