"""Prompt tokens of a plan that no cache can avoid computing, without sending it: a run's score is measured / floor.

The plan is replayed in the order of its planned times into a prefix cache without bounds that finds whole pages only.
Prompts share what their segments share; roles and tools count as beginnings that must be alike. What a chat template
adds per message counts where the scenario says how much that is: not knowing it, the floor is too low, by the more the
shorter the messages are. Answers have all of their `max_tokens`, and their text is assumed to become the same tokens
again when it comes back in a prompt.

Warm-up requests fill the cache and are not counted. For figures that contain them, such as a server's counters over a
whole run, take the floor of `msgspec.structs.replace(plan, warmup=frozenset())`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from kvferry_loadtest.plan import AnswerOf, Plan, PlannedRequest, RequestId
from kvferry_loadtest.result import Floor
from kvferry_loadtest.scenario import ChatTemplate

Item = tuple[str, int]  # key, number of tokens

_NO_TEMPLATE = ChatTemplate()


def floor_of(plan: Plan, page_tokens: int, template: ChatTemplate = _NO_TEMPLATE) -> Floor:
    """Shares are of the measured requests' prompt tokens; 0 where there are none. Time is linear in the plan's
    segments, a few microseconds for each.
    """
    with_answers, without_answers, within_sessions = _Prefixes(), _Prefixes(), _Prefixes()
    prompt_tokens = recompute = recompute_without_answers = recompute_within_sessions = 0
    # What nobody will look for is not kept, which spares traces two replays of three.
    reused = {part.request_id for request in plan.requests for part in _answers(request)}
    session_to_num_requests = Counter(request.session_id for request in plan.requests)
    for request in in_planned_order(plan):
        prompt = list(_prompt(plan, request, template))
        answer = [_answer(plan, request.request_id)] if request.request_id in reused else []
        num_tokens = sum(size for _, size in prompt)
        found = with_answers.find_and_add(prompt, answer)
        found_without_answers = without_answers.find_and_add(prompt, []) if reused else found
        found_within_sessions = 0
        if session_to_num_requests[request.session_id] > 1:
            session = (f"session/{request.session_id}", 0)
            found_within_sessions = within_sessions.find_and_add([session, *prompt], answer)
        if request.request_id not in plan.warmup:
            prompt_tokens += num_tokens
            recompute += num_tokens - found // page_tokens * page_tokens
            recompute_without_answers += num_tokens - found_without_answers // page_tokens * page_tokens
            recompute_within_sessions += num_tokens - found_within_sessions // page_tokens * page_tokens
    return Floor(
        page_tokens=page_tokens,
        prompt_tokens=prompt_tokens,
        recompute_tokens=recompute,
        recompute_share=recompute / max(1, prompt_tokens),
        recompute_share_without_answers=recompute_without_answers / max(1, prompt_tokens),
        recompute_share_within_sessions=recompute_within_sessions / max(1, prompt_tokens),
    )


def in_planned_order(plan: Plan) -> list[PlannedRequest]:
    """By the earliest time at which each may be due, were every answer instant; requests of one time, and all those of
    a closed loop, in the plan's order.
    """
    due_s: list[float] = []
    for request in plan.requests:
        if request.arrival_s is None and not request.after:
            return list(plan.requests)
        after_s = max((due_s[earlier] for earlier in request.after), default=0.0) + request.pause_s
        due_s.append(max(request.arrival_s or 0.0, after_s))
    return sorted(plan.requests, key=lambda request: due_s[request.request_id])


class _Prefixes:
    """Every sequence of items that was added, as a tree: (node, item) -> node."""

    def __init__(self) -> None:
        self._children: dict[tuple[int, str, int], int] = {}
        self._longest: dict[tuple[int, str], int] = {}  # tokens of the longest item of that key at that node

    def __repr__(self) -> str:
        return f"_Prefixes({len(self._children)} nodes)"

    def find_and_add(self, prompt: list[Item], answer: list[Item]) -> int:
        """How many tokens of `prompt` an earlier sequence began with alike; adds `prompt` with `answer` behind it."""
        node = found = 0
        for key, size in prompt:
            child = self._children.get((node, key, size))
            if child is None:
                # An item of the same key and another size begins alike. Below a new node there is nothing to find.
                found += min(size, self._longest.get((node, key), 0))
                child = self._add(node, key, size)
            else:
                found += size
            node = child
        for key, size in answer:
            child = self._children.get((node, key, size))
            node = self._add(node, key, size) if child is None else child
        return found

    def _add(self, node: int, key: str, size: int) -> int:
        child = self._children[node, key, size] = len(self._children) + 1
        if size > self._longest.get((node, key), 0):
            self._longest[node, key] = size
        return child


def _prompt(plan: Plan, request: PlannedRequest, template: ChatTemplate) -> Iterator[Item]:
    # Chat templates put tools first, so that prompts with and without them share nothing.
    if request.tools:
        yield "tools", 0
    for message in request.messages:
        yield _begin(message.role, template)
        for part in message.parts:
            yield _answer(plan, part.request_id) if isinstance(part, AnswerOf) else (f"={part.key}", part.num_tokens)
        yield "end", template.end
    if request.messages:
        yield _begin("assistant", template)
    for part in request.tokens:
        yield f"={part.key}", part.num_tokens


def _answers(request: PlannedRequest) -> Iterator[AnswerOf]:
    return (part for message in request.messages for part in message.parts if isinstance(part, AnswerOf))


def _begin(role: Literal["system", "user", "assistant", "tool"], template: ChatTemplate) -> Item:
    """Where a message begins. Prompts of token ids have none."""
    return f"role/{role}", getattr(template, role)


def _answer(plan: Plan, request_id: RequestId) -> Item:
    return f"answer/{request_id}", plan.requests[request_id].max_tokens
