"""The generating endpoints of the OpenAI API, independent of HTTP."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvferry.engine.base import EngineOutput
from kvferry.errors import EngineError, KvferryError
from kvferry.gateway.admission import Claim
from kvferry.gateway.bodies.large_bodies import MAX_VALUES, check_num_values, in_thread_if_large, join
from kvferry.gateway.bodies.openai_bodies import (
    ChatBody,
    CompletionBody,
    NamedTool,
    for_renderer,
    read_chat,
    read_completion,
)
from kvferry.gateway.generation import Gathered, Generation, refuse_abort
from kvferry.gateway.http.openai_responses import (
    DONE,
    ChatFormat,
    CompletionFormat,
    Format,
    NamedCallFormat,
    ParsedChatFormat,
    encode,
    error_chunk,
)
from kvferry.gateway.http.stream_writer import StreamWriter
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.intake import Intake
from kvferry.gateway.record_views import explained, for_tenant
from kvferry.gateway.request_trace import RequestTrace
from kvferry.router.dispatch import Dispatcher

log = logging.getLogger(__name__)

_Body = TypeVar("_Body", ChatBody, CompletionBody)


@dataclasses.dataclass(frozen=True, slots=True)
class Debug:
    """`x-kvferry-debug`: `show` adds the request's record to the answer, `disaggregate` forces a prefill worker."""

    show: bool = False
    shows_all: bool = False  # to an operator
    disaggregate: bool = False


NO_DEBUG = Debug()


class OpenAI:
    """Turns request bodies into answers."""

    def __init__(self, intake: Intake, dispatcher: Dispatcher) -> None:
        self._intake = intake
        self._dispatcher = dispatcher

    async def chat(
        self, raw: bytes, *, claim: Claim, tenant: Tenant, debug: Debug, trace: RequestTrace | None = None
    ) -> Answer:
        """Raises as `Intake.begin`."""
        begun_ns = time.time_ns()
        await check_num_values(raw, MAX_VALUES)
        body, fields = await _read(read_chat, raw)
        generation = await self._intake.begin(
            "chatcmpl",
            body,
            fields,
            begun_ns,
            claim=claim,
            tenant=tenant,
            trace=trace,
            may_be_aggregated=not debug.disaggregate,
        )
        request = generation.requests[0]
        fmt = ChatFormat
        if request.parse is not None:
            fmt = NamedCallFormat if isinstance(body.tool_choice, NamedTool) else ParsedChatFormat
        # Log-probabilities that are asked for may have been left out.
        num_top = (body.top_logprobs or 0) if body.logprobs and request.sampling.logprobs is not None else None
        return _answer(body, generation, num_top, fmt, debug)

    async def completion(
        self, raw: bytes, *, claim: Claim, tenant: Tenant, debug: Debug, trace: RequestTrace | None = None
    ) -> Answer:
        """Raises as `Intake.begin`."""
        begun_ns = time.time_ns()
        await check_num_values(raw, MAX_VALUES + self._intake.models.longest_context)
        body, fields = await _read(read_completion, raw)
        generation = await self._intake.begin(
            "cmpl",
            body,
            fields,
            begun_ns,
            claim=claim,
            tenant=tenant,
            trace=trace,
            may_be_aggregated=not debug.disaggregate,
        )
        return _answer(body, generation, body.logprobs, CompletionFormat, debug)

    def explain(self, answer_id: str, tenant: Tenant) -> list[dict[str, Any]]:
        """Return the placements of a tenant's answer, one per choice, or empty."""
        return [
            explained(record)
            for record in self._dispatcher.recent(answer_id)
            if (record.tenant, record.owner) == (tenant.name, tenant.cache_salt)
        ]


def _answer(
    body: ChatBody | CompletionBody,
    generation: Generation,
    num_top: int | None,
    kind: type[ChatFormat | CompletionFormat],
    debug: Debug,
) -> Answer:
    options = body.stream_options
    with_usage = bool(options and options.include_usage)
    return Answer(
        generation,
        kind(generation.answer_id, int(time.time()), body.model, with_usage=with_usage, num_top=num_top),
        streamed=bool(body.stream),
        with_usage=with_usage,
        debug=debug,
    )


async def _read(read: Callable[[bytes], _Body], raw: bytes) -> tuple[_Body, dict[str, Any]]:
    """Return the body and its fields for the renderer. Raises InvalidRequest."""

    def read_fields() -> tuple[_Body, dict[str, Any]]:
        body = read(raw)
        return body, for_renderer(body)

    return await in_thread_if_large(read_fields, len(raw))


