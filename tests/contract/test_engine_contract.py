"""What every Engine owes its callers, proved on the simulator and on vLLM with a real model.

The tests know nothing of either: no timings, and no token ids but those an engine gave. Engines live on
the session's event loop, because a real pair takes a minute to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest
import pytest_asyncio
from msgspec import structs

from kvferry.config import AdapterConfig, AdaptersConfig, TierConfig
from kvferry.engine.base import (
    Continued,
    Engine,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvEventBatch,
    PagesStored,
    PromptSources,
    RequestId,
    Sampling,
    TransferParams,
)
from kvferry.errors import InvalidRequest
from kvferry_sim import SimEngine, SimTokenizer
from kvferry_sim.settings import SimConfig
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

NUM_TOKENS = 12

WORDS = (  # noqa: SIM905
    "ferry pages carry across the narrow water while engines count every token that the harbour "
    "master wrote in winter and nobody reads before spring returns with light on stone"
).split()

_fresh = itertools.count()


class EnginePair(Protocol):
    """Started engines of one model that can exchange pages."""

    @property
    def prefill(self) -> Engine: ...

    @property
    def decode(self) -> Engine: ...

    def tokenize(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class SimPair:
    prefill: SimEngine
    decode: SimEngine

    def tokenize(self, text: str) -> list[int]:
        return SimTokenizer().encode(text)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sim_pair() -> AsyncIterator[SimPair]:
    async with _sim_pair(TierConfig()) as pair:
        yield pair


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sim_tier_pair() -> AsyncIterator[SimPair]:
    """Each engine with a CPU tier."""
    async with _sim_pair(TierConfig(enabled=True)) as pair:
        yield pair


@contextlib.asynccontextmanager
async def _sim_pair(tier: TierConfig) -> AsyncIterator[SimPair]:
    sim = SimConfig(step_ms=1.0, prefill_tokens_per_s=200_000, num_pages=256, page_bytes=512, max_model_len=2048)
    served = {name: AdapterConfig(path=f"/adapters/{name}") for name in ("sql", "poems")}
    options: dict[str, Any] = {"tier": tier, "adapters": AdaptersConfig(served=served)}
    pair = SimPair(*(SimEngine("tiny", sim, block_size=32, max_num_seqs=16, **options) for _ in range(2)))
    try:
        await pair.prefill.start()
        await pair.decode.start()
        yield pair
        for engine in (pair.prefill, pair.decode):
            engine.check()
    finally:
        await pair.prefill.stop()
        await pair.decode.stop()


@pytest.fixture(
    scope="session",
    params=["sim", "sim_tier", pytest.param("vllm", marks=[pytest.mark.model, pytest.mark.shared_pair])],
)
def engine_pair(request: pytest.FixtureRequest) -> EnginePair:
    # Not an async fixture: it could not ask for another one while the loop runs.
    pair: EnginePair = request.getfixturevalue(f"{request.param}_pair")
    return pair


def greedy(max_tokens: int = NUM_TOKENS, **values: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **values})


def fresh_prompt(pair: EnginePair, num_tokens: int = 100) -> list[int]:
    """A prompt that shares no page with any other of this session."""
    i = next(_fresh)
    words = [f"Letter number {i} says:"]
    words += [WORDS[(i * 7 + k * (3 + i % 5)) % len(WORDS)] for k in range(num_tokens)]
    token_ids = pair.tokenize(" ".join(words))[:num_tokens]
    assert len(token_ids) == num_tokens
    return token_ids


def fresh_id(name: str = "request") -> RequestId:
    return RequestId(f"{name}-{next(_fresh)}")


@dataclass
class Outcome:
    """All outputs of one request, put together."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    outputs: list[EngineOutput] = field(default_factory=list)

    @property
    def last(self) -> EngineOutput:
        return self.outputs[-1]

    @property
    def sources(self) -> PromptSources:
        assert self.last.sources is not None
        return self.last.sources

    def add(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.token_ids += output.token_ids
        self.text += output.text


async def run(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    transfer_params: TransferParams | None = None,
    keep_for_transfer: bool = False,
    cache_salt: str = "",
    adapter: str = "",
) -> Outcome:
    outcome = Outcome()
    request = EngineRequest(
        fresh_id(),
        prompt,
        sampling,
        keep_for_transfer=keep_for_transfer,
        transfer_params=transfer_params,
        cache_salt=cache_salt,
        adapter=adapter,
    )
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine.generate(request):
            outcome.add(output)
    if outcome.last.finish_reason is not FinishReason.ABORT:
        sources, cached = outcome.sources, outcome.last.cached
        assert cached is not None
        assert cached.device == sources.local_cache_hit
        assert cached.cpu + cached.volume + cached.kv_transfer == sources.external_kv_transfer
    return outcome


async def prefill(pair: EnginePair, prompt: Sequence[int], cache_salt: str = "", adapter: str = "") -> TransferParams:
    options: dict[str, Any] = {"cache_salt": cache_salt, "adapter": adapter}
    outcome = await run(pair.prefill, prompt, greedy(1), keep_for_transfer=True, **options)
    assert outcome.last.transfer_params is not None
    return outcome.last.transfer_params


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_idle(engine: Engine) -> bool:
    load = engine.stats()
    return load.num_running == 0 and load.num_waiting == 0


def num_cacheable(num_tokens: int, block_size: int) -> int:
    """Tokens of a prompt seen before that a second run may take from the cache: full pages, never the last token."""
    return (num_tokens - 1) // block_size * block_size


async def test_info_names_a_pair_that_fits(engine_pair: EnginePair) -> None:
    prefill_info, decode_info = engine_pair.prefill.info, engine_pair.decode.info
    assert prefill_info.engine_id != decode_info.engine_id
    assert (prefill_info.model, prefill_info.block_size, prefill_info.page_bytes, prefill_info.kv_cache_dtype) == (
        decode_info.model,
        decode_info.block_size,
        decode_info.page_bytes,
        decode_info.kv_cache_dtype,
    )
    assert prefill_info.num_pages > 0
    assert prefill_info.max_model_len > 0


async def test_a_living_engine_is_healthy(engine_pair: EnginePair) -> None:
    await engine_pair.prefill.check_health()
    await engine_pair.decode.check_health()


async def test_outputs_are_deltas_that_end_with_a_reason(engine_pair: EnginePair) -> None:
    outcome = await run(engine_pair.decode, fresh_prompt(engine_pair), greedy())
    assert len(outcome.token_ids) == NUM_TOKENS
    assert outcome.text
    *before, last = outcome.outputs
    assert last.finish_reason is FinishReason.LENGTH
    assert last.stop_reason is None
    for output in before:
        assert output.finish_reason is None
        assert output.transfer_params is None
    assert last.sources is not None
    assert [output.sources for output in before] == [last.sources, *[None] * (len(before) - 1)]


async def token_by_token(engine_pair: EnginePair, prompt: list[int], sampling: Sampling) -> Outcome:
    """Return an answer that came so; on a machine that is busy, vLLM gives the tokens of two steps at once."""
    for _ in range(10):
        whole = await run(engine_pair.decode, prompt, sampling)
        if all(len(output.token_ids) <= 1 for output in whole.outputs):
            break
    return whole


@pytest.mark.parametrize("stop", [False, True], ids=["to-the-end", "across-a-stop-string"])
@pytest.mark.parametrize("num_given", [1, 7, 18])
async def test_an_answer_goes_on_in_another_engine(engine_pair: EnginePair, num_given: int, stop: bool) -> None:
    """Tokens and text as if it had not been interrupted; the other engine here is the prefill engine."""
    prompt = fresh_prompt(engine_pair, 40)
    whole = await token_by_token(engine_pair, prompt, greedy(20))
    sampling = greedy(20)
    if stop:
        # Begins before the interruption and is complete after it, so that text is held back in between.
        ends = list(itertools.accumulate(len(output.text) for output in whole.outputs))
        end = next(at for at in ends[num_given:] if at > ends[num_given - 1])
        begin = ends[num_given - 2] if num_given > 1 else 0
        while whole.text.find(whole.text[begin:end]) < begin:  # a model that repeats itself says it before, too
            begin -= 1
        sampling = structs.replace(sampling, stop=(whole.text[begin:end],))
        whole = await token_by_token(engine_pair, prompt, sampling)
    delivered = Outcome()
    for output in whole.outputs[:num_given]:
        delivered.add(output)
    given = delivered.token_ids
    assert len(given) == num_given
    rest = Outcome()
    request = EngineRequest(
        fresh_id(),
        [*prompt, *given],
        sampling,
        continued=Continued(len(given), len(delivered.text)),
    )
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine_pair.prefill.generate(request):
            rest.add(output)
    assert given + rest.token_ids == whole.token_ids
    assert delivered.text + rest.text == whole.text
    assert rest.last.finish_reason is whole.last.finish_reason
    assert rest.last.stop_reason == whole.last.stop_reason
    assert rest.sources.total == len(prompt) + num_given


async def test_a_continuation_without_prompt_or_answer_is_refused(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 10)
    for num_given, max_tokens in ((10, 20), (5, 5), (0, 5)):
        request = EngineRequest(fresh_id(), prompt, greedy(max_tokens), continued=Continued(num_given, 0))
        with pytest.raises(InvalidRequest, match=f"cannot go on after {num_given} tokens"):
            async for _ in engine_pair.decode.generate(request):
                pass


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
async def test_max_tokens_ends_an_answer(engine_pair: EnginePair, max_tokens: int) -> None:
    outcome = await run(engine_pair.decode, fresh_prompt(engine_pair, 40), greedy(max_tokens))
    assert len(outcome.token_ids) == max_tokens
    assert outcome.last.finish_reason is FinishReason.LENGTH


async def test_greedy_answers_repeat(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair)
    first = await run(engine_pair.decode, prompt, greedy(), cache_salt="one")
    second = await run(engine_pair.decode, prompt, greedy(), cache_salt="two")
    elsewhere = await run(engine_pair.prefill, prompt, greedy())
    assert first.token_ids == second.token_ids == elsewhere.token_ids
    assert first.text == second.text == elsewhere.text


async def test_an_answer_continues_from_its_own_tokens(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 50)
    whole = await run(engine_pair.decode, prompt, greedy(), cache_salt="whole")
    rest = await run(
        engine_pair.prefill, [*prompt, *whole.token_ids[:5]], greedy(NUM_TOKENS - 5), cache_salt="continued"
    )
    assert rest.token_ids == whole.token_ids[5:]


async def test_requests_run_side_by_side(engine_pair: EnginePair) -> None:
    prompts = [fresh_prompt(engine_pair, 40 + 10 * i) for i in range(4)]
    outcomes = await asyncio.gather(*(run(engine_pair.decode, prompt, greedy(6)) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert len(outcome.token_ids) == 6
        assert outcome.sources.total == len(prompt)


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 150])
async def test_pulled_pages_give_the_answer_that_was_computed(engine_pair: EnginePair, num_tokens: int) -> None:
    prompt = fresh_prompt(engine_pair, num_tokens)
    aggregated = await run(engine_pair.decode, prompt, greedy(), cache_salt="aggregated")
    assert aggregated.sources == PromptSources(local_compute=num_tokens)
    transferred_bytes = engine_pair.decode.stats().transferred_bytes

    transfer_params = await prefill(engine_pair, prompt)
    disaggregated = await run(engine_pair.decode, prompt, greedy(), transfer_params=transfer_params)

    assert disaggregated.token_ids == aggregated.token_ids
    assert disaggregated.text == aggregated.text
    assert disaggregated.sources == PromptSources(external_kv_transfer=num_tokens)
    await eventually(lambda: engine_pair.decode.stats().transferred_bytes > transferred_bytes)


async def test_the_last_output_says_what_took_how_long(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 150)
    computed = (await run(engine_pair.decode, prompt, greedy(), cache_salt="computed")).outputs[-1]
    transfer_params = await prefill(engine_pair, prompt)
    pulled = (await run(engine_pair.decode, prompt, greedy(), transfer_params=transfer_params)).outputs[-1]
    assert computed.times is not None
    assert pulled.times is not None
    durations = computed.times.durations()
    assert durations.queue_ms is not None
    assert durations.queue_ms >= 0
    assert durations.prefill_ms is not None
    assert durations.prefill_ms > 0
    assert durations.prefill_share is not None
    assert 0 < durations.prefill_share <= 1
    assert (durations.kv_transfer_ms, durations.load_ms) == (None, None)
    durations = pulled.times.durations()
    assert durations.kv_transfer_ms is not None
    assert durations.kv_transfer_ms > 0
    assert durations.kv_transfer_share == 1.0


async def test_prompts_are_queued_until_their_first_token_unless_they_are_pulled(engine_pair: EnginePair) -> None:
    engine, prompt = engine_pair.decode, fresh_prompt(engine_pair, 40)
    assert engine.stats().queued_prompt_tokens == 0
    queued: list[int | None] = []
    async for _ in engine.generate(EngineRequest(fresh_id(), prompt, greedy(3))):
        queued.append(engine.stats().queued_prompt_tokens)
    assert queued == [0] * len(queued)
    transfer_params = await prefill(engine_pair, prompt)
    reader = asyncio.create_task(run(engine, prompt, greedy(), transfer_params=transfer_params))
    await asyncio.sleep(0)
    assert engine.stats().queued_prompt_tokens == 0
    await reader
    computing = asyncio.create_task(run(engine, fresh_prompt(engine_pair, 60), greedy()))
    await asyncio.sleep(0)
    assert engine.stats().queued_prompt_tokens == 60
    computing.cancel()
    await asyncio.gather(computing, return_exceptions=True)
    assert engine.stats().queued_prompt_tokens == 0


async def test_a_prompt_half_known_pulls_the_other_half(engine_pair: EnginePair) -> None:
    block_size = engine_pair.decode.info.block_size
    prompt = fresh_prompt(engine_pair, 3 * block_size + 5)
    await run(engine_pair.decode, prompt[: block_size + 1], greedy(1), cache_salt="half")
    expected = await run(engine_pair.decode, prompt, greedy(), cache_salt="none")

    transfer_params = await prefill(engine_pair, prompt, cache_salt="half")
    pulled = await run(engine_pair.decode, prompt, greedy(), transfer_params=transfer_params, cache_salt="half")

    assert pulled.token_ids == expected.token_ids
    assert pulled.sources.local_cache_hit == block_size
    assert pulled.sources.external_kv_transfer == len(prompt) - block_size


async def test_pages_nobody_has_any_more_are_computed(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 70)
    expected = await run(engine_pair.decode, prompt, greedy(), cache_salt="before")
    transfer_params = await prefill(engine_pair, prompt)
    # As if that engine had died and another one, or nobody, had its place.
    gone = {
        key: "0" * 32 if value == engine_pair.prefill.info.engine_id else 1 if key.endswith("port") else value
        for key, value in transfer_params.items()
    }
    assert gone != transfer_params

    outcome = await run(engine_pair.decode, prompt, greedy(), transfer_params=gone, cache_salt="after")

    assert outcome.token_ids == expected.token_ids
    # The engine works as a new one does.
    again = await run(engine_pair.decode, prompt, greedy(), cache_salt="again")
    assert again.token_ids == expected.token_ids


async def test_sources_add_up_and_the_cache_is_used(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 110)
    first = await run(engine_pair.decode, prompt, greedy(2), cache_salt="tenant")
    assert first.sources == PromptSources(local_compute=110)

    second = await run(engine_pair.decode, prompt, greedy(2), cache_salt="tenant")
    num_cached = num_cacheable(110, engine_pair.decode.info.block_size)
    assert second.sources == PromptSources(local_compute=110 - num_cached, local_cache_hit=num_cached)
    assert second.token_ids == first.token_ids


async def test_a_wholly_cached_prompt_computes_its_last_token(engine_pair: EnginePair) -> None:
    block_size = engine_pair.decode.info.block_size
    prompt = fresh_prompt(engine_pair, 2 * block_size)
    first = await run(engine_pair.decode, prompt, greedy(2))
    second = await run(engine_pair.decode, prompt, greedy(2))
    assert second.sources.local_compute >= 1
    assert second.sources.total == len(prompt)
    assert second.token_ids == first.token_ids


async def test_another_salt_hits_nothing(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 110)
    for cache_salt in ("tenant-a", "tenant-b", ""):
        outcome = await run(engine_pair.decode, prompt, greedy(2), cache_salt=cache_salt)
        assert outcome.sources == PromptSources(local_compute=110)


async def test_closing_the_iterator_ends_the_request(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    await eventually(lambda: is_idle(engine))
    outputs = engine.generate(EngineRequest(fresh_id(), fresh_prompt(engine_pair, 60), greedy(1000)))
    await anext(outputs)
    await outputs.aclose()  # type: ignore[attr-defined] # the contract's iterators are generators
    await eventually(lambda: is_idle(engine))


async def test_cancelling_the_reader_ends_the_request(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    await eventually(lambda: is_idle(engine))
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(EngineRequest(fresh_id(), fresh_prompt(engine_pair, 60), greedy(1000))):
            begun.set()

    reader = asyncio.create_task(read())
    async with asyncio.timeout(PATIENCE_S):
        await begun.wait()
    reader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reader
    await eventually(lambda: is_idle(engine))


async def test_abort_ends_the_iterator(engine_pair: EnginePair) -> None:
    engine, request_id = engine_pair.decode, fresh_id("aborted")
    outcome = Outcome()
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine.generate(EngineRequest(request_id, fresh_prompt(engine_pair, 60), greedy(1000))):
            if not outcome.outputs:
                await engine.abort(request_id)
            outcome.add(output)
    assert outcome.last.finish_reason is FinishReason.ABORT
    assert len(outcome.token_ids) < 1000
    await eventually(lambda: is_idle(engine))


async def test_abort_ignores_ids_it_does_not_know(engine_pair: EnginePair) -> None:
    outcome = Outcome()
    request = EngineRequest(fresh_id("finished"), fresh_prompt(engine_pair, 40), greedy(2))
    async for output in engine_pair.decode.generate(request):
        outcome.add(output)
    await engine_pair.decode.abort(request.request_id)
    await engine_pair.decode.abort(RequestId("never-seen"))
    assert outcome.last.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("included", [False, True])
async def test_a_stop_string_cuts_the_text(engine_pair: EnginePair, included: bool) -> None:
    prompt = fresh_prompt(engine_pair, 60)
    text = (await run(engine_pair.decode, prompt, greedy(16))).text
    # Somewhere in the middle, over word borders as it comes.
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    outcome = await run(
        engine_pair.decode,
        prompt,
        greedy(16, stop=("never written", stop), include_stop_str_in_output=included),
    )
    at = text.find(stop)
    assert outcome.text == text[: at + len(stop) if included else at]
    assert outcome.last.finish_reason is FinishReason.STOP
    assert outcome.last.stop_reason == stop
    assert len(outcome.token_ids) <= 16


async def test_a_stop_string_that_never_comes_costs_no_text(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 60)
    plain = await run(engine_pair.decode, prompt, greedy(8))
    # Its beginning is the end of the answer: text is held back for it, and must come all the same.
    held = await run(engine_pair.decode, prompt, greedy(8, stop=(plain.text[-3:] + "\x00",)))
    assert held.text == plain.text
    assert held.last.finish_reason is FinishReason.LENGTH


async def test_a_stop_token_ends_the_answer(engine_pair: EnginePair) -> None:
    prompt = fresh_prompt(engine_pair, 60)
    plain = await run(engine_pair.decode, prompt, greedy())
    stop_id = plain.token_ids[4]
    expected = plain.token_ids[: plain.token_ids.index(stop_id) + 1]
    outcome = await run(engine_pair.decode, prompt, greedy(stop_token_ids=(stop_id,)))
    assert outcome.token_ids == expected
    assert outcome.last.finish_reason is FinishReason.STOP
    assert outcome.last.stop_reason == stop_id
    assert plain.text.startswith(outcome.text)


async def test_logprobs_begin_with_the_sampled_token(engine_pair: EnginePair) -> None:
    outcome = await run(engine_pair.decode, fresh_prompt(engine_pair, 60), greedy(4, logprobs=3))
    for output in outcome.outputs:
        if not output.token_ids:
            continue
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        for token_id, position in zip(output.token_ids, output.logprobs, strict=True):
            assert position[0].token_id == token_id
            # The sampled token may be one of the three most likely, or a fourth.
            assert len(position) in (3, 4)
            alternatives = [entry.logprob for entry in position[1:]]
            assert alternatives == sorted(alternatives, reverse=True)
            assert all(entry.logprob <= 0 for entry in position)
            assert len({entry.token_id for entry in position}) == len(position)


async def test_logprobs_come_only_when_asked_for(engine_pair: EnginePair) -> None:
    outcome = await run(engine_pair.decode, fresh_prompt(engine_pair, 40), greedy(2))
    assert all(output.logprobs is None for output in outcome.outputs)
    sampled_only = await run(engine_pair.decode, fresh_prompt(engine_pair, 40), greedy(2, logprobs=0))
    for output in sampled_only.outputs:
        for position in output.logprobs or ():
            assert len(position) == 1


async def test_load_counts(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    before = engine.stats()
    await run(engine, fresh_prompt(engine_pair, 80), greedy(5))
    await eventually(lambda: engine.stats().num_generated_tokens == before.num_generated_tokens + 5)
    await eventually(lambda: engine.stats().prompt_tokens.total == before.prompt_tokens.total + 80)
    assert engine.stats().num_pages == engine.info.num_pages


async def test_a_prompt_over_the_context_is_refused(engine_pair: EnginePair) -> None:
    token_id = fresh_prompt(engine_pair, 40)[0]
    too_long = [token_id] * (engine_pair.decode.info.max_model_len + 1)
    with pytest.raises(InvalidRequest):
        await run(engine_pair.decode, too_long, greedy(1))
    await engine_pair.decode.check_health()
    assert (await run(engine_pair.decode, fresh_prompt(engine_pair, 40), greedy(1))).token_ids


async def test_keeping_and_pulling_exclude_each_other(engine_pair: EnginePair) -> None:
    with pytest.raises(InvalidRequest):
        await run(
            engine_pair.decode, fresh_prompt(engine_pair, 40), greedy(1), keep_for_transfer=True, transfer_params={}
        )


@contextlib.asynccontextmanager
async def listening(pair: EnginePair, engine: Engine) -> AsyncIterator[list[KvEventBatch]]:
    """A list that grows with the engine's events. Entered once the first came: a listener needs a moment to connect."""
    batches: list[KvEventBatch] = []

    async def listen() -> None:
        async for batch in engine.kv_events():
            batches.append(batch)

    listener = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not batches:
                await run(engine, fresh_prompt(pair, 2 * engine.info.block_size), greedy(1))
                await asyncio.sleep(0.05)
        yield batches
    finally:
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener


def stored_prefix(batches: Sequence[KvEventBatch], cache_salt: str) -> list[int]:
    """Tokens of the chain of pages that begins under this salt."""
    token_ids: list[int] = []
    last_hash: int | None = None
    for batch in batches:
        for event in batch.events:
            if not isinstance(event, PagesStored):
                continue
            begins = event.parent_hash is None and event.cache_salt == cache_salt
            if begins or (last_hash is not None and event.parent_hash == last_hash):
                assert len(event.token_ids) == len(event.page_hashes) * event.block_size
                token_ids += event.token_ids
                last_hash = event.page_hashes[-1]
    return token_ids


async def test_events_cover_the_full_pages_of_a_prompt(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    block_size = engine.info.block_size
    prompt = fresh_prompt(engine_pair, 3 * block_size + 7)
    async with listening(engine_pair, engine) as batches:
        await run(engine, prompt, greedy(2), cache_salt="events")
        covered = prompt[: 3 * block_size]
        await eventually(lambda: stored_prefix(batches, "events")[: len(covered)] == covered)


async def test_events_tell_of_pulled_pages(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    block_size = engine.info.block_size
    prompt = fresh_prompt(engine_pair, 3 * block_size + 7)
    transfer_params = await prefill(engine_pair, prompt, cache_salt="pulled")
    async with listening(engine_pair, engine) as batches:
        await run(engine, prompt, greedy(2), transfer_params=transfer_params, cache_salt="pulled")
        covered = prompt[: 3 * block_size]
        await eventually(lambda: stored_prefix(batches, "pulled")[: len(covered)] == covered)


async def test_events_are_numbered_without_gaps(engine_pair: EnginePair) -> None:
    engine = engine_pair.decode
    async with listening(engine_pair, engine) as batches:
        num_before = len(batches)
        for _ in range(3):
            await run(engine, fresh_prompt(engine_pair, 3 * engine.info.block_size), greedy(2))
        await eventually(lambda: len(batches) >= num_before + 3)
    sequences = [batch.sequence for batch in batches]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


async def test_kept_pages_that_nobody_pulls_are_released(engine_pair: EnginePair) -> None:
    # Many pages: other tests leave a few kept ones behind, whose leases may end meanwhile.
    engine, prompt = engine_pair.prefill, fresh_prompt(engine_pair, 640)
    num_pages = 640 // engine.info.block_size
    kept = await run(engine, prompt, greedy(1), keep_for_transfer=True)
    params = kept.last.transfer_params
    assert params is not None
    await run(engine, fresh_prompt(engine_pair), greedy(1))  # loads are reported at steps
    num_used = engine.stats().num_pages_used
    assert num_used >= num_pages
    await engine.release(params)
    await engine.release(params)
    async with asyncio.timeout(PATIENCE_S):
        while engine.stats().num_pages_used > num_used - num_pages:
            await run(engine, fresh_prompt(engine_pair), greedy(1))  # its next step, at the latest, frees them


async def test_releasing_what_an_engine_does_not_know_is_ignored(engine_pair: EnginePair) -> None:
    other = await run(engine_pair.prefill, fresh_prompt(engine_pair), greedy(1), keep_for_transfer=True)
    assert other.last.transfer_params is not None
    for params in ({}, {"nobody": "knows"}, other.last.transfer_params):
        await engine_pair.decode.release(params)
    prompt = fresh_prompt(engine_pair)
    assert len((await run(engine_pair.decode, prompt, greedy())).token_ids) == NUM_TOKENS
    await engine_pair.prefill.release(other.last.transfer_params)


# --- adapters. Engines of vLLM that have some: tests/model/test_adapters.py


@pytest.fixture(scope="session", params=["sim", "sim_tier"])
def adapter_pair(request: pytest.FixtureRequest) -> EnginePair:
    pair: EnginePair = request.getfixturevalue(f"{request.param}_pair")
    return pair


async def test_adapters_answer_otherwise_and_share_no_page(adapter_pair: EnginePair) -> None:
    engine, prompt = adapter_pair.decode, fresh_prompt(adapter_pair)
    keys = sorted(engine.info.adapters)
    assert [key.partition("@")[0] for key in keys] == ["poems", "sql"]
    assert adapter_pair.prefill.info.adapters == engine.info.adapters
    answers = []
    for key in ("", *keys):
        first = await run(engine, prompt, greedy(), adapter=key)
        again = await run(engine, prompt, greedy(), adapter=key)
        assert first.sources == PromptSources(local_compute=len(prompt))
        assert again.sources.local_cache_hit == len(prompt) // engine.info.block_size * engine.info.block_size
        assert first.token_ids == again.token_ids
        answers.append(first.token_ids)
    assert len(set(map(tuple, answers))) == 3


async def test_an_adapters_pages_are_pulled_for_it_alone(adapter_pair: EnginePair) -> None:
    prompt = fresh_prompt(adapter_pair)
    sql = next(key for key in adapter_pair.decode.info.adapters if key.startswith("sql@"))
    expected = await run(adapter_pair.decode, prompt, greedy(), cache_salt="alone", adapter=sql)
    params = await prefill(adapter_pair, prompt, adapter=sql)
    pulled = await run(adapter_pair.decode, prompt, greedy(), transfer_params=params, adapter=sql)
    assert pulled.sources == PromptSources(external_kv_transfer=len(prompt))
    assert pulled.token_ids == expected.token_ids


async def test_pages_of_one_adapter_are_refused_for_another(adapter_pair: EnginePair) -> None:
    """Whoever gave them: what they hold is wrong for any other."""
    prompt = fresh_prompt(adapter_pair)
    sql, poems = sorted(adapter_pair.decode.info.adapters, reverse=True)
    for of_pages, asked in ((sql, poems), (sql, ""), ("", sql)):
        params = await prefill(adapter_pair, prompt, adapter=of_pages)
        with pytest.raises(InvalidRequest, match="the pages were computed with adapter"):
            await run(adapter_pair.decode, prompt, greedy(), transfer_params=params, adapter=asked)
        await eventually(lambda: is_idle(adapter_pair.decode))
        await adapter_pair.prefill.release(params)


async def test_an_adapter_that_an_engine_does_not_have_is_refused(engine_pair: EnginePair) -> None:
    engine, prompt = engine_pair.decode, fresh_prompt(engine_pair)
    for adapter in ("unknown@00", "sql@00", "sql", "@"):
        with pytest.raises(InvalidRequest, match="has no adapter"):
            await run(engine, prompt, greedy(), adapter=adapter)
    assert len((await run(engine, prompt, greedy())).token_ids) == NUM_TOKENS
