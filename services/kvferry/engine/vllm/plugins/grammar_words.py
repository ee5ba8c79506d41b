"""A tokenizer of grammars that keeps no words of clients."""

# llguidance encodes the text that a grammar forces (constants, names of required properties) with a tokenizer of its
# own, which keeps words (`engine/vllm/rendering/tokenizer_words.py`). The time of an answer would tell a tenant which
# texts the grammars of others force: 25 us of each step for a word of 200 letters. That cache has no switch. It drops
# no word, and takes none when it is full: so it is filled with words of ours.

from __future__ import annotations

import functools
import itertools
import string
from collections.abc import Iterator
from typing import Any

from vllm.v1.structured_output.backend_guidance import GuidanceBackend

_NUM_WORDS = 20_000  # twice as many as it keeps: some versions have 64 parts, which fill unequally; 0.1 s
_NUM_LETTERS = 6


def fill_word_caches_of_grammars() -> None:
    """Idempotent."""
    build = GuidanceBackend._build_ll_tokenizer
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_filled(*arguments: Any) -> Any:
        tokenizer = build(*arguments)
        for word in words():
            tokenizer.tokenize_str(word)
        return tokenizer

    GuidanceBackend._build_ll_tokenizer = staticmethod(build_filled)


def words() -> Iterator[str]:
    """Yield different words without a meaning."""
    # Words of letters alone: a tokenizer does not split them.
    letters = itertools.product(string.ascii_lowercase, repeat=_NUM_LETTERS)
    return ("".join(reversed(word)) for word in itertools.islice(letters, _NUM_WORDS))
