"""Speculative decoding by n-grams on a decode engine: answers are those of an engine without, token for token.

The engines have tenants and a CPU tier, as those of a cluster; the prefill engine does not speculate.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from bench.engine_device import model_config
from bench.tiny_models import make_model
from bench.vllm_engines import VllmPair, answer, prefill, start_pair
from kvferry.config import TierConfig
from kvferry.engine.base import Continued, EngineOutput, EngineRequest, FinishReason, RequestId, Sampling, TierHints
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import InvalidRequest
from kvferry.tenancy.namespace import Namespace
from support.all_models import only_with_all_models

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
MAX_MODEL_LEN = 2048
NUM_PAGES = MAX_MODEL_LEN // 32 + 1  # one is vLLM's own
NUM_DRAWN = 800
GREEDY = Sampling(max_tokens=96, temperature=0.0, ignore_eos=True)
TEXTS = (
    "One, two, three, four, one, two, three, four, one, two, three,",
    "The ferry leaves at six. The ferry leaves at seven. The ferry leaves at eight. The ferry",
    "Write a list of ten fruits with their colours:\n1. Apple: red\n2. Banana: yellow\n3.",
    "Once upon a time a harbour master wrote a letter to every captain of the north. " * 8,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmPair]:
    folder = make_model("repeating-llama", tmp_path_factory.mktemp("model"))
    pair = await start_pair(
        model_config(path=str(folder), max_model_len=MAX_MODEL_LEN),
        tier=TierConfig(enabled=True, cpu_gib=0.5, blocks_per_chunk=1),
        has_tenants=True,
        decode={"args": {"speculative_config": NGRAM, "num_gpu_blocks_override": NUM_PAGES}},
        max_num_batched_tokens=256,
    )
    yield pair
    await pair.stop()


def counted(pair: VllmPair, name: str) -> float:
    """Return a counter of vLLM's, of the engines of this process together: the prefill engine has no drafts."""
    return sum(
        sample.value
        for family in pair.decode.own_metrics()
        for sample in family.samples
        if sample.name == f"vllm:spec_decode_{name}_total"
    )


def request(name: str, prompt: list[int], sampling: Sampling = GREEDY, **more: Any) -> EngineRequest:
    return EngineRequest(
        RequestId(name), prompt, sampling, cache_salt=name, tier=TierHints(Namespace("acme", 1)), **more
    )


async def outputs_of(pair: VllmPair, asked: EngineRequest) -> list[EngineOutput]:
    return [output async for output in pair.decode.generate(asked)]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


async def test_answers_after_a_transfer_equal_those_without_drafts(pair: VllmPair) -> None:
    before = {name: counted(pair, name) for name in ("num_draft_tokens", "num_accepted_tokens")}

    async def compare(i: int, prompt: list[int]) -> int:
        plain, _ = await answer(pair.prefill, request(f"plain-{i}", prompt))
        transfer = await prefill(pair.prefill, f"kept-{i}", prompt)
        outputs = await outputs_of(pair, request(f"drafts-{i}", prompt, transfer_params=transfer))
        assert tokens_of(outputs) == plain
        sources = outputs[-1].sources
        assert sources is not None
        assert sources.external_kv_transfer == len(prompt)
        return max(len(output.token_ids) for output in outputs)

    most = await asyncio.gather(*(compare(i, pair.tokenize(text)) for i, text in enumerate(TEXTS)))
    assert max(most) > 1, "no step gave more than one token"
    drafts, accepted = (counted(pair, name) - value for name, value in before.items())
    assert 0 < accepted < drafts, "drafts were accepted, and others were not"


