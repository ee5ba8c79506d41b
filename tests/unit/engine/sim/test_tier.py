"""the simulator's CPU tier, and volumes behind a real keeper: what comes back is right, or is computed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import TierConfig
from kvferry.engine.base import (
    CachedTokens,
    EngineOutput,
    EngineRequest,
    KvEventBatch,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
)
from kvferry.keeper.unix_socket import socket_path
from kvferry.pages.keys import pack_tokens, route_keys, seed_of
from kvferry.residency.index import Tier
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry.worker.page_mirror import PageMirror
from kvferry_sim import SimEngine
from kvferry_sim.block_pool import PageHash, chain_hash, root_hash
from kvferry_sim.settings import SimConfig
from kvferry_sim.tier import PageRef, SimTier, page_key, sim_layout
from support.tier_chunks import chunk_files
from support.tier_keeper import KeeperProcess, keeping, tier_config
from support.waiting import SOON_S, until

BLOCK_SIZE = 4
PAGE_BYTES = 64

_fresh = itertools.count()


@contextlib.asynccontextmanager
async def started(tier: TierConfig, *, volumes: bool = True, **options: Any) -> AsyncIterator[SimEngine]:
    names = ("clock", "sleep")
    of_engine = {name: options.pop(name) for name in names if name in options}
    values = {"step_ms": 0, "prefill_tokens_per_s": 10_000_000, "num_pages": 256, "page_bytes": PAGE_BYTES}
    engine = SimEngine(
        "tiny",
        SimConfig(**(values | {"tier_page_ms": 0, "cpu_pages": 64} | options)),
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        tier=tier,
        keeper_socket=str(socket_path(tier)) if volumes else "",
        **of_engine,
    )
    await engine.start()
    try:
        if volumes:
            await until(lambda: tier_of(engine).connected, what="the keeper")
        yield engine
        await until(lambda: tier_of(engine).num_jobs == 0, what="the end of all jobs")
        engine.check()
    finally:
        await engine.stop()


def tier_of(engine: SimEngine) -> SimTier:
    assert engine._cache.tier is not None
    return engine._cache.tier


def prompt_of(num_tokens: int) -> list[int]:
    seeded = random.Random(next(_fresh))
    return [seeded.randrange(16, 50_000) for _ in range(num_tokens)]


async def run(
    engine: SimEngine, prompt: Sequence[int], max_tokens: int = 8, **values: Any
) -> tuple[list[int], EngineOutput]:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    token_ids: list[int] = []
    last = EngineOutput((), "")
    async with asyncio.timeout(SOON_S):
        async for last in engine.generate(EngineRequest(RequestId(f"r{next(_fresh)}"), prompt, sampling, **values)):
            token_ids += last.token_ids
    return token_ids, last


async def kept(engine: SimEngine, folder: Path, num_pages: int) -> None:
    """Until so many pages lie on the volume, and the engine knows."""
    await until(lambda: tier_of(engine).num_jobs == 0 and len(chunk_files(folder)) == num_pages, what="pages kept")


@pytest.fixture
def config(tmp_path: Path) -> TierConfig:
    return tier_config(tmp_path)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "v0"


async def test_a_prompt_outlives_its_engine(config: TierConfig, volume: Path) -> None:
    prompt = prompt_of(101)
    async with keeping(config):
        async with started(config) as first:
            expected, computed = await run(first, prompt)
            assert computed.sources == PromptSources(101, 0, 0)
            assert first.info.num_cpu_pages == 64
            # The last token of an answer is never computed.
            await kept(first, volume, (101 + 8 - 1) // BLOCK_SIZE)
        async with started(config) as second:
            await knows(second, prompt)
            answer, last = await run(second, prompt)
            assert answer == expected
            assert last.sources == PromptSources(1, 0, 100)
            assert last.cached == CachedTokens(volume=100)
            assert second.stats().cached_tokens == CachedTokens(volume=100)
            # From its own memory the second time, and when that has been given away, from its CPU tier.
            assert (await run(second, prompt))[1].sources == PromptSources(1, 100, 0)
            assert second.stats().cached_tokens == CachedTokens(device=100, volume=100)


def page_hashes(prompt: Sequence[int]) -> list[PageHash]:
    parent, hashes = root_hash(""), []
    for start in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = chain_hash(parent, pack_tokens(prompt[start : start + BLOCK_SIZE]))
        hashes.append(parent)
    return hashes


async def knows(engine: SimEngine, prompt: Sequence[int]) -> None:
    """Until the engine has heard from its keeper of every page of the prompt."""
    hashes = page_hashes(prompt)
    await until(lambda: all(tier_of(engine).has(page_hash) for page_hash in hashes), what="the prompt's pages")


async def test_answers_are_kept_too(config: TierConfig, volume: Path) -> None:
    prompt = prompt_of(30)
    async with keeping(config):
        async with started(config) as first:
            answer, _ = await run(first, prompt, 50)
            whole = [*prompt, *answer]
            expected, _ = await run(first, whole)
            await kept(first, volume, (80 + 8 - 1) // BLOCK_SIZE)
        async with started(config) as second:
            await knows(second, whole[:-1])
            again, last = await run(second, whole)
            assert again == expected
            assert last.sources == PromptSources(4, 0, 76)


async def test_what_the_engine_gave_away_comes_from_its_cpu_tier(config: TierConfig) -> None:
    async with started(config, volumes=False, num_pages=12, cpu_pages=40) as engine:
        prompt = prompt_of(33)
        expected, _ = await run(engine, prompt, 1)
        await run(engine, prompt_of(40), 1)  # takes every page
        answer, last = await run(engine, prompt, 1)
        assert answer == expected
        assert last.sources is not None
        assert last.sources.external_kv_transfer > 16
        assert engine.stats().cached_tokens.cpu == last.sources.external_kv_transfer
        # The least recently used go first; nothing breaks when everything does.
        for _ in range(10):
            await run(engine, prompt_of(40), 1)
        assert (await run(engine, prompt, 1))[0] == expected


async def test_loads_take_their_time(config: TierConfig) -> None:
    sleeps: list[float] = []

    async def sleep(duration_s: float) -> None:
        sleeps.append(duration_s)
        await asyncio.sleep(0)

    async with started(config, volumes=False, num_pages=12, tier_page_ms=500, sleep=sleep) as engine:
        prompt = prompt_of(13)
        await run(engine, prompt, 1)
        await run(engine, prompt_of(45), 1)
        await run(engine, prompt, 1)
        assert 1.5 in sleeps


async def test_siblings_wait_for_what_one_of_them_loads(config: TierConfig, volume: Path) -> None:
    beginning = prompt_of(80)
    async with keeping(config):
        async with started(config) as first:
            await run(first, beginning, 1)
            await kept(first, volume, 20)
        async with started(config) as second:
            await knows(second, beginning)
            answers = await asyncio.gather(*(run(second, [*beginning, *prompt_of(3)], 1) for _ in range(6)))
            sources = [last.sources for _, last in answers]
            assert sorted(source.external_kv_transfer for source in sources if source is not None) == [0] * 5 + [80]
            assert second.stats().cached_tokens == CachedTokens(device=5 * 80, volume=80)


async def test_what_is_ferried_goes_to_both_cpu_tiers_and_one_volume(tmp_path: Path) -> None:
    prompt = prompt_of(40)
    here, there = tier_config(tmp_path / "here"), tier_config(tmp_path / "there")
    async with keeping(here), keeping(there), started(here) as prefill, started(there) as decode:
        _, last = await run(prefill, prompt, 1, keep_for_transfer=True)
        _, pulled = await run(decode, prompt, 9, transfer_params=last.transfer_params)
        assert pulled.sources == PromptSources(external_kv_transfer=40)
        assert decode.stats().cached_tokens == CachedTokens(kv_transfer=40)
        assert len(tier_of(decode)._ready) == 12
        await kept(prefill, tmp_path / "here" / "v0", 10)
        await kept(decode, tmp_path / "there" / "v0", 2)  # of the answer


async def test_pages_are_kept_under_their_tenant(config: TierConfig, volume: Path) -> None:
    hints = TierHints(Namespace("acme", 3))
    prompt = prompt_of(41)
    async with keeping(config):
        async with started(config) as engine:
            await run(engine, prompt, 1, tier=hints)
            await kept(engine, volume, 10)
        assert {file.parent.parent.name for file in chunk_files(volume)} == {"acme.3"}
        async with started(config) as engine:
            await knows(engine, prompt)
            # Whoever asks for another's page by its key does not get it.
            _, last = await run(engine, prompt, 1)
            assert last.sources == PromptSources(local_compute=41)


async def test_a_flipped_bit_is_computed_again(config: TierConfig, volume: Path) -> None:
    prompt = prompt_of(61)
    async with keeping(config) as keeper:
        async with started(config) as first:
            expected, _ = await run(first, prompt)
            await kept(first, volume, (61 + 7) // BLOCK_SIZE)
        async with started(config) as second:
            await knows(second, prompt)
            name = page_key(page_hashes(prompt)[5]).hex()
            flip(next(file for file in chunk_files(volume) if file.name.startswith(name)))
            answer, last = await run(second, prompt)
            assert answer == expected
            assert last.sources == PromptSources(61 - 5 * BLOCK_SIZE, 0, 5 * BLOCK_SIZE)
            assert second.num_wrong_pages == 0
        assert keeper.stats.loads["corrupt_payload"] == 1
    assert len(list((volume / "quarantine").iterdir())) == 1


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096 + 10] ^= 4
    file.write_bytes(content)


async def test_a_wrong_byte_in_memory_is_not_used(config: TierConfig) -> None:
    """The simulator knows what every page must hold, so whatever a tier does wrong is seen."""
    async with started(config, volumes=False, num_pages=12) as engine:
        prompt = prompt_of(33)
        expected, _ = await run(engine, prompt, 1)
        row = tier_of(engine)._ready[page_hashes(prompt)[2]]
        await run(engine, prompt_of(45), 1)
        tier_of(engine)._memory[row * 4096 + 7] ^= 1
        answer, last = await run(engine, prompt, 1)
        assert answer == expected
        assert last.sources == PromptSources(33 - 8, 0, 8)
        assert engine.num_wrong_pages == 1


async def test_without_a_keeper_everything_is_a_miss(config: TierConfig, volume: Path) -> None:
    prompt, other = prompt_of(61), prompt_of(61)
    async with started(config, volumes=False) as engine:
        expected, _ = await run(engine, prompt)
    async with keeping(config), started(config) as engine:
        await run(engine, prompt)
        await kept(engine, volume, 17)
    async with contextlib.AsyncExitStack() as stack:
        keeper = contextlib.AsyncExitStack()
        await keeper.enter_async_context(keeping(config))
        engine = await stack.enter_async_context(started(config))
        await knows(engine, prompt)
        await keeper.aclose()
        await until(lambda: not tier_of(engine).connected)
        answer, last = await run(engine, prompt)
        assert (answer, last.sources) == (expected, PromptSources(local_compute=61))
        await run(engine, other)
        # Back again: known at once, used by whoever has not computed it meanwhile.
        await stack.enter_async_context(keeping(config))
        await until(lambda: tier_of(engine).connected)


async def test_a_hint_alone_makes_it_ask_and_a_wrong_one_costs_nothing_else(config: TierConfig) -> None:
    prompt = prompt_of(41)
    async with keeping(config), started(config) as engine:
        hints = TierHints(volumes={"nobody-has-it": 7})
        _, last = await run(engine, prompt, tier=hints)
        assert last.sources == PromptSources(local_compute=41)


async def test_what_hangs_is_computed_and_its_memory_stays_the_keepers(tmp_path: Path) -> None:
    options = {"io_timeout_s": 1.0}
    keeper = KeeperProcess(tmp_path, **options)
    config = keeper.config
    prompt = prompt_of(61)
    keeper.start()
    try:
        async with started(config) as first:
            expected, _ = await run(first, prompt)
            await kept(first, tmp_path / "v0", 17)
        async with started(config) as second:
            await knows(second, prompt)
            keeper.stall()
            answer, last = await run(second, prompt)
            assert (answer, last.sources) == (expected, PromptSources(local_compute=61))
            tier = tier_of(second)
            await until(lambda: keeper.num_stalled > 0)
            assert tier.num_jobs > 0
            assert len(tier._loading) == 15
            for _ in range(3):
                await run(second, prompt_of(250), 1)  # more than the tier has rows; none of those is given away
            assert len(tier._loading) == 15
            keeper.go_on()
            await until(lambda: tier.num_jobs == 0)
            assert not tier._loading
    finally:
        keeper.reap()


async def test_gateways_hear_of_the_cpu_tier(config: TierConfig) -> None:
    async with started(config, volumes=False, num_pages=12, cpu_pages=16) as engine:
        mirror = PageMirror(BLOCK_SIZE, 1000)
        batches: list[KvEventBatch] = []

        async def listen() -> None:
            async for batch in engine.kv_events():
                batches.append(batch)
                mirror.apply(batch)

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        prompt = prompt_of(41)
        await run(engine, prompt, 1, cache_salt="tenant")
        expected = set(route_keys(prompt, BLOCK_SIZE, seed_of("tenant")))
        await until(lambda: mirror.keys_of(Tier.CPU) == expected)
        # Gone from the engine's own memory, and still here; then gone from here too.
        await run(engine, prompt_of(45), 1)
        await until(lambda: not mirror.keys_of(Tier.GPU) & expected)
        assert mirror.keys_of(Tier.CPU) & expected
        for _ in range(3):
            await run(engine, prompt_of(45), 1)
        await until(lambda: not mirror.keys_of(Tier.CPU) & expected)
        assert mirror.num_unknown == 0
        listening.cancel()


# The tier by itself.


@contextlib.asynccontextmanager
async def alone(num_rows: int) -> AsyncIterator[SimTier]:
    layout = sim_layout("m", block_size=BLOCK_SIZE, page_bytes=PAGE_BYTES)
    tier = SimTier(layout, page_bytes=PAGE_BYTES, num_rows=num_rows, engine_id="e")
    try:
        yield tier
        tier.check()
    finally:
        await tier.stop()


def page_ref(i: int) -> PageRef:
    return PageRef(PageHash(i), i)


def content_of(i: int) -> bytes:
    return random.Random(i).randbytes(PAGE_BYTES)


async def test_least_recently_used_go_first() -> None:
    async with alone(3) as tier:
        tier.store([(page_ref(i), content_of(i)) for i in (1, 2, 3)], DEFAULT_NAMESPACE)
        tier.store([(page_ref(1), content_of(1))], DEFAULT_NAMESPACE)  # used again
        tier.store([(page_ref(4), content_of(4))], DEFAULT_NAMESPACE)
        assert [tier.has(PageHash(i)) for i in (1, 2, 3, 4)] == [True, False, True, True]
        loaded = await tier.load([(page_ref(i), None) for i in (1, 3, 2, 4)], DEFAULT_NAMESPACE, timeout_s=1)
        assert [each.content for each in loaded] == [content_of(1), content_of(3)]
        assert {each.tier for each in loaded} == {Tier.CPU}


async def test_a_tier_of_random_stores_and_loads_keeps_its_invariants(tmp_path: Path) -> None:
    config = tier_config(tmp_path)
    seeded = random.Random(11)
    layout = sim_layout("m", block_size=BLOCK_SIZE, page_bytes=PAGE_BYTES)
    async with keeping(config):
        tier = SimTier(
            layout,
            page_bytes=PAGE_BYTES,
            num_rows=12,
            engine_id="e",
            keeper_socket=str(socket_path(config)),
        )
        await until(lambda: tier.connected)
        num_loaded = {Tier.CPU: 0, Tier.VOLUME: 0}
        for first in range(0, 60, 6):
            tier.store([(page_ref(i), content_of(i)) for i in range(first, first + 6)], DEFAULT_NAMESPACE)
            await until(lambda: tier.num_jobs == 0)
        await until(lambda: all(tier.has(PageHash(i)) for i in range(60)))

        async def work() -> None:
            for _ in range(120):
                first = seeded.randrange(seeded.choice((60, 6)))
                pages = list(range(first, first + seeded.randrange(1, 7)))
                if seeded.random() < 0.5:
                    tier.store([(page_ref(i), content_of(i)) for i in pages], DEFAULT_NAMESPACE)
                    await asyncio.sleep(0)
                    continue
                loading = asyncio.create_task(
                    tier.load([(page_ref(i), None) for i in pages], DEFAULT_NAMESPACE, timeout_s=10)
                )
                if seeded.random() < 0.2:
                    await asyncio.sleep(0)
                    loading.cancel()
                    await asyncio.gather(loading, return_exceptions=True)
                    continue
                for i, each in zip(pages, await loading, strict=False):
                    assert each.content == content_of(i)
                    num_loaded[each.tier] += 1
                tier.check()

        try:
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*(work() for _ in range(4)))
            await until(lambda: tier.num_jobs == 0)
            tier.check()
            assert num_loaded[Tier.CPU] > 20
            assert num_loaded[Tier.VOLUME] > 20
        finally:
            await tier.stop()
