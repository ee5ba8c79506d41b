"""Hostile and borderline requests as data, each with the answers that are right.

`BODIES` are bodies of requests, `REQUESTS` bytes of connections, `CALLS` messages of gRPC calls. All are for a gateway
of sim engines with default limits, except for the body (`MAX_BODY_BYTES`) and the context (`MAX_MODEL_LEN`), and for
the model `MODEL`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.gateway.admission import MAX_ANSWER_TOKENS, MAX_LOGPROB_ENTRIES, MAX_STEP_LOGPROB_ENTRIES
from kvferry.gateway.bodies.openai_bodies import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from kvferry.gateway.http.uvicorn_connection import MAX_HEADERS, MAX_PIPELINED, MAX_URL_BYTES
from kvferry.inference.v1 import inference_pb2 as pb

MODEL = "sim-model"
MAX_BODY_BYTES = 1 << 20
MAX_MODEL_LEN = 65_536

COMPLETION: Mapping[str, Any] = {"model": MODEL, "prompt": "one two", "max_tokens": 1}
CHAT: Mapping[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 1}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

CLOSED = 0  # instead of a status: the connection ends without an answer


@dataclass(frozen=True)
class Body:
    """A body, and the only status that is right."""

    name: str
    path: str
    raw: bytes
    status: int
    said: str = ""  # in the error's message


@dataclass(frozen=True)
class Request:
    """Bytes of a connection, and the statuses that come back, in order; each alternative is right."""

    name: str
    raw: bytes
    statuses: tuple[tuple[int, ...], ...]
    ends: bool = False  # the client sends its end of file after them


@dataclass(frozen=True)
class Call:
    """A message of a gRPC method, and the name of the status that is right."""

    name: str
    method: str
    raw: bytes
    code: str
    metadata: tuple[tuple[str, str | bytes], ...] = ()


def _completion(name: str, status: int, said: str = "", **values: Any) -> Body:
    return Body(name, COMPLETIONS, json.dumps({**COMPLETION, **values}).encode(), status, said)


def _chat(name: str, status: int, said: str = "", **values: Any) -> Body:
    return Body(name, CHATS, json.dumps({**CHAT, **values}).encode(), status, said)


def _text(name: str, raw: bytes, status: int = 400, said: str = "") -> Body:
    return Body(name, COMPLETIONS, raw, status, said)


def _around(values: str) -> bytes:
    """A completion whose further fields are JSON text."""
    return b'{"model":"sim-model","prompt":"one two","max_tokens":1,' + values.encode() + b"}"


# Fields and one value of each JSON type that is wrong for them.
_WRONG_TYPES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "n", "top_k", "seed"), ("1", 1.5, True, [1], {"a": 1})),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        ("1", True, [1], {"a": 1}),
    ),
    **dict.fromkeys(
        ("stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens"),
        ("true", 1, 0.5, [True], {"a": 1}),
    ),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), ("1", 1, True, ["1"], [1.5], [-1], [2**31], {"a": 1})),
    "stop": (1, True, [1], [""], {"a": 1}),
    "bad_words": ("x", 1, [1], [""], {"a": 1}),
    "logit_bias": ("x", 1, [1], {"x": 1}, {"-1": 1}, {"1": "1"}, {"1": 101}, {"1": -101}, {"²": 1}, {"1" * 5000: 1}),
    "stream_options": ("x", 1, [1], {"unknown": 1}, {"include_usage": 1}),
    "response_format": ("x", 1, [1]),
    "structured_outputs": ("x", 1, [1]),
    "model": (1, True, [1], {"a": 1}, None),
}
_WRONG_OF_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "prompt": (
        1,
        True,
        None,
        {"a": 1},
        "",
        [],
        [""],
        [[]],
        [1, "x"],
        [True],
        [1.5],
        [-1],
        [2**31],
        [[1], ["x"]],
        [None],
    ),
    "logprobs": ("1", True, -1, 21, 1.5),
}
_MESSAGE = {"role": "user", "content": "x"}
_WRONG_OF_CHATS: Mapping[str, tuple[Any, ...]] = {
    "messages": (
        *("x", 1, None, [], {"a": 1}, ["x"], [[]], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}]),
        *([{"role": "robot", "content": "x"}], [{"role": "user", "content": 1}], [{"role": "user", "content": [1]}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "tool", "content": "x"}],
        [{"role": "function", "content": "x"}],
        [{"role": "user", "content": "x", "tool_calls": [{}]}],
        [_MESSAGE, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}],
    ),
    "max_completion_tokens": ("1", 0, True, 2**31),
    "logprobs": (1, "true", 5),
    "top_logprobs": ("1", -1, 21, True),
    "tools": ("x", 1, {"a": 1}, ["x"], [{}], [{"type": "other"}], [{"type": "function", "function": {"name": ""}}]),
    "tool_choice": ("x", 1, ["auto"], "required", {"type": "function", "function": {"name": "x"}}),
    "chat_template_kwargs": ("x", 1, [1]),
}
_BEYOND: Mapping[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, 2**31, 2**63, 10**40, MAX_MODEL_LEN),
    "min_tokens": (-1, 2**31, 2),
    "n": (0, -1, 129, 2**31),
    "temperature": (-0.001, 2.001, 1e300),
    "top_p": (0, -0.1, 1.001),
    "top_k": (-2, 2**31),
    "min_p": (-0.001, 1.001),
    "seed": (2**63, -(2**63) - 1),
    "presence_penalty": (-2.001, 2.001),
    "frequency_penalty": (-2.001, 2.001),
    "repetition_penalty": (0, -1),
    "best_of": (2,),
    "echo": (True,),
    "suffix": ("x",),
    "unknown_argument": (1,),
    "x" * 100_000: (1,),
}
_AT_LIMITS: tuple[tuple[str, Any, Any], ...] = (
    ("temperature", 2, 2.0001),
    ("top_p", 1, 1.0001),
    ("top_k", -1, -2),
    ("min_p", 1, 1.0001),
    ("presence_penalty", -2, -2.0001),
    ("seed", 2**63 - 1, 2**63),
    ("seed", -(2**63), -(2**63) - 1),
    ("n", 128, 129),
    ("logprobs", 20, 21),
    ("stop", ["x"] * MAX_STOP_STRINGS, ["x"] * (MAX_STOP_STRINGS + 1)),
    ("stop", "x" * MAX_STOP_CHARS, "x" * (MAX_STOP_CHARS + 1)),
    ("bad_words", ["zz"] * MAX_BAD_WORDS, ["zz"] * (MAX_BAD_WORDS + 1)),
    ("bad_words", ["z" * MAX_BAD_WORD_CHARS], ["z" * (MAX_BAD_WORD_CHARS + 1)]),
    ("stop_token_ids", [7] * MAX_TOKEN_IDS, [7] * (MAX_TOKEN_IDS + 1)),
    ("allowed_token_ids", [7] * MAX_TOKEN_IDS, [7] * (MAX_TOKEN_IDS + 1)),
    ("logit_bias", {str(i): 1 for i in range(MAX_TOKEN_IDS)}, {str(i): 1 for i in range(MAX_TOKEN_IDS + 1)}),
    ("prompt", ["x"] * MAX_CHOICES, ["x"] * (MAX_CHOICES + 1)),
    ("max_tokens", MAX_MODEL_LEN - 3, MAX_MODEL_LEN - 2),
)


def _bodies() -> Iterator[Body]:
    for field, values in {**_WRONG_TYPES, **_WRONG_OF_COMPLETIONS}.items():
        for i, value in enumerate(values):
            yield _completion(f"{field} of a wrong kind {i}", 400, **{field: value})
    for field, values in {**_WRONG_TYPES, **_WRONG_OF_CHATS}.items():
        for i, value in enumerate(values):
            yield _chat(f"chat: {field} of a wrong kind {i}", 400, **{field: value})
    for field, values in _BEYOND.items():
        for i, value in enumerate(values):
            yield _completion(f"{field[:20]} out of range {i}", 400, **{field: value})
    for i, (field, at, over) in enumerate(_AT_LIMITS):
        short = {"max_tokens": 1, "ignore_eos": True} if field != "max_tokens" else {"stop": ["t"]}
        yield _completion(f"{field} at its limit {i}", 200, **{**short, field: at})
        yield _completion(f"{field} over its limit {i}", 400, **{**short, field: over})
    yield from _lists_of_chats()
    yield from _texts()
    yield from _poison()


def _lists_of_chats() -> Iterator[Body]:
    for over in (0, 1):
        status, which = (400, "over") if over else (200, "at")
        yield _chat(f"messages {which} the limit", status, messages=[_MESSAGE] * (MAX_MESSAGES + over))
        parts = [{"type": "text", "text": ""}] * (MAX_PARTS + over)
        yield _chat(f"parts {which} the limit", status, messages=[{"role": "user", "content": parts}])
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        answer = {"role": "assistant", "tool_calls": calls * (MAX_TOOL_CALLS + over)}
        yield _chat(f"tool calls {which} the limit", status, messages=[_MESSAGE, answer])
        tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(MAX_TOOLS + over)]
        yield _chat(f"tools {which} the limit", status, tools=tools, tool_choice="none")
        yield _chat(f"top_logprobs {which} the limit", status, logprobs=True, top_logprobs=20 + over)
        filler = MAX_BODY_BYTES - len(json.dumps({**CHAT, "user": ""})) + over
        yield _chat(f"body {which} the limit", 413 if over else 200, user="x" * filler)
    # Products of limits: choices x max_tokens x log-probabilities.
    for over in (0, 1):
        status, which = (400, "over") if over else (200, "at")
        most = MAX_LOGPROB_ENTRIES // 21
        yield _completion(
            f"log-probabilities {which} their limit", status, logprobs=20, max_tokens=most + over, stop=["t"]
        )
        most //= 4
        values = {"logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": most + over, "stop": ["t"]}
        yield _chat(f"log-probabilities of four choices {which} their limit", status, **values)
        values = {"logprobs": True, "top_logprobs": MAX_STEP_LOGPROB_ENTRIES // 64 - 1 + over, "n": 64}
        yield _chat(f"log-probabilities of a step {which} their limit", status, max_tokens=1, **values)
        most = MAX_ANSWER_TOKENS // 128
        yield _completion(
            f"tokens of 128 choices {which} their limit", status, n=128, max_tokens=most + over, stop=["t"]
        )


def _texts() -> Iterator[Body]:
    for name, raw in {
        "empty": b"", "null": b"null", "an array": b"[]", "a string": b'"x"', "a number": b"1", "a boolean": b"true",
        "cut": b'{"model":"sim-', "two values": b"{}{}", "a byte order mark": b"\xef\xbb\xbf{}",
        "utf-16": '{"model":"sim-model"}'.encode("utf-16"), "not utf-8": b'{"model":"\xff"}',
        "an overlong slash": b'{"model":"\xc0\xaf"}', "a raw surrogate": b'{"model":"\xed\xa0\x80"}',
        "NUL bytes": b"\x00" * 1000, "a raw newline": b'{"model":"a\nb"}', "a comment": b'{/**/"model":"x"}',
        "single quotes": b"{'model':'sim-model'}", "a trailing comma": _around('"n":1,'),
        "gzip": b"\x1f\x8b\x08" + b"\x00" * 99,
        "form": b"model=sim-model&prompt=x", "xml": b"<?xml version='1.0'?><x/>", "empty object": b"{}",
    }.items():  # fmt: skip
        yield _text(f"text: {name}", raw)
    for name, field in {
        "NaN": '"temperature":NaN', "Infinity": '"temperature":Infinity', "-Infinity": '"temperature":-Infinity',
        "1e400": '"temperature":1e400', "a number of 5,000 digits": f'"max_tokens":{"9" * 5000}',
        "a float of 5,000 digits": f'"temperature":9.{"9" * 5000}e9', "a seed of 5,000 digits": f'"seed":-{"9" * 5000}',
        "hexadecimal": '"n":0x1', "a leading zero": '"n":01', "a plus": '"n":+1', "an exponent": '"n":1e9',
        "200,000 arrays": '"user":' + "[" * 200_000, "200,000 objects": '"user":' + '{"a":' * 100_000,
        "a deep value": '"user":' + "[" * 5000 + "]" * 5000,
        "a deep schema": '"structured_outputs":{"json":' + '{"items":' * 500 + "{}" + "}" * 501,
    }.items():  # fmt: skip
        yield _text(f"text: {name}", _around(field))
    for name, value in {"high": r"\ud800", "low": r"\udc00", "swapped": r"\udc00\ud800"}.items():
        yield _text(f"text: a lone surrogate, {name}", _around(f'"user":"{value}"'), said="lone surrogate")
    yield _text("text: a pair of surrogates", _around(r'"user":"\ud83d\ude00"'), 200)
    yield _text("text: duplicate keys, the last is wrong", _around('"n":1,"n":"x"'))
    yield _text("text: duplicate keys, the last is right", _around('"n":"x","n":1'), 200)
    yield _text("text: 100,000 unknown keys", _around(",".join(f'"k{i}":1' for i in range(50_000))))
    yield _completion("NUL in a prompt", 200, prompt="a\0b")
    yield _completion("right-to-left marks and joiners", 200, prompt="‮‍" * 100)
    yield _completion("an unknown model", 404, model="gpt-9")
    yield _completion("a model of 500,000 characters", 404, model="x" * 500_000)
    yield _chat("a role of 500,000 characters", 400, messages=[{"role": "x" * 500_000, "content": "x"}])
    yield _completion("a token of 500,000 characters", 400, logit_bias={"x" * 500_000: 1})
    yield _completion("dropped fields", 200, kv_transfer_params={"remote_host": "x"}, cache_salt="x", priority=-9)
    yield _completion("a prompt over the context", 400, prompt="w " * MAX_MODEL_LEN)
    yield _completion("a prompt of token ids over the context", 400, prompt=[7] * MAX_MODEL_LEN)
    yield _completion("stream options without a stream", 200, stream_options={"include_usage": True})


def _poison() -> Iterator[Body]:
    """Schemas and patterns that cost an engine its life, of the kinds that gateways refuse before any library."""
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(10_000)}
    chained = {"$ref": "#/$defs/d0", "$defs": {**chain, "d10000": {"type": "string"}}}
    tag = {"type": "structural_tag", "structures": [{"begin": "<", "schema": chained, "end": ">"}], "triggers": ["<"]}
    yield _chat("a structural tag with 10,000 references", 400, response_format=tag)
    schemas: dict[str, Any] = {
        "10,000 references": chained,
        "a pattern repeated 10,000 times": {"type": "string", "pattern": "a{1,10000}"},
        "10,000 properties": {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}},
        "an enum of 50,000": {"enum": list(range(50_000))},
        "a long string": {"type": "string", "maxLength": 10**9},
    }
    for name, schema in schemas.items():
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        yield _chat(f"a schema with {name}", 400, response_format=wrapped)
        yield _completion(f"structured outputs with {name}", 400, structured_outputs={"json": schema})
    yield _completion("a regex repeated 10,000 times", 400, structured_outputs={"regex": "a{1,10000}"})
    yield _completion("a regex of nested repetitions", 400, structured_outputs={"regex": "((a{1,99}){1,99}){1,99}"})
    yield _completion("a grammar of 64 KiB", 400, structured_outputs={"grammar": "root ::= " + '"a" ' * 16_384})
    yield _completion("1,025 choices of text", 400, structured_outputs={"choice": [str(i) for i in range(1025)]})
    yield _completion("two structures", 400, structured_outputs={"regex": "a", "json": {}})
    yield _completion("200,000 stop_token_ids", 400, stop_token_ids=[5] * 200_000)
    yield _completion("200,000 bad words", 400, bad_words=["x"] * 200_000)
    yield _chat("80,000 empty messages", 413, messages=[{"role": "user", "content": ""}] * 80_000)
    yield _chat("template arguments of 129 KiB", 400, chat_template_kwargs={"x": "y" * (129 << 10)})


_GOOD = json.dumps(COMPLETION).encode()


# Of a request to be written by hand, with the number of its body's bytes.
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


def _http(line: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([line, "host: localhost", *headers, "", ""]).encode("latin-1") + body


def _post(*headers: str, body: bytes = _GOOD, kind: str = "content-type: application/json") -> bytes:
    return _http(f"POST {COMPLETIONS} HTTP/1.1", *filter(None, [kind]), *headers, body=body)


def _sized(body: bytes = _GOOD) -> str:
    return f"content-length: {len(body)}"


def _chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


_REFUSED = (400, CLOSED)
_END = b"0\r\n\r\n"
_GET = _http("GET /healthz HTTP/1.1")
_CHUNKED = "transfer-encoding: chunked"


def _requests() -> Iterator[Request]:
    one = lambda name, raw, *statuses: Request(name, raw, (statuses,))  # noqa: E731
    for name, headers in {
        "TE and CL": (_CHUNKED, _sized()),
        "CL and TE": (_sized(), _CHUNKED),
        "TE twice": (_CHUNKED, _CHUNKED),
        "an unknown TE": ("transfer-encoding: xchunked",),
        "TE that is not chunked last": ("transfer-encoding: chunked, identity",),
        "TE with a tab": ("transfer-encoding:\tchunked,",),
        "CL twice": (_sized(), f"content-length: {len(_GOOD) + 1}"),
        "a negative CL": ("content-length: -1",),
        "a CL with a plus": (f"content-length: +{len(_GOOD)}",),
        "a hexadecimal CL": ("content-length: 0x10",),
        "two CLs in a line": (f"content-length: {len(_GOOD)}, {len(_GOOD)}",),
        "a CL of 5,000 digits": (f"content-length: {'9' * 5000}",),
        "a CL over 2^64": (f"content-length: {2**64 + len(_GOOD)}",),
    }.items():
        yield one(f"smuggling: {name}", _post(*headers, body=_chunks(_GOOD) + _END), *_REFUSED)
    yield one("smuggling: a CL over the limit", _post(f"content-length: {MAX_BODY_BYTES + 1}"), 413)
    yield one("smuggling: a space before a colon", _post(f"content-length : {len(_GOOD)}"), *_REFUSED)
    yield one("smuggling: a folded header", _post("x-a: 1\r\n content-length: 3"), *_REFUSED)
    yield one("smuggling: bare line feeds", _post(_sized()).replace(b"\r\n", b"\n"), *_REFUSED, 200)
    yield one("smuggling: a bare carriage return", _post("x-a: 1\r2", _sized()), *_REFUSED)
    for name, body in {
        "no hexadecimal size": b"xyz\r\n", "a negative size": b"-1\r\n",
        "a size of 5,000 digits": b"f" * 5000 + b"\r\n",
        "a size over 2^64": b"f" * 17 + b"\r\n", "no line end after a chunk": b"1\r\nab\r\n", "an empty size": b"\r\n",
        "an endless extension": b"1;" + b"x" * (4 << 20),
    }.items():  # fmt: skip
        yield one(f"chunks: {name}", _post(_CHUNKED, body=body), *_REFUSED, 431)
    yield one("chunks: right", _post(_CHUNKED, body=_chunks(_GOOD[:5], _GOOD[5:]) + _END), 200)
    yield one("chunks: of a byte", _post(_CHUNKED, body=_chunks(*(bytes([byte]) for byte in _GOOD)) + _END), 200)
    trailers = b"0\r\nauthorization: Bearer x\r\nhost: evil\r\n\r\n"
    yield one("trailers: ignored", _post(_CHUNKED, body=_chunks(_GOOD) + trailers), 200)
    framing = b"0\r\ncontent-length: 9\r\n\r\n"
    yield one("trailers: a length", _post(_CHUNKED, body=_chunks(_GOOD) + framing), 400, 200)
    endless = b"0\r\n" + b"x: y\r\n" * (1 << 20)
    yield one("trailers: endless", _post(_CHUNKED, body=_chunks(_GOOD) + endless), 431, 200, CLOSED)
    yield one("body: chunked over the limit", _post(_CHUNKED, body=_chunks(b"x" * (MAX_BODY_BYTES + 1)) + _END), 413)
    for name, line in {
        "no version": "GET /healthz", "HTTP/0.9": "GET /healthz HTTP/0.9", "HTTP/2.0": "GET /healthz HTTP/2.0",
        "HTTP/9.9": "GET /healthz HTTP/9.9", "no method": " /healthz HTTP/1.1", "no target": "GET  HTTP/1.1",
        "an unknown method": "BREW /healthz HTTP/1.1", "a method in lower case": "get /healthz HTTP/1.1",
        "a long method": "A" * 10_000 + " / HTTP/1.1", "a NUL": "GET /\0 HTTP/1.1", "CONNECT": "CONNECT a:1 HTTP/1.1",
        "a space in the target": "GET /a b HTTP/1.1", "TLS": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "the preface of HTTP/2": "PRI * HTTP/2.0", "SSH": "SSH-2.0-OpenSSH_9.0", "an asterisk": "OPTIONS * HTTP/1.1",
    }.items():  # fmt: skip
        yield one(f"line: {name}", _http(line), *_REFUSED, 404, 405)
    for method in ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"):
        yield one(f"method: {method}", _http(f"{method} {COMPLETIONS} HTTP/1.1"), 405)
    for path in (
        *("/", "//v1/completions", "/v1/completions/", "/v1/../v1/completions", "/%2e%2e/etc/passwd", "/v1/responses"),
        *("/%00", "/%ff%fe", "/v1/models/../../x", "/docs", "/metrics/", "/v1/models/" + "x" * 5000, "/?" + "a" * 5000),
    ):
        yield one(f"path: {path[:40]}", _http(f"GET {path} HTTP/1.1"), 404, 405)
    yield one("path: absolute form", _http("GET http://localhost/healthz HTTP/1.1"), 200)
    yield one("path: absolute form of another host", _http("GET http://evil.example/healthz HTTP/1.1"), 400)
    slashes = "/" + "x" * (MAX_URL_BYTES - 1)
    yield one("URL at its limit", _http(f"GET {slashes} HTTP/1.1"), 404)
    yield one("URL over its limit", _http(f"GET {slashes}x HTTP/1.1"), 414)
    yield one("URL of 24 MiB", b"GET /" + b"x" * (24 << 20), 414, CLOSED)
    many = [f"x-{i}: y" for i in range(MAX_HEADERS)]
    yield one("headers at their limit", _http("GET /healthz HTTP/1.1", *many[:-1]), 200)
    yield one("headers over their limit", _http("GET /healthz HTTP/1.1", *many), 431)
    yield one("a header of 60 KiB", _http("GET /healthz HTTP/1.1", "x: " + "y" * (60 << 10)), 200)
    yield one("a header of 65 KiB", _http("GET /healthz HTTP/1.1", "x: " + "y" * (65 << 10)), 431, CLOSED)
    yield one("a header of 24 MiB", _http("GET /healthz HTTP/1.1", "x: " + "y" * (24 << 20)), 431, CLOSED)
    yield one("24 MiB of headers", b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * (4 << 20), 431, CLOSED)
    for name, header in {
        "a NUL": "x: a\0b", "no colon": "nothing", "no name": ": x", "a space in a name": "a b: c",
        "control characters": "x: \x01", "two hosts": "host: evil.example",
    }.items():  # fmt: skip
        yield one(f"header: {name}", _http("GET /v1/models HTTP/1.1", header), *_REFUSED)
    evil = b"GET /v1/models HTTP/1.1\r\nhost: %b\r\n%b\r\n"
    yield one("page: another host", evil % (b"evil.example", b""), 403)
    yield one("page: a host that begins as loopback", evil % (b"127.0.0.1.evil.example", b""), 403)
    yield one("page: another origin", evil % (b"localhost", b"origin: https://evil.example\r\n"), 403)
    yield one("page: no host", b"GET /v1/models HTTP/1.1\r\n\r\n", 400)
    yield one("page: no host, HTTP/1.0", b"GET /v1/models HTTP/1.0\r\n\r\n", 200)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        yield one(f"page: {kind}", _post(_sized(), kind=f"content-type: {kind}"), 415)
    yield one("page: a body without a type", _post(_sized(), kind=""), 415)
    yield one(
        "header: h2c", _post(_sized(), "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: x"), 200
    )
    upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13", "sec-websocket-key: eA==")
    yield one("header: a web socket", _http("GET /v1/models HTTP/1.1", *upgrade), 200)
    yield one("header: expect", _post(_sized(), "expect: 100-continue"), 100, 200)
    yield one("header: a wrong traceparent", _post(_sized(), "traceparent: " + "f" * 60_000), 200)
    yield one("header: an unknown debug", _post(_sized(), "x-kvferry-debug: drop table"), 200)
    yield one("header: a key that is not asked for", _post(_sized(), "authorization: Bearer \xff\xfe"), 200)
    yield one("header: a content encoding", _post(_sized(b"\x1f\x8b"), "content-encoding: gzip", body=b"\x1f\x8b"), 400)
    yield Request("pipelining: at the limit", _GET * (MAX_PIPELINED + 1), ((200,),) * (MAX_PIPELINED + 1))
    yield Request("pipelining: a fault after two", _GET * 2 + b"\x00\r\n\r\n", ((200,), (200,), (*_REFUSED,)))
    yield Request("pipelining: two bodies", _post(_sized()) * 2, ((200,), (200,)))
    yield Request("an end after a request", _post(_sized()), ((200, CLOSED),), ends=True)
    yield Request("an end within a body", _post("content-length: 500"), ((400, 408, CLOSED),), ends=True)
    yield Request("an end within the headers", b"POST / HTTP/1.1\r\nhost", ((400, 408, CLOSED),), ends=True)
    yield Request("an end at once", b"", ((CLOSED,),), ends=True)
    yield Request("noise", bytes(range(256)) * 256, (_REFUSED,))


_SERVICE = "/kvferry.inference.v1.Inference/"
_GENERATE = pb.GenerateRequest(model=MODEL, text="one two", sampling=pb.Sampling(max_tokens=1))


def _calls() -> Iterator[Call]:
    def generate(name: str, code: str = "INVALID_ARGUMENT", **values: Any) -> Iterator[Call]:
        raw = pb.GenerateRequest(**{"model": MODEL, "text": "one two", **values}).SerializeToString()
        for method in ("Generate", "GenerateStream"):
            yield Call(f"{method}: {name}", _SERVICE + method, raw, code)

    def sampled(name: str, code: str = "INVALID_ARGUMENT", **values: Any) -> Iterator[Call]:
        yield from generate(name, code, sampling=pb.Sampling(**{"max_tokens": 1, **values}))

    for raw in (b"", b"\xff", b"\xff" * 100, b"\x08", b"\x0a\xff\xff\xff\xff\x0f", bytes(range(256)), b"{" * 100_000):
        for method in ("Generate", "GenerateStream", "Tokenize"):
            yield Call(f"{method}: {raw[:6]!r}", _SERVICE + method, raw, "INVALID_ARGUMENT|NOT_FOUND")
    yield from generate("no prompt", text=None)
    yield from generate("an unknown model", "NOT_FOUND", model="x" * 500_000)
    yield from generate("129 choices", num_choices=129)
    yield from generate("2^32 - 1 choices", num_choices=2**32 - 1)
    yield from generate("a regex", structured_output=pb.StructuredOutput(regex="a{1,10000}"))
    yield from generate("a schema that is none", structured_output=pb.StructuredOutput(json_schema="["))
    for name, values in {
        "temperature": {"temperature": float("nan")}, "top_p": {"top_p": float("inf")}, "top_k": {"top_k": -2},
        "max_tokens": {"max_tokens": 2**31}, "min_tokens": {"min_tokens": 2**31}, "logprobs": {"logprobs": 21},
        "stop": {"stop": ["x"] * 5}, "bad words": {"bad_words": ["x"] * 129}, "ids": {"stop_token_ids": [1] * 1025},
        "allowed": {"allowed_token_ids": [1] * 1025}, "bias": {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    }.items():  # fmt: skip
        yield from sampled(f"{name} over its limit", **values)
    yield from sampled("lists at their limits", "OK", stop=["x"] * 4, bad_words=["zz"] * 128, stop_token_ids=[7] * 1024)
    messages = [pb.Message(role="user", content="x")]
    for over, code in ((0, "OK"), (1, "INVALID_ARGUMENT")):
        chat = pb.Conversation(messages=messages * (MAX_MESSAGES + over))
        yield from generate(
            f"{MAX_MESSAGES + over} messages", code, text=None, conversation=chat, sampling=_GENERATE.sampling
        )
    yield from generate("a body over the limit", text="x" * (MAX_BODY_BYTES + 1))
    yield from generate("a message that gRPC refuses", "RESOURCE_EXHAUSTED", text="x" * (3 * MAX_BODY_BYTES))
    good = _GENERATE.SerializeToString()
    yield Call("an unknown method", _SERVICE + "Delete", good, "UNIMPLEMENTED")
    yield Call("an unknown service", "/x.Y/Z", good, "UNIMPLEMENTED")
    yield Call("no method", "/", good, "UNIMPLEMENTED")
    yield Call("a long method", "/" + "x" * 4000 + "/y", good, "UNIMPLEMENTED|RESOURCE_EXHAUSTED")
    long = (("x-long", "y" * 60_000),)
    yield Call("metadata over the limit", _SERVICE + "Generate", good, "RESOURCE_EXHAUSTED", long)
    many = tuple((f"x-{i}", "y" * 100) for i in range(500))
    yield Call("500 metadata entries", _SERVICE + "Generate", good, "RESOURCE_EXHAUSTED", many)
    yield Call("binary metadata", _SERVICE + "Generate", good, "OK", (("x-bin", bytes(range(256))),))
    yield Call("an unknown service's health", "/grpc.health.v1.Health/Check", b"\x0a\x05hello", "NOT_FOUND")
    yield Call("health with noise", "/grpc.health.v1.Health/Check", b"\xff" * 1000, "INVALID_ARGUMENT")
    yield Call("a good call", _SERVICE + "Generate", good, "OK")


BODIES = tuple(_bodies())
REQUESTS = tuple(_requests())
CALLS = tuple(_calls())
