"""Speculative decoding with a draft model or an EAGLE head: answers are those of an engine without, token for token.

The engines have tenants, a CPU tier and a keeper's volume. Answers without drafts come from an engine that has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from bench.engine_device import engine_config, model_config
from bench.tiny_models import make_draft_model, make_eagle_head, make_model
from bench.vllm_engines import VllmPair, answer, prefill, start_pair
from kvferry.engine.base import (
    CachedTokens,
    Continued,
    EngineOutput,
    EngineRequest,
    FinishReason,
    RequestId,
    Sampling,
    TierHints,
)
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import ConfigError, InvalidRequest
from kvferry.tenancy.namespace import Namespace
from support.all_models import ALL_MODELS, only_with_all_models
from support.tier_chunks import chunk_files
from support.tier_node import NodeProcess
from support.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

MAX_MODEL_LEN = 2048
STEP_TOKENS = 256
NUM_TOKENS = 64
NOISE = 0.004  # about half of the drafts are accepted
NUM_DRAFT_TOKENS = 3
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
GRAMMAR = json.dumps({"regex": "([a-z]+ [0-9]{3}, ){3}end"})
# Across the borders of pages (32) and steps (256); the last one ends where the context does.
LENGTHS = (5, 31, 32, 33, 255, 300, 700, MAX_MODEL_LEN - NUM_TOKENS)
DRAWN = 600  # answers
SAMPLED = Sampling(max_tokens=3, temperature=2.0, top_k=3, ignore_eos=True)
METHODS = ["draft_model", *(["eagle3", "eagle"] if ALL_MODELS else [])]
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "min_tokens": {"min_tokens": 20, "ignore_eos": False},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "grammar": {"structured_outputs": GRAMMAR, "ignore_eos": False},
}


def prompt_of(length: int) -> list[int]:
    seeded = random.Random(length)
    return [seeded.randrange(200, 40_000) for _ in range(length)]


def request(name: str, prompt: list[int], sampling: Sampling = GREEDY, **more: Any) -> EngineRequest:
    return EngineRequest(
        RequestId(name), prompt, sampling, **{"cache_salt": name, "tier": TierHints(Namespace("acme", 1)), **more}
    )


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@dataclass
class World:
    method: str
    pair: VllmPair
    target: Path
    draft: Path
    volume: Path
    drawn: Counter[tuple[int, ...]]  # sampled answers, without drafts
    expected: Mapping[object, list[EngineOutput]]  # by length of the prompt or name of a change, without drafts

    def counted(self, name: str) -> float:
        """Return a counter of vLLM's, of both engines together."""
        return sum(
            sample.value
            for family in self.pair.decode.own_metrics()
            for sample in family.samples
            if sample.name == f"vllm:spec_decode_{name}_total"
        )


def drafts_of(folder: Path, method: str = "draft_model") -> dict[str, Any]:
    config = {"method": method, "model": str(folder), "num_speculative_tokens": NUM_DRAFT_TOKENS}
    return {"speculative_config": config}


async def draw(engine: VllmEngine) -> Counter[tuple[int, ...]]:
    few_at_once = asyncio.Semaphore(16)

    async def one(number: int) -> tuple[int, ...]:
        async with few_at_once:
            return tuple((await answer(engine, request(f"drawn-{number}", prompt_of(33), SAMPLED, cache_salt="d")))[0])

    return Counter(await asyncio.gather(*map(one, range(DRAWN))))


async def answers_without_drafts(target: Path) -> tuple[dict[object, list[EngineOutput]], Counter[tuple[int, ...]]]:
    model = model_config(path=str(target), max_model_len=MAX_MODEL_LEN)
    engine = VllmEngine(str(target), model, engine_config("prefill", max_num_batched_tokens=STEP_TOKENS), producer=True)

    async def ask(name: object, prompt: list[int], sampling: Sampling = GREEDY) -> list[EngineOutput]:
        return [output async for output in engine.generate(request(f"plain-{name}", prompt, sampling))]

    try:
        await engine.start()
        answers: dict[object, list[EngineOutput]] = {each: await ask(each, prompt_of(each)) for each in LENGTHS}
        for name, change in CHANGES.items():
            answers[name] = await ask(name, prompt_of(33), structs.replace(GREEDY, **change))
        return answers, await draw(engine)
    finally:
        await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=METHODS)
