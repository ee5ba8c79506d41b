"""Conversion between the engine's types and the messages of worker.proto, in both directions."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import structs

from kvferry.config import MAX_ADAPTERS
from kvferry.engine.base import (
    MAX_IMAGES,
    AnswerDelta,
    Backlogs,
    CachedTokens,
    Continued,
    EngineDurations,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    Parse,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TokenLogprob,
    ToolCallDelta,
    Turn,
)
from kvferry.errors import EngineDead, EngineError, KvferryError, by_code
from kvferry.observability.tracing import TraceContext
from kvferry.pages.keys import ImageSpan
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import MAX_WANTED_S
from kvferry.wire.v1 import worker_pb2 as pb

_FINISH_TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_FINISH_FROM_WIRE: dict[int, FinishReason] = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}

_ERROR_BY_CODE = by_code()

_json = msgspec.json.Encoder()
_delta_from_json = msgspec.json.Decoder(AnswerDelta)

_TIMES_BYTES = 64  # of Durations
_DURATIONS = ("queue_ms", "prefill_ms", "kv_transfer_ms", "load_ms")
_MAX_MS = 1e7  # almost three hours; a longer duration counts as unknown
_MIN_SHARE = 1e-6
_SHARES = ("prefill_share", "kv_transfer_share")
_RANGES = {**dict.fromkeys(_DURATIONS, (0.0, _MAX_MS)), **dict.fromkeys(_SHARES, (_MIN_SHARE, 1.0))}

_TUPLES = frozenset({"stop", "stop_token_ids", "allowed_token_ids", "bad_words"})
_OPTIONAL = frozenset({"seed", "logprobs"})
_MAX_UINT32 = 2**32 - 1
_SAMPLING_FIELDS = Sampling.__struct_fields__


def sampling_to_wire(sampling: Sampling) -> pb.Sampling:
    # Defaults of the wire format are left out: setting a field costs 0.5 us.
    values = structs.asdict(sampling).items()
    return pb.Sampling(**{name: value for name, value in values if value or (name in _OPTIONAL and value is not None)})


def sampling_from_wire(message: pb.Sampling) -> Sampling:
    values: dict[str, object] = {}
    for name in _SAMPLING_FIELDS:
        value = getattr(message, name)
        if name in _TUPLES:
            value = tuple(value)
        elif name == "logit_bias":
            value = dict(value)
        elif name in _OPTIONAL and not message.HasField(name):
            value = None
        values[name] = value
    return Sampling(**values)  # type: ignore[arg-type]


def submit_to_wire(number: int, request: EngineRequest) -> pb.Downward:
    message = pb.Downward()
    # Filled in place: messages given to a constructor are copied.
    submit = message.submit
    submit.number = number
    submit.request_id = request.request_id
    submit.prompt_token_ids.extend(request.prompt_token_ids)
    submit.sampling.MergeFrom(sampling_to_wire(request.sampling))
    submit.keep_for_transfer = request.keep_for_transfer
    submit.cache_salt = request.cache_salt
    submit.pool = request.pool
    submit.adapter = request.adapter
    if request.transfer_params is not None:
        submit.transfer_params = json.dumps(request.transfer_params).encode()
    if request.continued is not None:
        submit.continued.num_tokens = request.continued.num_tokens
        submit.continued.num_chars = request.continued.num_chars
        submit.continued.sizes.extend(request.continued.sizes)
    if request.parse is not None:
        submit.parse.request = request.parse.request
    if request.tier is not None:
        submit.tier.tenant = request.tier.namespace.tenant
        submit.tier.epoch = request.tier.namespace.epoch
        submit.tier.no_load = not request.tier.load
        for volume_id, num_pages in request.tier.volumes.items():
            submit.tier.volumes.add(volume_id=volume_id, num_pages=num_pages)
        if request.tier.wanted_s is not None:
            submit.tier.wanted_s = request.tier.wanted_s
    if request.trace is not None:
        submit.traceparent = request.trace.traceparent
        submit.tracestate = request.trace.tracestate
    if request.deadline_s is not None:
        submit.timeout_ms = min(_MAX_UINT32, max(0, math.ceil((request.deadline_s - time.monotonic()) * 1000.0)))
    if request.is_suspect:
        submit.suspect = True
    if request.is_resumed:
        submit.resumed = True
    if request.is_preemptible:
        submit.preemptible = True
    if request.turn is not None:
        turn_to_wire(request.turn, submit.turn)
    for image in request.images:
        submit.images.add(digest=image.digest, offset=image.offset, num_tokens=image.num_tokens)
    for entry, features in zip(submit.images, request.features, strict=False):  # none have any, or all
        entry.features = features
    return message


def reserve_to_wire(number: int, turn: Turn | None, *, is_resumed: bool, pool: str = "") -> pb.Downward:
    message = pb.Downward(reserve=pb.Reserve(number=number, resumed=is_resumed, pool=pool))
    if turn is not None:
        turn_to_wire(turn, message.reserve.turn)
    return message


def turn_to_wire(turn: Turn, message: pb.Turn) -> None:
    message.tenant = turn.tenant
    message.share = turn.share
    if turn.missing_tokens is not None:
        message.missing_tokens = turn.missing_tokens


def transfer_params_from_wire(raw: bytes) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("transfer parameters are nested too deeply") from None


def submit_from_wire(message: pb.Submit) -> EngineRequest:
    """Raises ValueError for a message that cannot be read."""
    images = message.images[: MAX_IMAGES + 1]  # of which engines refuse the last one
    features = [image.features for image in images]
    return EngineRequest(
        request_id=RequestId(message.request_id),
        prompt_token_ids=list(message.prompt_token_ids),
        sampling=sampling_from_wire(message.sampling),
        keep_for_transfer=message.keep_for_transfer,
        transfer_params=transfer_params_from_wire(message.transfer_params) if message.transfer_params else None,
        cache_salt=message.cache_salt,
        continued=Continued(message.continued.num_tokens, message.continued.num_chars, tuple(message.continued.sizes))
        if message.HasField("continued")
        else None,
        parse=_parse_from_wire(message.parse) if message.HasField("parse") else None,
        tier=_tier_hints_from_wire(message.tier) if message.HasField("tier") else None,
        trace=TraceContext.of(message.traceparent, message.tracestate),
        deadline_s=time.monotonic() + message.timeout_ms / 1000.0 if message.HasField("timeout_ms") else None,
        is_suspect=message.suspect,
        is_resumed=message.resumed,
        is_preemptible=message.preemptible,
        turn=_turn_from_wire(message.turn) if message.HasField("turn") else None,
        pool=message.pool,
        adapter=message.adapter,
        images=tuple(ImageSpan(image.digest, image.offset, image.num_tokens) for image in images),
        features=features if any(features) else [],
    )


def _parse_from_wire(message: pb.Parse) -> Parse:
    """Raises ValueError where a part of the answer was delivered before."""
    if message.num_tokens_before:
        raise ValueError("an answer that goes on from its beginning, for a gateway of an earlier release")
    return Parse(message.request)


def _turn_from_wire(message: pb.Turn) -> Turn:
    """Raises ValueError for a share that is not above 0 and finite."""
    if not 0 < message.share < math.inf:
        raise ValueError(f"a share of {message.share}")
    missing_tokens = message.missing_tokens if message.HasField("missing_tokens") else None
    return Turn(message.tenant, message.share, missing_tokens)


def _tier_hints_from_wire(message: pb.Tier) -> TierHints:
    volumes = {entry.volume_id: entry.num_pages for entry in message.volumes}
    wanted_s = message.wanted_s if message.HasField("wanted_s") else None
    if wanted_s is not None and not 0 <= wanted_s <= MAX_WANTED_S:
        raise ValueError(f"pages that are wanted for {wanted_s} s; from 0 to {MAX_WANTED_S:g} s are allowed")
    return TierHints(Namespace(message.tenant, message.epoch), volumes, not message.no_load, wanted_s)


def append_output(step: pb.Step, number: int, output: EngineOutput) -> None:
    delta = output.delta
    if output.token_ids or output.text or delta is not None:
        step.numbers.append(number)
        step.num_tokens.append(len(output.token_ids))
        step.token_ids.extend(output.token_ids)
        step.texts.append(_as_utf8(output.text))
        if output.logprobs is not None:
            step.logprobs.append(
                pb.StepLogprobs(
                    index=len(step.numbers) - 1,
                    positions=[
                        pb.PositionLogprobs(
                            top=[
                                pb.TokenLogprob(token_id=t.token_id, text=_as_utf8(t.text), logprob=t.logprob)
                                for t in position
                            ]
                        )
                        for position in output.logprobs
                    ],
                )
            )
        if delta is not None:
            step.deltas.append(pb.StepDelta(index=len(step.numbers) - 1, delta=_delta_to_json(delta)))
        if output.sources is not None and output.finish_reason is None:
            step.sources.append(pb.StepSources(number=number, sources=sources_to_wire(output.sources)))
    if output.finish_reason is not None:
        finished = pb.Finished(number=number, reason=_FINISH_TO_WIRE[output.finish_reason])
        if isinstance(output.stop_reason, str):
            finished.stop_text = _as_utf8(output.stop_reason)
        elif output.stop_reason is not None:
            finished.stop_token_id = output.stop_reason
        if output.sources is not None:
            finished.sources.CopyFrom(sources_to_wire(output.sources))
        if output.cached is not None:
            finished.cached.CopyFrom(_cached_to_wire(output.cached))
        if output.times is not None:
            _set_durations(finished.durations, output.times.durations())
        if output.transfer_params is not None:
            finished.transfer_params = json.dumps(output.transfer_params).encode()
        step.finished.append(finished)


def approximate_bytes(output: EngineOutput) -> int:
    """Estimate an output's size on the wire, never far too low; serialising costs too much."""
    size = 32 + 5 * len(output.token_ids) + 4 * len(output.text)
    for position in output.logprobs or ():
        size += sum(24 + 4 * len(entry.text) for entry in position)
    if output.delta is not None:
        size += 64 + 4 * (len(output.delta.content) + len(output.delta.reasoning))
        size += sum(128 + 4 * len(call.arguments) for call in output.delta.tool_calls)
    if output.times is not None:
        size += _TIMES_BYTES
    return size


