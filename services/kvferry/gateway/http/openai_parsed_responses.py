"""Chat answers that a worker parses into content, reasoning and tool calls.

Field names are OpenAI's, else vLLM's (`reasoning`).
"""

from __future__ import annotations

from typing import Any

from kvferry.engine.base import AnswerDelta, EngineOutput, FinishReason, ToolCallDelta
from kvferry.gateway.choices import Choice, ParsedChoice
from kvferry.gateway.http.openai_responses import ChatFormat, encode


class ParsedChatFormat(ChatFormat):
    """A ChatFormat whose `choice` arguments are ParsedChoice."""

    # What an answer that called tools ended with, where it would be "stop".
    finish_of_calls = "tool_calls"

    def chunk(self, index: int, output: EngineOutput) -> bytes:
        logprobs = b"null"
        if output.logprobs is not None:
            logprobs = encode(self._logprobs_of(index, output.logprobs))
        delta = b"{}" if output.delta is None else encode(_delta_json(output.delta))
        return self._choice(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}' % (index, delta, logprobs))

    def _finish_reason(self, choice: Choice) -> str | None:
        assert isinstance(choice, ParsedChoice)
        if choice.made_calls and choice.finish_reason == FinishReason.STOP:
            return self.finish_of_calls
        return choice.finish_reason

    def _message(self, choice: Choice) -> dict[str, Any]:
        assert isinstance(choice, ParsedChoice)
        return message_json(choice)


class NamedCallFormat(ParsedChatFormat):
    """For a named tool, OpenAI and vLLM give the finish reason "stop"."""

    finish_of_calls = "stop"


def message_json(choice: ParsedChoice) -> dict[str, Any]:
    content = "".join(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if choice.calls:
        if not content.strip():
            message["content"] = None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for _, call in sorted(choice.calls.items())
        ]
    if choice.reasoning:
        message["reasoning"] = "".join(choice.reasoning)
    return message


def _delta_json(delta: AnswerDelta) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if delta.content:
        values["content"] = delta.content
    if delta.reasoning:
        values["reasoning"] = delta.reasoning
    if delta.tool_calls:
        values["tool_calls"] = list(map(_call_json, delta.tool_calls))
    return values


def _call_json(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {
        "index": piece.index,
        "id": piece.id,
        "type": "function",
        "function": {"name": piece.name, "arguments": piece.arguments},
    }
