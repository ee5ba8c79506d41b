"""Exchange digest: all that decides the meaning of a KV page's bytes, beside its tokens. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

# Names and values, sorted by name.
ExchangeFields = tuple[tuple[str, str], ...]

# Raised when the order of a page's bytes in rows, files or transfers changes. Releases that keep it exchange pages.
PAGE_FORMATS = 1

# The field of the weights, which also travels in the configuration of vLLM's NIXL connector.
WEIGHTS = "weights"

# The field of vLLM arguments and variables that engines must have in common; vLLM's `additional_config` has it too.
ARGUMENTS = "arguments"

_MAX_NAMED = 3
_MAX_VALUE = 80  # characters


def exchange_digest(fields: ExchangeFields) -> str:
    """Return 32 hexadecimal digits: engines exchange pages, directly or over volumes, only if theirs are equal."""
    text = json.dumps(fields, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def sorted_fields(fields: Mapping[str, str | int]) -> ExchangeFields:
    return tuple(sorted((name, str(value)) for name, value in fields.items()))


def difference(one: ExchangeFields, other: ExchangeFields) -> str:
    """Return the first fields that differ as `max_model_len is 4096 and 8192`; empty if none does."""
    here, there = dict(one), dict(other)
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    named = [
        f"{name} is {here.get(name, 'not known')[:_MAX_VALUE]} and {there.get(name, 'not known')[:_MAX_VALUE]}"
        for name in names[:_MAX_NAMED]
    ]
    more = [f"{len(names) - _MAX_NAMED} more differ"] if len(names) > _MAX_NAMED else []
    return ", ".join(named + more)
