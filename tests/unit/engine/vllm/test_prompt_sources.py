"""PromptSourceRecorder of engine/vllm/outputs.py on an output processor of the same shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine.base import PromptSources, RequestId
from kvferry.engine.vllm.outputs import PromptSourceRecorder


class OutputProcessor:
    """Sets a request's first token time while it processes, as vLLM's does."""

    def __init__(self) -> None:
        self.request_states: dict[str, Any] = {}

    def add(self, request_id: str, scheduled_ts: float, *, with_stats: bool = True) -> None:
        stats = SimpleNamespace(scheduled_ts=scheduled_ts, first_token_ts=0.0) if with_stats else None
        self.request_states[request_id] = SimpleNamespace(external_req_id=f"our-{request_id}", stats=stats)

    def process_outputs(self, outputs: list[Any], timestamp: float) -> str:
        for output in outputs:
            state = self.request_states.pop(output.request_id, None)
            if state is not None and state.stats is not None:
                state.stats.first_token_ts = timestamp
        return "processed"


def first_output(request_id: str, num_computed: int, num_cached: int = 0) -> Any:
    stats = SimpleNamespace(
        num_computed_tokens=num_computed, num_local_cached_tokens=num_cached, num_external_cached_tokens=0
    )
    return SimpleNamespace(request_id=request_id, prefill_stats=stats)


def test_prompts_of_one_step_get_their_shares_before_anybody_reads_them() -> None:
    processor = OutputProcessor()
    recorder = PromptSourceRecorder(processor)
    processor.add("a", 1.0)
    processor.add("b", 1.5)
    outputs = [first_output("a", 300, 16), first_output("b", 100), first_output("unknown", 5)]
    outputs.append(SimpleNamespace(request_id="old", prefill_stats=None))
    process: Any = processor.process_outputs
    assert process(outputs, 2.0) == "processed"
    assert recorder.pop(RequestId("our-a")) == (PromptSources(300, 16, 0), pytest.approx(0.75))
    assert recorder.pop(RequestId("our-b")) == (PromptSources(100), pytest.approx(0.5))
    assert recorder.pop(RequestId("our-b")) is None
    assert recorder.pop(RequestId("our-unknown")) is None


def test_a_prompt_without_times_has_sources_only() -> None:
    processor = OutputProcessor()
    recorder = PromptSourceRecorder(processor)
    processor.add("a", 1.0, with_stats=False)
    processor.add("b", 0.0)
    process: Any = processor.process_outputs
    process([first_output("a", 300), first_output("b", 0, 16)], 2.0)
    assert recorder.pop(RequestId("our-a")) == (PromptSources(300), None)
    assert recorder.pop(RequestId("our-b")) == (PromptSources(0, 16), None)
