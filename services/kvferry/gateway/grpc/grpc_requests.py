"""Requests of the gRPC endpoint, from message to messages; independent of gRPC itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from kvferry.engine.base import EngineOutput, TokenLogprob, ToolCallDelta
from kvferry.errors import RequestError
from kvferry.gateway.admission import Claim
from kvferry.gateway.bodies.grpc_bodies import in_fields, read_generate, read_tokenize
from kvferry.gateway.bodies.large_bodies import MAX_VALUES, check_num_message_values, in_thread_if_large, join
from kvferry.gateway.bodies.openai_bodies import ChatBody, CompletionBody, for_renderer
from kvferry.gateway.choices import Choice, ParsedChoice, Usage
from kvferry.gateway.generation import Gathered, Generation, refuse_abort
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.intake import Intake
from kvferry.gateway.request_trace import RequestTrace
from kvferry.inference.v1 import inference_pb2 as pb

_Message = TypeVar("_Message", pb.GenerateRequest, pb.TokenizeRequest)

_FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}

# Tag of the field `answers`, messages of any length. They are encoded in pieces: a call of protobuf holds the GIL.
_ANSWERS_TAG = bytes([pb.GenerateResponse.DESCRIPTOR.fields_by_name["answers"].number << 3 | 2])
_IDS_AT_ONCE = 16 << 10

# What a token id, and an entry of log-probabilities, take in a message, about.
_TOKEN_BYTES = 4
_LOGPROB_BYTES = 24
_CHUNK_BYTES = 32  # the rest of one

# A stream reports its waiting bytes each time this much more waits, as a transport over HTTP does.
_UNREAD_STEP_BYTES = 64 << 10


class Inference:
    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    async def generate(
        self,
        raw: bytes,
        *,
        claim: Claim,
        tenant: Tenant,
        disaggregate: bool = False,
        trace: RequestTrace | None = None,
        deadline_s: float | None = None,
    ) -> InferenceAnswer:
        """Raises as `Intake.begin`; `param` of a RequestError is the message's field."""
        begun_ns = time.time_ns()
        max_values = MAX_VALUES + self._intake.models.longest_context
        await check_num_message_values(raw, pb.GenerateRequest.DESCRIPTOR, max_values)
        message, body, fields = await _read(read_generate, raw)
        try:
            generation = await self._intake.begin(
                "gen",
                body,
                fields,
                begun_ns,
                claim=claim,
                tenant=tenant,
                trace=trace,
                may_be_aggregated=not disaggregate,
                deadline_s=deadline_s,
            )
        except RequestError as error:
            raise in_fields(error, message.WhichOneof("prompt")) from None
        return InferenceAnswer(message.model, generation, with_token_ids=message.return_token_ids)

    async def tokenize(self, raw: bytes, tenant: Tenant, claim: Claim) -> bytes:
        """Return a TokenizeResponse, encoded. Raises the same errors as `generate`."""
        await check_num_message_values(raw, pb.TokenizeRequest.DESCRIPTOR, MAX_VALUES)
        message, body, fields = await _read(read_tokenize, raw)
        try:
            token_ids, max_model_len = await self._intake.tokenize(body, fields, claim=claim, tenant=tenant)
        except RequestError as error:
            raise in_fields(error, message.WhichOneof("prompt")) from None
        rest = pb.TokenizeResponse(max_model_len=max_model_len)
        return await in_thread_if_large(
            lambda: b"".join([rest.SerializeToString(), *_in_steps(pb.TokenizeResponse, token_ids)]), len(token_ids)
        )

    def models(self, tenant: Tenant) -> pb.ListModelsResponse:
        contexts = self._intake.models.of(tenant)
        models = [pb.Model(name=name, max_model_len=context) for name, context in contexts.items()]
        for name, parent in self._intake.adapters.of(tenant).items():
            models.append(pb.Model(name=name, max_model_len=contexts.get(parent, 0), parent=parent))
        return pb.ListModelsResponse(models=models)


async def _read(
    read: Callable[[bytes], tuple[_Message, ChatBody | CompletionBody]], raw: bytes
) -> tuple[_Message, ChatBody | CompletionBody, dict[str, Any]]:
    """Return the message, its body and its fields for the renderer. Raises the errors of `read`."""

    def read_fields() -> tuple[_Message, ChatBody | CompletionBody, dict[str, Any]]:
        message, body = read(raw)
        return message, body, for_renderer(body)

    return await in_thread_if_large(read_fields, len(raw))


