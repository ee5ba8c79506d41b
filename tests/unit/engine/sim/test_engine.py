"""What the contract suite does not ask of every engine: the simulator's faults, its clock, its pages running out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvferry.engine.base import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PagesRemoved,
    PagesStored,
    PromptSources,
    RequestId,
    Sampling,
    TransferParams,
)
from kvferry.errors import ContextLengthExceeded, EngineDead, EngineError, InvalidRequest, UnsupportedEngine
from kvferry_sim import Faults, PullFault, SimEngine, kv_cache
from kvferry_sim.settings import SimConfig
from support.waiting import SOON_S

BLOCK_SIZE = 4

_fresh = itertools.count()


@contextlib.asynccontextmanager
async def started(
    *, max_num_seqs: int = 16, clock: Any = None, sleep: Any = None, **sim: Any
) -> AsyncIterator[SimEngine]:
    values = {"step_ms": 0, "prefill_tokens_per_s": 10_000_000, "num_pages": 256, "page_bytes": 64} | sim
    time_source = {name: value for name, value in (("clock", clock), ("sleep", sleep)) if value is not None}
    engine = SimEngine("tiny", SimConfig(**values), block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, **time_source)
    await engine.start()
    try:
        yield engine
        engine.check()
    finally:
        await engine.stop()


@pytest.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with started() as engine:
        yield engine


@pytest.fixture
async def pair() -> AsyncIterator[tuple[SimEngine, SimEngine]]:
    async with started() as prefill, started() as decode:
        yield prefill, decode


def prompt_of(num_tokens: int) -> list[int]:
    seeded = random.Random(next(_fresh))
    return [seeded.randrange(16, 50_000) for _ in range(num_tokens)]


def request_for(prompt: Sequence[int], max_tokens: int = 8, **values: Any) -> EngineRequest:
    of_request = {
        name: values.pop(name) for name in ("keep_for_transfer", "transfer_params", "cache_salt") if name in values
    }
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, **{"ignore_eos": True, **values})
    return EngineRequest(RequestId(f"r{next(_fresh)}"), prompt, sampling, **of_request)


async def finish(outputs: AsyncIterator[EngineOutput]) -> tuple[list[int], EngineOutput]:
    token_ids: list[int] = []
    last = EngineOutput((), "")
    async with asyncio.timeout(SOON_S):
        async for last in outputs:
            token_ids += last.token_ids
    return token_ids, last


async def run(
    engine: SimEngine, prompt: Sequence[int], max_tokens: int = 8, **values: Any
) -> tuple[list[int], EngineOutput]:
    return await finish(engine.generate(request_for(prompt, max_tokens, **values)))


async def prefill(engine: SimEngine, prompt: Sequence[int]) -> TransferParams:
    _token_ids, last = await run(engine, prompt, 1, keep_for_transfer=True)
    assert last.transfer_params is not None
    return last.transfer_params


async def expected_tokens(prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
    async with started() as engine:
        return (await run(engine, prompt, max_tokens))[0]


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def several_loops() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def is_idle(engine: SimEngine) -> bool:
    load = engine.stats()
    return load.num_running == load.num_waiting == load.num_pages_used == 0


# Time.


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.sleeps.append(duration_s)
        await asyncio.sleep(0)


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


async def test_prompts_take_their_tokens_and_answers_their_steps(time: VirtualTime) -> None:
    async with started(clock=time.clock, sleep=time.sleep, step_ms=10, prefill_tokens_per_s=1000) as engine:
        await run(engine, prompt_of(35), 4)
    # 35 tokens at 10 a step, then three more tokens after the first.
    assert time.sleeps == pytest.approx([0.01, 0.01, 0.01, 0.005, 0.01, 0.01, 0.01])


async def test_a_cached_prompt_takes_only_what_is_not_cached(time: VirtualTime) -> None:
    prompt = prompt_of(35)
    async with started(clock=time.clock, sleep=time.sleep, step_ms=10, prefill_tokens_per_s=1000) as engine:
        await run(engine, prompt, 1)
        before_s = time.now_s
        _, last = await run(engine, prompt, 1)
    assert last.sources == PromptSources(local_compute=3, local_cache_hit=32)
    assert time.now_s - before_s == pytest.approx(0.003)


async def test_siblings_that_come_together_compute_their_beginning_once(time: VirtualTime) -> None:
    async with started(clock=time.clock, sleep=time.sleep, step_ms=10, prefill_tokens_per_s=1000) as engine:
        beginning = prompt_of(40 * 16)
        requests = [request_for([*beginning, *prompt_of(5)], 1) for _ in range(8)]
        stranger = request_for(prompt_of(50), 1)
        answers = await asyncio.gather(*(finish(engine.generate(request)) for request in (*requests, stranger)))
        computed = [last.sources.local_compute for _, last in answers if last.sources is not None]
        assert sorted(computed) == sorted([40 * 16 + 5, *[5] * 7, 50])
        engine.check()


async def test_a_long_prompt_does_not_stop_others(time: VirtualTime) -> None:
    async with started(clock=time.clock, sleep=time.sleep, step_ms=10, prefill_tokens_per_s=1000) as engine:
        answering = engine.generate(request_for(prompt_of(5), 50))
        await anext(answering)
        long = asyncio.create_task(run(engine, prompt_of(100), 1))
        num_between = 0
        while not long.done():
            await anext(answering)
            num_between += 1
        await answering.aclose()  # type: ignore[attr-defined]
        assert (await long)[1].finish_reason is FinishReason.LENGTH
    assert num_between >= 9


async def test_slow_prefill_and_slow_steps_take_longer(time: VirtualTime) -> None:
    async with started(clock=time.clock, sleep=time.sleep, step_ms=10, prefill_tokens_per_s=1000) as engine:
        engine.faults = Faults(prefill_slowdown=3.0)
        await run(engine, prompt_of(10), 1)
        assert time.now_s == pytest.approx(0.03)
        engine.faults = Faults(step_delay_s=0.5)
        await run(engine, prompt_of(10), 2)
        assert time.now_s == pytest.approx(0.03 + 0.51 + 0.51)


# Faults.


async def test_prompts_of_one_step_share_its_time_and_count_as_queued_until_it_ends() -> None:
    async with started(step_ms=40, prefill_tokens_per_s=4000) as engine:
        requests = [request_for(prompt_of(num), 1) for num in (40, 120)]
        ends = [asyncio.create_task(finish(engine.generate(request))) for request in requests]
        assert engine.stats().queued_prompt_tokens == 0
        await asyncio.sleep(0)
        assert engine.stats().queued_prompt_tokens == 160
        (_, short), (_, long) = await asyncio.gather(*ends)
        assert engine.stats().queued_prompt_tokens == 0
        assert short.times is not None
        assert long.times is not None
        assert short.times.first_token_s == long.times.first_token_s
        shares = [short.times.prefill_share, long.times.prefill_share]
        assert shares == pytest.approx([0.25, 0.75], rel=0.1)


async def test_a_stalled_engine_goes_on_when_it_may(engine: SimEngine) -> None:
    outputs = engine.generate(request_for(prompt_of(10), 1000))
    await anext(outputs)
    engine.faults = Faults(stalled=True)
    waiting = asyncio.create_task(run(engine, prompt_of(10), 2))
    await eventually(lambda: engine.stats().num_waiting == 1)
    await several_loops()  # a step that was under way may end
    num_generated = engine.stats().num_generated_tokens
    await several_loops()
    assert engine.stats().num_generated_tokens == num_generated
    await engine.check_health()
    engine.faults = Faults()
    assert len((await waiting)[0]) == 2
    assert len((await finish(outputs))[0]) == 999


async def test_a_killed_engine_fails_everything(engine: SimEngine) -> None:
    outputs = engine.generate(request_for(prompt_of(10), 900))
    events = engine.kv_events()
    await anext(outputs)
    engine.kill()
    with pytest.raises(EngineDead, match="killed"):
        await finish(outputs)
    with pytest.raises(EngineDead, match="killed"):
        await engine.check_health()
    with pytest.raises(EngineDead, match="killed"):
        await run(engine, prompt_of(5))
    async with asyncio.timeout(SOON_S):
        assert all([batch.events async for batch in events])
    await engine.abort(RequestId("any"))
    engine.kill()
    assert engine.stats().num_running == 0
    assert "dead" in repr(engine)


async def test_pages_of_a_killed_engine_are_computed(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, prompt)
    prefiller.kill()
    token_ids, last = await run(decode, prompt, transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=30)


@pytest.mark.parametrize(
    ("fault", "num_pulled"),
    [(PullFault.REFUSE, 0), (PullFault.CORRUPT, 0), (PullFault.BREAK_OFF, 4), (PullFault.HANG, 0)],
)
async def test_what_cannot_be_pulled_is_computed(
    pair: tuple[SimEngine, SimEngine], monkeypatch: pytest.MonkeyPatch, fault: PullFault, num_pulled: int
) -> None:
    monkeypatch.setattr(kv_cache, "PULL_TIMEOUT_S", 0.2)
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, prompt)
    prefiller.faults = Faults(pulls=fault)
    token_ids, last = await run(decode, prompt, transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=30 - num_pulled, external_kv_transfer=num_pulled)
    await eventually(lambda: is_idle(prefiller) and is_idle(decode))
    assert prefiller.num_offers == 0


async def test_pages_of_another_prompt_are_not_taken(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, [*prompt[:8], *prompt_of(22)])
    token_ids, last = await run(decode, prompt, transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=22, external_kv_transfer=8)


@pytest.mark.parametrize(("num_offered", "num_pulled"), [(29, 28), (28, 28), (3, 0)])
async def test_pages_of_a_beginning_are_taken_as_far_as_they_are_full(
    pair: tuple[SimEngine, SimEngine], num_offered: int, num_pulled: int
) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, prompt[:num_offered])
    token_ids, last = await run(decode, prompt, transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=30 - num_pulled, external_kv_transfer=num_pulled)
    await eventually(lambda: prefiller.num_offers == 0)


async def test_pages_of_a_longer_prompt_are_taken(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(40)
    transfer_params = await prefill(prefiller, prompt)
    token_ids, last = await run(decode, prompt[:30], transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt[:30])
    # The eighth page holds more than this prompt's two tokens, and nothing here can tell what.
    assert last.sources == PromptSources(local_compute=2, external_kv_transfer=28)


async def test_pages_of_another_salt_are_not_taken(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, prompt)
    _, last = await run(decode, prompt, transfer_params=transfer_params, cache_salt="another")
    assert last.sources == PromptSources(local_compute=30)


async def test_foreign_transfer_parameters_are_computed(engine: SimEngine) -> None:
    prompt = prompt_of(30)
    token_ids, last = await run(engine, prompt, transfer_params={"remote_host": "10.0.0.1", "remote_port": 1})
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=30)


# Offers.


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 30, 32])
async def test_pulled_prompts_of_every_length(pair: tuple[SimEngine, SimEngine], num_prompt: int) -> None:
    prefiller, decode = pair
    prompt = prompt_of(num_prompt)
    transfer_params = await prefill(prefiller, prompt)
    token_ids, last = await run(decode, prompt, 20, transfer_params=transfer_params)
    assert token_ids == await expected_tokens(prompt, 20)
    assert last.sources == PromptSources(external_kv_transfer=num_prompt)
    assert decode.stats().transferred_bytes == -(-num_prompt // BLOCK_SIZE) * decode.info.page_bytes
    await eventually(lambda: is_idle(prefiller) and is_idle(decode))


async def test_pulled_pages_are_a_cache_for_the_next(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    await run(decode, prompt, transfer_params=await prefill(prefiller, prompt))
    _, last = await run(decode, prompt)
    assert last.sources == PromptSources(local_compute=2, local_cache_hit=28)


async def test_pulls_at_the_same_time_share_it(pair: tuple[SimEngine, SimEngine]) -> None:
    prompts = [prompt_of(80) for _ in range(8)]
    params = [await prefill(pair[0], prompt) for prompt in prompts]
    ends = await asyncio.gather(
        *(run(pair[1], prompt, transfer_params=each) for prompt, each in zip(prompts, params, strict=True))
    )
    shares = [last.times.kv_transfer_share for _, last in ends if last.times is not None]
    assert all(share is not None and 0 < share < 1 for share in shares)
    assert min(share for share in shares if share is not None) < 0.3
    alone = prompt_of(80)
    _, last = await run(pair[1], alone, transfer_params=await prefill(pair[0], alone))
    assert last.times is not None
    assert last.times.kv_transfer_share == 1.0
    assert pair[1].stats().queued_prompt_tokens == 0


async def test_a_pull_of_what_is_cached_already_releases_the_offer(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(29)
    await run(decode, prompt)
    _, last = await run(decode, prompt, transfer_params=await prefill(prefiller, prompt[:28]))
    assert last.sources == PromptSources(local_compute=1, local_cache_hit=28)
    await eventually(lambda: prefiller.num_offers == 0)


async def test_offered_pages_stay_until_the_lease_ends() -> None:
    async with started(transfer_lease_s=0.05) as engine:
        await prefill(engine, prompt_of(30))
        assert engine.stats().num_pages_used == 8
        await eventually(lambda: is_idle(engine))
        assert engine.num_offers == 0


async def test_a_prefill_that_answers_more_offers_what_is_still_the_prompts(
    pair: tuple[SimEngine, SimEngine],
) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    _, kept = await run(prefiller, prompt, 9, keep_for_transfer=True)
    assert kept.transfer_params is not None
    token_ids, last = await run(decode, prompt, transfer_params=kept.transfer_params)
    assert token_ids == await expected_tokens(prompt)
    assert last.sources == PromptSources(local_compute=2, external_kv_transfer=28)


async def test_a_prefill_whose_answer_ends_at_once_still_offers() -> None:
    async with started(answer_tokens=1) as engine:
        _, last = await run(engine, prompt_of(10), 1, keep_for_transfer=True, ignore_eos=False)
        assert last.finish_reason is FinishReason.STOP
        assert last.transfer_params is not None
        assert engine.num_offers == 1
        engine.kill()


async def test_an_aborted_prefill_offers_nothing(engine: SimEngine) -> None:
    request = request_for(prompt_of(10), 1000, keep_for_transfer=True)
    outputs = engine.generate(request)
    await anext(outputs)
    await engine.abort(request.request_id)
    _, last = await finish(outputs)
    assert last.finish_reason is FinishReason.ABORT
    assert last.transfer_params is None
    assert is_idle(engine)


async def test_a_decode_that_waits_in_line_releases_when_aborted() -> None:
    async with started() as prefiller, started(max_num_seqs=1) as decode:
        prompt = prompt_of(30)
        transfer_params = await prefill(prefiller, prompt)
        first = decode.generate(request_for(prompt_of(5), 900))
        await anext(first)
        request = request_for(prompt, transfer_params=transfer_params)
        second = asyncio.create_task(finish(decode.generate(request)))
        await eventually(lambda: decode.stats().num_waiting == 1)
        assert prefiller.num_offers == 1
        await decode.abort(request.request_id)
        assert (await second)[1].finish_reason is FinishReason.ABORT
        await eventually(lambda: prefiller.num_offers == 0)
        await first.aclose()  # type: ignore[attr-defined]


async def test_a_decode_that_is_pulling_releases_when_its_reader_leaves(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    prompt = prompt_of(30)
    transfer_params = await prefill(prefiller, prompt)
    prefiller.faults = Faults(pulls=PullFault.HANG)
    reader = asyncio.create_task(run(decode, prompt, transfer_params=transfer_params))
    await eventually(lambda: decode.stats().num_pages_used == 8)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert is_idle(decode)
    await eventually(lambda: prefiller.num_offers == 0)


async def test_a_refused_decode_releases(pair: tuple[SimEngine, SimEngine]) -> None:
    prefiller, decode = pair
    transfer_params = await prefill(prefiller, prompt_of(30))
    with pytest.raises(InvalidRequest):
        await run(decode, [], transfer_params=transfer_params)
    await eventually(lambda: prefiller.num_offers == 0)


# Pages running out.


async def test_requests_that_do_not_fit_together_take_turns() -> None:
    async with started(num_pages=8) as engine:
        prompts = [prompt_of(20) for _ in range(4)]
        results = await asyncio.gather(*(run(engine, prompt, 8) for prompt in prompts))
        for prompt, (token_ids, last) in zip(prompts, results, strict=True):
            assert token_ids == await expected_tokens(prompt)
            assert last.sources == PromptSources(local_compute=20)
        assert is_idle(engine)


async def test_who_came_last_gives_way_when_answers_grow() -> None:
    async with started(num_pages=8) as engine:
        prompts = [prompt_of(12) for _ in range(2)]
        results = await asyncio.gather(*(run(engine, prompt, 20) for prompt in prompts))
        assert engine.num_preemptions > 0
        for prompt, (token_ids, last) in zip(prompts, results, strict=True):
            assert token_ids == await expected_tokens(prompt, 20)
            assert last.sources == PromptSources(local_compute=12)
        assert is_idle(engine)


async def test_a_request_that_fills_every_page_is_served() -> None:
    async with started(num_pages=8) as engine:
        # 32 tokens have room; the 33rd is never computed.
        assert len((await run(engine, prompt_of(13), 20))[0]) == 20


async def test_a_request_that_can_never_fit_is_refused() -> None:
    async with started(num_pages=8) as engine:
        with pytest.raises(InvalidRequest, match="9 pages of 4 tokens; this engine has 8"):
            await run(engine, prompt_of(14), 20)


async def test_a_request_waits_for_pages_that_are_offered() -> None:
    async with started(num_pages=8, transfer_lease_s=0.2) as engine:
        await prefill(engine, prompt_of(20))
        assert len((await run(engine, prompt_of(20), 2))[0]) == 2


async def test_no_more_run_than_may(time: VirtualTime) -> None:
    async with started(max_num_seqs=3, clock=time.clock, sleep=time.sleep) as engine:
        running = [asyncio.create_task(run(engine, prompt_of(5), 30)) for _ in range(9)]
        most = 0
        while not all(task.done() for task in running):
            load = engine.stats()
            most = max(most, load.num_running)
            await asyncio.sleep(0)
        assert most == 3
        assert all(len(task.result()[0]) == 30 for task in running)


async def test_hundreds_of_requests_that_come_go_and_pull_leave_nothing_behind() -> None:
    seeded = random.Random(5)
    async with started() as prefiller, started(num_pages=40, max_num_seqs=12) as decode:
        shared = prompt_of(16)

        async def one(i: int) -> None:
            prompt = [*shared[: seeded.choice([0, 8, 16])], *prompt_of(seeded.randrange(1, 40))]
            max_tokens = seeded.randrange(1, 30)
            transfer_params = await prefill(prefiller, prompt) if i % 2 else None
            request = request_for(prompt, max_tokens, transfer_params=transfer_params)
            leaves_after = seeded.choice([None, None, 0, 1, 5])
            outputs = decode.generate(request)
            async with asyncio.timeout(SOON_S), contextlib.aclosing(outputs):  # type: ignore[type-var]
                num_tokens = 0
                async for output in outputs:
                    num_tokens += len(output.token_ids)
                    if num_tokens == leaves_after:
                        return
                    if leaves_after == 0:
                        await decode.abort(request.request_id)
            if leaves_after is None:
                assert num_tokens == max_tokens
                assert output.sources is not None
                assert output.sources.total == len(prompt)

        await asyncio.gather(*(one(i) for i in range(200)))
        await eventually(lambda: is_idle(prefiller) and is_idle(decode))
        decode.check()
        prefiller.check()


# Limits and life.


async def test_the_context_ends_an_answer(engine: SimEngine) -> None:
    async with started(max_model_len=64) as engine:
        token_ids, last = await run(engine, prompt_of(60), 100)
        assert len(token_ids) == 4
        assert last.finish_reason is FinishReason.LENGTH
        with pytest.raises(ContextLengthExceeded, match="64 tokens; the prompt has 64"):
            await run(engine, prompt_of(64))


@pytest.mark.parametrize(
    ("prompt", "values"),
    [
        ([], {}),
        ([-1], {}),
        ([50_000], {}),
        ([20], {"max_tokens": 0}),
        ([20], {"structured_outputs": "{}"}),
        ([20], {"keep_for_transfer": True, "transfer_params": {}}),
    ],
)
async def test_what_it_cannot_do_it_refuses(engine: SimEngine, prompt: list[int], values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        await run(engine, prompt, **values)
    assert is_idle(engine)


async def test_an_id_runs_once_at_a_time(engine: SimEngine) -> None:
    request = request_for(prompt_of(5), 1000)
    outputs = engine.generate(request)
    await anext(outputs)
    with pytest.raises(InvalidRequest, match="running already"):
        await finish(engine.generate(request))
    await outputs.aclose()  # type: ignore[attr-defined]
    assert len((await finish(engine.generate(request)))[0]) == 1000


async def test_answers_of_unseeded_requests_follow_the_engines_seed() -> None:
    sampling = Sampling(max_tokens=8, temperature=0.8, ignore_eos=True)
    request = EngineRequest(RequestId("warm"), prompt_of(10), sampling)
    answers = []
    for seed in (1, 1, 2):
        engine = SimEngine("tiny", SimConfig(step_ms=0), block_size=BLOCK_SIZE, max_num_seqs=1, seed=seed)
        await engine.start()
        answers.append((await finish(engine.generate(request)))[0])
        await engine.stop()
    assert answers[0] == answers[1] != answers[2]


async def test_an_engine_that_was_not_started_is_dead() -> None:
    engine = SimEngine("tiny", SimConfig(), block_size=4, max_num_seqs=1)
    with pytest.raises(EngineDead, match="not started"):
        await engine.check_health()
    with pytest.raises(EngineDead, match="not started"):
        await run(engine, prompt_of(5))
    with pytest.raises(EngineError, match="not started"):
        _ = engine.info
    await engine.stop()


async def test_a_stopped_engine_fails_what_runs_and_starts_as_another(engine: SimEngine) -> None:
    with pytest.raises(EngineError, match="started already"):
        await engine.start()
    before = engine.info
    prompt = prompt_of(10)
    await run(engine, prompt)
    outputs = engine.generate(request_for(prompt_of(10), 900))
    await anext(outputs)
    await engine.stop()
    await engine.stop()
    with pytest.raises(EngineDead, match="stopped"):
        await finish(outputs)
    with pytest.raises(EngineDead, match="stopped"):
        await engine.check_health()

    await engine.start()
    assert engine.info.engine_id != before.engine_id
    _, last = await run(engine, prompt)
    assert last.sources == PromptSources(local_compute=10)
    await engine.check_health()


async def test_a_host_it_cannot_listen_on_is_named() -> None:
    engine = SimEngine("tiny", SimConfig(), block_size=4, max_num_seqs=1, host="203.0.113.7")
    with pytest.raises(UnsupportedEngine, match=r"203\.0\.113\.7"):
        await engine.start()
    await engine.stop()


async def test_a_failing_step_loop_is_a_dead_engine() -> None:
    async def broken_sleep(_duration_s: float) -> None:
        raise RuntimeError("no time")

    async with started(sleep=broken_sleep) as engine:
        with pytest.raises(EngineDead, match="step loop failed"):
            await run(engine, prompt_of(5))


# Events.


async def test_pages_of_the_answer_are_told_too(engine: SimEngine) -> None:
    events = engine.kv_events()
    prompt = prompt_of(6)
    token_ids, _ = await run(engine, prompt, 8, cache_salt="salt")
    stored_tokens: list[int] = []
    parent = None
    async with asyncio.timeout(SOON_S):
        while len(stored_tokens) < 12:
            batch = await anext(events)
            for event in batch.events:
                assert isinstance(event, PagesStored)
                assert event.parent_hash == parent
                assert event.cache_salt == ("salt" if parent is None else None)
                stored_tokens += event.token_ids
                parent = event.page_hashes[-1]
    # The 14th token was never computed, the 13th is alone on its page.
    assert stored_tokens == [*prompt, *token_ids][:12]
    _, again = await run(engine, [*prompt, *token_ids], 1, cache_salt="salt")
    assert again.sources == PromptSources(local_compute=2, local_cache_hit=12)


async def test_forgotten_pages_are_told() -> None:
    async with started(num_pages=8) as engine:
        events = engine.kv_events()
        for _ in range(3):
            await run(engine, prompt_of(20), 2)
        findable: set[int] = set()
        num_removed = 0
        last = -1
        async with asyncio.timeout(SOON_S):
            while findable != set(engine._cache.pool.hash_to_page):
                batch = await anext(events)
                assert batch.sequence == last + 1
                last = batch.sequence
                for event in batch.events:
                    if isinstance(event, PagesStored):
                        findable |= set(event.page_hashes)
                    elif isinstance(event, PagesRemoved):
                        findable -= set(event.page_hashes)
                        num_removed += len(event.page_hashes)
        assert num_removed > 0


async def test_the_newest_listener_hears_from_now_on(engine: SimEngine) -> None:
    first = engine.kv_events()
    await run(engine, prompt_of(8), 1)
    second = engine.kv_events()
    await run(engine, prompt_of(8), 1)
    async with asyncio.timeout(SOON_S):
        assert [batch.sequence async for batch in first] == [0]
        assert (await anext(second)).sequence == 1


async def test_pages_whose_reader_left_with_the_last_output_are_released() -> None:
    async with started() as engine:
        outputs = engine.generate(request_for(prompt_of(64), 1, keep_for_transfer=True))
        reading = asyncio.ensure_future(anext(outputs))
        while not engine.num_offers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        # The last output waits for its reader, which is cancelled before it runs again.
        assert not reading.done()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert not engine.num_offers
