"""The two generating endpoints: body in, bytes out.

Nothing here knows HTTP: an `Answer` is asked for its whole body, or to write itself to an outlet as it comes, and
cancelling either cancels the request on every worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, RenderedPrompt, Renderer, RequestId
from kvferry.errors import EngineError, KvferryError, ModelNotFound
from kvferry.gateway.answers import DONE, ChatFormat, Choice, CompletionFormat, Format, Usage, encode, error_chunk
from kvferry.gateway.openai_bodies import ChatBody, CompletionBody, NamedTool, for_renderer, read_chat, read_completion
from kvferry.gateway.outlet import Outlet
from kvferry.gateway.parsed_answers import NamedCallFormat, ParsedChatFormat, ParsedChoice
from kvferry.gateway.request_trace import RequestTrace, Take, TakeText
from kvferry.router.dispatch import Dispatcher, Journey
from kvferry.router.policy import explain
from kvferry.telemetry import Metrics

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Debug:
    """What a client asks for beside its answer.

    `show`: the journey, in the answer. `disaggregate`: have a prefill worker compute the prompt, whatever it costs.
    """

    show: bool = False
    disaggregate: bool = False


NO_DEBUG = Debug()


class OpenAI:
    """Turns bodies into answers, for one served model."""

    def __init__(self, renderer: Renderer, dispatcher: Dispatcher, metrics: Metrics, served_name: str) -> None:
        self._renderer = renderer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._served_name = served_name

    async def chat(self, raw: bytes, *, debug: Debug, trace: RequestTrace | None = None) -> Answer:
        """Raises a RequestError for anything wrong with the body."""
        begun_ns = time.time_ns()
        body = read_chat(raw)
        self._check_model(body)
        rendered = await self._renderer.render_chat(for_renderer(body))
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        fmt = ChatFormat
        if rendered.parse is not None:
            fmt = NamedCallFormat if isinstance(body.tool_choice, NamedTool) else ParsedChatFormat
            if body.include_reasoning is False and num_top is not None:
                # They would spell the reasoning out.
                num_top = None
                rendered = dataclasses.replace(rendered, sampling=structs.replace(rendered.sampling, logprobs=None))
        return self._answer(body, [rendered], num_top, fmt, "chatcmpl", debug=debug, trace=trace, begun_ns=begun_ns)

    async def completion(self, raw: bytes, *, debug: Debug, trace: RequestTrace | None = None) -> Answer:
        """Raises a RequestError for anything wrong with the body."""
        begun_ns = time.time_ns()
        body = read_completion(raw)
        self._check_model(body)
        rendered = await self._renderer.render_completion(for_renderer(body))
        return self._answer(
            body, list(rendered), body.logprobs, CompletionFormat, "cmpl", debug=debug, trace=trace, begun_ns=begun_ns
        )

    def explain(self, answer_id: str) -> list[dict[str, Any]]:
        """What is remembered of an answer, one entry per choice; empty when nothing is."""
        return [
            {
                "request_id": journey.request_id,
                **_journey_values(journey),
                "choices": [explain(choice) for choice in journey.choices],
            }
            for journey in self._dispatcher.recent(answer_id)
        ]

    def _check_model(self, body: ChatBody | CompletionBody) -> None:
        if body.model != self._served_name:
            raise ModelNotFound(
                f"the model {body.model!r} does not exist; served here: {self._served_name}", param="model"
            )

    def _answer(
        self,
        body: ChatBody | CompletionBody,
        rendered: list[RenderedPrompt],
        num_top: int | None,
        kind: type[ChatFormat] | type[CompletionFormat],
        prefix: str,
        *,
        debug: Debug,
        trace: RequestTrace | None,
        begun_ns: int,
    ) -> Answer:
        answer_id = f"{prefix}-{secrets.token_hex(12)}"
        requests = _choices(answer_id, rendered, body.n or 1)
        if trace is not None:
            trace.rendered(body, requests, begun_ns)
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        return Answer(
            answer_id,
            requests,
            sum(len(prompt.token_ids) for prompt in rendered),
            kind(answer_id, int(time.time()), self._served_name, with_usage=with_usage, num_top=num_top),
            self._dispatcher,
            self._metrics,
            streamed=bool(body.stream),
            with_usage=with_usage,
            debug=debug,
            trace=trace,
        )


def _choices(answer_id: str, rendered: list[RenderedPrompt], n: int) -> list[EngineRequest]:
    """One engine request per choice: `n` of each prompt, numbered as OpenAI numbers them.

    Seeds differ within a prompt. Tokens travel as arrays: keys are made from them in less than half of the time.
    """
    requests: list[EngineRequest] = []
    for prompt in rendered:
        token_ids = array("I", prompt.token_ids)
        for i in range(n):
            sampling = prompt.sampling
            if sampling.seed is not None and i:
                sampling = structs.replace(sampling, seed=_wrap_int64(sampling.seed + i))
            request_id = RequestId(f"{answer_id}-{len(requests)}")
            requests.append(EngineRequest(request_id, token_ids, sampling, parse=prompt.parse))
    return requests


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class Answer:
    """One answer on its way. Use either `whole` or `stream`, once.

    What a worker sends is taken by the sinks of its choices, within the reading of the worker's step; the task that
    asks for the answer sleeps until its end.
    """

    def __init__(
        self,
        answer_id: str,
        requests: list[EngineRequest],
        num_prompt_tokens: int,
        fmt: Format,
        dispatcher: Dispatcher,
        metrics: Metrics,
        *,
        streamed: bool,
        with_usage: bool,
        debug: Debug,
        trace: RequestTrace | None = None,
    ) -> None:
        self.answer_id = answer_id
        self.streamed = streamed
        self._requests = requests
        self._num_prompt_tokens = num_prompt_tokens
        self._format = fmt
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._with_usage = with_usage
        self._debug = debug
        self._trace = trace
        span = trace.span if trace is not None else None
        self._journeys = [Journey(trace=span) for _ in requests]
        self._choices = [Choice() if request.parse is None else ParsedChoice() for request in requests]
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._last_events = b""

    async def whole(self) -> bytes:
        """The body. Raises KvferryError."""
        await self._run([_Gathered(self, choice) for choice in self._choices])
        return self._format.whole(self._choices, self._usage(), self._debug_values())

    async def stream(self, outlet: Outlet) -> None:
        """Write everything up to `[DONE]`, which closes the outlet.

        Raises KvferryError while nothing was written; later errors are events.
        """
        streamed = _Streamed if self._requests[0].parse is None else _StreamedParsed
        try:
            await self._run([streamed(self, index, self._format, outlet) for index in range(len(self._choices))])
        except KvferryError as error:
            if not outlet.started:
                raise
            if self._trace is not None:
                self._trace.failed(error)
            await outlet.close(error_chunk(error) + DONE)
            return
        except Exception as error:
            if not outlet.started:
                raise
            if self._trace is not None:
                self._trace.failed(error)
            log.exception("answer %s failed", self.answer_id)
            await outlet.close(error_chunk(EngineError("the gateway failed on this request; its log says why")) + DONE)
            return
        closing = b""
        if self._with_usage or self._debug.show:
            closing = self._format.closing_chunk(self._usage() if self._with_usage else None, self._debug_values())
        await outlet.close(self._last_events + closing + DONE)

    def choice(self, index: int) -> Choice:
        return self._choices[index]

    def end_choice(self, events: bytes, outlet: Outlet) -> None:
        """Write what a choice ends with; of an only one, together with the end of the answer that follows at once."""
        if len(self._choices) == 1:
            self._last_events = events
        else:
            outlet.write(events)

    def note_first_token(self) -> None:
        """Called at the first token of each choice; the first of them counts."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter()
            self._metrics.time_to_first_token.observe(self._first_token_s - self._started_s)

    async def _run(self, sinks: Sequence[_Gathered | _Streamed]) -> None:
        """All choices at once; the first failure ends the answer."""
        if len(sinks) == 1:
            await self._dispatch(0, sinks[0])
        else:
            await self._run_several(sinks)
        self._settle()

    async def _dispatch(self, index: int, sink: _Gathered | _Streamed) -> None:
        sinks: tuple[Take, TakeText] = (sink.take, sink.take_text)
        if self._trace is not None:
            sinks = self._trace.listen(index, *sinks)
        await self._dispatcher.run(
            self._requests[index], self._journeys[index], *sinks, may_be_alone=not self._debug.disaggregate
        )

    async def _run_several(self, sinks: Sequence[_Gathered | _Streamed]) -> None:
        tasks = [asyncio.create_task(self._dispatch(index, sink)) for index, sink in enumerate(sinks)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _settle(self) -> None:
        usage = self._usage()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generated_tokens.inc(usage.completion_tokens)
        num_after_first = max(choice.num_tokens for choice in self._choices) - 1
        if self._first_token_s is not None and num_after_first > 0:
            self._metrics.inter_token.observe((time.perf_counter() - self._first_token_s) / num_after_first)
        if self._trace is not None:
            first_s = self._first_token_s
            self._trace.answered(
                self.answer_id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                generated_tokens=usage.completion_tokens,
                finish_reasons=[choice.finish_reason for choice in self._choices],
                first_token_s=None if first_s is None else first_s - self._started_s,
            )

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=min(self._num_prompt_tokens, sum(journey.num_cached_tokens for journey in self._journeys)),
        )

    def _debug_values(self) -> dict[str, Any] | None:
        """The journey of the first choice, for `x-kvferry-debug`."""
        if not self._debug.show:
            return None
        ttft_ms = None if self._first_token_s is None else round((self._first_token_s - self._started_s) * 1e3, 3)
        return {**_journey_values(self._journeys[0]), "ttft_ms": ttft_ms}