def append_failure(step: pb.Step, number: int, error: KvferryError) -> None:
    step.finished.append(
        pb.Finished(
            number=number,
            reason=pb.FINISH_REASON_ERROR,
            failure=pb.Failure(
                code=error.code or "engine_error",
                message=_as_utf8(error.message),
                retry_after_s=error.retry_after_s,
                blameless=isinstance(error, EngineDead) and error.is_blameless,
            ),
        )
    )


def _delta_to_json(delta: AnswerDelta) -> bytes:
    try:
        return _json.encode(delta)
    except UnicodeEncodeError:
        calls = tuple(
            ToolCallDelta(
                call.index, call.id, _as_utf8(call.name) if call.name is not None else None, _as_utf8(call.arguments)
            )
            for call in delta.tool_calls
        )
        return _json.encode(AnswerDelta(_as_utf8(delta.content), _as_utf8(delta.reasoning), calls))


def _as_utf8(text: str) -> str:
    """Replace lone surrogates, which protobuf refuses, by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def outputs_of(step: pb.Step) -> Iterable[tuple[int, EngineOutput | KvferryError]]:
    """Yield the columns in order, then the ends."""
    yield from _columns_of(step)
    yield from ends_of(step)


def is_text_only(step: pb.Step) -> bool:
    """Whether `texts_of` and `ends_of` give the whole step."""
    return not (step.logprobs or step.deltas)


def texts_of(step: pb.Step) -> Iterable[tuple[int, Sequence[int], str]]:
    """Return number, tokens and text of each entry, without an object each."""
    token_ids, num_tokens = list(step.token_ids), list(step.num_tokens)
    each: Iterable[Sequence[int]]
    if len(token_ids) == len(num_tokens) == num_tokens.count(1):
        each = zip(token_ids)
    else:
        ends = list(itertools.accumulate(num_tokens))
        each = [token_ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return zip(step.numbers, each, step.texts, strict=True)


def ends_of(step: pb.Step) -> Iterable[tuple[int, EngineOutput | KvferryError]]:
    for ended in step.finished:
        yield ended.number, _ended(ended)


def _columns_of(step: pb.Step) -> Iterable[tuple[int, EngineOutput]]:
    logprobs = {entry.index: entry for entry in step.logprobs}
    deltas = {entry.index: entry.delta for entry in step.deltas}
    # Lists: reading a message's columns entry by entry costs twice as much.
    token_ids = list(step.token_ids)
    start = 0
    for i, (number, count, text) in enumerate(zip(step.numbers, step.num_tokens, step.texts, strict=True)):
        end = start + count
        output = EngineOutput(token_ids[start:end], text)
        start = end
        if logprobs and (entry := logprobs.get(i)) is not None:
            output.logprobs = _logprobs_from_wire(entry)
        if deltas and (delta := deltas.get(i)) is not None:
            output.delta = _delta_from_json.decode(delta)
        yield number, output


def _ended(message: pb.Finished) -> EngineOutput | KvferryError:
    if message.reason == pb.FINISH_REASON_ERROR:
        failure = message.failure
        error = _ERROR_BY_CODE.get(failure.code, EngineError)(failure.message)
        if failure.HasField("retry_after_s"):
            error.retry_after_s = failure.retry_after_s
        if isinstance(error, EngineDead):
            error.is_blameless = failure.blameless
        return error
    reason = _FINISH_FROM_WIRE.get(message.reason)
    if reason is None:
        # A newer release sent it. Only this request ends, not the link.
        return EngineError(
            f"the worker ended the request for a reason that this gateway does not know ({message.reason})"
        )
    output = EngineOutput(token_ids=(), text="", finish_reason=reason)
    if message.stop_text:
        output.stop_reason = message.stop_text
    elif message.HasField("stop_token_id"):
        output.stop_reason = message.stop_token_id
    if message.HasField("sources"):
        output.sources = sources_from_wire(message.sources)
    if message.HasField("cached"):
        output.cached = _cached_from_wire(message.cached)
    if message.HasField("durations"):
        output.durations = _durations_from_wire(message.durations)
    if message.transfer_params:
        output.transfer_params = transfer_params_from_wire(message.transfer_params)
    return output


def _logprobs_from_wire(entry: pb.StepLogprobs) -> Sequence[Sequence[TokenLogprob]]:
    return [[TokenLogprob(t.token_id, t.text, t.logprob) for t in position.top] for position in entry.positions]


def sources_to_wire(sources: PromptSources) -> pb.PromptSources:
    return pb.PromptSources(
        local_compute=sources.local_compute,
        local_cache_hit=sources.local_cache_hit,
        external_kv_transfer=sources.external_kv_transfer,
    )


def sources_from_wire(message: pb.PromptSources) -> PromptSources:
    return PromptSources(message.local_compute, message.local_cache_hit, message.external_kv_transfer)


def _cached_to_wire(cached: CachedTokens) -> pb.CachedTokens:
    return pb.CachedTokens(device=cached.device, cpu=cached.cpu, volume=cached.volume, kv_transfer=cached.kv_transfer)


def _cached_from_wire(message: pb.CachedTokens) -> CachedTokens:
    return CachedTokens(message.device, message.cpu, message.volume, message.kv_transfer)


def _set_durations(message: pb.Durations, durations: EngineDurations) -> None:
    for name in (*_DURATIONS, *_SHARES):
        value = getattr(durations, name)
        if value is not None:
            setattr(message, name, value)


def _durations_from_wire(message: pb.Durations) -> EngineDurations:
    # Values that no clock can give count as unknown: rates are learned from them.
    values: dict[str, float] = {}
    for field, value in message.ListFields():
        lowest, highest = _RANGES[field.name]
        if lowest <= value <= highest:
            values[field.name] = value
    return EngineDurations(**values)


def stats_to_wire(load: EngineStats, *, draining: bool, full: bool = False) -> pb.Load:
    message = pb.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_prompts=load.num_prompts,
        num_pages_used=load.num_pages_used,
        num_pages=load.num_pages,
        draining=draining,
        full=full,
        prompt_tokens=sources_to_wire(load.prompt_tokens),
        cached_tokens=_cached_to_wire(load.cached_tokens),
        transferred_bytes=load.transferred_bytes,
        num_generated_tokens=load.num_generated_tokens,
        num_steps=load.num_steps,
        queued_prompt_tokens=load.queued_prompt_tokens,
        loaded_adapters=sorted(load.loaded_adapters),
    )
    if load.backlogs is not None:
        for tenant, (ms, share) in load.backlogs.by_tenant.items():
            message.backlogs.add(tenant=tenant, ms=ms, share=share)
        for exponent, (ms, share) in load.backlogs.others.items():
            message.other_backlogs.add(exponent=exponent, ms=ms, share=share)
    return message


def _backlogs_from_wire(message: pb.Load) -> Backlogs | None:
    if not message.backlogs:
        return None
    return Backlogs(
        {entry.tenant: (entry.ms, entry.share) for entry in message.backlogs if entry.share > 0},
        {entry.exponent: (entry.ms, entry.share) for entry in message.other_backlogs if entry.share > 0},
    )


def stats_from_wire(message: pb.Load) -> EngineStats:
    return EngineStats(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_prompts=message.num_prompts,
        num_pages_used=message.num_pages_used,
        num_pages=message.num_pages,
        prompt_tokens=sources_from_wire(message.prompt_tokens),
        cached_tokens=_cached_from_wire(message.cached_tokens),
        transferred_bytes=message.transferred_bytes,
        num_generated_tokens=message.num_generated_tokens,
        num_steps=message.num_steps,
        queued_prompt_tokens=message.queued_prompt_tokens if message.HasField("queued_prompt_tokens") else None,
        backlogs=_backlogs_from_wire(message),
        loaded_adapters=frozenset(message.loaded_adapters[:MAX_ADAPTERS]),
    )
