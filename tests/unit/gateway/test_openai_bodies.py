"""Bad bodies are refused by name; what a client must not set is dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import MAX_ERROR_BYTES, MAX_PARAM_BYTES, InvalidRequest
from kvferry.gateway.bodies.openai_bodies import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
    MAX_TOOL_CALLS,
    for_renderer,
    read_chat,
    read_completion,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**changes: Any) -> bytes:
    return json.dumps({**CHAT, **changes}).encode()


def completion(**changes: Any) -> bytes:
    return json.dumps({**COMPLETION, **changes}).encode()


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def called(name: str, arguments: str, role: str = "assistant") -> dict[str, Any]:
    call = {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": role, "content": "", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("body", "says", "param"),
    [
        (b"", "the body is empty", None),
        (b" \n", "the body is empty", None),
        (b"{", "not valid JSON", None),
        (b"\xff\xfe", "not valid JSON", None),
        (b"[]", "must be a JSON object, not an array", None),
        (b"{}", "model is required", "model"),
        (chat(messages=[]), "messages: expected `array` of length >= 1", "messages"),
        (chat(messages="hi"), "messages: expected `array`, got `str`", "messages"),
        (chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role: expected one of", "messages[0].role"),
        (chat(messages=[{"role": "user"}]), "messages[0].content is required", "messages[0].content"),
        (
            chat(messages=[{"role": "user", "content": 5}]),
            "expected a string or a list of parts",
            "messages[0].content",
        ),
        (
            chat(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]),
            "expected 'text' or 'image_url', not 'input_audio'",
            "messages[0].content[0].type",
        ),
        (chat(max_tokens="many"), "max_tokens: expected `int | null`, got `str`", "max_tokens"),
        (chat(max_tokens=0), "max_tokens: expected `int` >= 1", "max_tokens"),
        (chat(temperature=3), "temperature: expected `float` <= 2", "temperature"),
        (chat(temperature=-0.1), "temperature: expected `float` >= 0", "temperature"),
        (chat(n=0), "n: expected `int` >= 1", "n"),
        (chat(stream="yes"), "stream: expected `bool | null`, got `str`", "stream"),
        (chat(top_logprobs=3), "top_logprobs needs logprobs: true", "top_logprobs"),
        (chat(logit_bias={"a": 1}), "'a' is not a token id", "logit_bias"),
        (chat(tools=[{"type": "function"}]), "missing required field `function`", "tools[0]"),
        (chat(tools=[{"type": "web_search"}]), "invalid enum value 'web_search'", "tools[0].type"),
        (chat(tools=[tool("")]), "expected `str` of length >= 1", "tools[0].function.name"),
        (chat(tools=[tool("f")] * 129), "expected `array` of length <= 128", "tools"),
        (chat(tools=[tool("f")], tool_choice="any"), "invalid enum value 'any'", "tool_choice"),
        (chat(tools=[tool("f")], tool_choice=named("g")), "'g' is not one of the tools (f)", "tool_choice"),
        (chat(tool_choice="required"), "tool_choice needs tools", "tool_choice"),
        (chat(functions=[{"name": "f"}]), "functions is not supported", "functions"),
        (chat(messages=[{"role": "function", "content": "x"}]), "use tools", "messages[0]"),
        (chat(messages=[{"role": "tool", "content": "x"}]), "expected a string", "messages[0].tool_call_id"),
        (chat(messages=[called("f", "{", role="user")]), "only messages of the assistant", "messages[0].tool_calls"),
        (
            chat(messages=[called("f", "{")]),
            "not valid JSON",
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            chat(messages=[called("f", "[1]")]),
            "expected a JSON object, not an array",
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            chat(messages=[{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}]),
            "missing required field `function`",
            "messages[0].tool_calls[0]",
        ),
        (
            chat(messages=[{"role": "assistant", "content": "x", "reasoning": 5}]),
            "expected a string",
            "messages[0].reasoning",
        ),
        (chat(frobnicate=1), "unrecognized request argument: frobnicate", "frobnicate"),
        (chat(stream_options={"include_usage": True, "x": 1}), "unknown field `x`", "stream_options"),
    ],
)
def test_bad_chat_bodies(body: bytes, says: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_chat(body)
    assert says.lower() in refused.value.message.lower()
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (json.dumps({"model": "m"}).encode(), "prompt is required"),
        (completion(prompt=""), "must not be empty"),
        (completion(prompt=[]), "must not be empty"),
        (completion(prompt=["a", 1]), "a list of one kind"),
        (completion(prompt=[[]]), "at least one"),
        (completion(prompt=[1, -1]), "none negative"),
        (completion(prompt=["a", ""]), "no part may be empty"),
        (completion(echo=True), "echo is not supported"),
        (completion(best_of=2), "best_of is not supported"),
        (completion(logprobs=True), "logprobs: expected"),
    ],
)
def test_bad_completion_bodies(body: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match="(?i)" + says):
        read_completion(body)


USER = {"role": "user", "content": "x"}
PART = {"type": "text", "text": "x"}
CALL = called("f", "{}")["tool_calls"][0]


@pytest.mark.parametrize(
    ("field", "most", "param"),
    [
        (lambda count: {"stop": ["x"] * count}, MAX_STOP_STRINGS, "stop"),
        (lambda count: {"stop": "x" * count}, MAX_STOP_CHARS, "stop"),
        (lambda count: {"stop": ["x" * count]}, MAX_STOP_CHARS, "stop[0]"),
        (lambda count: {"bad_words": ["x"] * count}, MAX_BAD_WORDS, "bad_words"),
        (lambda count: {"bad_words": ["x" * count]}, MAX_BAD_WORD_CHARS, "bad_words[0]"),
        (lambda count: {"stop_token_ids": [1] * count}, MAX_TOKEN_IDS, "stop_token_ids"),
        (lambda count: {"allowed_token_ids": [1] * count}, MAX_TOKEN_IDS, "allowed_token_ids"),
        (lambda count: {"logit_bias": {str(i): 1.0 for i in range(count)}}, MAX_TOKEN_IDS, "logit_bias"),
        (lambda count: {"messages": [USER] * count}, MAX_MESSAGES, "messages"),
        (lambda count: {"messages": [{"role": "user", "content": [PART] * count}]}, MAX_PARTS, "messages"),
        (
            lambda count: {
                "messages": [{"role": "user", "content": [PART] * half} for half in (count // 2, -(-count // 2))]
            },
            MAX_PARTS,
            "messages",
        ),
        (lambda count: {"messages": [{"role": "assistant", "tool_calls": [CALL] * count}]}, MAX_TOOL_CALLS, "messages"),
    ],
)
def test_lists_and_texts_have_limits(field: Any, most: int, param: str) -> None:
    read_chat(chat(**field(most)))
    with pytest.raises(InvalidRequest, match=str(most)) as refused:
        read_chat(chat(**field(most + 1)))
    assert refused.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        chat(**{"x" * 100_000: 1}),
        chat(tool_choice="x" * 100_000),
        chat(logit_bias={"x" * 100_000: 1}),
        chat(messages=[{"role": "x" * 100_000, "content": ""}]),
        chat(messages=[{"role": "user", "content": [{"type": "x" * 100_000}]}]),
        chat(tools=[tool(f"{i}" + "x" * 100) for i in range(128)], tool_choice=named("g" * 100_000)),
    ],
)
def test_errors_repeat_little_of_a_body(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_chat(body)
    assert len(refused.value.message.encode()) <= MAX_ERROR_BYTES
    assert len((refused.value.param or "").encode()) <= MAX_PARAM_BYTES


def test_what_only_the_cluster_may_set_is_dropped_not_refused() -> None:
    body = read_chat(chat(kv_transfer_params={"remote_host": "evil"}, priority=-5))
    assert for_renderer(body) == {"messages": CHAT["messages"]}


def test_a_cache_salt_is_for_the_gateway() -> None:
    body = read_chat(chat(cache_salt="a" * MAX_CACHE_SALT_CHARS))
    assert body.cache_salt == "a" * MAX_CACHE_SALT_CHARS
    assert for_renderer(body) == {"messages": CHAT["messages"]}


@pytest.mark.parametrize(
    "salt", ["", "a" * (MAX_CACHE_SALT_CHARS + 1), 7, ["a"]], ids=["empty", "long", "number", "list"]
)
def test_a_cache_salt_that_is_none_is_refused_by_name(salt: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_chat(chat(cache_salt=salt))
    assert refused.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("fields", "wanted_s"),
    [
        ({}, None),
        ({"cache_ttl_s": None}, None),
        ({"cache_ttl_s": 0}, 0.0),
        ({"cache_ttl_s": 0.5}, 0.5),
        ({"cache_ttl_s": 86400}, 86400.0),
        ({"prompt_cache_retention": "24h"}, 86400.0),
        ({"prompt_cache_retention": "24h", "cache_ttl_s": 60}, 60.0),
        ({"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}, None),
        ({"prompt_cache_retention": {"later": "kinds"}}, None),
    ],
)
def test_how_long_pages_are_wanted_is_for_the_cluster(fields: dict[str, object], wanted_s: float | None) -> None:
    for body in (read_chat(chat(**fields)), read_completion(completion(prompt="x", **fields))):
        assert body.wanted_s == wanted_s
        assert for_renderer(body).keys() <= {"messages", "prompt"}


@pytest.mark.parametrize("value", [-1, -0.001, 86400.1, 1e308, "60", [60], True])
def test_a_time_that_no_page_may_be_wanted_for_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_chat(chat(cache_ttl_s=value))
    assert refused.value.param == "cache_ttl_s"


def test_what_changes_nothing_and_explicit_nulls_are_accepted() -> None:
    body = read_chat(chat(user="u", metadata={}, tools=[], n=None, seed=None, stop=None, logprobs=None))
    assert for_renderer(body) == {"messages": CHAT["messages"]}


@pytest.mark.parametrize("choice", ["none", "auto", "required", named("f")])
def test_tools_and_calls_reach_the_renderer_as_they_are(choice: Any) -> None:
    asked = {
        "tools": [tool("f", description="d", parameters={"type": "object", "properties": {}}), tool("g")],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "include_reasoning": False,
        "messages": [
            {"role": "user", "content": "hi"},
            {**called("f", '{"a": 1}'), "reasoning": "because"},
            {"role": "tool", "tool_call_id": "call-1", "content": "5"},
        ],
    }
    assert for_renderer(read_chat(chat(**asked))) == asked


@pytest.mark.parametrize("changes", [{}, {"tools": []}, {"tools": None}])
@pytest.mark.parametrize("choice", ["none", "auto", None])
def test_without_tools_there_is_nothing_to_choose(changes: dict[str, Any], choice: str | None) -> None:
    body = read_chat(chat(**changes, tool_choice=choice, parallel_tool_calls=True))
    assert for_renderer(body) == {"messages": CHAT["messages"]}


def test_what_shapes_the_answer_reaches_the_renderer() -> None:
    asked = {"temperature": 0.5, "seed": 4, "stop": ["x"], "max_tokens": 3, "logit_bias": {"7": -1.0}, "top_k": 4}
    assert for_renderer(read_completion(completion(**asked))) == {"prompt": "hi", **asked}
