"""What is read out of an OpenAI stream, however its bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry_loadtest.stream import MAX_ERROR_CHARS, StreamReader, error_text

CHAT = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"Hel"}}]}\n\n'
    b": a comment\n\n"
    b'data: {"choices":[{"index":0,"delta":{"content":"lo \xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
    b"data: [DONE]\n\n"
)


@given(st.lists(st.integers(0, len(CHAT)), max_size=12), st.booleans())
def test_any_cut_reads_the_same(cuts: list[int], crlf: bool) -> None:
    data = CHAT.replace(b"\n", b"\r\n") if crlf else CHAT
    edges = sorted({0, *cuts, len(data)})
    reader = StreamReader()
    for at_s, (begin, end) in enumerate(itertools.pairwise(edges)):
        reader.feed(data[begin:end], float(at_s))
    reader.finish()
    assert reader.error == ""
    assert reader.text == "Hello é"
    assert reader.finish_reason == "stop"
    assert reader.usage is not None
    assert reader.usage.prompt_tokens == 7
    assert reader.usage.cached_tokens == 4
    # The role alone is no token.
    assert len(reader.token_s) == 2
    assert reader.token_s == sorted(reader.token_s)


@pytest.mark.parametrize(
    "choice",
    [
        '{"text":" a"}',
        '{"delta":{"reasoning_content":"hm"}}',
        '{"delta":{"reasoning":"hm"}}',
        '{"delta":{"tool_calls":[{"index":0}]}}',
    ],
)
def test_whatever_a_client_would_show_is_a_token(choice: str) -> None:
    reader = StreamReader()
    reader.feed(f'data: {{"choices":[{choice}]}}\n\n'.encode(), 1.5)
    assert reader.token_s == [1.5]


def test_comments_are_no_tokens() -> None:
    """Servers send them to keep a silent connection open."""
    reader = StreamReader()
    reader.feed(b': keep-alive\n\n: keep-alive\n\ndata: {"choices":[{"text":"a"}]}\n\n: keep', 1.0)
    reader.feed(b"-alive\n\ndata: [DONE]\n\n", 2.0)
    reader.finish()
    assert (reader.token_s, reader.text, reader.error) == ([1.0], "a", "")


def test_an_error_in_the_stream_is_the_streams() -> None:
    reader = StreamReader()
    reader.feed(b'data: {"error":{"message":"the worker was lost","code":500}}\n\ndata: [DONE]\n\n', 0.0)
    reader.finish()
    assert reader.error == "the worker was lost"


def test_a_stream_that_stops_is_no_answer() -> None:
    reader = StreamReader()
    reader.feed(b'data: {"choices":[{"text":"a"}]}\n\n', 0.0)
    reader.finish()
    assert reader.error == "the stream ended without its end"


def test_nonsense_is_named() -> None:
    reader = StreamReader()
    reader.feed(b"data: {]\n\n", 0.0)
    reader.finish()
    assert reader.error.startswith("an event that cannot be read: ")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too\\n much","type":"x"}}', "too much"),
        (b'{"error":"plain"}', "plain"),
        (b'{"object":"error","message":"old shape"}', "old shape"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b"<html>502</html>", "<html>502</html>"),
        (b"", ""),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"x" * 500, "x" * (MAX_ERROR_CHARS - 1) + "…"),
    ],
)
def test_error_bodies_of_all_shapes(body: bytes, text: str) -> None:
    assert error_text(body) == text
