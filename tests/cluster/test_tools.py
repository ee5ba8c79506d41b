"""Tool calls and reasoning over real HTTP, through the openai client; the sim engine's parser takes answers apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from kvferry.engine.base import Parse
from kvferry.errors import ConfigError
from kvferry.gateway.lifecycle import build_renderer
from kvferry.membership.base import MemberKind
from kvferry_sim import engine as sim_engine
from kvferry_sim.answer import NUM_CONTENT_WORDS, NUM_REASONING_WORDS, SimParser
from support.waiting import PATIENCE_S

from .conftest import MODEL, SimCluster, running

TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}},
]
NAMED: Any = {"type": "function", "function": {"name": "wait"}}
MESSAGES: Any = [{"role": "user", "content": "tell me of the river"}]
BOTH = {"path": MODEL, "tool_parser": "sim", "reasoning_parser": "sim"}
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 400, "temperature": 0}


@asynccontextmanager
async def talking(model: dict[str, Any] = BOTH, **values: Any) -> AsyncIterator[tuple[SimCluster, AsyncOpenAI]]:
    async with (
        running(model=model, **values) as cluster,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield cluster, client


class Gathered:
    """A streamed choice, put together as a client does it."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: dict[int, dict[str, str]] = {}
        self.finish_reason: str | None = None

    def add(self, choice: Any) -> None:
        assert self.finish_reason is None, "something follows the end"
        self.content += choice.delta.content or ""
        self.reasoning += getattr(choice.delta, "reasoning", None) or ""
        for piece in choice.delta.tool_calls or ():
            call = self.calls.setdefault(piece.index, {"arguments": ""})
            if piece.id is not None:
                assert "id" not in call
                call |= {"id": piece.id, "name": piece.function.name, "type": piece.type}
            call["arguments"] += piece.function.arguments
        self.finish_reason = choice.finish_reason


async def stream(
    client: AsyncOpenAI, during: Callable[[], Awaitable[None]] | None = None, **asked: Any
) -> dict[int, Gathered]:
    """The choices of a streamed answer; `during` runs once, after the first call began."""
    choices: dict[int, Gathered] = {}
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            choices.setdefault(choice.index, Gathered()).add(choice)
            if during is not None and choice.delta.tool_calls:
                then, during = during, None
                await then()
    return choices


def as_gathered(choice: Any) -> tuple[Any, ...]:
    """A whole answer's choice, to be compared with `parts`."""
    message = choice.message
    calls = [(call.id, call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return message.content or "", getattr(message, "reasoning", ""), calls, choice.finish_reason


def parts(gathered: Gathered) -> tuple[Any, ...]:
    calls = [(call["id"], call["type"], call["name"], call["arguments"]) for _, call in sorted(gathered.calls.items())]
    return gathered.content, gathered.reasoning, calls, gathered.finish_reason


async def test_streamed_and_whole_answers_have_the_same_parts() -> None:
    async with talking() as (_, client):
        asked = {**ASKED, "tools": TOOLS, "n": 3, "temperature": 1, "seed": 3}
        whole = (await client.chat.completions.create(**asked)).choices
        streamed = await stream(client, **asked)
        assert [parts(streamed[i]) for i in range(3)] == [as_gathered(choice) for choice in whole]
        for choice in whole:
            assert len(choice.message.reasoning.split()) == NUM_REASONING_WORDS  # type: ignore[attr-defined]
            assert len((choice.message.content or "").split()) == NUM_CONTENT_WORDS
            (call,) = choice.message.tool_calls or ()
            assert call.type == "function"
            assert call.function.name == "look"
            assert set(json.loads(call.function.arguments)) == {"words"}
            assert choice.finish_reason == "tool_calls"
        assert len({choice.message.content for choice in whole}) == 3


@pytest.mark.parametrize(
    ("choice", "name", "finish"),
    [
        ("required", "look", "tool_calls"),
        (NAMED, "wait", "stop"),
        ("none", None, "stop"),
        ("auto", "look", "tool_calls"),
    ],
)
async def test_tool_choice(choice: Any, name: str | None, finish: str) -> None:
    async with talking({**BOTH, "reasoning_parser": ""}) as (_, client):
        answer = (await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)).choices[0]
        assert [call.function.name for call in answer.message.tool_calls or ()] == ([name] if name else [])  # type: ignore[union-attr]
        assert answer.finish_reason == finish
        assert (answer.message.content is None) == (choice == "required" or choice is NAMED)
        assert not hasattr(answer.message, "reasoning")


async def test_an_answer_cut_short_within_a_call_says_length() -> None:
    async with talking() as (_, client):
        asked = {**ASKED, "tools": TOOLS, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.message.tool_calls
        assert whole.finish_reason == "length"
        assert parts((await stream(client, **asked))[0]) == as_gathered(whole)


async def test_reasoning_without_tools_and_its_log_probabilities() -> None:
    async with talking({**BOTH, "tool_parser": ""}) as (_, client):
        asked = {**ASKED, "logprobs": True, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.logprobs is not None
        assert len(whole.logprobs.content or ()) == 12
        assert len(whole.message.reasoning.split()) == NUM_REASONING_WORDS  # type: ignore[attr-defined]
        assert parts((await stream(client, **asked))[0]) == as_gathered(whole)

        hidden = {**asked, "extra_body": {"ignore_eos": True, "include_reasoning": False}}
        without = (await client.chat.completions.create(**hidden)).choices[0]
        assert not hasattr(without.message, "reasoning")
        assert without.logprobs is None  # they would spell it out
        assert without.message.content == whole.message.content


async def test_a_conversation_with_calls_is_another_prompt() -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    follow_up: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "why not"},
        {"role": "tool", "tool_call_id": "call-1", "content": "wide"},
    ]
    async with talking() as (_, client):
        num_tokens = []
        for values in ({}, {"tools": TOOLS}, {"messages": follow_up}, {"messages": follow_up, "tools": TOOLS}):
            usage = (await client.chat.completions.create(**{**ASKED, **values})).usage
            assert usage is not None
            num_tokens.append(usage.prompt_tokens)
        assert num_tokens[0] < num_tokens[1] < num_tokens[3]
        assert num_tokens[0] < num_tokens[2] < num_tokens[3]


async def test_without_a_parser_tools_are_refused_naming_the_setting() -> None:
    async with talking({"path": MODEL}) as (_, client):
        for choice in ("auto", "required"):
            with pytest.raises(BadRequestError, match=r"model\.tool_parser") as refused:
                await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)
            assert refused.value.param == "tools"
        told = await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="none")
        assert told.choices[0].message.tool_calls is None


