"""Requests of a run, fixed before it begins: the same plan goes to every deployment that is compared.

Prompts are made of segments. A segment's key determines its content, so two prompts share exactly the tokens of the
segments they begin with alike; that is what makes the arithmetic of `floor.py` possible without a tokenizer.
"""

from __future__ import annotations

from typing import Literal, NewType

import msgspec

RequestId = NewType("RequestId", int)  # the request's index in `Plan.requests`


class Segment(msgspec.Struct, frozen=True):
    """`num_tokens` tokens of content that `key` determines."""

    key: str
    num_tokens: int


class AnswerOf(msgspec.Struct, frozen=True):
    """Answer of the server to an earlier request, word for word."""

    request_id: RequestId


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; `parts` follow one another."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[Segment | AnswerOf, ...]


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request is due at `arrival_s` or, if that is later, `pause_s` after the last of `after` has ended.

    Exactly one of `messages` (chat) and `tokens` (completions with token ids, for exact traces) is not empty.
    """

    request_id: RequestId
    session_id: str
    turn: int = 0  # place in its session, from 0
    tenant: str = ""
    arrival_s: float | None = None  # seconds from the start; None: as soon as `after` allows (closed loop: a free user)
    after: tuple[RequestId, ...] = ()
    pause_s: float = 0.0
    messages: tuple[Message, ...] = ()
    tokens: tuple[Segment, ...] = ()
    max_tokens: int
    tools: bool = False  # offers the tools of `content.TOOLS`


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Sound by construction of its generator: `check` says whether it is."""

    scenario: str
    seed: int
    requests: tuple[PlannedRequest, ...]
    warmup: frozenset[RequestId] = frozenset()  # sent, and left out of every figure
    notes: dict[str, int] = {}  # counts that a report should state, such as prompts that had to be cut

    def check(self) -> None:
        """Raises ValueError where the plan contradicts itself; a generator that makes such a plan is wrong."""
        for index, request in enumerate(self.requests):
            if request.request_id != index:
                raise ValueError(f"request {index} calls itself {request.request_id}")
            if bool(request.messages) == bool(request.tokens):
                raise ValueError(f"request {index} must have either messages or tokens")
            if request.max_tokens < 1:
                raise ValueError(f"request {index} asks for {request.max_tokens} tokens")
            answers = {
                part.request_id for message in request.messages for part in message.parts if isinstance(part, AnswerOf)
            }
            for earlier in (*request.after, *answers):
                if not 0 <= earlier < index:
                    raise ValueError(f"request {index} follows {earlier}, which does not come before it")
                if (earlier in self.warmup) != (index in self.warmup):
                    raise ValueError(f"request {index} follows {earlier}, of which one alone is warm-up")
            if not answers <= ancestors(self.requests, request):
                raise ValueError(f"request {index} uses an answer that it does not wait for")


def ancestors(requests: tuple[PlannedRequest, ...], request: PlannedRequest) -> set[RequestId]:
    """Every request that has ended when `request` is due."""
    found: set[RequestId] = set()
    waiting = list(request.after)
    while waiting:
        earlier = waiting.pop()
        if earlier not in found:
            found.add(earlier)
            waiting.extend(requests[earlier].after)
    return found