async def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder, method = tmp_path_factory.mktemp("drafts"), str(request.param)
    target = make_model("llama" if method == "draft_model" else "wide-llama", folder / "target")
    expected, drawn = await answers_without_drafts(target)
    if method == "draft_model":
        draft = make_draft_model(target, folder / "draft", noise=NOISE)
    else:
        known = [([*prompt_of(each), *tokens_of(expected[each])], each) for each in LENGTHS]
        draft = make_eagle_head(target, folder / "draft", method, known)
    (registry := folder / "registry").mkdir()
    keeper = NodeProcess(
        folder / "node", registry, "node", cpu_gib=0.2, blocks_per_chunk=1, volume={"capacity_gib": 1.0}
    )
    keeper.start()
    try:
        pair = await start_pair(
            model_config(path=str(target), max_model_len=MAX_MODEL_LEN),
            tier=keeper.config,
            keeper_socket=str(keeper.socket_path),
            has_tenants=True,
            args={**drafts_of(draft, method), "num_gpu_blocks_override": 4 * MAX_MODEL_LEN // 32},
            max_num_batched_tokens=STEP_TOKENS,
        )
        try:
            yield World(method, pair, target, draft, keeper.folder / "v0", drawn, expected)
        finally:
            await pair.stop()
    finally:
        keeper.reap()


@pytest.mark.parametrize("way", ["transferred", "computed"])
async def test_answers_equal_those_without_drafts(world: World, way: str) -> None:
    pair, before = world.pair, {name: world.counted(name) for name in ("num_draft_tokens", "num_accepted_tokens")}

    async def compare(length: int) -> int:
        prompt, transfer = prompt_of(length), None
        if way == "transferred":
            transfer = await prefill(pair.prefill, f"kept-{length}", prompt)
        asked = request(f"{way}-{length}", prompt, transfer_params=transfer)
        outputs = [output async for output in pair.decode.generate(asked)]
        assert tokens_of(outputs) == tokens_of(world.expected[length]), length
        sources = outputs[-1].sources
        assert sources is not None
        assert (sources.external_kv_transfer if transfer else sources.local_compute) == length
        return max(len(output.token_ids) for output in outputs)

    most = max(await asyncio.gather(*map(compare, LENGTHS)))
    # The EAGLE-3 head of this test repeats its first draft.
    assert most == (2 if world.method == "eagle3" else NUM_DRAFT_TOKENS + 1)
    drafted, accepted = (world.counted(name) - value for name, value in before.items())
    assert 0.2 < accepted / drafted < 0.9, "drafts were accepted, and others were not"


@pytest.mark.parametrize("change", CHANGES)
async def test_parameters_of_sampling_mean_the_same(world: World, change: str) -> None:
    sampling = structs.replace(GREEDY, **CHANGES[change])
    asked = request(f"drafts-{change}", prompt_of(33), sampling)
    drafts, plain = [output async for output in world.pair.decode.generate(asked)], world.expected[change]
    assert tokens_of(drafts) == tokens_of(plain)
    assert "".join(each.text for each in drafts) == "".join(each.text for each in plain)
    assert drafts[-1].finish_reason is plain[-1].finish_reason


@pytest.mark.parametrize("name", [33, "grammar"])
async def test_an_answer_goes_on_exactly_after_any_token(world: World, name: object) -> None:
    """As after the loss of a decode worker, in the middle of what one step had given."""
    prompt, plain = prompt_of(33), world.expected[name]
    sampling = structs.replace(GREEDY, **CHANGES.get(str(name), {}))
    tokens, text = tokens_of(plain), "".join(output.text for output in plain)

    num_given = itertools.accumulate(len(output.token_ids) for output in plain[:-1])
    num_chars = itertools.accumulate(len(output.text) for output in plain[:-1])
    given = [Continued(*each) for each in zip(num_given, num_chars, strict=True)][::5]
    assert len(given) > len(tokens) // 12

    async def go_on(given: Continued) -> None:
        so_far = [*prompt, *tokens[: given.num_tokens]]
        asked = request(f"on-{name}-{given.num_tokens}", so_far, sampling, continued=given)
        rest = [output async for output in world.pair.decode.generate(asked)]
        assert tokens_of(rest) == tokens[given.num_tokens :]
        assert text[: given.num_chars] + "".join(output.text for output in rest) == text

    await asyncio.gather(*map(go_on, given))


async def test_pages_of_both_models_come_back_from_the_volume_and_the_cpu_tier(world: World) -> None:
    decode, prompt = world.pair.decode, prompt_of(700)
    whole = len(prompt) // 32 * 32

    async def ask(engine: VllmEngine, name: str) -> CachedTokens:
        before = world.counted("num_accepted_tokens")
        tokens, last = await answer(engine, request(name, prompt, cache_salt="kept"))
        assert tokens == tokens_of(world.expected[700])
        assert last.cached is not None
        accepted.append(world.counted("num_accepted_tokens") - before)
        return last.cached

    accepted: list[float] = []
    files = len(chunk_files(world.volume))
    assert await ask(world.pair.prefill, "computed") == CachedTokens()
    await until(lambda: len(chunk_files(world.volume)) >= files + whole // 32, what="pages kept")
    assert await ask(decode, "volume") == CachedTokens(volume=whole)
    # The last page of a head's has what it drafted from the next token, so vLLM takes one page fewer from the device.
    last = 32 if world.method != "draft_model" else 0
    assert await ask(decode, "device") == CachedTokens(device=whole - last, cpu=last)
    assert await decode._llm.reset_prefix_cache()
    assert await ask(decode, "cpu") == CachedTokens(cpu=whole)
    assert accepted[1] == accepted[2] == accepted[3] > 0, "drafts are those that computed pages give"


async def test_pages_are_described_with_those_of_the_draft_model(world: World) -> None:
    info = world.pair.decode.info
    # Keys and values of 4 layers of 2 heads of 32 float32, of both models, for 32 tokens. A head has one layer.
    assert info.page_bytes == 2 * (2 * 32 * 4) * 32 * (4 + (4 if world.method == "draft_model" else 1))
    assert info.pool_bytes == info.num_pages * info.page_bytes
    assert info.exchange == world.pair.prefill.info.exchange
    arguments = json.loads(dict(info.exchange)["arguments"])
    assert str(world.draft) not in json.dumps(arguments), "nodes may have it in other folders"
    assert len(arguments["speculative_config"]["model"]) == 32


async def test_sampled_answers_have_the_same_distribution(world: World) -> None:
    accepted = world.counted("num_accepted_tokens")
    drawn = await draw(world.pair.decode)
    assert world.counted("num_accepted_tokens") > accepted
    assert len(world.drawn) > 10
    # The total variation: about 0.1 between draws of one distribution over 27 answers.
    assert sum(abs(drawn[each] - world.drawn[each]) for each in drawn.keys() | world.drawn.keys()) / (2 * DRAWN) < 0.2


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_that_allows_no_token_is_refused_by_the_fields(world: World, role: str) -> None:
    grammar = json.dumps({"choice": ["yes", "no"]})
    sampling = structs.replace(GREEDY, structured_outputs=grammar, allowed_token_ids=(5,), bad_words=("maybe",))
    with pytest.raises(InvalidRequest, match="structured_outputs allow no token that allowed_token_ids and bad_words"):
        await answer(getattr(world.pair, role), request(f"none-{role}", prompt_of(5), sampling))


async def test_what_vllm_does_not_speculate_with_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="speculative decoding"):
        await answer(
            world.pair.decode, request("refused", prompt_of(5), structs.replace(GREEDY, temperature=1.0, min_p=0.1))
        )
    _, last = await answer(world.pair.decode, request("after", prompt_of(5), structs.replace(GREEDY, max_tokens=2)))
    assert last.finish_reason is FinishReason.LENGTH


@only_with_all_models
async def test_another_draft_model_gives_the_same_answers(world: World, tmp_path: Path) -> None:
    """A model with pages of another size, never right; or the same head with a context that some prompts exceed."""
    draft = tmp_path / "draft"
    if world.method == "draft_model":
        make_model("small-llama", draft)
    else:
        shutil.copytree(world.draft, draft)
        config = json.loads((draft / "config.json").read_text())
        (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    pair = await start_pair(
        model_config(path=str(world.target), max_model_len=MAX_MODEL_LEN),
        args=drafts_of(draft, world.method),
        max_num_batched_tokens=STEP_TOKENS,
    )
    try:
        for length in (33, 255, 300):
            transfer = await prefill(pair.prefill, f"other-{length}", prompt_of(length))
            asked = request(f"decode-other-{length}", prompt_of(length), transfer_params=transfer)
            tokens, last = await answer(pair.decode, asked)
            assert tokens == tokens_of(world.expected[length])
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
        assert dict(pair.decode.info.exchange) != dict(world.pair.decode.info.exchange)
    finally:
        await pair.stop()


async def test_a_draft_model_that_is_not_there_is_named_by_its_key(world: World) -> None:
    model = model_config(path=str(world.target), max_model_len=MAX_MODEL_LEN)
    engine = VllmEngine(
        str(world.target), model, engine_config("decode", args=drafts_of(Path("/no/such"))), producer=False
    )
    try:
        with pytest.raises(ConfigError, match=r"^engine\.args\.speculative_config\.model: '/no/such' is not a folder"):
            await engine.start()
    finally:
        await engine.stop()
