"""Shares of a model's requests that another model answers. Pure."""

# The share is of conversations, not of requests: all turns of a conversation have to find its pages on the same
# engines. So a hash of the tenant and of the conversation's beginning decides, alike on every gateway and after every
# restart, and nothing is kept. The share of requests is met over many conversations.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
import xxhash

from kvferry.gateway.bodies.openai_bodies import ChatBody, CompletionBody

# A prompt without messages is assigned by its beginning of this length: a longer prompt with the same beginning counts
# as its next turn. One turn of a shorter prompt may move to the other model, which recomputes at most this much.
PREFIX_CHARS = 4096
PREFIX_TOKENS = 1024
# A conversation is assigned by its messages up to this length.
MESSAGES_CHARS = 64 << 10


def diverted_to(canary: Mapping[str, float], tenant: str, asked: str, conversation: Callable[[], bytes]) -> str:
    """Return who answers instead of `asked`; empty for itself. `canary` has per cent by model."""
    digest = xxhash.xxh3_64()
    for part in (tenant.encode(), asked.encode(), conversation()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    point = (digest.intdigest() >> 11) / (1 << 53) * 100  # below 100
    for name, percent in canary.items():
        if point < percent:
            return name
        point -= percent
    return ""


def beginning_of(body: ChatBody | CompletionBody) -> bytes:
    """Return what all turns of a conversation begin with, up to the user's first message."""
    if isinstance(body, ChatBody):
        return "\0".join(_first_texts(body)).encode("utf-8", "surrogatepass")
    prompt = body.prompt
    # Token ids, a text, or several prompts of which the first decides.
    first = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
    if isinstance(first, str):
        return first[:PREFIX_CHARS].encode("utf-8", "surrogatepass")
    return msgspec.json.encode(first[:PREFIX_TOKENS])


def _first_texts(body: ChatBody) -> Iterator[str]:
    num_left = MESSAGES_CHARS
    for message in body.messages:
        role, content = message.get("role"), message.get("content")
        parts = content if isinstance(content, list) else [content]
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str) and num_left > 0:
                yield f"{role}:{text[:num_left]}"
                num_left -= len(text)
        if role == "user" or num_left <= 0:
            break
