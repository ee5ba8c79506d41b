"""Distances between the answers of engines whose answers depend on each page that they hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, PromptSources, RequestId, TokenLogprob
from kvferry.proof.measure import _TOKEN, Answered, Measurement, NotComparable, answered
from kvferry.proof.verdict import FARTHEST, Distances, Outcome, View, judge, longest_prompt, prompts

TOKENS = list(range(1000, 1060))
LONGEST = 161
Entries = list[Any]  # of one prompt's pages, by position: what was computed for that place and token
Damage = Callable[[Entries, int, Entries], Entries]  # of an earlier prompt, at last


def entry(place: int, token: int) -> Any:
    return place, token


@dataclass
class FakeEngine:
    """Has a prefix cache by salt, of whole pages, as vLLM: it never looks up the last token of a prompt."""

    block_size: int
    noise: float = 0.0
    cached: dict[tuple[str, tuple[int, ...]], Entries] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)

    def held(self, salt: str, tokens: Sequence[int]) -> Entries:
        found: Entries = []
        while len(found) + self.block_size < len(tokens):
            page = self.cached.get((salt, tuple(tokens[: len(found) + self.block_size])))
            if page is None:
                break
            found += page
        return found

    def store(self, salt: str, tokens: Sequence[int], entries: Entries) -> None:
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            self.cached.setdefault((salt, tuple(tokens[:end])), entries[end - self.block_size : end])

    def answer(
        self, request: EngineRequest, held: Entries, sources: PromptSources, *, is_kept: bool = True
    ) -> list[EngineOutput]:
        tokens, sampling = list(request.prompt_token_ids), request.sampling
        entries = [*held, *(entry(place, tokens[place]) for place in range(len(held), len(tokens)))]
        outputs = []
        for number in range(sampling.max_tokens):
            likely = self.likely(request.cache_salt, entries)
            token = sampling.allowed_token_ids[0] if sampling.allowed_token_ids else likely[0].token_id
            is_last = number == sampling.max_tokens - 1
            outputs.append(
                EngineOutput(
                    [token],
                    "",
                    [likely] if sampling.logprobs else None,
                    FinishReason.LENGTH if is_last else None,
                    sources=sources if is_last else None,
                )
            )
            entries.append(entry(len(tokens), token))
            tokens.append(token)
        if is_kept:
            self.store(request.cache_salt, tokens[:-1], entries[:-1])
        return outputs

    def likely(self, salt: str, entries: Entries) -> list[TokenLogprob]:
        draw, shake = random.Random(repr(entries)), random.Random(f"{salt} {len(entries)}")
        found = [(token, draw.uniform(-9, -1)) for token in draw.sample(TOKENS, 20)]
        return [
            TokenLogprob(token, "", value + self.noise * shake.uniform(-1, 1))
            for token, value in sorted(found, key=lambda each: -each[1])
        ]


@dataclass
class FakePair:
    block_size: int = 16
    noise: float = 0.0
    damage: Damage = lambda entries, block_size, before: entries
    keeps: bool = True  # the prefill engine
    pulls: bool = True  # the decode engine; else it computes prompts itself
    caches_pulled: Callable[[str], bool] = lambda salt: True
    says_pulled: bool | None = None  # None: what is true
    kept: list[Entries] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prefill, self.decode = (FakeEngine(self.block_size, self.noise) for _ in range(2))

    async def ask_prefill(self, request: EngineRequest) -> Answered:
        return answered(request, self.prefill_outputs(request))

    async def ask_decode(self, request: EngineRequest) -> Answered:
        return answered(request, self.decode_outputs(request))

    def prefill_outputs(self, request: EngineRequest) -> list[EngineOutput]:
        self.prefill.requests.append(request)
        tokens = request.prompt_token_ids
        held = self.prefill.held(request.cache_salt, tokens)
        outputs = self.prefill.answer(request, held, PromptSources(len(tokens) - len(held), len(held)))
        assert request.keep_for_transfer
        self.kept.append([entry(place, token) for place, token in enumerate(tokens)])
        if self.keeps:
            outputs[-1].transfer_params = {"number": len(self.kept) - 1}
        return outputs

    def decode_outputs(self, request: EngineRequest) -> list[EngineOutput]:
        self.decode.requests.append(request)
        assert not request.keep_for_transfer
        tokens = list(request.prompt_token_ids)
        if request.transfer_params is None:
            held = self.decode.held(request.cache_salt, tokens)
            sources = PromptSources(len(tokens) - len(held), len(held))
            return self.decode.answer(request, held, sources)
        pulled = held = self.decode.held(request.cache_salt, tokens)
        if self.pulls:
            number = request.transfer_params["number"]
            found = self.damage(list(self.kept[number]), self.block_size, self.kept[number - 1])
            pulled = [*held, *found[len(held) : len(tokens) - 1]]
        says_pulled = self.pulls if self.says_pulled is None else self.says_pulled
        sources = PromptSources(0, len(held), len(tokens) - len(held)) if says_pulled else PromptSources(len(tokens))
        return self.decode.answer(request, pulled, sources, is_kept=self.caches_pulled(request.cache_salt))

    def measurement(self, **values: Any) -> Measurement:
        known: dict[str, Any] = {"block_size": self.block_size, "tokens": TOKENS, "name": "proof-1"}
        return Measurement(self.ask_prefill, self.ask_decode, **{**known, **values})

    async def distances(self) -> list[Distances]:
        measurement = self.measurement()
        made = prompts(TOKENS, self.block_size, longest_prompt(9000, self.block_size, on_gpu=False), 7)
        return [each for number, prompt in enumerate(made) for each in await measurement.distances(number, prompt)]


def end_of_pages(entries: Entries, block_size: int) -> int:
    return (len(entries) - 1) // block_size * block_size


def first_pages_exchanged(entries: Entries, block_size: int, before: Entries) -> Entries:
    one, other, rest = entries[:block_size], entries[block_size : 2 * block_size], entries[2 * block_size :]
    return [*other, *one, *rest] if len(other) == block_size else entries


def last_pages_exchanged(entries: Entries, block_size: int, before: Entries) -> Entries:
    end = end_of_pages(entries, block_size)
    begin = max(0, end - 2 * block_size)
    pages = entries[begin:end]
    return [*entries[:begin], *pages[block_size:], *pages[:block_size], *entries[end:]]


def shifted_by_one(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [entries[-1], *entries[:-1]]


def shifted_by_a_page(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [*entries[-block_size:], *entries[:-block_size]]


def of_another_prompt(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [("another", place) for place in range(len(entries))]


def a_stale_page(entries: Entries, block_size: int, before: Entries) -> Entries:
    # Of what was kept before, at the same place.
    return [*before[:block_size], *entries[block_size:]] if len(before) > block_size else entries


def zeroed(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [None] * len(entries)


def partial_page_zeroed(entries: Entries, block_size: int, before: Entries) -> Entries:
    end = end_of_pages(entries, block_size)
    return [*entries[:end], *[None] * (len(entries) - end)]


def one_page_zeroed_of_long_ones(entries: Entries, block_size: int, before: Entries) -> Entries:
    return zeroed(entries, block_size, before) if len(entries) >= LONGEST else entries


def all_but_the_first_page_zeroed(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [*entries[:block_size], *[None] * (len(entries) - block_size)]


def one_place_wrong(entries: Entries, block_size: int, before: Entries) -> Entries:
    return [None, *entries[1:]]


DAMAGES = (
    first_pages_exchanged,
    last_pages_exchanged,
    shifted_by_one,
    shifted_by_a_page,
    of_another_prompt,
    a_stale_page,
    zeroed,
    partial_page_zeroed,
    one_page_zeroed_of_long_ones,
    all_but_the_first_page_zeroed,
    one_place_wrong,
)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("block_size", [16, 32, 128])
async def test_pages_that_survive_are_proven(block_size: int, noise: float) -> None:
    found = await FakePair(block_size, noise).distances()
    assert judge(found).outcome is Outcome.PROVEN
    assert {each.view for each in found} == set(View)
    assert all((each.transferred == each.noise == 0.0) is not bool(noise) for each in found)
    assert all(0.5 < control < FARTHEST for each in found for control in each.controls)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("block_size", [16, 32, 256, 1024])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_pages_that_were_damaged_are_not_proven(damage: Damage, block_size: int, noise: float) -> None:
    assert judge(await FakePair(block_size, noise, damage).distances()).outcome is not Outcome.PROVEN


@pytest.mark.parametrize("damage", [of_another_prompt, zeroed, partial_page_zeroed, one_place_wrong])
async def test_the_same_damage_in_every_transfer_is_refuted(damage: Damage) -> None:
    assert judge(await FakePair(16, 0.0, damage).distances()).outcome is Outcome.REFUTED


@pytest.mark.parametrize(
    "values", [{"keeps": False}, {"pulls": False}, {"says_pulled": False}], ids=lambda values: next(iter(values))
)
async def test_what_was_not_transferred_is_not_compared(values: dict[str, Any]) -> None:
    with pytest.raises(NotComparable, match="no pages"):
        await FakePair(**values).distances()


async def test_an_engine_that_computes_the_prompt_and_says_that_it_pulled_pages_is_found_out() -> None:
    assert judge(await FakePair(pulls=False, says_pulled=True).distances()).outcome is Outcome.UNDECIDED


@pytest.mark.parametrize("which", ["-transferred-0", "-transferred-1", "-transferred-2"])
async def test_pages_that_are_not_held_after_the_transfer_are_not_compared(which: str) -> None:
    # What the engine computes from its own pages would be at distance 0.
    with pytest.raises(NotComparable, match="held"):
        await FakePair(caches_pulled=lambda salt: which not in salt).distances()


async def test_an_engine_that_keeps_no_transferred_pages_is_measured_by_the_transfer_alone() -> None:
    def keeps(salt: str) -> bool:
        return "-transferred-" not in salt

    found = await FakePair(caches_pulled=keeps).distances()
    assert {each.view for each in found} == {View.DIRECT}
    assert judge(found).outcome is Outcome.PROVEN
    damaged = await FakePair(caches_pulled=keeps, damage=one_place_wrong).distances()
    assert judge(damaged).outcome is Outcome.REFUTED


async def test_an_engine_without_a_prefix_cache_is_measured_by_the_transfer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeEngine, "held", lambda self, salt, tokens: [])
    found = await FakePair().distances()
    assert {each.view for each in found} == {View.DIRECT}
    assert judge(found).outcome is Outcome.PROVEN
    assert judge(await FakePair(damage=one_place_wrong).distances()).outcome is Outcome.REFUTED


@pytest.mark.parametrize(
    ("length", "views"),
    [
        (14, [View.DIRECT]),
        (15, [View.DIRECT]),
        (16, [View.DIRECT]),
        (17, [View.HELD]),
        (18, [View.DIRECT, View.HELD]),
        (33, [View.HELD]),
    ],
)
async def test_views_of_a_prompt(length: int, views: list[View]) -> None:
    prompt = TOKENS[:length]
    found = await FakePair().measurement().distances(3, prompt)
    assert [each.view for each in found] == views
    assert {(each.prompt, each.num_tokens) for each in found} == {(3, length)}


async def test_requests_have_ids_and_salts_of_their_own() -> None:
    pair = FakePair()
    measurement = pair.measurement(name="proof-2", pool="p", adapter="a@1")
    for number, prompt in enumerate(prompts(TOKENS, 16, LONGEST, 1)):
        await measurement.distances(number, prompt)
    requests = [*pair.prefill.requests, *pair.decode.requests]
    assert len({each.request_id for each in requests}) == len(requests)
    assert all(each.request_id.startswith("proof-2-") and each.cache_salt.startswith("proof-2-") for each in requests)
    assert {(each.pool, each.adapter) for each in requests} == {("p", "a@1")}
    assert {(each.turn, each.tier, each.sampling.temperature) for each in requests} == {(None, None, 0.0)}
    # One salt has pages of one kind alone.
    pulled = [each.cache_salt for each in pair.decode.requests if each.transfer_params is not None]
    assert len(set(pulled)) == len(pulled)
    assert {each.cache_salt for each in pair.prefill.requests} == set(pulled)
    for salt in pulled:
        uses = [each for each in pair.decode.requests if each.cache_salt == salt]
        (transfer,) = (each for each in uses if each.transfer_params is not None)
        before = uses[: uses.index(transfer)]
        assert all(len(each.prompt_token_ids) <= len(transfer.prompt_token_ids) // 2 for each in before)


@pytest.mark.parametrize("number", [0, 1])
async def test_of_some_prompts_both_engines_hold_a_beginning_as_in_a_chat(number: int) -> None:
    pair, prompt = FakePair(), TOKENS[:50]
    await pair.measurement().distances(number, prompt)
    transfers = [each for each in pair.decode.requests if each.transfer_params is not None]
    assert len(transfers) == 3
    for engine in (pair.prefill, pair.decode):
        beginnings = [each for each in engine.requests if list(each.prompt_token_ids) == prompt[:25]]
        assert len(beginnings) == 3 * number
        assert all(engine.held(each.cache_salt, prompt[:25]) for each in beginnings)


async def test_the_last_token_is_computed_in_the_same_step_each_time() -> None:
    pair, prompt = FakePair(), TOKENS[:20]
    await pair.measurement().distances(0, prompt)
    alone = pair.decode.requests[0]
    assert list(alone.prompt_token_ids) == prompt[:-1]
    assert alone.sampling.allowed_token_ids == (prompt[-1],)


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [(1, 1), (2, 1), (2, 0), (3, 3)], ids=["short", "one missing", "none", "long"]
)
def test_an_answer_without_what_was_asked_for_is_not_compared(tokens: int, logprobs: int) -> None:
    request = EngineRequest(RequestId("r"), [1, 2], structs.replace(_TOKEN, max_tokens=2))
    entries = [[TokenLogprob(7, "", -0.5)]] * logprobs
    output = EngineOutput([7] * tokens, "", entries or None, FinishReason.LENGTH)
    with pytest.raises(NotComparable):
        answered(request, [output])
    unasked = structs.replace(request, sampling=request.sampling.without_logprobs())
    assert answered(unasked, [output]).token_ids == [7] * tokens


def test_an_answer_in_several_outputs() -> None:
    request = EngineRequest(RequestId("r"), [1, 2], structs.replace(_TOKEN, max_tokens=2))
    outputs = [EngineOutput([token], "", [[TokenLogprob(token, "", -0.5)]]) for token in (7, 8)]
    found = answered(request, outputs)
    assert (found.token_ids, found.logprobs, found.last) == ([7, 8], [{7: -0.5}, {8: -0.5}], outputs[1])
