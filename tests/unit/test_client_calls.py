"""What becomes of a client's arguments before they are sent."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.inference.v1 import inference_pb2 as pb
from kvferry_client import Client, Message, Tool
from kvferry_client.calls import generate_request, tokenize_request

HALF = "an emoji \ud83d cut in two"


def request_of(model: str = "m", **values: Any) -> pb.GenerateRequest:
    prompts = {name: values.pop(name, None) for name in ("text", "messages", "token_ids")}
    options = {
        "tools": (),
        "tool_choice": "",
        "structured_output": None,
        "num_choices": 1,
        "return_token_ids": False,
        "cache_salt": None,
        "cache_ttl_s": None,
    }
    given = {name: values.pop(name, value) for name, value in options.items()}
    return generate_request(model, *prompts.values(), **given, sampling=values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"text": HALF}, "text"),
        ({"model": HALF, "text": "x"}, "model"),
        ({"text": "x", "stop": ["a", HALF]}, r"stop\[1\]"),
        ({"text": "x", "bad_words": (HALF,)}, r"bad_words\[0\]"),
        ({"text": "x", "cache_salt": HALF}, "cache_salt"),
        ({"messages": [("user", "x"), ("user", HALF)]}, r"messages\[1\]\[1\]"),
        ({"messages": [{"role": "user", "content": HALF}]}, r"messages\[0\]\['content'\]"),
        ({"messages": [{"role": HALF, "content": "x"}]}, r"messages\[0\]\['role'\]"),
        ({"messages": [("user", "x")], "tool_choice": HALF}, "tool_choice"),
    ],
)
def test_half_a_surrogate_pair_is_refused_with_its_place(values: dict[str, Any], field: str) -> None:
    half = r"'an emoji \\ud83d cut in two' cannot be sent: character 9 is half of a surrogate pair"
    with pytest.raises(ValueError, match=f"^{field}: {half}") as refused:
        request_of(**values)
    assert type(refused.value) is ValueError


def test_of_a_long_text_the_place_is_shown() -> None:
    with pytest.raises(ValueError, match="character 100000 is half") as refused:
        tokenize_request("m", "x" * 100_000 + "\udc00" + "y" * 100_000, None)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"text": 7}, "text: 7 cannot be sent"),
        ({"model": 7, "text": "x"}, "model: 7 cannot be sent"),
        ({"messages": [("user", 7)]}, r"messages\[0\]: \('user', 7\) cannot be sent"),
        ({"messages": [("user", "x"), {"colour": "red"}]}, r"messages\[1\]: .* no \"colour\" field"),
        ({"messages": "user"}, r"messages\[0\]: 'u' cannot be sent"),
    ],
)
def test_what_is_no_text_or_message_is_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        request_of(**values)


def test_arguments_become_the_fields_of_a_request() -> None:
    messages = [("user", "a"), {"role": "assistant", "tool_calls": [{"id": "1"}]}, Message(role="user")]
    request = request_of(messages=messages, tools=[Tool(name="t")], tool_choice="auto", stop=["q"], max_tokens=3)
    assert request == pb.GenerateRequest(
        model="m",
        num_choices=1,
        conversation=pb.Conversation(
            messages=[
                Message(role="user", content="a"),
                Message(role="assistant", tool_calls=[pb.ToolCall(id="1")]),
                Message(role="user"),
            ],
            tools=[Tool(name="t")],
            tool_choice="auto",
        ),
        sampling=pb.Sampling(stop=["q"], max_tokens=3),
    )
    empty = request_of(messages=[])
    assert empty.WhichOneof("prompt") == "conversation"
    assert tokenize_request("m", "", None).WhichOneof("prompt") == "text"


def test_a_client_refuses_half_a_surrogate_pair_without_a_call() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(ValueError, match=r"stop\[0\]"):
        client.generate("x", model="m", stop=["\ud800"])
