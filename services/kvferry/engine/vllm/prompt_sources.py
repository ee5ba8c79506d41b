"""Records each request's PromptSources."""

from __future__ import annotations

from typing import Any

from kvferry.engine.base import PromptSources, RequestId


class PromptSourceRecorder:
    """Keeps a request's sources from first token until `pop`."""

    def __init__(self, output_processor: Any) -> None:
        self._states = output_processor.request_states
        self._process = output_processor.process_outputs
        self._sources: dict[str, PromptSources] = {}
        output_processor.process_outputs = self._record

    def pop(self, request_id: RequestId) -> PromptSources | None:
        return self._sources.pop(request_id, None)

    def _record(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            stats = output.prefill_stats
            if stats is not None and (state := self._states.get(output.request_id)) is not None:
                self._sources[state.external_req_id] = PromptSources(
                    local_compute=stats.num_computed_tokens,
                    local_cache_hit=stats.num_local_cached_tokens,
                    external_kv_transfer=stats.num_external_cached_tokens,
                )
        return self._process(outputs, *args, **kwargs)
