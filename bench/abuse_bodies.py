"""Bodies of requests that attack what tenants share, and those of an innocent tenant that needs the same."""

from __future__ import annotations

import base64
import functools
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from bench.live_cluster import MODEL

Body = Callable[[int], Mapping[str, Any]]  # of the request with this number, of this process

MAX_N = 128  # choices of one prompt
CHOICE_TOKENS = 1024  # they hold their slots of the batch for a window
LONG_PROMPT_TOKENS = 4000
LONG_ANSWER_TOKENS = 512
STREAM_TOKENS = 4096  # longer than a window
CONTEXT = 8192  # tokens, of simulated engines and of the model whose prompts are rendered
HOSTILE_TEXT_CHARS = 16 * CONTEXT  # as much of a text as a gateway tokenizes before it refuses it
HOSTILE_PATTERNS = 12  # that one string has to fit
HOSTILE_OBJECTS, HOSTILE_PROPERTIES = 60, 20
HOSTILE_IMAGE_PIXELS = 4000  # each way: about gateway.images.max_pixels

PROMPT_TOKENS = 32
ANSWER_TOKENS = 16
STREAM_ANSWER_TOKENS = 128  # 26 streams at once, of 20 that begin in a second: more than the slots kept free for others
QUESTION_CHARS = 1800  # about 400 tokens
TEXT_CHARS = 3000  # texts of more than 2,000 characters need the line of texts
IMAGE_PIXELS = 64
_NOUNS = ("river", "engine", "window", "garden", "letter", "market", "winter", "bridge", "teacher", "mountain", "paper")
_VERBS = ("carries", "opens", "follows", "answers", "holds", "leaves", "turns")


def completion(prompt: str | list[str], max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


# --- The innocent: streamed, with something new in each request, so that no cache answers it.


def short(number: int) -> dict[str, Any]:
    prompt = f"innocent {_unique(number)} " + " ".join(f"v{i}" for i in range(PROMPT_TOKENS - 2))
    return completion(prompt, ANSWER_TOKENS, stream=True)


def stream(number: int) -> dict[str, Any]:
    return short(number) | {"max_tokens": STREAM_ANSWER_TOKENS}


def small_grammar(number: int) -> dict[str, Any]:
    name = f"p{_unique(number)}"
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
    return completion(_question(number), ANSWER_TOKENS, stream=True, **_json_schema(schema))


def text(number: int) -> dict[str, Any]:
    return completion(f"{_unique(number)} {_words(TEXT_CHARS)}", ANSWER_TOKENS, stream=True)


def small_image(number: int) -> dict[str, Any]:
    return _chat_with_image(number, IMAGE_PIXELS, _question(number))


# --- Attacks.


def choices(num_choices: int) -> Body:
    def body(number: int) -> dict[str, Any]:
        prompts = [f"{number} choices {i}" for i in range(num_choices // MAX_N + (num_choices % MAX_N > 0))]
        return completion(prompts, CHOICE_TOKENS, n=num_choices // len(prompts), stream=True)

    return body


def one_prompt(num_choices: int) -> Body:
    return lambda _: completion("one prompt", CHOICE_TOKENS, n=num_choices)


def tiny(number: int) -> dict[str, Any]:
    return completion(f"{number} a b c d e f g", 1)


def long(number: int) -> dict[str, Any]:
    words = " ".join(f"w{i}" for i in range(LONG_PROMPT_TOKENS - 1))
    return completion(f"{_unique(number)} {words}", LONG_ANSWER_TOKENS, stream=True)


def seeded_stream(number: int) -> dict[str, Any]:
    return completion(f"{_unique(number)} stream", STREAM_TOKENS, seed=number, stream=True) | {"temperature": 0.5}


def penalized_stream(number: int) -> dict[str, Any]:
    return completion(f"{_unique(number)} stream", STREAM_TOKENS, presence_penalty=0.001, stream=True)


def many_patterns(number: int) -> dict[str, Any]:
    """Return a schema that llguidance works on for about a second, then refuses."""
    patterns = [{"type": "string", "pattern": f".*{_unique(number)}a.{{{i}}}b.*"} for i in range(HOSTILE_PATTERNS)]
    return {**completion("hi", 1), **_json_schema({"allOf": patterns})}


def many_objects(number: int) -> dict[str, Any]:
    """Return a schema that is tried for some tenths of a second, then accepted."""
    bound = {"type": "integer", "minimum": 0, "maximum": 10**15 + number}
    objects = [
        {
            "type": "object",
            "properties": {f"p{i}": bound for i in range(first, first + HOSTILE_PROPERTIES)},
            "required": [f"p{first}"],
        }
        for first in range(HOSTILE_OBJECTS)
    ]
    return {**completion(f"{_unique(number)}", 1), **_json_schema({"anyOf": objects})}


def hostile_text(number: int) -> dict[str, Any]:
    return completion(f"{_unique(number)} {_words(HOSTILE_TEXT_CHARS)}", 1)


def hostile_image(number: int) -> dict[str, Any]:
    return {**_chat_with_image(number, HOSTILE_IMAGE_PIXELS, "What is it?"), "cache_salt": _unique(number)}


def _unique(number: int) -> str:
    return f"{os.getpid()}x{number}"


def _question(number: int) -> str:
    return f"{_unique(number)} {_words(QUESTION_CHARS)}"


@functools.cache
def _words(num_chars: int) -> str:
    return " ".join(f"{_NOUNS[i % len(_NOUNS)]} {_VERBS[i % len(_VERBS)]}" for i in range(num_chars))[:num_chars]


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _chat_with_image(number: int, pixels: int, question: str) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(pixels, _unique(number))).decode()
    parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": url}}]
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def png(pixels: int, comment: str) -> bytes:
    """Return the file of a black square, each with its comment: other bytes, whose preparation is not kept."""
    head = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"tEXt", b"Comment\0" + comment.encode()), (b"IDAT", _rows(pixels)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


@functools.cache
def _rows(pixels: int) -> bytes:
    return zlib.compress(bytes((1 + 3 * pixels) * pixels))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
