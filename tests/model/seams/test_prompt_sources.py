"""engine/vllm/outputs.py"""

from __future__ import annotations

import dataclasses
import inspect

import msgspec
import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestPromptSources:
    """engine/vllm/outputs.py"""

    def test_the_processor_gets_outputs_first_and_knows_requests(self) -> None:
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.engine.output_processor import OutputProcessor, RequestState
        from vllm.v1.metrics.stats import PrefillStats

        assert parameters(OutputProcessor.process_outputs)[1] == "engine_core_outputs"
        source = inspect.getsource(OutputProcessor.__init__)
        assert "self.request_states" in source
        assert "self.external_req_ids" in source
        assert "external_req_id" in parameters(RequestState.__init__)
        assert "self.stats = RequestStateStats(" in inspect.getsource(RequestState.__init__)
        assert not inspect.iscoroutinefunction(OutputProcessor.process_outputs)
        assert "prefill_stats" in {field.name for field in msgspec.structs.fields(EngineCoreOutput)}
        assert {"num_computed_tokens", "num_local_cached_tokens", "num_external_cached_tokens"} <= {
            field.name for field in dataclasses.fields(PrefillStats)
        }
