"""Token ids that a model's embedding has rows for. Any other id in a request ends the engine's process."""

from __future__ import annotations

import contextlib
import functools
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy

from kvferry.engine.base import Sampling
from kvferry.errors import InvalidRequest

_MAX_TEXT_CHARS = 40
_MAX_SHORT = 256  # tokens of an array; numpy takes 4 us before it looks at the first


class Vocabulary:
    def __init__(self, model_config: Any, tokenizer: Any) -> None:
        self.num_ids = int(model_config.get_vocab_size())
        self._num_in_tokenizer = int(tokenizer.max_token_id) + 1
        self._model_config = model_config
        self._tokenizer = tokenizer

    def __repr__(self) -> str:
        return f"<Vocabulary of {self.num_ids} ids, {self._num_in_tokenizer} in the tokenizer>"

    @property
    def mismatch(self) -> str:
        # Which tokens of the tokenizer the model does not have.
        if self._num_in_tokenizer <= self.num_ids:
            return ""
        return (
            f"the tokenizer has ids up to {self._num_in_tokenizer - 1}, the model's embedding has {self.num_ids} rows: "
            f"requests with {self._named(self.num_ids)} or a later token are refused"
        )

    def check_prompt(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest for an id that the model does not have."""
        if isinstance(token_ids, array) and len(token_ids) > _MAX_SHORT:
            self._check(field, int(numpy.max(token_ids)))  # ten times as fast as `max`
        elif len(token_ids):
            self._check(field, max(token_ids))

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises InvalidRequest for such an id, also of a parameter's text."""
        self.check("allowed_token_ids", sampling.allowed_token_ids)
        self.check("logit_bias", sampling.logit_bias)
        self.check("stop_token_ids", sampling.stop_token_ids)
        if self._num_in_tokenizer > self.num_ids:
            if sampling.bad_words:
                self.check("bad_words", self._ids_of_words(sampling.bad_words))
            if sampling.min_tokens:  # of which engines forbid the tokens that end an answer
                self.check("min_tokens", self._end_ids)

    def check(self, field: str, token_ids: Collection[int]) -> None:
        if token_ids:
            self._check(field, max(token_ids))

    def _check(self, field: str, largest: int) -> None:
        if largest >= self.num_ids:
            raise InvalidRequest(
                f"{field}: {self._named(largest)} is not a token id of this model, which has {self.num_ids} "
                f"(0 to {self.num_ids - 1})",
                param=field,
            )

    def _named(self, token_id: int) -> str:
        text = ""
        if token_id < self._num_in_tokenizer:
            with contextlib.suppress(Exception):  # tokenizers may have ids without a text
                text = self._tokenizer.decode([token_id])
        return f"{token_id} ({text!r})" if 0 < len(text) <= _MAX_TEXT_CHARS else str(token_id)

    def _ids_of_words(self, words: Sequence[str]) -> set[int]:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(bad_words=list(words))
        params.update_from_tokenizer(self._tokenizer)
        return {token_id for token_ids in params.bad_words_token_ids or () for token_id in token_ids}

    @functools.cached_property
    def _end_ids(self) -> set[int]:
        from vllm.sampling_params import SamplingParams

        params = SamplingParams()
        params.update_from_generation_config(
            self._model_config.try_get_generation_config(), self._tokenizer.eos_token_id
        )
        return set(params.all_stop_token_ids)
