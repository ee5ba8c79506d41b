"""Shares of conversations: met, kept, and cheap to find."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.bodies.openai_bodies import chat_of, completion_of
from kvferry.gateway.canary import MESSAGES_CHARS, PREFIX_CHARS, PREFIX_TOKENS, beginning_of, diverted_to


def chosen(canary: dict[str, float], num: int = 4000, tenant: str = "t") -> Counter[str]:
    return Counter(diverted_to(canary, tenant, "a", lambda i=i: b"%d" % i) for i in range(num))  # type: ignore[misc]


def test_shares_are_met() -> None:
    counts = chosen({"b": 10, "c": 0.5, "d": 40})
    assert 320 <= counts["b"] <= 480
    assert 5 <= counts["c"] <= 45
    assert 1480 <= counts["d"] <= 1720


def test_all_of_it_is_all_of_it() -> None:
    assert chosen({"b": 100}) == Counter({"b": 4000})
    assert chosen({"b": 99.5, "c": 0.5})[""] == 0


@given(before=st.floats(1, 50), after=st.floats(1, 50), beginning=st.binary(max_size=20))
def test_a_growing_share_takes_no_conversation_back(before: float, after: float, beginning: bytes) -> None:
    low, high = sorted((before, after))
    if diverted_to({"b": low}, "t", "a", lambda: beginning):
        assert diverted_to({"b": high}, "t", "a", lambda: beginning)


def test_tenants_and_models_are_diverted_apart() -> None:
    def first(tenant: str, asked: str) -> list[str]:
        return [diverted_to({"b": 50}, tenant, asked, lambda i=i: b"%d" % i) for i in range(64)]  # type: ignore[misc]

    assert len({tuple(first(*each)) for each in (("t", "a"), ("u", "a"), ("t", "c"))}) == 3


def body(*contents: Any) -> Any:
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return chat_of({"model": "m", "messages": messages})


def test_all_turns_of_a_conversation_begin_alike_and_others_do_not() -> None:
    first = beginning_of(body("be brief", "hello"))
    assert beginning_of(body("be brief", "hello", "hi", "how are you?")) == first
    assert beginning_of(body("be brief", [{"type": "text", "text": "hello"}])) == first
    assert beginning_of(body("be brief", "goodbye")) != first
    assert beginning_of(body("be long", "hello")) != first


def test_beginnings_are_bounded() -> None:
    long = beginning_of(body("s" * 3 * MESSAGES_CHARS, "hello"))
    assert len(long) <= MESSAGES_CHARS + 16
    parts = [{"type": "text", "text": "x" * 100} for _ in range(3000)]
    assert len(beginning_of(body("s", parts))) <= MESSAGES_CHARS + 16 * 1000
    many = chat_of({"model": "m", "messages": [{"role": "assistant", "content": "x" * 100}] * 4096})
    assert len(beginning_of(many)) < 2 * MESSAGES_CHARS


def test_prompts_of_texts_and_tokens_have_a_beginning_too() -> None:
    def of(prompt: Any) -> bytes:
        return beginning_of(completion_of({"model": "m", "prompt": prompt}))

    assert of("a" * PREFIX_CHARS + "b") == of("a" * PREFIX_CHARS + "c") != of("a")
    assert of(["first", "second"]) == of("first")
    assert of([1] * PREFIX_TOKENS + [2]) == of([1] * PREFIX_TOKENS + [3]) == of([[1] * PREFIX_TOKENS, [9]]) != of([1])
    assert of("\ud800") == "\ud800".encode("utf-8", "surrogatepass")
