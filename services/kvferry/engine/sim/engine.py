"""The twin engine: vLLM's shape without a model.

One task runs steps: plan (who computes how many tokens, given pages and budget), let the time pass that a real step
would take, commit (tokens out, pages findable). Planning and committing never wait, so nothing changes between their
lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.config import SimConfig, TierConfig
from kvferry.engine.base import (
    CachedTokens,
    EngineId,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    KvEventBatch,
    KvTransferStats,
    PromptSources,
    RequestId,
    TransferParams,
    check_continued,
)
from kvferry.engine.parsing import ParsedAnswer
from kvferry.engine.sim.answer import Answer
from kvferry.engine.sim.block_pool import BlockPool, PageHash, PageId
from kvferry.engine.sim.kv_transfer import (
    PULL_TIMEOUT_S,
    KvTransferError,
    KvTransferServer,
    PullFault,
    Ticket,
    pull_pages,
    release_offer,
)
from kvferry.engine.sim.mailbox import Mailbox
from kvferry.engine.sim.page_memory import PageMemory, layout_digest
from kvferry.engine.sim.parsing import SimParser
from kvferry.engine.sim.sequence import Phase, TokenSequence
from kvferry.engine.sim.tier import SimTier, sim_layout
from kvferry.engine.sim.tokenizer import SimTokenizer
from kvferry.errors import ContextLengthExceeded, EngineDead, EngineError, InvalidRequest, UnsupportedEngine
from kvferry.pages.keys import TOKEN_BYTES, pack_tokens
from kvferry.residency.index import Tier
from kvferry.task_set import TaskSet

log = logging.getLogger(__name__)

KV_CACHE_DTYPE = "sim"
UNPACED_CHUNK_TOKENS = 2048  # prompt tokens a step where steps take no time
MAX_UNREAD_EVENT_BATCHES = 100_000  # then batches are dropped, and the listener sees the gap


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, from the moment it is set as `SimEngine.faults`."""

    stalled: bool = False  # steps stop until other faults are set
    step_delay_s: float = 0.0  # added to every step
    prefill_slowdown: float = 1.0  # prompts take this many times as long
    pulls: PullFault = PullFault.NONE  # how this engine treats whoever pulls from it


