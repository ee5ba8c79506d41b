"""An answer, independent of HTTP and gRPC: dispatches its choices, counts tokens and records the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvferry.engine.base import (
    EngineOutput,
    FinishReason,
    TokenLogprob,
)
from kvferry.errors import EngineError
from kvferry.gateway.choices import Choice, ParsedChoice, Usage
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.record_views import record_values
from kvferry.gateway.request_trace import RequestTrace
from kvferry.gateway.timeouts import TokenTimeouts
from kvferry.link.remote_request import OnOutput, OnText
from kvferry.router.dispatch import Dispatcher
from kvferry.router.request import Request, RequestRecord

# Choices of an answer, and prompt tokens of theirs, that are dispatched in one turn of the event loop: placing one
# takes some hundred microseconds, and as many more for 8,000 tokens.
DISPATCHED_AT_ONCE = 8
TOKENS_AT_ONCE = 8 << 10


class Sink(Protocol):
    """Receiver of one choice's outputs. Must not wait: it runs while a step is read."""

    def on_output(self, output: EngineOutput) -> None: ...

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        """Receive an output of tokens and text only."""
        ...


class Generation:
    """The choices of one answer. Cancelling `run` cancels every request on every worker."""

    def __init__(
        self,
        answer_id: str,
        requests: Sequence[Request],
        n: int,
        tenant: Tenant,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        timeouts: TokenTimeouts,
        *,
        may_be_aggregated: bool = True,
        trace: RequestTrace | None = None,
    ) -> None:
        """`requests` has one request per choice, `n` for each prompt.

        Unless `may_be_aggregated`, prefill workers compute the prompts.
        """
        self.requests = requests
        self._trace = trace
        span = trace.span if trace is not None else None
        pool, adapter = requests[0].pool, requests[0].prompt.adapter
        if span is not None:
            span.set({"kvferry.tenant": tenant.name, "kvferry.adapter": adapter or None})
        self.records = [
            RequestRecord(tenant=tenant.name, owner=tenant.cache_salt, pool=pool, adapter=adapter, trace=span)
            for _ in requests
        ]
        self.choices = [
            (Choice if request.parse is None else ParsedChoice)(resumed_after=record.resumed_after)
            for request, record in zip(self.requests, self.records, strict=True)
        ]
        self.answer_id = answer_id
        self._n = n
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._may_be_aggregated = may_be_aggregated
        self._timeouts = timeouts
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._usage: Usage | None = None  # once all choices have ended, as the next
        self._token_gap_s: float | None = None

    async def run(self, sinks: Sequence[Sink]) -> None:
        """Run all choices at once; the first failure ends the answer.

        Raises KvferryError: DeadlineExceeded where a choice waited too long for a token.
        """
        async with self._timeouts.watch(self.choices):
            if len(sinks) == 1:
                await self._dispatch(0, sinks[0])
            else:
                await self._run_several(sinks)
        self._settle()

    def note_first_token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter()
            self._metrics.time_to_first_token.observe(self._first_token_s - self._started_s)

    @property
    def first_token_after_s(self) -> float | None:
        return None if self._first_token_s is None else self._first_token_s - self._started_s

    @property
    def token_gap_s(self) -> float | None:
        """Mean, up to now or to the answer's end."""
        if self._usage is not None:
            return self._token_gap_s
        num_after_first = max(choice.num_tokens for choice in self.choices) - 1
        if self._first_token_s is None or num_after_first <= 0:
            return None
        return (time.perf_counter() - self._first_token_s) / num_after_first

    def usage(self) -> Usage:
        # Counted so far: a prompt that no worker has accepted counts nothing.
        if self._usage is not None:
            return self._usage
        usage = Usage(completion_tokens=sum(choice.num_tokens for choice in self.choices))
        for first in range(0, len(self.requests), self._n):
            # Choices of a prompt share its pages: cached is what none of them had to compute.
            computed = [record for record in self.records[first : first + self._n] if record.is_computed]
            if computed:
                usage.prompt_tokens += len(self.requests[first].prompt.token_ids)
                usage.cached_tokens += min(record.num_cached_tokens for record in computed)
        return usage

    def num_admitted_tokens(self) -> int:
        """Return the prompt tokens that workers have computed or taken, for each choice as limits count them."""
        pairs = zip(self.requests, self.records, strict=True)
        return sum(len(request.prompt.token_ids) for request, record in pairs if record.is_computed)

    def debug_values(self) -> dict[str, Any]:
        ttft_ms = None if self._first_token_s is None else round((self._first_token_s - self._started_s) * 1e3, 3)
        return {**record_values(self.records[0]), "ttft_ms": ttft_ms}

    async def _dispatch(self, index: int, sink: Sink) -> None:
        sinks_of_choice: tuple[OnOutput, OnText] = (sink.on_output, sink.on_text)
        if self._trace is not None:
            sinks_of_choice = self._trace.listen(index, *sinks_of_choice)
        await self._dispatcher.run(
            self.requests[index], self.records[index], *sinks_of_choice, may_be_aggregated=self._may_be_aggregated
        )

    async def _run_several(self, sinks: Sequence[Sink]) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            num_choices = num_tokens = 0
            for index, sink in enumerate(sinks):
                tasks.append(asyncio.create_task(self._dispatch(index, sink)))
                num_choices += 1
                num_tokens += len(self.requests[index].prompt.token_ids)
                if num_choices == DISPATCHED_AT_ONCE or num_tokens >= TOKENS_AT_ONCE:
                    num_choices = num_tokens = 0
                    await asyncio.sleep(0)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _settle(self) -> None:
        usage, gap_s = self.usage(), self.token_gap_s
        self._usage, self._token_gap_s = usage, gap_s
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generated_tokens.inc(usage.completion_tokens)
        if gap_s is not None:
            self._metrics.inter_token.observe(gap_s)
        if self._trace is not None:
            self._trace.answered(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                generated_tokens=usage.completion_tokens,
                finish_reasons=[choice.finish_reason for choice in self.choices],
                first_token_s=self.first_token_after_s,
            )


class Gathered:
    __slots__ = ("_choice", "_generation", "_keep_logprobs")

    def __init__(
        self,
        generation: Generation,
        choice: Choice,
        keep_logprobs: Callable[[Sequence[Sequence[TokenLogprob]]], None],
    ) -> None:
        self._generation = generation
        self._choice = choice
        self._keep_logprobs = keep_logprobs

    def on_output(self, output: EngineOutput) -> None:
        if not self._choice.num_tokens and output.token_ids:
            self._generation.note_first_token()
        self._choice.add(output)
        if output.logprobs is not None:
            self._keep_logprobs(output.logprobs)
        refuse_abort(output)

    def on_text(self, token_ids: Sequence[int], text: str) -> None:
        choice = self._choice
        if not choice.num_tokens:
            self.on_output(EngineOutput(token_ids, text))
            return
        choice.add_text(token_ids, text)


def refuse_abort(output: EngineOutput) -> None:
    """Raises EngineError for a last output without a proper finish reason."""
    if output.finish_reason is FinishReason.ABORT:
        raise EngineError("the engine aborted the request")
