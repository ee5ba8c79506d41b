"""Random answers that a grammar of llguidance allows, as an engine follows it."""

from __future__ import annotations

import random
from typing import Any

from kvferry import model_folder

_ENDS = ('"', "}", "]", ",")


class GrammarWalker:
    """Walks on the default model's tokenizer."""

    def __init__(self) -> None:
        import llguidance.hf
        import numpy as np
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(model_folder.resolve("default")))
        self.library = llguidance.hf.from_tokenizer(self.tokenizer, len(self.tokenizer))
        texts = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        self._is_end = np.array([text[:1] in _ENDS for text in texts])

    def matcher(self, grammar: str) -> Any:
        import llguidance

        matcher = llguidance.LLMatcher(self.library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def walk(self, grammar: str, seed: int, most_tokens: int = 300, hurry: float = 0.5) -> list[int] | None:
        """Return random allowed tokens, or None for an answer that did not end.

        `hurry` is how often an end, or a token that ends a value, is preferred where it is allowed.
        """
        import numpy as np

        eos, chance = self.tokenizer.eos_token_id, random.Random(seed)
        matcher = self.matcher(grammar)
        given: list[int] = []
        while len(given) < most_tokens:
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = allowed[: len(self.tokenizer)]
            assert not matcher.is_error(), matcher.get_error()
            if matcher.is_stopped() or (allowed[eos] and chance.random() < hurry):
                return given
            allowed[eos] = 0
            ending = np.flatnonzero(allowed & self._is_end)
            ids = ending if len(ending) and chance.random() < hurry else np.flatnonzero(allowed)
            if not len(ids):
                return given
            given.append(int(ids[chance.randrange(len(ids))]))
            matcher.consume_token(given[-1])
        return None