class Answer:
    """An answer in progress; call `whole` or `stream` once. Cancelling it cancels every worker's request."""

    def __init__(
        self,
        generation: Generation,
        fmt: Format,
        *,
        streamed: bool,
        with_usage: bool,
        debug: Debug,
    ) -> None:
        self.answer_id = generation.answer_id
        self.streamed = streamed
        self._generation = generation
        self._format = fmt
        self._with_usage = with_usage
        self._debug = debug
        self._last_events = b""

    async def whole(self) -> bytes:
        generation = self._generation
        await generation.run(
            [
                Gathered(generation, choice, functools.partial(self._format.keep_logprobs, index))
                for index, choice in enumerate(generation.choices)
            ]
        )
        usage = generation.usage()
        encode = functools.partial(self._format.whole, generation.choices, usage, self._debug_values())
        pieces = await in_thread_if_large(encode, usage.completion_tokens)
        return await join(pieces, sum(map(len, pieces)))

    async def stream(self, writer: StreamWriter, note_error: Callable[[KvferryError], None]) -> None:
        """Write all events up to `[DONE]`, then close the writer.

        Raises KvferryError until something is written; later errors become events, and `note_error` gets them.
        """
        generation = self._generation
        streamed = _Streamed if generation.requests[0].parse is None else _StreamedParsed
        try:
            await generation.run(
                [streamed(self, index, self._format, writer) for index in range(len(generation.choices))]
            )
        except KvferryError as error:
            if not writer.started:
                raise
            note_error(error)
            await writer.close(error_chunk(error) + DONE)
            return
        except Exception:
            if not writer.started:
                raise
            log.exception("answer %s failed", self.answer_id)
            fault = EngineError("the gateway failed on this request; its log says why")
            note_error(fault)
            await writer.close(error_chunk(fault) + DONE)
            return
        closing = b""
        if self._with_usage or self._debug.show:
            closing = self._format.closing_chunk(generation.usage() if self._with_usage else None, self._debug_values())
        await writer.close(self._last_events + closing + DONE)

    @property
    def generation(self) -> Generation:
        return self._generation

    def end_choice(self, events: bytes, writer: StreamWriter) -> None:
        """Write a choice's end; a single choice's goes with the answer's end."""
        if len(self._generation.choices) == 1:
            self._last_events = events
        else:
            writer.write(events)

    def _debug_values(self) -> dict[str, Any] | None:
        if not self._debug.show:
            return None
        values = self._generation.debug_values()
        return values if self._debug.shows_all else for_tenant(values)


class _Streamed:
    """Sink that formats and writes each output at once."""

    __slots__ = ("_answer", "_begun", "_choice", "_format", "_index", "_write_text", "_writer")

    def __init__(self, answer: Answer, index: int, fmt: Format, writer: StreamWriter) -> None:
        self._answer = answer
        self._index = index
        self._format = fmt
        self._writer = writer
        self._choice = answer.generation.choices[index]
        self._begun = False
        self._write_text = writer.writer(*fmt.around_text(index))

    def on_output(self, output: EngineOutput) -> None:
        if not self._choice.num_tokens or output.finish_reason is not None:
            self._take_first_or_last(output)
            return
        self._choice.note(output)
        if self._shows(output):
            self._writer.write(self._format.chunk(self._index, output))

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        """Write tokens and text. Called for every token."""
        choice = self._choice
        if not choice.num_tokens:
            self._take_first_or_last(EngineOutput(token_ids, text))
            return
        choice.num_tokens += len(token_ids)
        if text:
            self._write_text(encode(text))

    def _take_first_or_last(self, output: EngineOutput) -> None:
        choice = self._choice
        if not choice.num_tokens and output.token_ids:
            self._answer.generation.note_first_token()
        choice.note(output)
        refuse_abort(output)
        events = b""
        if not self._begun:
            self._begun = True
            events = self._format.first_chunk(self._index)
        if self._shows(output):
            events += self._format.chunk(self._index, output)
        if output.finish_reason is not None:
            self._answer.end_choice(events + self._format.last_chunk(self._index, choice), self._writer)
        elif events:
            self._writer.write(events)

    def _shows(self, output: EngineOutput) -> bool:
        return bool(output.text) or output.logprobs is not None


class _StreamedParsed(_Streamed):
    __slots__ = ()

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        self.on_output(EngineOutput(token_ids, text))

    def _shows(self, output: EngineOutput) -> bool:
        return output.delta is not None or output.logprobs is not None
