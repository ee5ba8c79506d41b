"""An answer, independent of HTTP and gRPC: dispatches its choices, counts tokens and records the end."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from msgspec import structs

from kvferry.config import is_of_entry
from kvferry.engine.base import (
    Asker,
    CacheSalt,
    EngineOutput,
    EngineRequest,
    FinishReason,
    RenderedPrompt,
    RequestId,
    TierHints,
    TokenLogprob,
)
from kvferry.errors import EngineError
from kvferry.gateway.choices import Choice, ParsedChoice, Usage
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.record_views import record_values
from kvferry.gateway.request_trace import RequestTrace
from kvferry.gateway.token_timeouts import TokenTimeouts
from kvferry.link.remote_request import OnOutput, OnText
from kvferry.router.dispatch import Dispatcher
from kvferry.router.request_record import RequestRecord

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


def _requests_of(
    answer_id: str,
    rendered: Sequence[RenderedPrompt],
    n: int,
    tenant: Tenant,
    cache_salt: str | None,
    wanted_s: float | None,
    deadline_s: float | None,
    pool: str,
    adapter: str,
) -> list[EngineRequest]:
    """Return `n` requests per prompt in OpenAI's order, with different seeds.

    Tokens are arrays, which halves the time of route keys.
    """
    requests: list[EngineRequest] = []
    salt: str = salt_of(tenant, cache_salt)
    if is_of_entry(pool):
        # Models have tokens in common: without this, pages of one would be looked for under the keys of another.
        salt = f"{pool}/{salt}"
    tier = tenant.tier
    if wanted_s is not None:
        tier = structs.replace(tier or TierHints(), wanted_s=wanted_s)
    for prompt in rendered:
        token_ids = prompt.token_ids if isinstance(prompt.token_ids, array) else array("I", prompt.token_ids)
        for i in range(n):
            sampling = prompt.sampling
            if sampling.seed is not None and i:
                sampling = structs.replace(sampling, seed=_wrap_int64(sampling.seed + i))
            requests.append(
                EngineRequest(
                    RequestId(f"{answer_id}-{len(requests)}"),
                    token_ids,
                    sampling,
                    cache_salt=salt,
                    parse=prompt.parse,
                    tier=tier,
                    deadline_s=deadline_s,
                    turn=tenant.turn,
                    pool=pool,
                    adapter=adapter,
                    images=prompt.images,
                )
            )
    return requests


def salt_of(tenant: Tenant, cache_salt: str | None) -> CacheSalt:
    return tenant.cache_salt if cache_salt is None else tenant.salt_of(cache_salt)


def asker_of(tenant: Tenant, cache_salt: str | None) -> Asker:
    return Asker(tenant.name, salt_of(tenant, cache_salt))


class Generation:
    """The choices of one answer. Cancelling `run` cancels every request on every worker."""

    def __init__(
        self,
        answer_id: str,
        rendered: Sequence[RenderedPrompt],
        n: int,
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        *,
        tenant: Tenant,
        pool: str,
        adapter: str = "",
        timeouts: TokenTimeouts,
        may_be_aggregated: bool = True,
        trace: RequestTrace | None = None,
        cache_salt: str | None = None,
        wanted_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Make `n` requests per prompt. Unless `may_be_aggregated`, prefill workers compute the prompts.

        `cache_salt`, `wanted_s` (`TierHints`) and `deadline_s`, of `time.monotonic`, are the client's own; without the
        last, `gateway.request_timeout_s` is the limit.

        Raises NoDecodeWorker while no worker has the adapter.
        """
        if adapter:
            adapter = dispatcher.adapter_key(adapter, pool)
        if deadline_s is None:
            deadline_s = time.monotonic() + dispatcher.request_timeout_s
        self.requests = _requests_of(answer_id, rendered, n, tenant, cache_salt, wanted_s, deadline_s, pool, adapter)
        if wanted_s is not None:
            metrics.hinted_requests.labels("wanted" if wanted_s else "end").inc()
        self._trace = trace
        span = trace.span if trace is not None else None
        if span is not None:
            span.set({"kvferry.tenant": tenant.name, "kvferry.adapter": adapter or None})
        self.records = [
            RequestRecord(tenant=tenant.name, owner=tenant.cache_salt, pool=pool, adapter=adapter, trace=span)
            for _ in self.requests
        ]
        self.choices = [
            (Choice if request.parse is None else ParsedChoice)(resumed_after=record.continued_after)
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
        # Up to now: a prompt that no worker has taken counts nothing.
        if self._usage is not None:
            return self._usage
        usage = Usage(completion_tokens=sum(choice.num_tokens for choice in self.choices))
        for first in range(0, len(self.requests), self._n):
            # Choices of a prompt share its pages: cached is what none of them had to compute.
            computed = [record for record in self.records[first : first + self._n] if record.is_computed]
            if computed:
                usage.prompt_tokens += len(self.requests[first].prompt_token_ids)
                usage.cached_tokens += min(record.num_cached_tokens for record in computed)
        return usage

    def num_admitted_tokens(self) -> int:
        """Return the prompt tokens that workers have computed or taken, for each choice as limits count them."""
        pairs = zip(self.requests, self.records, strict=True)
        return sum(len(request.prompt_token_ids) for request, record in pairs if record.is_computed)

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
                num_tokens += len(self.requests[index].prompt_token_ids)
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


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
