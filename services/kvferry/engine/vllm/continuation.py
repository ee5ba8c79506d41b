"""An answer that goes on in another engine: its text, and its limits, count from its start.

To vLLM the tokens given so far are part of the prompt. Its detokenizer would then begin with the next token: characters
that need tokens of both sides, and text that was held back because a stop string may begin there, would be lost. So the
request's detokenizer is made anew as it was when the answer began, is fed the tokens given so far, and told how many of
its characters were delivered.
"""

from __future__ import annotations

import copy
from typing import Any

from msgspec import structs
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from kvferry.engine.base import Continued, RequestId, Sampling


class Continuations:
    """Owns what is to be done when a continued request is added, from `expect` until it was added or forgotten."""

    def __init__(self, output_processor: Any) -> None:
        self._processor = output_processor
        self._add_request = output_processor.add_request
        self._expected: dict[str, tuple[Continued, int]] = {}
        output_processor.add_request = self._added

    def expect(self, request_id: RequestId, continued: Continued, min_tokens: int) -> None:
        """`min_tokens` is the whole answer's."""
        self._expected[request_id] = (continued, min_tokens)

    def forget(self, request_id: RequestId) -> None:
        self._expected.pop(request_id, None)

    def _added(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._add_request(request, *args, **kwargs)
        expected = self._expected.pop(request.external_req_id, None)
        if expected is not None:
            state = self._processor.request_states[request.request_id]
            state.detokenizer = resumed_detokenizer(self._processor.tokenizer, request, *expected)


def resumed_detokenizer(tokenizer: Any, request: Any, continued: Continued, min_tokens: int) -> IncrementalDetokenizer:
    """A detokenizer that stands where the answer's own stood after the tokens given so far."""
    begun = copy.copy(request)
    begun.prompt_token_ids = request.prompt_token_ids[: -continued.num_tokens]
    begun.sampling_params = copy.copy(request.sampling_params)
    begun.sampling_params.min_tokens = min_tokens
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, begun)
    detokenizer.update(request.prompt_token_ids[-continued.num_tokens :], False)
    detokenizer._last_output_text_offset = continued.num_chars
    return detokenizer


def remaining_limits(sampling: Sampling, continued: Continued) -> Sampling:
    """What is left of an answer's limits."""
    return structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - continued.num_tokens,
        min_tokens=max(0, sampling.min_tokens - continued.num_tokens),
    )
