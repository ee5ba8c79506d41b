"""Bodies of bench-isolation: no two of a kind are equal, and images are files that decoders read."""

from __future__ import annotations

import json
import struct
import zlib

import pytest

from bench import abuse_bodies as bodies
from bench.abuse_bodies import Body


@pytest.mark.parametrize(
    "body",
    [
        *(bodies.short, bodies.stream, bodies.small_grammar, bodies.text, bodies.small_image),
        *(bodies.many_patterns, bodies.many_objects, bodies.hostile_text),
    ],
)
def test_no_cache_answers_two_bodies_of_a_kind(body: Body) -> None:
    assert len({json.dumps(body(number)) for number in range(20)}) == 20


def test_texts_wait_in_the_line_of_long_texts() -> None:
    assert len(bodies.text(1)["prompt"]) > 2_000
    assert len(bodies.hostile_text(1)["prompt"]) > 16 * bodies.CONTEXT


def test_an_image_is_a_black_square_with_a_comment() -> None:
    file = bodies.png(5, "one")
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, rest = {}, file[8:]
    while rest:
        length, kind = struct.unpack(">I4s", rest[:8])
        data = rest[8 : 8 + length]
        assert struct.unpack(">I", rest[8 + length : 12 + length]) == (zlib.crc32(kind + data),)
        chunks[kind], rest = data, rest[12 + length :]
    assert list(chunks) == [b"IHDR", b"tEXt", b"IDAT", b"IEND"]
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (5, 5)
    assert zlib.decompress(chunks[b"IDAT"]) == bytes(5 * (1 + 3 * 5))
    assert bodies.png(5, "two") != file