class InferenceAnswer:
    """An answer in progress. Use either `whole` or `stream`, once."""

    def __init__(self, model: str, generation: Generation, *, with_token_ids: bool) -> None:
        self.answer_id = generation.answer_id
        self._model = model
        self._generation = generation
        self._with_token_ids = with_token_ids

    async def whole(self) -> bytes:
        """Return a GenerateResponse, encoded. Raises KvferryError."""
        generation = self._generation
        sinks = [_GatheredWithIds(generation, choice) for choice in generation.choices]
        await generation.run(sinks)
        usage = generation.usage()
        rest = pb.GenerateResponse(request_id=self.answer_id, model=self._model, usage=_usage(usage))

        def encode() -> list[bytes]:
            pieces = [rest.SerializeToString()]
            for choice, sink in zip(generation.choices, sinks, strict=True):
                pieces += _encoded(choice, sink.token_ids if self._with_token_ids else (), sink.logprobs)
            return pieces

        pieces = await in_thread_if_large(encode, usage.completion_tokens)
        return await join(pieces, sum(map(len, pieces)))

    async def stream(self, chunks: Chunks) -> None:
        """Fill `chunks` until the end. Raises KvferryError; earlier chunks are valid."""
        generation = self._generation
        chunks.begin(self.answer_id)
        await generation.run(
            [
                _Streamed(generation, index, chunks, with_token_ids=self._with_token_ids)
                for index in range(len(generation.choices))
            ]
        )
        chunks.last().usage.CopyFrom(_usage(generation.usage()))


class Chunks:
    """At most one waiting chunk per choice, so slow readers get larger ones.

    At about `max_unread_bytes`, `on_slow` is called once and all chunks are dropped from then on. Before that,
    `on_unread` is called for every 64 KiB.
    """

    def __init__(self, max_unread_bytes: int, on_slow: Callable[[], None], on_unread: Callable[[], None]) -> None:
        self.num_popped_bytes = 0  # of the last `pop_all`
        self._max_unread_bytes = max_unread_bytes
        self._on_slow = on_slow
        self._on_unread = on_unread
        self._tell_first_bytes = self._tell_at_bytes = min(max_unread_bytes, _UNREAD_STEP_BYTES)
        self._request_id = ""
        self._choice_to_chunk: dict[int, pb.GenerateChunk] = {}
        self._num_bytes = 0
        self._is_cut = False
        self._there = asyncio.Event()

    def begin(self, request_id: str) -> None:
        self._request_id = request_id

    def of(self, choice: int, num_bytes: int) -> pb.GenerateChunk:
        """Return the waiting chunk of a choice, to which about `num_bytes` are added."""
        chunk = self._choice_to_chunk.get(choice)
        if chunk is None:
            chunk = pb.GenerateChunk(request_id=self._request_id, choice=choice)
            if self._is_cut:
                return chunk
            self._choice_to_chunk[choice] = chunk
            num_bytes += _CHUNK_BYTES
            self._there.set()
        self._num_bytes += num_bytes
        if self._num_bytes > self._tell_at_bytes and not self._is_cut:
            self._tell()
        return chunk

    def _tell(self) -> None:
        self._tell_at_bytes = min(self._max_unread_bytes, self._num_bytes + _UNREAD_STEP_BYTES)
        if self._num_bytes <= self._max_unread_bytes:
            self._on_unread()
            return
        self._is_cut = True
        self._choice_to_chunk.clear()
        self._on_slow()

    def num_unread_bytes(self) -> int:
        """Return about what waits and what was popped last."""
        return self._num_bytes + self.num_popped_bytes

    def last(self) -> pb.GenerateChunk:
        if not self._choice_to_chunk:
            return self.of(0, 0)
        return next(reversed(self._choice_to_chunk.values()))

    def wake(self) -> None:
        """Make `wait` return even if no chunk waits."""
        self._there.set()

    async def wait(self) -> None:
        await self._there.wait()

    def pop_all(self) -> list[pb.GenerateChunk]:
        self._there.clear()
        popped = list(self._choice_to_chunk.values())
        self._choice_to_chunk.clear()
        self.num_popped_bytes, self._num_bytes = self._num_bytes, 0
        self._tell_at_bytes = self._tell_first_bytes
        return popped


class _GatheredWithIds(Gathered):
    __slots__ = ("logprobs", "token_ids")

    def __init__(self, generation: Generation, choice: Choice) -> None:
        super().__init__(generation, choice, self._add_logprobs)
        self.token_ids: list[int] = []
        self.logprobs: list[bytes] = []  # fields of an Answer

    def _add_logprobs(self, positions: Sequence[Sequence[TokenLogprob]]) -> None:
        # Encoded at the end, those of a long answer would take the event loop 100 ms.
        self.logprobs.append(pb.Answer(logprobs=map(_position, positions)).SerializeToString())

    def on_output(self, output: EngineOutput) -> None:
        super().on_output(output)
        self.token_ids.extend(output.token_ids)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        if not self.token_ids:
            self.on_output(EngineOutput(token_ids, text))
            return
        super().on_text(token_ids, text)
        self.token_ids.extend(token_ids)


