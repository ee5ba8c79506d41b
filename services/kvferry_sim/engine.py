"""The simulator as an Engine."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from kvferry.config import AdaptersConfig, TierConfig
from kvferry.engine.base import (
    EngineId,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    KvEventBatch,
    KvTransferStats,
    RequestId,
    TransferParams,
    name_adapter,
)
from kvferry.engine.parsing import ParsedAnswer
from kvferry.errors import EngineDead, EngineError, InvalidRequest, UnsupportedEngine
from kvferry.observability.tracing import TraceContext
from kvferry.pages.exchange import PAGE_FORMATS, sorted_fields
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.terms import TierTerms
from kvferry_sim.answer import Answer, SimParser
from kvferry_sim.block_pool import PageId
from kvferry_sim.event_stream import KvEventStream
from kvferry_sim.kv_cache import KvCache, KvFetcher
from kvferry_sim.kv_transfer import KvTransferError, KvTransferServer, Ticket, layout_digest
from kvferry_sim.scheduler import Scheduler
from kvferry_sim.sequence import Phase, TokenSequence, ticket_of, to_sequence, validate_request
from kvferry_sim.settings import SimConfig
from kvferry_sim.step_loop import Faults, StepLoop
from kvferry_sim.tier import SimTier, sim_layout
from kvferry_sim.tokenizer import SimTokenizer

log = logging.getLogger(__name__)

KV_CACHE_DTYPE = "sim"
UNPACED_CHUNK_TOKENS = 2048  # prompt tokens per step where steps take no time
# Prompts this long that come at once are admitted with this pause between them, so that steps go on: vLLM hashes them
# in a thread beside its steps. 8,000 tokens take about 0.6 ms.
LONG_PROMPT_TOKENS = 1024
LONG_PROMPT_PAUSE_S = 0.002


class SimEngine:
    """Timing and sizes come from `sim`, randomness from requests or `seed`.

    `clock` and `sleep` pace only steps and loads. `tier.enabled` adds a CPU tier, and the volumes of the keeper at
    `keeper_socket`, if set. Adapters' folders are not read.
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
        volume_pool: str = "",
        revision: str = "",
        adapters: AdaptersConfig = AdaptersConfig(),  # noqa: B008 - frozen
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
        self._volume_pool = volume_pool
        self._revision = revision
        self._adapters = _adapter_keys(adapters)
        self._seed = seed
        self._clock = clock
        self._sleep = sleep
        self._tokenizer = SimTokenizer()
        self._faults = Faults()
        self._info: EngineInfo | None = None
        self._failure: EngineDead | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._kv_transfer: KvTransferServer | None = None
        self._reset()

    def _reset(self) -> None:
        sim = self._sim
        layout = layout_digest(self._model, self._block_size, sim.page_bytes)
        self._cache = KvCache(sim.num_pages, self._block_size, sim.page_bytes, layout)
        self._events = KvEventStream()
        self._fetcher = KvFetcher(
            self._cache,
            sim,
            tier_timeout_s=self._tier_config.load_timeout_s,
            sleep=self._sleep,
            on_fetched=self._resume,
        )
        step_s = sim.step_ms / 1000
        self._scheduler = Scheduler(
            self._cache.pool,
            max_num_seqs=self._max_num_seqs,
            chunk_tokens=max(1, int(sim.prefill_tokens_per_s * step_s)) if step_s else UNPACED_CHUNK_TOKENS,
            start_fetch=self._fetcher.start,
        )
        self._steps = StepLoop(
            self._scheduler, self._cache, self._events, sim, offer=self._offer, clock=self._clock, sleep=self._sleep
        )
        self._steps.faults = self._faults
        self._tier_end: asyncio.Task[None] | None = None
        self._long_prompts = asyncio.Lock()

    def __repr__(self) -> str:
        state = "dead" if self._failure else "alive" if self._loop_task else "not started"
        return f"<SimEngine {state} {self._scheduler!r} {self._cache.pool!r}>"

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
        self._faults = self._steps.faults = faults
        if self._kv_transfer is not None:
            self._kv_transfer.fault = faults.pulls
        self._steps.wake()

    @property
    def num_offers(self) -> int:
        return self._kv_transfer.num_offers if self._kv_transfer is not None else 0

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_wrong_pages(self) -> int:
        return self._fetcher.num_wrong_pages

    async def start(self) -> None:
        if self._loop_task is not None:
            raise EngineError("the engine was started already")
        if self._info is not None:  # it was started before
            self._reset()
        self._failure = None
        engine_id = EngineId(secrets.token_hex(16))
        self._kv_transfer = KvTransferServer(
            engine_id,
            self._cache.memory.layout,
            host=self._host,
            lease_s=self._sim.transfer_lease_s,
            read_page=self._cache.memory.read,
            free_pages=self._free_offered,
        )
        self._kv_transfer.fault = self._faults.pulls
        try:
            await self._kv_transfer.start()
        except OSError as error:
            raise UnsupportedEngine(f"the sim engine cannot listen on {self._host!r}: {error.strerror}") from None
        if self._tier_config.enabled:
            self._cache.tier = SimTier(
                sim_layout(self._model, block_size=self._block_size, page_bytes=self._sim.page_bytes),
                page_bytes=self._sim.page_bytes,
                num_rows=self._sim.cpu_pages,
                engine_id=engine_id,
                keeper_socket=self._keeper_socket,
                volume_pool=self._volume_pool,
            )
        self._info = EngineInfo(
            engine_id=engine_id,
            model=self._model,
            max_model_len=self._sim.max_model_len,
            block_size=self._block_size,
            page_bytes=self._sim.page_bytes,
            num_pages=self._sim.num_pages,
            kv_cache_dtype=KV_CACHE_DTYPE,
            num_cpu_pages=self._sim.cpu_pages if self._cache.tier is not None else 0,
            exchange=sorted_fields(
                {
                    "formats": PAGE_FORMATS,
                    "engine": "sim",
                    "max_model_len": self._sim.max_model_len,
                    "tokens_per_block": self._block_size,
                }
            ),
            adapters=self._adapters,
        )
        self._loop_task = asyncio.create_task(self._run(), name=f"sim engine {engine_id[:8]}")

    async def stop(self) -> None:
        self._die("the engine was stopped")
        tasks = [task for task in (self._loop_task, self._tier_end) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.wait_closed()
        if self._kv_transfer is not None:
            await self._kv_transfer.wait_closed()
        self._loop_task = None

    def kill(self) -> None:
        """Crash: requests fail, connections break, nothing is released."""
        self._die("the engine was killed")

    async def check_health(self) -> None:
        if self._failure is not None:
            raise EngineDead(self._failure.message)
        if self._loop_task is None:
            raise EngineDead("the engine was not started")

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_pages_used=self._cache.pool.num_used,
            num_pages=self._cache.pool.num_pages,
            prompt_tokens=self._steps.prompt_tokens,
            cached_tokens=self._steps.cached_tokens,
            transferred_bytes=self._fetcher.stats.num_bytes,
            num_generated_tokens=self._steps.num_generated_tokens,
            num_steps=self._steps.num_steps,
            queued_prompt_tokens=sum(
                sequence.num_prompt
                for sequence in self._scheduler
                if not sequence.has_first_token and sequence.request.transfer_params is None
            ),
            loaded_adapters=self._adapters,
        )

    def kv_transfer_stats(self) -> KvTransferStats:
        return self._fetcher.stats

    def tenant_usages(self) -> Mapping[str, Mapping[str, TenantUsage]]:
        return {}

    async def set_terms(self, terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        pass

    def own_metrics(self) -> Iterable[Any]:
        return ()

    def check(self) -> None:
        self._cache.check(with_tier=self._failure is None)
        self._scheduler.check()
        has_holder = self._failure is not None or self.num_offers or len(self._scheduler)
        assert has_holder or not self._cache.pool.num_used, "pages are held by nobody"

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        return self._events.listen()

    async def generate(
        self, request: EngineRequest, *, due_ms: float = 0.0, trace: TraceContext | None = None
    ) -> AsyncIterator[EngineOutput]:
        try:
            if len(request.prompt_token_ids) < LONG_PROMPT_TOKENS:
                sequence = self._admit(request, due_ms, trace)
            else:
                is_burst = self._long_prompts.locked()
                async with self._long_prompts:
                    await self._sleep(LONG_PROMPT_PAUSE_S if is_burst else 0)
                    sequence = self._admit(request, due_ms, trace)
        except (InvalidRequest, EngineDead, asyncio.CancelledError):
            await self.decline(request)
            raise
        try:
            parsed = self._parsed_answer(request) if request.parse is not None else None
            while True:
                output = await sequence.outputs.get()
                if parsed is not None and output.finish_reason is not FinishReason.ABORT:
                    finished = output.finish_reason is not None
                    output.delta = parsed.on_output(output.token_ids, output.text, finished=finished)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._remove(sequence)
            # A last output that the reader never got names pages that nobody else can release before their lease ends.
            for unread in sequence.outputs.pop_all():
                if unread.transfer_params is not None:
                    self._release(unread.transfer_params)

    async def abort(self, request_id: RequestId) -> None:
        sequence = self._scheduler.get(request_id)
        if sequence is not None:
            self._remove(sequence)
            last = EngineOutput(token_ids=(), text="", finish_reason=FinishReason.ABORT, sources=sequence.sources)
            sequence.outputs.put(last)

    async def decline(self, request: EngineRequest) -> None:
        if request.transfer_params is not None:
            self._fetcher.release(ticket_of(request.transfer_params))

    async def release(self, transfer_params: TransferParams) -> None:
        self._release(transfer_params)

    def _release(self, transfer_params: TransferParams) -> None:
        try:
            ticket = Ticket.from_params(transfer_params)
        except KvTransferError:
            return
        if self._kv_transfer is not None and ticket.engine_id == self._kv_transfer.engine_id:
            self._kv_transfer.release(ticket.offer_id)

    def _parsed_answer(self, request: EngineRequest) -> ParsedAnswer:
        assert request.parse is not None
        parsed = ParsedAnswer(SimParser(request.parse))
        if request.continued is not None:
            given = request.prompt_token_ids[-request.continued.num_tokens :]
            texts = Answer(b"", request.sampling, self._tokenizer, answer_tokens=1, default_seed=0).resume(given, 0)
            continued = request.continued
            parsed.resume(list(zip(given, texts, strict=True)), continued.num_chars, continued.sizes)
        return parsed

    def _admit(self, request: EngineRequest, due_ms: float, trace: TraceContext | None) -> TokenSequence:
        if self._failure is not None:
            raise EngineDead(self._failure.message)
        if self._loop_task is None:
            raise EngineDead("the engine was not started")
        max_tokens_total = validate_request(
            request,
            self._sim,
            vocabulary_size=self._tokenizer.vocabulary_size,
            block_size=self._block_size,
            active=self._scheduler,
            adapters=self._adapters,
        )
        sequence = to_sequence(
            request,
            self._sim,
            self._tokenizer,
            block_size=self._block_size,
            max_tokens_total=max_tokens_total,
            seed=self._seed,
            revision=self._revision,
            due_ms=due_ms,
            trace=trace,
        )
        self._scheduler.add(sequence)
        self._steps.wake()
        return sequence

    def _remove(self, sequence: TokenSequence) -> None:
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.FETCHING and sequence.fetch is not None:
            sequence.fetch.cancel()
        self._fetcher.release(sequence.ticket)
        self._scheduler.remove(sequence)
        self._steps.wake()

    def _resume(self, sequence: TokenSequence) -> None:
        self._scheduler.resume(sequence)
        self._steps.wake()

    def _offer(self, sequence: TokenSequence) -> TransferParams | None:
        if self._kv_transfer is None:
            return None
        pages, num_tokens = self._cache.detach_prompt(sequence)
        return name_adapter(self._kv_transfer.offer(pages, num_tokens).to_params(), sequence.request)

    def _free_offered(self, pages: Sequence[PageId]) -> None:
        self._cache.free(pages)
        self._steps.wake()

    async def _run(self) -> None:
        try:
            await self._steps.run()
        except Exception:
            log.exception("the sim engine's step loop failed")
            self._die("the engine's step loop failed; its log says why")

    def _die(self, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = EngineDead(reason)
        if self._loop_task is not None and self._loop_task is not asyncio.current_task():
            self._loop_task.cancel()
        self._fetcher.close()
        if self._kv_transfer is not None:
            self._kv_transfer.close()
        if self._cache.tier is not None:
            self._tier_end = asyncio.get_running_loop().create_task(self._cache.tier.stop())
        for sequence in self._scheduler.abandon():
            sequence.outputs.fail(EngineDead(reason))
        self._events.close(self._failure)


def _adapter_keys(adapters: AdaptersConfig) -> frozenset[str]:
    return frozenset(
        f"{name}@{xxhash.xxh3_128_hexdigest(f'{adapter.path}@{adapter.revision}'.encode())}"
        for name, adapter in adapters.served.items()
    )
