"""LoRA adapters on real engines: right answers, and no page of one for another.

Two engines exchange pages, have CPU tiers and one volume; a tiny model with random weights answers otherwise with each
adapter. The tests share the engines, in order. `make test-models` also tries adapters of other models.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.tiny_models import OVERRIDDEN, TESTED, make_model
from kvferry.config import AdapterConfig, AdaptersConfig, EngineConfig, ModelConfig
from kvferry.engine.base import (
    CachedTokens,
    Continued,
    EngineOutput,
    EngineRequest,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TransferParams,
)
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import ConfigError, InvalidRequest
from kvferry.pages.keys import page_salt, route_keys, seed_of
from kvferry.residency.index import Tier
from kvferry.tenancy.namespace import Namespace
from kvferry.worker.page_mirror import PageMirror
from support.all_models import only_with_all_models
from support.lora_adapters import make_adapter, merged_answer
from support.tier_chunks import chunk_files
from support.tier_node import NodeProcess
from support.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]


BLOCK_SIZE = 32
NUM_PAGES = 5
PROMPT_TOKENS = NUM_PAGES * BLOCK_SIZE + 9
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
SCALED: dict[str, Any] = {
    "use_rslora": True,
    "lora_alpha": 3,
    "alpha_pattern": {"q_proj": 1, "layers.1.mlp.up_proj": 4.5},
}
ACME = TierHints(Namespace("acme", 3))
OPTIONS = {"cpu_gib": 0.25, "volume": {"capacity_gib": 0.5}, "blocks_per_chunk": 1}
# Of architectures whose adapters are served, beside Llama's.
OTHERS = ["gemma3", "granite", "mistral", "olmo2", "qwen2", "qwen3", "qwen3-yarn"]

_fresh = itertools.count()


def prompt_of(i: int) -> list[int]:
    seeded = random.Random(i)
    return [seeded.randrange(200, 40_000) for _ in range(PROMPT_TOKENS)]


@dataclass
class World:
    name: str
    folder: Path
    model: Path
    keeper: NodeProcess | None
    adapters: AdaptersConfig
    prefill: VllmEngine
    decode: VllmEngine
    mirror: PageMirror

    def engine(self, *, producer: bool) -> VllmEngine:
        return VllmEngine(
            str(self.model),
            ModelConfig(path=str(self.model), max_model_len=1024, **OVERRIDDEN.get(self.name, {})),
            EngineConfig(threads=1),
            producer=producer,
            tier=None if self.keeper is None else self.keeper.config,
            keeper_socket="" if self.keeper is None else str(self.keeper.socket_path),
            adapters=self.adapters,
        )

    def key(self, name: str) -> str:
        """The adapter as engines call it; empty for the model itself."""
        return next((key for key in self.decode.info.adapters if key.startswith(f"{name}@")), "")

    async def answer(
        self,
        engine: VllmEngine,
        prompt: Sequence[int],
        adapter: str,
        *,
        salt: str = "acme's",
        transfer: TransferParams | None = None,
        continued: Continued | None = None,
        tier: TierHints | None = ACME,
    ) -> tuple[list[int], EngineOutput]:
        request = EngineRequest(
            RequestId(f"r{next(_fresh)}"),
            prompt,
            GREEDY,
            cache_salt=salt,
            transfer_params=transfer,
            continued=continued,
            tier=tier,
            adapter=adapter,
        )
        tokens: list[int] = []
        last = EngineOutput((), "")
        async with asyncio.timeout(PATIENCE_S):
            async for last in engine.generate(request):
                tokens += last.token_ids
        return tokens, last

    async def alone(self, prompt: Sequence[int], adapter: str) -> list[int]:
        """The answer of an engine that has nothing of the prompt."""
        tokens, last = await self.answer(self.decode, prompt, adapter, salt=f"alone {next(_fresh)}", tier=None)
        assert last.sources == PromptSources(local_compute=len(prompt))
        return tokens

    async def kept(self, prompt: Sequence[int], adapter: str) -> TransferParams:
        sampling = Sampling(max_tokens=1, temperature=0.0)
        request = EngineRequest(
            RequestId(f"r{next(_fresh)}"),
            prompt,
            sampling,
            keep_for_transfer=True,
            cache_salt="acme's",
            tier=ACME,
            adapter=adapter,
        )
        transfer = None
        async for output in self.prefill.generate(request):
            transfer = output.transfer_params
        assert transfer is not None
        return transfer

    def num_chunks(self) -> int:
        assert self.keeper is not None
        return len(chunk_files(self.keeper.folder / "v0"))

    def pages_in(self, tier: Tier, prompt: Sequence[int], adapter: str) -> int:
        """Pages of a prompt that the decode engine holds, under the keys that routers look for."""
        keys = route_keys(prompt, BLOCK_SIZE, seed_of(page_salt("acme's", adapter)))
        return len(self.mirror.keys_of(tier).intersection(keys))


async def make_world(name: str, folder: Path, keeper: NodeProcess | None = None) -> World:
    """Make a model and its adapters, and engines that are not started."""
    model = await asyncio.to_thread(make_model, name, folder / "model")
    served: Mapping[str, AdapterConfig] = {
        each: AdapterConfig(path=str(make_adapter(folder / each, model, seed, **settings)))
        for seed, (each, settings) in enumerate({"sql": {}, "poems": {}, "third": {}, "fourth": SCALED}.items())
    }
    adapters = AdaptersConfig(served=dict(served), max_rank=8, max_active=2, max_loaded=3)
    world = World(name, folder, model, keeper, adapters, None, None, PageMirror(BLOCK_SIZE, 10_000))  # type: ignore[arg-type]
    world.prefill, world.decode = world.engine(producer=True), world.engine(producer=False)
    return world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("adapters", numbered=True)
    (registry := folder / "registry").mkdir()
    keeper = NodeProcess(folder / "here", registry, "here", **OPTIONS)
    keeper.start()
    world = await make_world("llama", folder, keeper)
    listening = None

    async def listen() -> None:
        async for batch in world.decode.kv_events():
            world.mirror.apply(batch)

    try:
        await world.prefill.start()
        await world.decode.start()
        listening = asyncio.create_task(listen())
        yield world
    finally:
        if listening is not None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
        await world.prefill.stop()
        await world.decode.stop()
        keeper.reap()


async def test_both_engines_have_the_same_adapters(world: World) -> None:
    assert world.prefill.info.adapters == world.decode.info.adapters
    assert sorted(key.partition("@")[0] for key in world.decode.info.adapters) == ["fourth", "poems", "sql", "third"]
    assert dict(world.decode.info.exchange)["adapters"] == "lora"


@pytest.mark.parametrize("name", ["sql", "fourth"])
async def test_answers_are_those_of_weights_with_the_adapter_in_them(world: World, name: str) -> None:
    prompt = prompt_of(40)
    merged = await asyncio.to_thread(merged_answer, world.model, world.folder / name, prompt, GREEDY.max_tokens)
    assert await world.alone(prompt, world.key(name)) == merged != await world.alone(prompt, "")


async def test_interleaved_requests_with_the_same_prompt_give_what_each_adapter_gives_alone(world: World) -> None:
    await compare_interleaved(world)
    assert world.decode.stats().loaded_adapters < world.decode.info.adapters
    assert len(world.decode.stats().loaded_adapters) == 3


async def compare_interleaved(world: World) -> None:
    names = ("", "sql", "poems", "third", "fourth")
    prompts = [prompt_of(i) for i in range(3)]
    alone = {
        (i, name): await world.alone(prompt, world.key(name)) for i, prompt in enumerate(prompts) for name in names
    }
    for i in range(len(prompts)):
        assert len({tuple(alone[i, name]) for name in names}) == len(names), "answers do not depend on adapters"

    async def apart(i: int, name: str) -> tuple[int, str, list[int], EngineOutput]:
        adapter = world.key(name)
        tokens, last = await world.answer(
            world.decode, prompts[i], adapter, transfer=await world.kept(prompts[i], adapter)
        )
        return i, name, tokens, last

    # Four adapters, of which two fit into a step and three into memory, with the model itself between them.
    outcomes = await asyncio.gather(*(apart(i, name) for i in range(len(prompts)) for name in names))
    for i, name, tokens, last in outcomes:
        assert tokens == alone[i, name], f"prompt {i} with {name or 'the model itself'}"
        assert last.sources == PromptSources(external_kv_transfer=PROMPT_TOKENS)


async def test_the_same_adapter_finds_its_pages_again_and_no_other_does(world: World) -> None:
    prompt = prompt_of(10)
    alone = {name: await world.alone(prompt, world.key(name)) for name in ("", "sql", "poems")}
    held = NUM_PAGES * BLOCK_SIZE
    for name in ("", "sql", "poems"):
        adapter = world.key(name)
        assert not world.pages_in(Tier.GPU, prompt, adapter)
        first, cold = await world.answer(world.decode, prompt, adapter)
        again, warm = await world.answer(world.decode, prompt, adapter)
        assert (cold.cached, warm.cached) == (CachedTokens(), CachedTokens(device=held)), name
        assert first == again == alone[name]
        await until(
            lambda adapter=adapter: world.pages_in(Tier.GPU, prompt, adapter) == NUM_PAGES,  # type: ignore[misc]
            what="pages under route keys",
        )


async def test_pages_of_one_adapter_are_refused_for_another(world: World) -> None:
    prompt, sql = prompt_of(15), world.key("sql")
    for of_pages, asked in ((sql, world.key("poems")), (sql, ""), ("", sql)):
        transfer = await world.kept(prompt, of_pages)
        with pytest.raises(InvalidRequest, match="the pages were computed with adapter"):
            await world.answer(world.decode, prompt, asked, transfer=transfer)
        await world.prefill.release(transfer)


async def test_an_answer_goes_on_with_its_adapter(world: World) -> None:
    prompt, adapter = prompt_of(20), world.key("sql")
    whole = await world.alone(prompt, adapter)
    rest, _ = await world.answer(
        world.decode, [*prompt, *whole[:7]], adapter, salt="elsewhere", continued=Continued(7, 0)
    )
    assert rest == whole[7:]


async def test_an_adapter_that_the_engine_does_not_have_is_refused(world: World) -> None:
    name, _, digest = world.key("sql").partition("@")
    for unknown in (f"{name}@{'0' * 32}", f"other@{digest}"):
        with pytest.raises(InvalidRequest, match="has no adapter"):
            await world.answer(world.decode, prompt_of(21), unknown)
    assert await world.alone(prompt_of(21), "")


async def test_volumes_keep_pages_by_adapter_and_by_its_files(world: World) -> None:
    """An engine that has nothing in memory finds an adapter's pages on the volume, until the adapter changes."""
    prompt, held = prompt_of(30), NUM_PAGES * BLOCK_SIZE
    alone = {name: await world.alone(prompt, world.key(name)) for name in ("", "sql", "poems")}
    before = world.num_chunks()
    for adapter in ("", world.key("sql")):
        await world.kept(prompt, adapter)
    await until(lambda: world.num_chunks() >= before + 2 * NUM_PAGES, what="chunks of both on the volume")
    old_sql = world.key("sql")
    assert world.keeper is not None
    volumes = {world.keeper.volume_id: NUM_PAGES}
    hints = TierHints(ACME.namespace, volumes)
    # Of another adapter nothing is on the volume, whatever routers believe.
    tokens, last = await world.answer(world.decode, prompt, world.key("poems"), tier=hints)
    assert (tokens, last.cached) == (alone["poems"], CachedTokens())
    for name in ("", "sql"):
        tokens, last = await world.answer(world.decode, prompt, world.key(name), tier=hints)
        assert (tokens, last.cached) == (alone[name], CachedTokens(volume=held)), name
    await world.prefill.stop()
    await world.decode.stop()

    make_adapter(world.folder / "sql", world.model, seed=77)
    world.decode = world.engine(producer=False)
    await world.decode.start()
    assert world.key("sql") != old_sql
    with pytest.raises(InvalidRequest, match="has no adapter 'sql' with the files"):
        await world.answer(world.decode, prompt, old_sql, tier=hints)
    changed, last = await world.answer(world.decode, prompt, world.key("sql"), tier=hints)
    assert last.cached == CachedTokens()
    assert changed == await world.alone(prompt, world.key("sql")) != alone["sql"]
    # Pages of the model itself are what they were; the new files' are found again.
    tokens, last = await world.answer(world.decode, prompt, "", tier=hints)
    assert (tokens, last.cached) == (alone[""], CachedTokens(volume=held))
    tokens, last = await world.answer(world.decode, prompt, world.key("sql"))
    assert (tokens, last.cached) == (changed, CachedTokens(device=held))


async def test_a_start_with_an_adapter_of_another_model_fails_with_its_reason(world: World) -> None:
    make_adapter(world.folder / "poems", world.model, seed=1, rank=8, r=4)
    engine = world.engine(producer=False)
    try:
        with pytest.raises(ConfigError, match=r"adapters\.served\.poems\.path: .*adapter_model\.safetensors: .*shape"):
            await engine.start()
    finally:
        await engine.stop()


@only_with_all_models
@pytest.mark.parametrize("name", OTHERS)
async def test_adapters_of_other_models_give_what_they_give_alone(name: str, tmp_path: Path) -> None:
    assert name in TESTED
    world = await make_world(name, tmp_path)
    try:
        await world.prefill.start()
        await world.decode.start()
        await compare_interleaved(world)
    finally:
        await world.prefill.stop()
        await world.decode.stop()
