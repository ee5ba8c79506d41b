"""vLLM's request outputs to EngineOutputs, and the sources of their prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvferry.engine.base import (
    EngineOutput,
    EngineTimes,
    FinishReason,
    PromptSources,
    RequestId,
    Sampling,
    TokenLogprob,
)
from kvferry.engine.time_shares import PromptShares, PromptTime
from kvferry.engine.vllm.plugins.core_fields import CACHED_PARAMETER, cached_tokens
from kvferry.engine.vllm.plugins.transfer_times import pop_times
from kvferry.errors import EngineError, InvalidRequest, PagesNotMoved


class RecordedPrompt(NamedTuple):
    sources: PromptSources = PromptSources()
    prefill_share: float | None = None  # as in EngineDurations


class PromptSourceRecorder:
    """Keeps a request's sources, and its share of the steps that computed its prompt, from first token until `pop`."""

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


_FAILED = "error"  # vLLM's, of a request alone
_FINISH_REASONS: dict[str | None, FinishReason] = {reason.value: reason for reason in FinishReason}


def to_engine_output(completion: Any) -> EngineOutput:
    output = EngineOutput(token_ids=completion.token_ids, text=completion.text)
    if completion.logprobs is not None:
        output.logprobs = [
            _logprobs(token_id, entries)
            for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    return output


def finish_output(
    result: EngineOutput,
    output: Any,
    sources: PromptSources,
    prefill_share: float | None = None,
    *,
    lacks_images: bool = False,
    sampling: Sampling | None = None,
) -> None:
    """Raises InvalidRequest where no token is allowed, PagesNotMoved if the engine `lacks_images` and needed them.

    Raises EngineError for an unknown finish reason.
    """
    completion = output.outputs[0]
    if lacks_images and completion.finish_reason == _FAILED:
        raise PagesNotMoved("the pages of the prompt's images did not come from the engine that computed them")
    if completion.finish_reason == _FAILED and sampling is not None and (fields := _fields_beside_a_grammar(sampling)):
        raise InvalidRequest(f"structured_outputs allow no token that {fields} leave")
    result.finish_reason = _FINISH_REASONS.get(completion.finish_reason)
    if result.finish_reason is None:
        raise EngineError(f"the engine ended the request with {completion.finish_reason!r}")
    result.stop_reason = completion.stop_reason
    result.sources = sources
    transfer_params, kv_transfer, load = pop_times(output.kv_transfer_params)
    loaded = transfer_params.pop(CACHED_PARAMETER, None) if transfer_params is not None else None
    result.cached = cached_tokens(sources, loaded)
    result.transfer_params = transfer_params or None
    result.times = _times(output.metrics, kv_transfer, load, prefill_share)


def _fields_beside_a_grammar(sampling: Sampling) -> str:
    names = ("allowed_token_ids", "bad_words", "logit_bias") if sampling.structured_outputs else ()
    return " and ".join(name for name in names if getattr(sampling, name))


def _times(stats: Any, kv_transfer: Any, load: Any, prefill_share: float | None = None) -> EngineTimes | None:
    """In the core's monotonic clock; None for a request that never began.

    `kv_transfer` and `load` are begin, end and share.
    """
    if stats is None or not stats.first_token_ts:
        return None
    return EngineTimes(
        stats.queued_ts,
        stats.scheduled_ts,
        stats.first_token_ts,
        stats.last_token_ts,
        tuple(kv_transfer[:2]) if kv_transfer is not None else None,
        tuple(load[:2]) if load is not None else None,
        prefill_share,
        kv_transfer[2] if kv_transfer is not None else None,
    )


def _logprobs(sampled: int, entries: Any) -> list[TokenLogprob]:

    def one(token_id: int) -> TokenLogprob:
        entry = entries[token_id]
        return TokenLogprob(token_id, entry.decoded_token or "", entry.logprob)

    others = sorted((token_id for token_id in entries if token_id != sampled), key=lambda t: -entries[t].logprob)
    return [one(sampled), *map(one, others)]
