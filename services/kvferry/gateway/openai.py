"""The two generating endpoints: body in, bytes out.

Nothing here knows HTTP: an `Answer` is asked for its whole body or for its chunks, and closing either cancels the
request on every worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, RenderedPrompt, Renderer, RequestId
from kvferry.errors import EngineError, KvferryError, ModelNotFound
from kvferry.gateway.answers import DONE, ChatFormat, Choice, CompletionFormat, Format, Usage, error_chunk
from kvferry.gateway.openai_bodies import ChatBody, CompletionBody, for_renderer, read_chat, read_completion
from kvferry.router.dispatch import Dispatcher, Journey
from kvferry.telemetry import Metrics

log = logging.getLogger(__name__)


class OpenAI:
    """Turns bodies into answers, for one served model."""

    def __init__(self, renderer: Renderer, dispatcher: Dispatcher, metrics: Metrics, served_name: str) -> None:
        self._renderer = renderer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._served_name = served_name

    async def chat(self, raw: bytes, *, debug: bool) -> Answer:
        """Raises a RequestError for anything wrong with the body."""
        body = read_chat(raw)
        self._check_model(body)
        rendered = [await self._renderer.render_chat(for_renderer(body))]
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        return self._answer(body, rendered, num_top, ChatFormat, "chatcmpl", debug=debug)

    async def completion(self, raw: bytes, *, debug: bool) -> Answer:
        """Raises a RequestError for anything wrong with the body."""
        body = read_completion(raw)
        self._check_model(body)
        rendered = await self._renderer.render_completion(for_renderer(body))
        return self._answer(body, list(rendered), body.logprobs, CompletionFormat, "cmpl", debug=debug)

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
        debug: bool,
    ) -> Answer:
        answer_id = f"{prefix}-{secrets.token_hex(12)}"
        options = body.stream_options
        with_usage = bool(options and options.include_usage)
        return Answer(
            answer_id,
            _choices(answer_id, rendered, body.n or 1),
            sum(len(prompt.token_ids) for prompt in rendered),
            kind(answer_id, int(time.time()), self._served_name, with_usage=with_usage, num_top=num_top),
            self._dispatcher,
            self._metrics,
            streamed=bool(body.stream),
            with_usage=with_usage,
            debug=debug,
        )


def _choices(answer_id: str, rendered: list[RenderedPrompt], n: int) -> list[EngineRequest]:
    """One engine request per choice: `n` of each prompt, numbered as OpenAI numbers them.

    Seeds differ within a prompt.
    """
    requests: list[EngineRequest] = []
    for prompt in rendered:
        for i in range(n):
            sampling = prompt.sampling
            if sampling.seed is not None and i:
                sampling = dataclasses.replace(sampling, seed=_wrap_int64(sampling.seed + i))
            requests.append(EngineRequest(RequestId(f"{answer_id}-{len(requests)}"), prompt.token_ids, sampling))
    return requests


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


class Answer:
    """One answer on its way. Use either `whole` or `chunks`, once.

    Every iterator here closes the one it reads from, so that closing the outermost reaches the workers at once, not
    when the garbage collector finds the innermost.
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
        debug: bool,
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
        self._journeys = [Journey() for _ in requests]
        self._choices = [Choice() for _ in requests]
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None

    async def whole(self) -> bytes:
        """The whole body. Raises what the request failed with."""
        async with contextlib.aclosing(self._outputs()) as outputs:
            async for _ in outputs:
                pass
        return self._format.whole(self._choices, self._usage(), self._debug_values())

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events, ending with [DONE].

        Before the first chunk a failure is raised; after it, it is an event.
        """
        fmt, begun, sent = self._format, set[int](), False
        try:
            async with contextlib.aclosing(self._outputs()) as outputs:
                async for index, output in outputs:
                    choice = self._choices[index]
                    pieces = b""
                    if index not in begun:
                        begun.add(index)
                        pieces = fmt.first_chunk(index)
                    if output.text or output.logprobs is not None:
                        pieces += fmt.chunk(index, output)
                    if output.finish_reason is not None:
                        pieces += fmt.last_chunk(index, choice)
                    if pieces:
                        sent = True
                        yield pieces
        except KvferryError as error:
            if not sent:
                raise
            yield error_chunk(error) + DONE
            return
        except Exception:
            if not sent:
                raise
            log.exception("answer %s failed", self.answer_id)
            yield error_chunk(EngineError("the gateway failed on this request; its log says why")) + DONE
            return
        closing = b""
        if self._with_usage or self._debug:
            closing = fmt.closing_chunk(self._usage() if self._with_usage else None, self._debug_values())
        yield closing + DONE

    async def _outputs(self) -> AsyncGenerator[tuple[int, EngineOutput], None]:
        """Outputs of all choices as they come, each already added to its choice."""
        async with contextlib.aclosing(self._arriving()) as source:
            async for index, output in source:
                if self._first_token_s is None and output.token_ids:
                    self._first_token_s = time.perf_counter()
                    self._metrics.time_to_first_token.observe(self._first_token_s - self._started_s)
                self._choices[index].add(output)
                if output.finish_reason is FinishReason.ABORT:
                    raise EngineError("the engine aborted the request")
                yield index, output
        self._settle()

    async def _arriving(self) -> AsyncGenerator[tuple[int, EngineOutput], None]:
        """All choices at once; the first failure ends the answer."""
        arrived: asyncio.Queue[tuple[int, EngineOutput | KvferryError | None]] = asyncio.Queue()

        async def follow(index: int) -> None:
            request = self._requests[index]
            try:
                await self._dispatcher.run(
                    request, self._journeys[index], lambda output: arrived.put_nowait((index, output))
                )
                arrived.put_nowait((index, None))
            except KvferryError as error:
                arrived.put_nowait((index, error))
            except Exception:
                log.exception("request %s failed", request.request_id)
                arrived.put_nowait((index, EngineError("the gateway failed on this request; its log says why")))

        tasks = [asyncio.create_task(follow(index)) for index in range(len(self._requests))]
        try:
            remaining = len(tasks)
            while remaining:
                index, item = await arrived.get()
                if item is None:
                    remaining -= 1
                elif isinstance(item, KvferryError):
                    raise item
                else:
                    yield index, item
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

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=min(self._num_prompt_tokens, sum(journey.num_cached_tokens for journey in self._journeys)),
        )

    def _debug_values(self) -> dict[str, Any] | None:
        """The journey of the first choice, for `x-kvferry-debug`."""
        if not self._debug:
            return None
        journey = self._journeys[0]
        return {
            "reason": journey.reason,
            "prefill_worker": journey.prefill_worker,
            "decode_worker": journey.decode_worker,
            "prefill_failure": journey.prefill_failure or None,
            "continued_after": journey.continued_after,
            "ferried_pages": journey.ferried_pages,
            "ferried_bytes": journey.ferried_bytes,
            "prompt_tokens_by_source": dataclasses.asdict(journey.sources),
            "ttft_ms": None if self._first_token_s is None else round((self._first_token_s - self._started_s) * 1e3, 3),
        }
