"""engine/vllm/continuation.py"""

from __future__ import annotations

import inspect

import msgspec
import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestContinuation:
    """engine/vllm/continuation.py"""

    def test_vllm_still_has_what_is_replaced(self) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
        from vllm.v1.engine.output_processor import OutputProcessor

        assert parameters(OutputProcessor.add_request)[:2] == ["self", "request"]
        assert parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
        assert parameters(BaseIncrementalDetokenizer.update) == ["self", "new_token_ids", "stop_terminated"]
        assert "self._last_output_text_offset" in inspect.getsource(BaseIncrementalDetokenizer.get_next_output_text)
        assert {"prompt_token_ids", "sampling_params", "external_req_id"} <= {
            field.name for field in msgspec.structs.fields(EngineCoreRequest)
        }
