"""Choices of an answer while they are collected, whatever the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.engine.base import EngineOutput


@dataclass(slots=True)
class Usage:
    """Token counts of an answer. A prompt counts once for all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Choice:
    text: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    # Tokens given when a worker was lost, for each loss; the request's record has the same list.
    resumed_after: list[int] = field(default_factory=list)

    def add(self, output: EngineOutput) -> None:
        if output.text:
            self.text.append(output.text)
        self.note(output)

    def add_text(self, token_ids: Sequence[int], text: str) -> None:
        self.num_tokens += len(token_ids)
        self.text.append(text)

    def note(self, output: EngineOutput) -> None:
        """Keep only counts and the end, for text already sent."""
        self.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            self.stop_reason = output.stop_reason


@dataclass(slots=True)
class GatheredCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ParsedChoice(Choice):
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
        self.note(output)

    def add_text(self, token_ids: Sequence[int], text: str) -> None:
        self.num_tokens += len(token_ids)

    def note(self, output: EngineOutput) -> None:
        # Not super(): a dataclass with slots is another class than the one that was written.
        Choice.note(self, output)
        if output.delta is not None and output.delta.tool_calls:
            self.made_calls = True
