"""Continues an answer in another engine."""

# vLLM would begin to detokenize after the tokens so far, and lose characters across that border and text held back for
# a stop string. So the request's detokenizer is fed those tokens.

from __future__ import annotations

import copy
from typing import Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from kvferry.engine.base import Continued, RequestId


class Continuations:
    """Continued requests, from `expect` until vLLM has added them or `forget`."""

    def __init__(self, output_processor: Any) -> None:
        self._processor = output_processor
        self._add_request = output_processor.add_request
        self._expected: dict[str, Continued] = {}
        output_processor.add_request = self._added

    def expect(self, request_id: RequestId, continued: Continued) -> None:
        self._expected[request_id] = continued

    def forget(self, request_id: RequestId) -> None:
        self._expected.pop(request_id, None)

    def _added(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._add_request(request, *args, **kwargs)
        expected = self._expected.pop(request.external_req_id, None)
        if expected is not None:
            state = self._processor.request_states[request.request_id]
            state.detokenizer = resumed_detokenizer(self._processor.tokenizer, request, expected)


def resumed_detokenizer(tokenizer: Any, request: Any, continued: Continued) -> IncrementalDetokenizer:
    begun = copy.copy(request)
    begun.prompt_token_ids = request.prompt_token_ids[: -continued.num_tokens]
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, begun)
    detokenizer.update(request.prompt_token_ids[-continued.num_tokens :], False)
    detokenizer._last_output_text_offset = continued.num_chars
    return detokenizer