class _Streamed:
    __slots__ = ("_choice", "_chunks", "_generation", "_index", "_is_parsed", "_with_token_ids")

    def __init__(self, generation: Generation, index: int, chunks: Chunks, *, with_token_ids: bool) -> None:
        self._generation = generation
        self._index = index
        self._choice = generation.choices[index]
        self._is_parsed = isinstance(self._choice, ParsedChoice)
        self._chunks = chunks
        self._with_token_ids = with_token_ids

    def on_output(self, output: EngineOutput) -> None:
        choice, delta = self._choice, output.delta
        if not choice.num_tokens and output.token_ids:
            self._generation.note_first_token()
        choice.note(output)
        refuse_abort(output)
        text = output.text if not self._is_parsed else delta.content if delta is not None else ""
        has_ids = self._with_token_ids and bool(output.token_ids)
        if not (text or delta or has_ids or output.logprobs is not None or output.finish_reason is not None):
            return
        num_logprobs = sum(map(len, output.logprobs or ()))
        chunk = self._chunks.of(
            self._index, len(output.text) + _TOKEN_BYTES * len(output.token_ids) + _LOGPROB_BYTES * num_logprobs
        )
        if text:
            chunk.text += _utf8(text)
        if delta is not None:
            if delta.reasoning:
                chunk.reasoning += _utf8(delta.reasoning)
            chunk.tool_calls.extend(map(_call_delta, delta.tool_calls))
        if has_ids:
            chunk.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            chunk.logprobs.extend(map(_position, output.logprobs))
        if output.finish_reason is not None:
            _end(chunk, choice)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        choice = self._choice
        if not choice.num_tokens or self._is_parsed or self._with_token_ids:
            self.on_output(EngineOutput(token_ids, text))
            return
        choice.num_tokens += len(token_ids)
        if text:
            self._chunks.of(self._index, len(text)).text += _utf8(text)


def _encoded(choice: Choice, token_ids: Sequence[int], logprobs: Sequence[bytes]) -> list[bytes]:
    """Return one of GenerateResponse's `answers`, encoded, in pieces."""
    answer = pb.Answer(text=_utf8("".join(choice.text)))
    if isinstance(choice, ParsedChoice):
        answer.reasoning = _utf8("".join(choice.reasoning))
        for _, call in sorted(choice.calls.items()):
            answer.tool_calls.add(id=call.id, name=call.name, arguments=_utf8("".join(call.arguments)))
    _end(answer, choice)
    pieces = [answer.SerializeToString(), *_in_steps(pb.Answer, token_ids), *logprobs]
    return [_ANSWERS_TAG + _varint(sum(map(len, pieces))), *pieces]


def _in_steps(message: Callable[..., pb.Answer | pb.TokenizeResponse], token_ids: Sequence[int]) -> Iterator[bytes]:
    # Decoders put the parts of a repeated field together.
    for first in range(0, len(token_ids), _IDS_AT_ONCE):
        yield message(token_ids=token_ids[first : first + _IDS_AT_ONCE]).SerializeToString()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _end(message: pb.Answer | pb.GenerateChunk, choice: Choice) -> None:
    reason = _FINISH_REASONS.get(choice.finish_reason or "", pb.FINISH_REASON_UNSPECIFIED)
    if reason == pb.FINISH_REASON_STOP and isinstance(choice, ParsedChoice) and choice.made_calls:
        reason = pb.FINISH_REASON_TOOL_CALLS
    message.finish_reason = reason
    message.resumed_after.extend(choice.resumed_after)
    if isinstance(choice.stop_reason, str):
        message.stop_text = _utf8(choice.stop_reason)
    elif choice.stop_reason is not None:
        message.stop_token_id = choice.stop_reason


def _call_delta(piece: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(
        index=piece.index, id=piece.id or "", name=piece.name or "", arguments=_utf8(piece.arguments)
    )


def _position(position: Sequence[TokenLogprob]) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        top=[
            pb.TokenLogprob(token_id=entry.token_id, text=_utf8(entry.text), logprob=entry.logprob)
            for entry in position
        ]
    )


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_tokens,
    )


def _utf8(text: str) -> str:
    """Replace lone surrogates: protobuf carries UTF-8 only."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode()
