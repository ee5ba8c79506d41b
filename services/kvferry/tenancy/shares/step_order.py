"""Which prompts one step of an engine computes, where prompts inside it have an order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Prompt = TypeVar("Prompt")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Prompt]):
    """A prompt that has begun, or that waits and may begin. `num_tokens` are left to compute, 1 at least."""

    prompt: Prompt
    due_ms: float
    num_tokens: int
    has_begun: bool


@dataclass(frozen=True, slots=True)
class StepOrder(Generic[Prompt]):
    """Changes of the step for prompts that have begun: `paused` ones are skipped. No prompt may have more than
    `max_tokens` of it; None: as many as are left.
    """

    paused: Sequence[Prompt] = ()
    max_tokens: int | None = None


def step_order(candidates: Sequence[Candidate[Prompt]], num_tokens: int) -> StepOrder[Prompt]:
    """Divide a step's tokens among prompts by `due_ms`, and in their order where that is equal."""
    # An engine gives tokens to prompts that have begun before those that wait. So prompts that have begun are left out
    # or cut short where waiting ones are due before them. Nothing changes where none is.
    ordered = sorted(candidates, key=lambda each: (each.due_ms, not each.has_begun))
    num_left, most_before = num_tokens, 0  # of tokens; the most that a waiting prompt may need
    paused: list[Prompt] = []
    max_tokens: int | None = None
    for each in ordered:
        if not each.has_begun:
            most_before = max(most_before, min(each.num_tokens, num_left))
            num_left -= min(each.num_tokens, num_left)
        elif not most_before:
            num_left -= min(each.num_tokens, num_left)
        elif num_left >= each.num_tokens:
            num_left -= each.num_tokens
        elif num_left < most_before:
            # What is left would also be the limit of those before it.
            paused.append(each.prompt)
            num_left = 0
        else:
            max_tokens, num_left = num_left, 0
    return StepOrder(tuple(paused), max_tokens)