@pytest.mark.parametrize(
    "change",
    [
        {"stop": ("five", "nine", "Cherry")},
        # Those of `test_draft_model.py` are verified by the same code of vLLM.
        *(
            pytest.param(change, marks=only_with_all_models)
            for change in (
                {"min_tokens": 20, "ignore_eos": False},
                {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
                {"bad_words": ("four", " four")},
                {"structured_outputs": json.dumps({"regex": "([a-z]+ [0-9]{3}, ){6}end"}), "ignore_eos": False},
            )
        ),
        {
            "structured_outputs": json.dumps(
                {
                    "json": {
                        "type": "object",
                        "properties": {"rows": {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 9}},
                        "required": ["rows"],
                        "additionalProperties": False,
                    }
                }
            ),
            "ignore_eos": False,
        },
    ],
    ids=lambda change: next(iter(change)),
)
async def test_parameters_of_sampling_mean_the_same(pair: VllmPair, change: dict[str, Any]) -> None:
    sampling, name = structs.replace(GREEDY, **change), next(iter(change))
    for i, text in enumerate(TEXTS[:3]):
        prompt = pair.tokenize(text)
        plain = [output async for output in pair.prefill.generate(request(f"p-{name}-{i}", prompt, sampling))]
        drafts = await outputs_of(pair, request(f"d-{name}-{i}", prompt, sampling))
        assert tokens_of(drafts) == tokens_of(plain)
        assert "".join(each.text for each in drafts) == "".join(each.text for each in plain)
        assert drafts[-1].finish_reason is plain[-1].finish_reason
        assert drafts[-1].stop_reason == plain[-1].stop_reason


async def test_min_tokens_that_end_among_drafts_let_an_answer_end_where_it_would(pair: VllmPair) -> None:
    prompt = pair.tokenize(TEXTS[1])
    plain, _ = await answer(pair.prefill, request("p-whole", prompt, structs.replace(GREEDY, max_tokens=32)))

    async def compare(num: int) -> None:
        sampling = structs.replace(
            GREEDY, max_tokens=48, min_tokens=num, stop_token_ids=(plain[num],), ignore_eos=False
        )
        expected, last = await answer(pair.prefill, request(f"p-min-{num}", prompt, sampling))
        found, end = await answer(pair.decode, request(f"d-min-{num}", prompt, sampling))
        assert (found, end.finish_reason) == (expected, last.finish_reason), num

    await asyncio.gather(*(compare(num) for num in range(4, 30)))


async def test_log_probabilities_belong_to_their_tokens(pair: VllmPair) -> None:
    sampling = structs.replace(GREEDY, max_tokens=40, logprobs=2)
    prompt = pair.tokenize(TEXTS[0])
    plain = [output async for output in pair.prefill.generate(request("p-logprobs", prompt, sampling))]
    drafts = await outputs_of(pair, request("d-logprobs", prompt, sampling))
    expected = [entries for output in plain for entries in output.logprobs or ()]
    found = [entries for output in drafts for entries in output.logprobs or ()]
    assert len(found) == len(expected) == 40
    assert [entries[0].token_id for entries in found] == tokens_of(drafts) == tokens_of(plain)
    for one, other in zip(found, expected, strict=True):
        assert [each.logprob for each in one] == pytest.approx([each.logprob for each in other], abs=1e-3)


@pytest.mark.parametrize("change", [{"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.9}], ids=str)
async def test_settings_of_sampling_need_no_drafts(pair: VllmPair, change: dict[str, Any]) -> None:
    """A first step has none."""
    sampling = Sampling(max_tokens=4, temperature=1.0, ignore_eos=True, **change)
    tokens, _ = await answer(pair.decode, request(f"first-{change}", pair.tokenize(TEXTS[0]), sampling))
    assert len(tokens) == 4


async def test_a_seed_gives_its_answer_again(pair: VllmPair) -> None:
    prompt = pair.tokenize(TEXTS[2])
    drawn = []
    for i, seed in enumerate((1, 1, 2)):
        sampling = Sampling(max_tokens=32, temperature=1.2, seed=seed, ignore_eos=True)
        drawn.append(tokens_of(await outputs_of(pair, request(f"seed-{i}", prompt, sampling))))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_seed_means_the_same_however_a_prompt_is_cut(pair: VllmPair, role: str) -> None:
    """Of 600 tokens, 256 at once; beside others, fewer. Without drafts, whose number depends on others too."""
    engine, seeded = getattr(pair, role), random.Random(7)
    prompts = [[seeded.randrange(10, 40_000) for _ in range(600)] for _ in range(3)]
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)

    async def ask(name: str, i: int) -> list[int]:
        return (await answer(engine, request(f"{name}-{role}-{i}", prompts[i], sampling)))[0]

    alone = [await ask("alone", i) for i in range(3)]
    assert await asyncio.gather(*(ask("together", i) for i in range(3))) == alone


@only_with_all_models
async def test_sampled_answers_have_the_same_distribution(pair: VllmPair) -> None:
    """Drafts are accepted or replaced by chance, so that answers are drawn as without them."""
    allowed = [pair.tokenize(word)[0] for word in (" one", " two", " three")]
    prompt = allowed * 8
    sampling = Sampling(max_tokens=3, temperature=1.5, ignore_eos=True, allowed_token_ids=tuple(allowed))

    async def drawn(engine: VllmEngine, name: str, sampling: Sampling) -> Counter[tuple[int, ...]]:
        few_at_once = asyncio.Semaphore(16)

        async def draw(number: int) -> tuple[int, ...]:
            async with few_at_once:
                asked = structs.replace(request(f"{name}-{number}", prompt, sampling), cache_salt="drawn")
                return tuple((await answer(engine, asked))[0])

        return Counter(await asyncio.gather(*map(draw, range(NUM_DRAWN))))

    def difference(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
        """Return the total variation, 0 to 1: about 0.1 between draws of one distribution over 27 answers."""
        return sum(abs(one[each] - other[each]) for each in one.keys() | other.keys()) / (2 * NUM_DRAWN)

    accepted = counted(pair, "num_accepted_tokens")
    drafts = await drawn(pair.decode, "drawn", sampling)
    assert counted(pair, "num_accepted_tokens") > accepted
    plain = await drawn(pair.prefill, "plain-drawn", sampling)
    cold = await drawn(pair.prefill, "cold", structs.replace(sampling, temperature=0.2))
    assert len(plain) > 10
    assert difference(drafts, plain) < 0.18
    assert difference(cold, plain) > 0.25, "another distribution would be found"


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "text": {"ignore_eos": True},
        "grammar": {"structured_outputs": json.dumps({"regex": "(one|two|three)( (one|two|three)){12}"})},
        "penalties": {"ignore_eos": True, "presence_penalty": 0.3, "frequency_penalty": 0.2, "bad_words": ("the",)},
    }.items(),
)
async def test_an_answer_goes_on_exactly_after_any_token(pair: VllmPair, name: str, change: dict[str, Any]) -> None:
    """As after the loss of a decode worker, in the middle of what one step had given."""
    prompt = pair.tokenize(TEXTS[0])
    sampling = structs.replace(Sampling(max_tokens=32, temperature=0.0), **change)
    whole = [output async for output in pair.prefill.generate(request(f"p-{name}", prompt, sampling))]
    tokens, text = tokens_of(whole), "".join(output.text for output in whole)
    # A step of the plain engine gives a token. On a busy machine an output has those of several steps, and only the
    # characters of all are known.
    num_given = itertools.accumulate(len(output.token_ids) for output in whole[:-1])
    num_chars = itertools.accumulate(len(output.text) for output in whole[:-1])
    given = [Continued(*each) for each in zip(num_given, num_chars, strict=True)][::3]
    assert len(given) > len(tokens) // 8

    async def go_on(given: Continued) -> None:
        asked = request(f"{name}-{given.num_tokens}", [*prompt, *tokens[: given.num_tokens]], sampling, continued=given)
        rest = await outputs_of(pair, asked)
        assert tokens_of(rest) == tokens[given.num_tokens :]
        assert text[: given.num_chars] + "".join(output.text for output in rest) == text
        assert rest[-1].finish_reason is whole[-1].finish_reason

    await asyncio.gather(*map(go_on, given))


async def test_pages_of_an_answer_are_right_in_memory_and_in_the_cpu_tier(pair: VllmPair) -> None:
    """A draft that was not accepted leaves nothing in pages that later requests use."""
    prompt = pair.tokenize(TEXTS[1])
    asked = structs.replace(GREEDY, max_tokens=200)
    given = tokens_of(await outputs_of(pair, request("turns", prompt, asked)))
    follow_up = [*prompt, *given, *pair.tokenize("\nAnd then? Then the ferry")]
    plain, computed = await answer(pair.prefill, request("plain-turns", follow_up))
    assert computed.sources is not None
    assert computed.sources.local_compute == len(follow_up)

    async def again() -> EngineOutput:
        tokens, last = await answer(pair.decode, request("turns", follow_up))
        assert tokens == plain
        return last

    first = await again()
    assert first.cached is not None
    assert first.cached.device >= (len(prompt) + len(given)) // 32 * 32 - 32
    seeded = random.Random(5)
    flood = [seeded.randrange(10, 40_000) for _ in range(MAX_MODEL_LEN - 40)]  # with its answer, as much as fits
    await answer(pair.decode, request("flood", flood, structs.replace(GREEDY, max_tokens=32)))
    last = await again()
    assert last.cached is not None
    assert last.cached.cpu >= (len(prompt) + len(given)) // 32 * 32 - 32
    assert last.cached.device == 0


@pytest.mark.parametrize("change", [{"min_p": 0.1}, {"logit_bias": {5: 1.0}}])
async def test_what_vllm_does_not_speculate_with_is_refused(pair: VllmPair, change: dict[str, Any]) -> None:
    sampling = structs.replace(GREEDY, temperature=1.0, **change)
    with pytest.raises(InvalidRequest, match="speculative decoding"):
        await answer(pair.decode, request("refused", pair.tokenize("One"), sampling))
    _, last = await answer(pair.decode, request("after", pair.tokenize("One"), structs.replace(GREEDY, max_tokens=2)))
    assert last.finish_reason is FinishReason.LENGTH
