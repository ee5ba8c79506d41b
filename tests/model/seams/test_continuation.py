"""engine/vllm/continuation.py"""

from __future__ import annotations

import inspect

import msgspec
import pytest

from kvferry.engine.base import Continued, Sampling

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

    def test_noise_of_a_seed_is_not_repeated_in_the_rest_of_an_answer(self) -> None:
        from kvferry.engine.vllm.continuation import remaining_limits

        whole = Sampling(max_tokens=10, seed=7)
        seeds = [remaining_limits(whole, Continued(num_given, 0)).seed for num_given in (1, 2, 2)]
        assert len({7, *seeds}) == 3
        assert seeds[1] == seeds[2]
        assert remaining_limits(Sampling(max_tokens=10), Continued(1, 0)).seed is None