def _journey_values(journey: Journey) -> dict[str, Any]:
    return {
        "reason": journey.reason,
        "prefill_worker": journey.prefill_worker,
        "decode_worker": journey.decode_worker,
        "prefill_failure": journey.prefill_failure or None,
        "continued_after": journey.continued_after,
        "ferried_pages": journey.ferried_pages,
        "ferried_bytes": journey.ferried_bytes,
        "prompt_tokens_by_source": dataclasses.asdict(journey.sources),
    }


class _Gathered:
    """One choice of an answer that is sent whole."""

    __slots__ = ("_answer", "_choice")

    def __init__(self, answer: Answer, choice: Choice) -> None:
        self._answer = answer
        self._choice = choice

    def take(self, output: EngineOutput) -> None:
        """The sink."""
        if not self._choice.num_tokens and output.token_ids:
            self._answer.note_first_token()
        self._choice.add(output)
        _refuse_abort(output)

    def take_text(self, token_ids: Sequence[int], text: str) -> None:
        """The sink of tokens and text alone."""
        choice = self._choice
        if not choice.num_tokens:
            self.take(EngineOutput(token_ids, text))
            return
        choice.add_text(token_ids, text)


class _Streamed:
    """One choice of a streamed answer: every output is formatted and written as it comes."""

    __slots__ = ("_answer", "_begun", "_choice", "_format", "_index", "_outlet", "_write_text")

    def __init__(self, answer: Answer, index: int, fmt: Format, outlet: Outlet) -> None:
        self._answer = answer
        self._index = index
        self._format = fmt
        self._outlet = outlet
        self._choice = answer.choice(index)
        self._begun = False
        self._write_text = outlet.writer(*fmt.around_text(index))

    def take(self, output: EngineOutput) -> None:
        """The sink."""
        if not self._choice.num_tokens or output.finish_reason is not None:
            self._take_first_or_last(output)
            return
        self._choice.note(output)
        if self._shows(output):
            self._outlet.write(self._format.chunk(self._index, output))

    def take_text(self, token_ids: Sequence[int], text: str) -> None:
        """The sink of tokens and text alone. Called for every token: what happens once per choice is elsewhere."""
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
            self._answer.note_first_token()
        choice.note(output)
        _refuse_abort(output)
        events = b""
        if not self._begun:
            self._begun = True
            events = self._format.first_chunk(self._index)
        if self._shows(output):
            events += self._format.chunk(self._index, output)
        if output.finish_reason is not None:
            self._answer.end_choice(events + self._format.last_chunk(self._index, choice), self._outlet)
        elif events:
            self._outlet.write(events)

    def _shows(self, output: EngineOutput) -> bool:
        """Whether a chunk tells anything of it."""
        return bool(output.text) or output.logprobs is not None


class _StreamedParsed(_Streamed):
    """One choice of an answer that a worker parses: what its deltas say, not its raw text."""

    __slots__ = ()

    def take_text(self, token_ids: Sequence[int], text: str) -> None:
        self.take(EngineOutput(token_ids, text))

    def _shows(self, output: EngineOutput) -> bool:
        return output.delta is not None or output.logprobs is not None


def _refuse_abort(output: EngineOutput) -> None:
    if output.finish_reason is FinishReason.ABORT:
        raise EngineError("the engine aborted the request")