async def test_a_parser_of_another_engine_fails_the_start() -> None:
    async with running() as cluster:
        config = cluster.config
        model = config.model.model_copy(update={"tool_parser": "hermes"})
        with pytest.raises(ConfigError, match=r"model\.tool_parser.*'hermes'.*'sim'"):
            build_renderer(config.model_copy(update={"model": model}), MODEL)


async def test_plain_requests_never_meet_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a parser was made")

    monkeypatch.setattr(sim_engine, "SimParser", refuse)
    async with talking({**BOTH, "reasoning_parser": ""}) as (cluster, client):
        assert (await client.chat.completions.create(**ASKED)).choices[0].message.content
        assert (await client.completions.create(model=MODEL, prompt="a b")).choices[0].text
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            refused = await http.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS})
            assert refused.status_code == 500


async def test_an_answer_is_parsed_once_where_it_is_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(SimParser):
        def __init__(self, parse: Parse) -> None:
            made.append("parser")
            super().__init__(parse)

    monkeypatch.setattr(sim_engine, "SimParser", Counted)
    async with talking() as (cluster, client):
        await client.chat.completions.create(**ASKED, tools=TOOLS)
        assert made == ["parser"]
        assert cluster.metric('kvferry_placements_total{reason="disaggregated"}') == 1


async def test_the_clients_own_way_to_put_a_stream_together() -> None:
    async with talking() as (_, client):
        async with client.chat.completions.stream(**ASKED, tools=TOOLS) as events:
            async for _event in events:
                pass
            last = (await events.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(**ASKED, tools=TOOLS)).choices[0]
        assert as_gathered(last) == as_gathered(whole)


@pytest.mark.parametrize(
    "values",
    [{}, {"presence_penalty": 1.0}, {"n": 3, "temperature": 1.0, "seed": 5}],
    ids=["continued", "computed-again", "three-seeded"],
)
async def test_a_call_goes_on_when_its_worker_is_lost(values: dict[str, Any]) -> None:
    asked = {**ASKED, "tools": TOOLS, "max_tokens": 300, "extra_body": {"ignore_eos": True}, **values}
    async with talking(decode=2, sim={"step_ms": 1.0, "prefill_tokens_per_s": 2e5}) as (cluster, client):
        expected = {i: parts(choice) for i, choice in (await stream(client, **asked)).items()}

        async def lose_the_busy_one() -> None:
            next(engine for engine in cluster.engines(MemberKind.DECODE) if engine.stats().num_running).kill()

        again = {i: parts(choice) for i, choice in (await stream(client, lose_the_busy_one, **asked)).items()}
        assert again == expected
        assert cluster.metric("kvferry_continued_requests_total") >= 1
        await cluster.until_quiet()
