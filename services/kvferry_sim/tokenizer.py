"""A tokenizer without files: one word, one token.

Ids below `NUM_SPECIAL` are markers, others pseudo words with a leading space. Encoding a decoded answer gives the same
tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import xxhash

VOCABULARY_SIZE = 50_000
NUM_SPECIAL = 16
NUM_WORDS = VOCABULARY_SIZE - NUM_SPECIAL

BOS, EOS, END_OF_TURN = 0, 1, 2
ROLE_TO_MARKER: Mapping[str, int] = {
    "system": 3,
    "developer": 4,
    "user": 5,
    "assistant": 6,
    "tool": 7,
    "function": 8,
}

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aio")


@functools.cache
def _vocabulary() -> tuple[tuple[str, ...], Mapping[str, int]]:
    names = {BOS: "<bos>", EOS: "<eos>", END_OF_TURN: "<end>"}
    names |= {marker: f"<{role}>" for role, marker in ROLE_TO_MARKER.items()}
    special = [names.get(token_id, f"<special{token_id}>") for token_id in range(NUM_SPECIAL)]
    words = ["".join(parts) for parts in itertools.islice(itertools.product(_SYLLABLES, repeat=3), NUM_WORDS)]
    texts = (*special, *(" " + word for word in words))
    return texts, {word: NUM_SPECIAL + i for i, word in enumerate(words)}


class SimTokenizer:
    """All instances share one vocabulary."""

    vocabulary_size = VOCABULARY_SIZE
    bos_token_id = BOS
    eos_token_id = EOS
    end_of_turn_token_id = END_OF_TURN

    def __init__(self) -> None:
        self.texts, self._word_to_id = _vocabulary()

    def encode(self, text: str) -> list[int]:
        """No text encodes to a marker."""
        find = self._word_to_id.get
        token_ids = []
        for word in text.split():
            token_id = find(word)
            if token_id is None:
                digest = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
                token_id = NUM_SPECIAL + digest % NUM_WORDS
            token_ids.append(token_id)
        return token_ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        lowest = NUM_SPECIAL if skip_special_tokens else 0
        return "".join(self.texts[token_id] for token_id in token_ids if token_id >= lowest)

    def encode_chat(self, turns: Sequence[tuple[str, str]], *, open_turn: str | None) -> list[int]:
        """If `open_turn` is None, the last turn stays open."""
        token_ids = [BOS]
        for role, text in turns:
            token_ids.append(ROLE_TO_MARKER[role])
            token_ids += self.encode(text)
            token_ids.append(END_OF_TURN)
        if open_turn is None:
            token_ids.pop()
        else:
            token_ids.append(ROLE_TO_MARKER[open_turn])
        return token_ids
