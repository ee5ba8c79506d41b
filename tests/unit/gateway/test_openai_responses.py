"""The bytes of answers: OpenAI's shape, whatever the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.engine.base import EngineOutput, FinishReason, TokenLogprob
from kvferry.errors import InvalidRequest, NoDecodeWorker
from kvferry.gateway.http.openai_responses import (
    ENCODED_AT_ONCE,
    JOINED_AT_ONCE,
    ChatFormat,
    Choice,
    CompletionFormat,
    Usage,
    error_body,
    error_chunk,
)

TEXTS = [
    "plain",
    "ünïcödé 漢字 😀",
    'quotes " and \\ back\\slashes',
    "\x00\x01\x1f\x7f control\t\r\n",
    "\u2028\u2029 line ends of JavaScript",
    "half a pair \ud83d and the other \udc00",
    "data: [DONE]\n\n",
]


def chat(*, with_usage: bool = False, num_top: int | None = None) -> ChatFormat:
    return ChatFormat("id-1", 7, 'a "model"', with_usage=with_usage, num_top=num_top)


def completion(*, with_usage: bool = False, num_top: int | None = None) -> CompletionFormat:
    return CompletionFormat("id-1", 7, 'a "model"', with_usage=with_usage, num_top=num_top)


def event(raw: bytes) -> dict[str, Any]:
    """The one event of a chunk."""
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    assert raw.count(b"\n\n") == 1, "text within an event must not end it"
    value: dict[str, Any] = json.loads(raw.removeprefix(b"data: "))
    return value


def logprob(text: str, value: float = -0.5, token_id: int = 1) -> TokenLogprob:
    return TokenLogprob(token_id, text, value)


@pytest.mark.parametrize("text", TEXTS)
def test_a_chat_chunk_is_json_of_openais_shape(text: str) -> None:
    value = event(chat().chunk(2, EngineOutput((1,), text)))
    assert value == {
        "id": "id-1",
        "object": "chat.completion.chunk",
        "created": 7,
        "model": 'a "model"',
        "choices": [{"index": 2, "delta": {"content": text}, "logprobs": None, "finish_reason": None}],
    }


@pytest.mark.parametrize("text", TEXTS)
def test_a_completion_chunk_is_json_of_openais_shape(text: str) -> None:
    value = event(completion().chunk(0, EngineOutput((1,), text)))
    assert value == {
        "id": "id-1",
        "object": "text_completion",
        "created": 7,
        "model": 'a "model"',
        "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}],
    }


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [chat, completion])
async def test_whole_answers_logprobs_and_stop_reasons_take_any_text(make: Any, text: str) -> None:
    fmt = make(num_top=1)
    output = EngineOutput((1,), text, [[logprob(text)]], finish_reason=FinishReason.STOP, stop_reason=text)
    choice = Choice()
    choice.add(output)
    fmt.keep_logprobs(0, output.logprobs)
    whole = json.loads(b"".join(fmt.whole([choice], Usage(3, 1), {"reason": text})))
    (said,) = whole["choices"]
    assert (said["text"] if make is completion else said["message"]["content"]) == text
    assert (said["finish_reason"], said["stop_reason"]) == ("stop", text)
    assert whole["usage"]["total_tokens"] == 4
    assert event(fmt.chunk(0, output))["choices"][0]["logprobs"] is not None
    assert event(fmt.last_chunk(0, choice))["choices"][0]["stop_reason"] == text


def test_the_first_chat_chunk_names_the_role_and_the_last_the_reason() -> None:
    (first,) = event(chat().first_chunk(1))["choices"]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert completion().first_chunk(1) == b""
    choice = Choice(finish_reason="length")
    (last,) = event(chat().last_chunk(1, choice))["choices"]
    assert (last["index"], last["delta"], last["finish_reason"], last["stop_reason"]) == (1, {}, "length", None)
    (last,) = event(completion().last_chunk(1, choice))["choices"]
    assert (last["index"], last["text"], last["finish_reason"]) == (1, "", "length")


@pytest.mark.parametrize("make", [chat, completion])
def test_usage_is_null_in_every_chunk_but_the_last_where_it_was_asked_for(make: Any) -> None:
    fmt = make(with_usage=True)
    output = EngineOutput((1,), "x")
    chunks = [fmt.first_chunk(0), fmt.chunk(0, output), fmt.last_chunk(0, Choice(finish_reason="stop"))]
    for chunk in filter(None, chunks):
        value = event(chunk)
        assert "usage" in value
        assert value["usage"] is None
    closing = event(fmt.closing_chunk(Usage(5, 2, 3), None))
    assert closing["choices"] == []
    assert closing["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    without = make()
    for chunk in filter(None, [without.first_chunk(0), without.chunk(0, output)]):
        assert "usage" not in event(chunk)


async def test_text_offsets_go_on_from_chunk_to_chunk_for_each_choice_apart() -> None:
    fmt = completion(num_top=1)
    tokens = ["ab", "ü", "😀", "c"]

    def said(index: int, texts: list[str]) -> dict[str, Any]:
        output = EngineOutput([1] * len(texts), "".join(texts), [[logprob(text)] for text in texts])
        logprobs: dict[str, Any] = event(fmt.chunk(index, output))["choices"][0]["logprobs"]
        return logprobs

    assert said(0, tokens[:2])["text_offset"] == [0, 2]
    assert said(1, tokens[:1])["text_offset"] == [0]
    assert said(0, tokens[2:])["text_offset"] == [3, 4]
    assert said(1, tokens[1:2])["text_offset"] == [2]

    gathered = completion(num_top=1)
    gathered.keep_logprobs(0, [[logprob(text)] for text in tokens[:1]])
    gathered.keep_logprobs(0, [[logprob(text)] for text in tokens[1:]])
    whole = json.loads(b"".join(gathered.whole([Choice()], Usage(), None)))
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3, 4]
    assert whole["choices"][0]["logprobs"]["tokens"] == tokens


@pytest.mark.parametrize("num_top", [0, 2])
def test_as_many_top_logprobs_as_were_asked_for_most_likely_first(num_top: int) -> None:
    position = [logprob("sampled", -3.0, 1), logprob("best", -0.1, 2), logprob("second", -1.0, 3)]
    output = EngineOutput((1,), "sampled", [position])
    (content,) = event(chat(num_top=num_top).chunk(0, output))["choices"][0]["logprobs"]["content"]
    assert (content["token"], content["logprob"]) == ("sampled", -3.0)
    assert bytes(content["bytes"]) == b"sampled"
    assert [entry["token"] for entry in content["top_logprobs"]] == ["best", "second"][:num_top]
    logprobs = event(completion(num_top=num_top).chunk(0, output))["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == ([{"best": -0.1, "second": -1.0}] if num_top else None)


@pytest.mark.parametrize("make", [chat, completion])
def test_a_logprob_of_minus_infinity_is_a_number(make: Any) -> None:
    """Tokens that a request forbids have it; JSON has no infinity and clients expect a number."""
    output = EngineOutput((1,), "x", [[logprob("x"), logprob("never", float("-inf"), 2)]])
    logprobs = event(make(num_top=2).chunk(0, output))["choices"][0]["logprobs"]
    top = logprobs["content"][0]["top_logprobs"][1]["logprob"] if make is chat else logprobs["top_logprobs"][0]["never"]
    assert top == -9999.0


def test_an_error_has_openais_shape_in_a_body_and_in_an_event() -> None:
    error = InvalidRequest('no "such" \ud800 thing', param="n")
    assert json.loads(error_body(error)) == {
        "error": {
            "message": 'no "such" \ud800 thing',
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_request",
        }
    }
    assert event(error_chunk(NoDecodeWorker("nobody")))["error"]["code"] == "no_decode_worker"


@pytest.mark.parametrize("make", [chat, completion])
def test_log_probabilities_are_joined_as_they_come(make: Any) -> None:
    fmt = make(num_top=1)
    texts = [f"token {i} " + "x" * 100 for i in range(5_000)]
    for i in range(2):
        for text in texts:
            fmt.keep_logprobs(i, [[logprob(text)]])
    pieces = fmt.whole([Choice(), Choice(), Choice()], Usage(), None)
    num_fields = 1 if make is chat else 4
    joined_at_once = ENCODED_AT_ONCE * JOINED_AT_ONCE
    assert len(pieces) < 2 * num_fields * (len(texts) / joined_at_once + JOINED_AT_ONCE + 5)
    assert max(map(len, pieces)) < 2_000 * joined_at_once
    choices = json.loads(b"".join(pieces))["choices"]
    for choice, expected in zip(choices, (texts, texts, []), strict=True):
        logprobs = choice["logprobs"]
        said = [entry["token"] for entry in logprobs["content"]] if make is chat else logprobs["tokens"]
        assert said == expected
