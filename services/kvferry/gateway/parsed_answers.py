"""Chat answers that a worker's parser takes apart: content, reasoning, tool calls.

Field names are vLLM's where OpenAI has none (`reasoning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.engine.base import AnswerDelta, EngineOutput, FinishReason, ToolCallDelta
from kvferry.gateway.answers import ChatFormat, Choice, encode


@dataclass(slots=True)
class GatheredCall:
    """One tool call, put together from its pieces."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ParsedChoice(Choice):
    """One choice, gathered from its deltas; its raw text is not kept."""

    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, GatheredCall] = field(default_factory=dict)  # index -> call
    made_calls: bool = False

    def add(self, output: EngineOutput) -> None:
        delta = output.delta
        if delta is not None:
            if delta.content:
                self.text.append(delta.content)
            if delta.reasoning:
                self.reasoning.append(delta.reasoning)
            for piece in delta.tool_calls:
                call = self.calls.setdefault(piece.index, GatheredCall())
                call.id = piece.id or call.id
                call.name = piece.name or call.name
                call.arguments.append(piece.arguments)
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        self.note(output)

    def add_text(self, token_ids: Sequence[int], text: str) -> None:
        self.num_tokens += len(token_ids)

    def note(self, output: EngineOutput) -> None:
        # Not super(): a dataclass with slots is another class than the one that was written.
        Choice.note(self, output)
        if output.delta is not None and output.delta.tool_calls:
            self.made_calls = True

    def message(self) -> dict[str, Any]:
        content = "".join(self.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            if not content.strip():
                message["content"] = None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for _, call in sorted(self.calls.items())
            ]
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        return message


class ParsedChatFormat(ChatFormat):
    """`choice` arguments are ParsedChoice."""

    # What an answer that called tools ended with, where it would be "stop".
    finish_of_calls = "tool_calls"

    def chunk(self, index: int, output: EngineOutput) -> bytes:
        logprobs = b"null"
        if output.logprobs is not None:
            logprobs = self._logprobs_json(index, output.logprobs)
        delta = b"{}" if output.delta is None else encode(_delta_json(output.delta))
        return self._choice(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}' % (index, delta, logprobs))

    def _finish_reason(self, choice: Choice) -> str | None:
        assert isinstance(choice, ParsedChoice)
        if choice.made_calls and choice.finish_reason == FinishReason.STOP:
            return self.finish_of_calls
        return choice.finish_reason

    def _message(self, choice: Choice) -> dict[str, Any]:
        assert isinstance(choice, ParsedChoice)
        return choice.message()


class NamedCallFormat(ParsedChatFormat):
    """For a request that names the tool to call: OpenAI, and vLLM, say "stop" there."""

    finish_of_calls = "stop"


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
