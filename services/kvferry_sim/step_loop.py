"""The simulator's step loop: plan, wait a step's time, commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvferry.engine.base import CachedTokens, EngineOutput, FinishReason, PromptSources, TransferParams
from kvferry.engine.time_shares import PromptShares, PromptTime
from kvferry_sim.event_stream import KvEventStream
from kvferry_sim.kv_cache import KvCache
from kvferry_sim.kv_transfer import PullFault
from kvferry_sim.scheduler import Plan, Scheduler
from kvferry_sim.sequence import Phase, TokenSequence
from kvferry_sim.settings import SimConfig


@dataclass(frozen=True, slots=True)
class Faults:
    stalled: bool = False  # no step runs until other faults are set
    step_delay_s: float = 0.0  # added to every step
    prefill_slowdown: float = 1.0  # prompts take this many times as long
    pulls: PullFault = PullFault.NONE  # how this engine answers pulls from it


class StepLoop:
    """Planning and committing never wait, so nothing changes between their lines."""

    def __init__(
        self,
        scheduler: Scheduler,
        cache: KvCache,
        events: KvEventStream,
        sim: SimConfig,
        *,
        offer: Callable[[TokenSequence], TransferParams | None],
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._events = events
        self._sim = sim
        self._offer = offer
        self._clock = clock
        self._sleep = sleep
        self._step_s = sim.step_ms / 1000
        self._block_size = cache.pool.block_size
        self._work = asyncio.Event()
        self._prompt_shares = PromptShares()
        self.faults = Faults()
        self.prompt_tokens = PromptSources()
        self.cached_tokens = CachedTokens()
        self.num_generated_tokens = 0
        self.num_steps = 0

    def wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        due_s = self._clock()
        while True:
            plan = [] if self.faults.stalled else self._scheduler.plan()
            self._events.publish(self._cache.drain_events())
            if not plan:
                self._work.clear()
                await self._work.wait()
                due_s = self._clock()
                continue
            # Steps are due by the clock, so that late wake-ups do not add up. Time that is lost for good (a busy
            # machine) is not caught up by steps that take no time.
            duration_s = self._duration_s(plan)
            now_s = self._clock()
            due_s = max(due_s, now_s - duration_s) + duration_s
            await self._sleep(max(0.0, due_s - now_s))
            self._commit(plan)

    def _duration_s(self, plan: Plan) -> float:
        num_prefill = 0
        decode_s = 0.0
        for sequence, num_now in plan:
            if sequence.num_computed < sequence.num_prompt:
                num_prefill += num_now
            else:
                decode_s = self._step_s
        prefill_s = num_prefill / self._sim.prefill_tokens_per_s * self.faults.prefill_slowdown
        return max(decode_s, prefill_s) + self.faults.step_delay_s

    def _commit(self, plan: Plan) -> None:
        block_size = self._block_size
        self.num_steps += 1
        now_s = time.monotonic()
        self._divide_time(plan, now_s)
        for sequence, num_now in plan:
            if sequence.phase is not Phase.RUNNING:
                continue  # removed while the step ran
            sequence.num_computed = num_computed = sequence.num_computed + num_now
            if num_computed // block_size > sequence.num_stored:
                self._cache.store_computed(sequence)
            if num_computed == sequence.num_tokens:
                self._generate_token(sequence, now_s)

    def _divide_time(self, plan: Plan, now_s: float) -> None:
        """Set the shares of prompts that end in this step."""
        ended = [
            (sequence, sequence.sources.local_compute)
            for sequence, num_now in plan
            if sequence.phase is Phase.RUNNING
            and not sequence.has_first_token
            and sequence.num_computed + num_now == sequence.num_prompt
            and sequence.sources is not None
        ]
        if not ended:
            return
        shares = self._prompt_shares.divide(
            [PromptTime(sequence.times.scheduled_s, now_s, num_tokens) for sequence, num_tokens in ended]
        )
        for (sequence, _), share in zip(ended, shares, strict=True):
            sequence.times.prefill_share = share

    def _generate_token(self, sequence: TokenSequence, now_s: float) -> None:
        answer = sequence.answer
        logprobs = None
        if sequence.request.sampling.logprobs is None:
            token_id = answer.next_token()
        else:
            before = answer.digest()
            token_id = answer.next_token()
            logprobs = (answer.logprobs(before, token_id),)
        is_first = not sequence.has_first_token
        if is_first and sequence.sources is not None:
            self.prompt_tokens += sequence.sources
            self.cached_tokens += sequence.cached
            sequence.times.first_token_s = now_s
        sequence.append(token_id)
        self.num_generated_tokens += 1
        output = EngineOutput((token_id,), answer.text, logprobs, sources=sequence.sources if is_first else None)
        output.finish_reason = answer.finish_reason
        if output.finish_reason is None and sequence.num_tokens >= sequence.max_tokens_total:
            output.finish_reason = FinishReason.LENGTH
            output.text += answer.flush()
        if output.finish_reason is not None:
            self._finish(sequence, output)
        sequence.outputs.put(output)

    def _finish(self, sequence: TokenSequence, last: EngineOutput) -> None:
        last.stop_reason = sequence.answer.stop_reason
        last.sources = sequence.sources
        last.cached = sequence.cached
        last.times = sequence.times.ended(with_first_token=sequence.num_tokens == sequence.num_prompt + 1)
        if sequence.request.keep_for_transfer:
            last.transfer_params = self._offer(sequence)
        self._scheduler.remove(sequence)
