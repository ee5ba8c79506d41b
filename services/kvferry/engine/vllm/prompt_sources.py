"""Records each request's PromptSources, and its share of the steps that computed its prompt."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvferry.engine.base import PromptSources, RequestId
from kvferry.engine.time_shares import PromptShares, PromptTime


class RecordedPrompt(NamedTuple):
    sources: PromptSources = PromptSources()
    prefill_share: float | None = None  # as in EngineDurations


class PromptSourceRecorder:
    """Keeps a request's sources from first token until `pop`."""

    def __init__(self, output_processor: Any) -> None:
        self._states = output_processor.request_states
        self._process = output_processor.process_outputs
        self._prompts: dict[str, RecordedPrompt] = {}
        self._shares = PromptShares()
        output_processor.process_outputs = self._record

    def get(self, request_id: RequestId) -> RecordedPrompt | None:
        return self._prompts.get(request_id)

    def pop(self, request_id: RequestId) -> RecordedPrompt | None:
        return self._prompts.pop(request_id, None)

    def _record(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        first: list[tuple[Any, PromptSources]] = []
        for output in outputs:
            stats = output.prefill_stats
            if stats is not None and (state := self._states.get(output.request_id)) is not None:
                sources = PromptSources(
                    local_compute=stats.num_computed_tokens,
                    local_cache_hit=stats.num_local_cached_tokens,
                    external_kv_transfer=stats.num_external_cached_tokens,
                )
                self._prompts[state.external_req_id] = RecordedPrompt(sources)
                first.append((state, sources))
        # Readers of these outputs run after this call: processing awaits nothing.
        result = self._process(outputs, *args, **kwargs)
        if first:
            self._divide_time(first)
        return result

    def _divide_time(self, first: list[tuple[Any, PromptSources]]) -> None:
        """Set the shares of prompts that got their first token in one step."""
        timed = [
            (
                state.external_req_id,
                sources,
                PromptTime(state.stats.scheduled_ts, state.stats.first_token_ts, sources.local_compute),
            )
            for state, sources in first
            if state.stats is not None and state.stats.scheduled_ts
        ]
        if not timed:
            return
        shares = self._shares.divide([prompt for _, _, prompt in timed])
        for (request_id, sources, _), share in zip(timed, shares, strict=True):
            self._prompts[request_id] = RecordedPrompt(sources, share)