class SimEngine:
    """An Engine. `sim` is the timing model and the sizes; all randomness comes from `seed` and from requests.

    `seed` stands in for a request's own where it has none: two engines of one seed answer alike at every temperature.
    `clock` and `sleep` pace the steps and the tier's loads only. With `tier.enabled` it has a CPU tier of
    `sim.cpu_pages`, and behind it the volumes of the keeper at `keeper_socket`, if that is named.
    """

    def __init__(
        self,
        model: str,
        sim: SimConfig,
        *,
        block_size: int,
        max_num_seqs: int,
        host: str = "127.0.0.1",
        tier: TierConfig | None = None,
        keeper_socket: str = "",
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._model = model
        self._sim = sim
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._host = host
        self._tier_config = tier if tier is not None else TierConfig()
        self._keeper_socket = keeper_socket
        self._seed = seed
        self._clock = clock
        self._sleep = sleep
        self._tokenizer = SimTokenizer()
        self._layout = layout_digest(model, block_size, sim.page_bytes)
        self._step_s = sim.step_ms / 1000
        paced_chunk = int(sim.prefill_tokens_per_s * self._step_s)
        self._chunk_tokens = max(1, paced_chunk) if self._step_s else UNPACED_CHUNK_TOKENS
        self._faults = Faults()
        self._info: EngineInfo | None = None
        self._failure: EngineDead | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._kv_transfer: KvTransferServer | None = None
        self._reset()

    def _reset(self) -> None:
        """As new, as after a restart."""
        self._pool = BlockPool(self._sim.num_pages, self._block_size)
        self._memory = PageMemory(self._sim.num_pages, self._sim.page_bytes, self._layout)
        self._id_to_sequence: dict[RequestId, TokenSequence] = {}
        self._waiting: deque[TokenSequence] = deque()
        self._pulling: set[TokenSequence] = set()
        self._running: list[TokenSequence] = []
        self._work = asyncio.Event()
        self._background = TaskSet()
        self._listener: Mailbox[KvEventBatch] | None = None
        self._event_sequence = 0
        self._prompt_tokens = PromptSources()
        self._cached_tokens = CachedTokens()
        self._tier: SimTier | None = None
        self._tier_end: asyncio.Task[None] | None = None
        self._num_generated_tokens = 0
        self._num_steps = 0
        self._transferred_bytes = 0
        self._num_transfers = 0
        self._num_failed_transfers = 0
        self._transfer_s = 0.0
        self.num_preemptions = 0
        self.num_wrong_pages = 0  # that a tier brought, and that were computed instead

    def __repr__(self) -> str:
        state = "dead" if self._failure else "alive" if self._loop_task else "not started"
        return (
            f"<SimEngine {state} running={len(self._running)} pulling={len(self._pulling)} "
            f"waiting={len(self._waiting)} {self._pool!r}>"
        )

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine was not started")
        return self._info

    @property
    def faults(self) -> Faults:
        return self._faults

    @faults.setter
    def faults(self, faults: Faults) -> None:
        self._faults = faults
        if self._kv_transfer is not None:
            self._kv_transfer.fault = faults.pulls
        self._work.set()

    @property
    def num_offers(self) -> int:
        """Prompts whose pages wait to be pulled from here."""
        return self._kv_transfer.num_offers if self._kv_transfer is not None else 0

    async def start(self) -> None:
        if self._loop_task is not None:
            raise EngineError("the engine was started already")
        self._reset()
        self._failure = None
        engine_id = EngineId(secrets.token_hex(16))
        self._kv_transfer = KvTransferServer(
            engine_id,
            self._layout,
            host=self._host,
            lease_s=self._sim.transfer_lease_s,
            read_page=self._memory.read,
            free_pages=self._free_offered,
        )
        self._kv_transfer.fault = self._faults.pulls
        try:
            await self._kv_transfer.start()
        except OSError as error:
            raise UnsupportedEngine(f"the sim engine cannot listen on {self._host!r}: {error.strerror}") from None
        if self._tier_config.enabled:
            self._tier = SimTier(
                sim_layout(self._model, block_size=self._block_size, page_bytes=self._sim.page_bytes),
                page_bytes=self._sim.page_bytes,
                num_rows=self._sim.cpu_pages,
                engine_id=engine_id,
                keeper_socket=self._keeper_socket,
            )
        self._info = EngineInfo(
            engine_id=engine_id,
            model=self._model,
            max_model_len=self._sim.max_model_len,
            block_size=self._block_size,
            page_bytes=self._sim.page_bytes,
            num_pages=self._sim.num_pages,
            kv_cache_dtype=KV_CACHE_DTYPE,
            num_cpu_pages=self._sim.cpu_pages if self._tier is not None else 0,
        )
        self._loop_task = asyncio.create_task(self._run(), name=f"sim engine {engine_id[:8]}")

    async def stop(self) -> None:
        self._die("the engine was stopped")
        tasks = [task for task in (self._loop_task, self._tier_end) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._background.wait()
        if self._kv_transfer is not None:
            await self._kv_transfer.wait_closed()
        self._loop_task = None

    def kill(self) -> None:
        """Die at once, as a crashed process does: every request fails, every connection breaks, nothing is released."""
        self._die("the engine was killed")

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure.message)
        if self._loop_task is None:
            raise EngineDead("the engine was not started")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._pulling),
            num_pages_used=self._pool.num_used,
            num_pages=self._pool.num_pages,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            transferred_bytes=self._transferred_bytes,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
        )

    def kv_transfer_stats(self) -> KvTransferStats:
        return KvTransferStats(
            self._num_transfers, self._transferred_bytes, self._transfer_s, {"transfer": self._num_failed_transfers}
        )

    def own_metrics(self) -> Iterable[Any]:
        return ()

    def check(self) -> None:
        """The conservation laws of the whole engine. Raises AssertionError."""
        self._pool.check()
        if self._tier is not None and self._failure is None:
            self._tier.check()
        where = {Phase.WAITING: self._waiting, Phase.PULLING: self._pulling, Phase.RUNNING: self._running}
        for phase, sequences in where.items():
            assert all(sequence.phase is phase for sequence in sequences), f"a sequence among {phase} is not"
        num_active = len(self._waiting) + len(self._pulling) + len(self._running)
        assert num_active == len(self._id_to_sequence), "a sequence is known and nowhere, or somewhere and unknown"
        assert not any(sequence.pages for sequence in self._waiting), "a waiting sequence holds pages"
        assert self._failure or self.num_offers or num_active or not self._pool.num_used, "pages are held by nobody"

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        if self._listener is not None:
            self._listener.fail(_ListenerReplaced())
        self._listener = listener = Mailbox[KvEventBatch]()
        if self._failure is not None:
            listener.fail(self._failure)
        return self._listen(listener)

    async def _listen(self, listener: Mailbox[KvEventBatch]) -> AsyncIterator[KvEventBatch]:
        try:
            while True:
                yield await listener.get()
        except (_ListenerReplaced, EngineDead):
            return
        finally:
            if self._listener is listener:
                self._listener = None

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        try:
            sequence = self._admit(request)
        except (InvalidRequest, EngineDead):
            if request.transfer_params is not None:
                self._release(_ticket(request.transfer_params))
            raise
        try:
            parsed = self._parsed_answer(request) if request.parse is not None else None
            while True:
                output = await sequence.mailbox.get()
                if parsed is not None and output.finish_reason is not FinishReason.ABORT:
                    finished = output.finish_reason is not None
                    output.delta = parsed.take(output.token_ids, output.text, finished=finished)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._end(sequence)

    async def abort(self, request_id: RequestId) -> None:
        sequence = self._id_to_sequence.get(request_id)
        if sequence is not None:
            self._end(sequence)
            last = EngineOutput(token_ids=(), text="", finish_reason=FinishReason.ABORT, sources=sequence.sources)
            sequence.mailbox.put(last)

    async def release(self, transfer_params: TransferParams) -> None:
        try:
            ticket = Ticket.from_params(transfer_params)
        except KvTransferError:
            return
        if self._kv_transfer is not None and ticket.engine_id == self._kv_transfer.engine_id:
            self._kv_transfer.release(ticket.offer_id)

    # Coming and going of requests.

    def _parsed_answer(self, request: EngineRequest) -> ParsedAnswer:
        assert request.parse is not None
        parsed = ParsedAnswer(SimParser(request.parse), request.parse)
        if request.continued is not None:
            given = request.prompt_token_ids[-request.continued.num_tokens :]
            texts = Answer(b"", request.sampling, self._tokenizer, answer_tokens=1, default_seed=0).resume(given, 0)
            parsed.resume(list(zip(given, texts, strict=True)), request.continued.num_chars)
        return parsed

    def _admit(self, request: EngineRequest) -> TokenSequence:
        if self._failure is not None:
            raise EngineDead(self._failure.message)
        if self._loop_task is None:
            raise EngineDead("the engine was not started")
        max_tokens_total = self._validate(request)
        packed = bytearray(pack_tokens(request.prompt_token_ids))
        given = list(request.prompt_token_ids[-request.continued.num_tokens :]) if request.continued else []
        answer = Answer(
            packed[: len(packed) - TOKEN_BYTES * len(given)],
            request.sampling,
            self._tokenizer,
            answer_tokens=self._sim.answer_tokens,
            default_seed=self._seed,
        )
        if request.continued is not None:
            answer.resume(given, request.continued.num_chars)
        ticket = _ticket(request.transfer_params) if request.transfer_params is not None else None
        sequence = TokenSequence(request, answer, packed, self._block_size, max_tokens_total, ticket)
        self._id_to_sequence[request.request_id] = sequence
        self._waiting.append(sequence)
        self._work.set()
        return sequence

    def _validate(self, request: EngineRequest) -> int:
        """How many tokens prompt and answer may have together. Raises InvalidRequest."""
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        num_given = request.continued.num_tokens if request.continued is not None else 0
        check_continued(request)
        if request.keep_for_transfer and request.transfer_params is not None:
            raise InvalidRequest("a request is either kept for transfer or pulled, not both")
        if request.request_id in self._id_to_sequence:
            raise InvalidRequest(f"request {request.request_id} is running already")
        if sampling.structured_outputs:
            raise InvalidRequest("the sim engine writes plain text only", param="structured_outputs")
        if sampling.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {sampling.max_tokens}", param="max_tokens")
        if num_prompt == 0:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        highest, lowest = max(request.prompt_token_ids), min(request.prompt_token_ids)
        if lowest < 0 or highest >= self._tokenizer.vocabulary_size:
            raise InvalidRequest(
                f"token ids go from 0 to {self._tokenizer.vocabulary_size - 1}; the prompt has {lowest} to {highest}",
                param="prompt",
            )
        limit = self._sim.max_model_len
        if num_prompt >= limit:
            raise ContextLengthExceeded(
                f"this model's context is {limit} tokens; the prompt has {num_prompt} and leaves no room for an answer",
                param="prompt",
            )
        total = min(num_prompt - num_given + sampling.max_tokens, limit)
        # The last token is never computed, so it needs no room.
        num_pages = math.ceil((total - 1) / self._block_size)
        if num_pages > self._pool.num_pages:
            raise InvalidRequest(
                f"prompt and answer may need {num_pages} pages of {self._block_size} tokens; this engine has "
                f"{self._pool.num_pages} in all",
                param="max_tokens",
            )
        return total

    def _end(self, sequence: TokenSequence) -> None:
        """Take a request out, wherever it is, and give its pages back. May be repeated."""
        match sequence.phase:
            case Phase.WAITING:
                self._waiting.remove(sequence)
            case Phase.PULLING:
                self._pulling.discard(sequence)
                if sequence.pull is not None:
                    sequence.pull.cancel()
            case Phase.RUNNING:
                self._running.remove(sequence)
            case Phase.ENDED:
                return
        sequence.phase = Phase.ENDED
        self._release(sequence.ticket)
        self._pool.free(sequence.pages)
        sequence.pages = []
        del self._id_to_sequence[sequence.request.request_id]
        self._work.set()

    def _die(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = EngineDead(reason)
        if self._loop_task is not None and self._loop_task is not asyncio.current_task():
            self._loop_task.cancel()
        self._background.cancel()
        if self._kv_transfer is not None:
            self._kv_transfer.close()
        if self._tier is not None:
            self._tier_end = asyncio.get_running_loop().create_task(self._tier.stop())
        for sequence in self._id_to_sequence.values():
            sequence.phase = Phase.ENDED
            sequence.mailbox.fail(EngineDead(reason))
        self._id_to_sequence.clear()
        self._waiting.clear()
        self._pulling.clear()
        self._running.clear()
        if self._listener is not None:
            self._listener.fail(self._failure)

    # Steps.

    async def _run(self) -> None:
        try:
            due_s = self._clock()
            while True:
                plan = [] if self._faults.stalled else self._plan()
                self._publish()
                if not plan:
                    self._work.clear()
                    await self._work.wait()
                    due_s = self._clock()
                    continue
                # Against the clock rather than from now, so that late wake-ups do not add up; but time that was lost
                # for good (a busy machine) is not caught up by steps that take no time.
                duration_s = self._duration_s(plan)
                now_s = self._clock()
                due_s = max(due_s, now_s - duration_s) + duration_s
                await self._sleep(max(0.0, due_s - now_s))
                self._commit(plan)
        except Exception:
            log.exception("the sim engine's step loop failed")
            self._die("the engine's step loop failed; its log says why")

    def _plan(self) -> list[tuple[TokenSequence, int]]:
        """Who computes how many tokens in the next step."""
        plan = []
        budget = self._chunk_tokens
        running = self._running
        i = 0
        while i < len(running):
            sequence = running[i]
            i += 1
            # Whoever came last gives way; when that is `sequence` itself, it waits.
            while sequence.num_tokens > sequence.capacity and sequence.phase is Phase.RUNNING:
                if self._pool.can_allocate(1):
                    sequence.pages += self._pool.allocate(1)
                    sequence.capacity += self._block_size
                else:
                    self._preempt(running[-1])
            if sequence.phase is not Phase.RUNNING:
                break
            num_left = sequence.num_tokens - sequence.num_computed
            if num_left == 1:
                plan.append((sequence, 1))
            elif budget > 0:
                num_now = min(num_left, budget)
                budget -= num_now
                plan.append((sequence, num_now))
        being_computed = self._being_computed() if self._waiting else frozenset()
        i = 0
        while budget > 0 and i < len(self._waiting) and len(running) + len(self._pulling) < self._max_num_seqs:
            sequence = self._waiting[i]
            if being_computed and self._next_page(sequence) in being_computed:
                # vLLM finds pages from the moment they are scheduled, and computes none of them twice. Here they are
                # found once they are computed: the sequence lets others pass until then.
                i += 1
                continue
            if not self._place(sequence):
                break
            del self._waiting[i]
            if sequence.phase is Phase.RUNNING:
                num_now = min(sequence.num_tokens - sequence.num_computed, budget)
                budget -= num_now
                plan.append((sequence, num_now))
                being_computed = being_computed.union(sequence.page_hashes[sequence.num_stored :])
            elif sequence.bringing:
                being_computed = being_computed.union(sequence.bringing)
        return plan

    def _being_computed(self) -> frozenset[PageHash]:
        """Pages that sequences now compute for their prompts, or bring from slower tiers."""
        computed = (
            page_hash
            for sequence in self._running
            if sequence.num_computed < sequence.num_prompt
            for page_hash in sequence.page_hashes[sequence.num_stored :]
        )
        return frozenset(computed).union(*(sequence.bringing for sequence in self._pulling))

    def _next_page(self, sequence: TokenSequence) -> PageHash | None:
        """The first page that a waiting sequence would have to compute, of those that others may find."""
        if sequence.ticket is not None:
            return None
        findable = sequence.findable()
        num_found = len(self._pool.find_prefix(findable))
        return findable[num_found] if num_found < len(findable) else None

    def _place(self, sequence: TokenSequence) -> bool:
        """Give a waiting sequence pages for all tokens it knows, cached ones first. False when there are too few."""
        block_size, pool = self._block_size, self._pool
        found = pool.find_prefix(sequence.findable())
        num_new = math.ceil(sequence.num_tokens / block_size) - len(found)
        if not pool.can_allocate(num_new, found):
            return False
        pool.touch(found)
        sequence.pages = found + pool.allocate(num_new)
        sequence.capacity = len(sequence.pages) * block_size
        sequence.num_stored = len(found)
        sequence.num_computed = num_cached = len(found) * block_size
        is_first = sequence.sources is None
        if is_first:
            sequence.sources = PromptSources(sequence.num_prompt - num_cached, num_cached, 0)
            sequence.cached = CachedTokens(device=num_cached)
        if sequence.ticket is not None:
            sequence.phase = Phase.PULLING
            self._pulling.add(sequence)
            sequence.pull = self._spawn(self._pull(sequence, sequence.ticket))
        elif self._tier is not None and (end := self._end_in_tier(self._tier, sequence)) > len(found):
            sequence.phase = Phase.PULLING
            sequence.bringing = sequence.page_hashes[len(found) : end]
            self._pulling.add(sequence)
            sequence.pull = self._spawn(self._load(self._tier, sequence, is_first=is_first))
        else:
            sequence.phase = Phase.RUNNING
            sequence.begin_computing()
            self._running.append(sequence)
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        """Take the pages of a running sequence. It waits, and computes again what is not cached any more by then."""
        self._running.remove(sequence)
        self._pool.free(sequence.pages)
        sequence.pages = []
        sequence.capacity = sequence.num_computed = sequence.num_stored = 0
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _duration_s(self, plan: Sequence[tuple[TokenSequence, int]]) -> float:
        num_prefill = 0
        decode_s = 0.0
        for sequence, num_now in plan:
            if sequence.num_computed < sequence.num_prompt:
                num_prefill += num_now
            else:
                decode_s = self._step_s
        prefill_s = num_prefill / self._sim.prefill_tokens_per_s * self._faults.prefill_slowdown
        return max(decode_s, prefill_s) + self._faults.step_delay_s

    def _commit(self, plan: Sequence[tuple[TokenSequence, int]]) -> None:
        block_size = self._block_size
        self._num_steps += 1
        for sequence, num_now in plan:
            if sequence.phase is not Phase.RUNNING:
                continue  # ended while the step ran
            sequence.num_computed = num_computed = sequence.num_computed + num_now
            if num_computed // block_size > sequence.num_stored:
                self._store(sequence)
            if num_computed == sequence.num_tokens:
                self._append_token(sequence)

    def _append_token(self, sequence: TokenSequence) -> None:
        """Every known token is computed: here is the next."""
        answer = sequence.answer
        logprobs = None
        if sequence.request.sampling.logprobs is None:
            token_id = answer.next_token()
        else:
            before = answer.digest()
            token_id = answer.next_token()
            logprobs = (answer.logprobs(before, token_id),)
        if sequence.num_tokens == sequence.num_prompt and sequence.sources is not None:
            self._prompt_tokens += sequence.sources
            self._cached_tokens += sequence.cached
            sequence.first_token_s = time.monotonic()
        sequence.append(token_id)
        self._num_generated_tokens += 1
        output = EngineOutput((token_id,), answer.text, logprobs)
        reason = answer.finish_reason
        if reason is None and sequence.num_tokens >= sequence.max_tokens_total:
            reason = FinishReason.LENGTH
            output.text += answer.flush()
        if reason is not None:
            output.finish_reason = reason
            output.stop_reason = answer.stop_reason
            output.sources = sequence.sources
            output.cached = sequence.cached
            output.times = sequence.times()
            if sequence.request.keep_for_transfer:
                output.transfer_params = self._offer(sequence)
            self._end(sequence)
        sequence.mailbox.put(output)

    # Pages.

    def _store(self, sequence: TokenSequence) -> None:
        """Pages that became full get their bytes and become findable."""
        block_size = self._block_size
        first, end = sequence.num_stored, sequence.num_computed // block_size
        sequence.extend_hashes(end)
        for i in range(first, end):
            self._memory.write(sequence.pages[i], self._memory.expected(sequence.page_hashes[i]))
        self._publish_stored(sequence, first, end)

    def _publish_stored(self, sequence: TokenSequence, first: int, end: int, *, transferred: bool = False) -> None:
        self._pool.store(
            sequence.pages[first:end],
            sequence.page_hashes[first:end],
            sequence.tokens_of_pages(first, end),
            parent_hash=sequence.page_hashes[first - 1] if first else None,
            cache_salt=sequence.request.cache_salt,
        )
        sequence.num_stored = end
        if self._tier is not None:
            names, pages = sequence.names(first, end), sequence.pages[first:end]
            self._tier.store(
                [(named, self._memory.read(page)) for named, page in zip(names, pages, strict=True)],
                sequence.namespace,
                # The prefill engine's keeper keeps them.
                on_volumes=not transferred,
            )

    def _offer(self, sequence: TokenSequence) -> TransferParams | None:
        """Hand the hold on the prompt's pages to the ferry."""
        if self._kv_transfer is None:
            return None
        num_full, num_tail = divmod(sequence.num_prompt, self._block_size)
        # A tail page that answer tokens were computed into as well is no longer what the puller's prompt says it is.
        with_tail = num_tail > 0 and sequence.num_computed == sequence.num_prompt
        num_pages = num_full + with_tail
        if with_tail:
            self._memory.write(sequence.pages[num_full], self._memory.expected(sequence.tail_hash()))
        offered, sequence.pages = sequence.pages[:num_pages], sequence.pages[num_pages:]
        num_tokens = sequence.num_prompt if with_tail else num_full * self._block_size
        return self._kv_transfer.offer(offered, num_tokens).to_params()

    def _free_offered(self, pages: Sequence[PageId]) -> None:
        self._pool.free(pages)
        self._work.set()

    async def _pull(self, sequence: TokenSequence, ticket: Ticket) -> None:
        """Fetch what the prompt lacks. Whatever is missing or wrong in the end is computed instead."""
        # From here on the pull releases the offer; a task that is cancelled before it ran never comes here.
        sequence.ticket = None
        block_size = self._block_size
        first = sequence.num_stored
        num_offered = min(ticket.num_tokens, sequence.num_prompt)
        expected = sequence.page_hashes[: num_offered // block_size]
        if num_offered % block_size:
            if num_offered == sequence.num_prompt:
                expected.append(sequence.tail_hash())
            else:
                # The tail of a shorter prompt lacks tokens that this one has on the same page.
                num_offered = len(expected) * block_size
        num_wanted = max(0, len(expected) - first)
        num_pulled = 0
        began_s = time.monotonic()
        is_whole = False
        try:
            async with (
                asyncio.timeout(PULL_TIMEOUT_S),
                contextlib.aclosing(
                    pull_pages(
                        ticket, self._layout, page_bytes=self._sim.page_bytes, first_page=first, num_pages=num_wanted
                    )
                ) as contents,
            ):
                async for content in contents:
                    self._transferred_bytes += len(content)
                    at = first + num_pulled
                    if content != self._memory.expected(expected[at]):
                        raise KvTransferError(f"page {at} does not hold the tokens of this prompt")
                    self._memory.write(sequence.pages[at], content)
                    num_pulled += 1
            is_whole = True
        except (asyncio.CancelledError, KvTransferError, OSError) as error:
            self._release(ticket)  # the connection that would have carried it may never have been there, or be gone
            if isinstance(error, asyncio.CancelledError):
                raise
            log.warning(
                "request %s computes its prompt: %s", sequence.request.request_id, str(error) or type(error).__name__
            )
        finally:
            sequence.kv_transfer = (began_s, time.monotonic())
            if is_whole:
                self._num_transfers += 1
                self._transfer_s += sequence.kv_transfer[1] - began_s
            else:
                self._num_failed_transfers += 1
            # Whatever went wrong, nobody else would ever take the sequence out of PULLING.
            if sequence.phase is Phase.PULLING:
                self._arrived(sequence, first, num_pulled, num_offered)

    def _arrived(self, sequence: TokenSequence, first: int, num_pulled: int, num_offered: int) -> None:
        block_size = self._block_size
        num_cached = first * block_size
        num_covered = max(num_cached, min((first + num_pulled) * block_size, num_offered))
        num_full = num_covered // block_size
        if num_full > first:
            self._publish_stored(sequence, first, num_full, transferred=True)
        sequence.sources = PromptSources(sequence.num_prompt - num_covered, num_cached, num_covered - num_cached)
        sequence.cached = CachedTokens(device=num_cached, kv_transfer=num_covered - num_cached)
        sequence.num_computed = min(num_covered, sequence.num_prompt - 1)
        sequence.phase = Phase.RUNNING
        sequence.begin_computing()
        self._pulling.discard(sequence)
        self._running.append(sequence)
        self._work.set()

    def _end_in_tier(self, tier: SimTier, sequence: TokenSequence) -> int:
        """The end of the run of pages after the stored ones that slower tiers have."""
        end = sequence.num_stored
        findable = sequence.findable()
        hints = sequence.request.tier
        from_volumes = hints is None or hints.load
        while end < len(findable) and tier.has(findable[end], sequence.volume_of(end), from_volumes=from_volumes):
            end += 1
        return end

    async def _load(self, tier: SimTier, sequence: TokenSequence, *, is_first: bool) -> None:
        """Fetch what slower tiers have of a prompt. Whatever does not come, or is wrong, is computed instead."""
        first = sequence.num_stored
        names = sequence.names(first, first + len(sequence.bringing))
        pages = [(named, sequence.volume_of(first + i)) for i, named in enumerate(names)]
        from_tier = {Tier.CPU: 0, Tier.VOLUME: 0}
        began_s = time.monotonic()
        try:
            loaded = await tier.load(
                pages, sequence.namespace, patience_s=self._tier_config.io_timeout_s, trace=sequence.request.trace
            )
            await self._sleep(len(loaded) * self._sim.tier_page_ms / 1000)
            for named, page, (content, where) in zip(names, sequence.pages[first:], loaded, strict=False):
                if content != self._memory.expected(named.page_hash):
                    self.num_wrong_pages += 1
                    log.error("request %s: a wrong page came from %s", sequence.request.request_id, where.value)
                    break
                self._memory.write(page, content)
                from_tier[where] += 1
        finally:
            sequence.bringing = []
            if is_first:
                sequence.load = (began_s, time.monotonic())
            # As with pulls: nobody else would ever take the sequence out of PULLING.
            if sequence.phase is Phase.PULLING:
                num_loaded = sum(from_tier.values())
                if is_first and sequence.sources is not None:
                    num_tokens = num_loaded * self._block_size
                    sequence.sources += PromptSources(-num_tokens, 0, num_tokens)
                    sequence.cached += CachedTokens(
                        cpu=from_tier[Tier.CPU] * self._block_size, volume=from_tier[Tier.VOLUME] * self._block_size
                    )
                self._resume(sequence, first + num_loaded)

    def _resume(self, sequence: TokenSequence, num_pages: int) -> None:
        """A sequence whose first `num_pages` pages are there goes on with computing."""
        if num_pages > sequence.num_stored:
            self._publish_stored(sequence, sequence.num_stored, num_pages)
        sequence.num_computed = num_pages * self._block_size
        sequence.phase = Phase.RUNNING
        sequence.begin_computing()
        self._pulling.discard(sequence)
        self._running.append(sequence)
        self._work.set()

    def _release(self, ticket: Ticket | None) -> None:
        if ticket is not None and self._failure is None:
            self._spawn(release_offer(ticket))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._background.spawn(work)

    # Events.

    def _publish(self) -> None:
        events = self._pool.take_events()
        if self._tier is not None:
            events += self._tier.take_events()
        if not events:
            return
        batch = KvEventBatch(self._event_sequence, events)
        self._event_sequence += 1
        if self._listener is not None and len(self._listener) < MAX_UNREAD_EVENT_BATCHES:
            self._listener.put(batch)


class _ListenerReplaced(Exception):
    """Another listener took over."""


def _ticket(params: TransferParams) -> Ticket | None:
    try:
        return Ticket.from_params(params)
    except KvTransferError as error:
        log.warning("a prompt is computed here: %s", error)
        return None
