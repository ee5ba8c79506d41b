"""rendering/plain_prompts.py gives what vLLM's own renderer gives, token for token and parameter for parameter."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvferry import model_folder
from kvferry.config import ModelConfig
from kvferry.engine.base import Asker, CacheSalt, RenderedPrompt, TenantName
from kvferry.engine.vllm.rendering import plain_prompts
from kvferry.engine.vllm.rendering import renderer as vllm_renderer
from kvferry.engine.vllm.rendering.grammars import prepared_schema
from kvferry.engine.vllm.rendering.plain_prompts import (
    CHAT_PROBES,
    COMPLETION_PROBES,
    PlainPrompts,
    Rendered,
    prompts_of,
)
from kvferry.engine.vllm.rendering.renderer import VllmRenderer
from kvferry.engine.vllm.rendering.structural_tags import SpecialTokens
from kvferry.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from kvferry.gateway.bodies.grpc_bodies import read_generate
from kvferry.gateway.bodies.openai_bodies import for_renderer
from kvferry.inference.v1 import inference_pb2 as pb
from support.waiting import PATIENCE_S, until

# One loop for all: the renderer's grammar process belongs to it.
pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer() -> AsyncIterator[VllmRenderer]:
    made = await asyncio.to_thread(VllmRenderer, str(model_folder.resolve("default")), "m", ModelConfig())
    assert made.renders_plain_prompts_itself
    yield made
    await made.close()


PIECES = [
    "hello", " ", "\n\n", "  ", "ünï", "漢字", "😀", "\u200d", "\u0301", "\x00", "\t", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "<s>", "</s>", "user\n", "{{ x }}", "{% if %}", "'", '"', "\\", "1234567890", "ＦＵＬＬ", "مرحبا",
    "a" * 200, ".", "x-anthropic",
]  # fmt: skip


def conversations(count: int) -> Iterator[dict[str, Any]]:
    """Of every shape, always the same ones."""
    chance = random.Random(20)
    for _ in range(count):
        turns: list[dict[str, Any]] = [
            {
                "role": chance.choice(["user", "assistant", "system"]),
                "content": "".join(chance.choices(PIECES, k=chance.choice([0, 1, 3, 20, 200]))),
            }
            for _ in range(chance.randint(1, 6))
        ]
        for turn in turns:
            if chance.random() < 0.3:
                texts = [turn["content"], *chance.choices(PIECES, k=chance.choice([0, 1, 5]))]
                turn["content"] = [{"type": "text", "text": text} for text in texts]
        fields: dict[str, Any] = {
            "temperature": chance.choice([0, 0.5, 1.0]), "top_p": chance.choice([0.1, 1]),
            "top_k": chance.choice([-1, 0, 5]), "seed": chance.choice([0, -5, 2**62]),
            "stop": chance.choice(["a", ["b", "c"]]), "logprobs": chance.random() < 0.5, "presence_penalty": 1.5,
            "ignore_eos": True, "skip_special_tokens": False, "max_tokens": chance.choice([1, 64]),
            "max_completion_tokens": 3,
        }  # fmt: skip
        yield {"messages": turns, **{name: fields[name] for name in fields if chance.random() < 0.3}}
    yield {"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1\nBe terse."}, *turns]}


async def by_vllm(renderer: VllmRenderer, body: Mapping[str, Any]) -> RenderedPrompt:
    plain, renderer._plain = renderer._plain, None
    try:
        return await renderer.render_chat(body)
    finally:
        renderer._plain = plain


async def test_the_same_as_vllm_for_many_conversations(renderer: VllmRenderer) -> None:
    num_taken = 0
    for body in [*conversations(300), *CHAT_PROBES]:
        assert renderer._plain is not None
        num_taken += renderer._plain.takes_chat(body) and renderer._plain.chat(body) is not None
        got, wanted = await renderer.render_chat(body), await by_vllm(renderer, body)
        assert list(got.token_ids) == list(wanted.token_ids), body
        assert got.sampling == wanted.sampling, body
    assert num_taken > 280


async def test_the_same_as_vllm_for_prompts(renderer: VllmRenderer) -> None:
    for body in (
        *COMPLETION_PROBES,
        {"prompt": "x", "max_tokens": 4},
        {"prompt": "".join(PIECES) * 30},
        {"prompt": PIECES},
    ):
        assert renderer._plain is not None
        assert renderer._plain.completions(body, prompts_of(body)) is not None
        got = await renderer.render_completion(body)
        max_tokens = body.get("max_tokens", 16)
        asked = await renderer._vllm.completions(body)
        assert got == [renderer._within_context(one, max_tokens, "prompt") for one in asked], body


@pytest.mark.parametrize(
    "changes",
    [
        {"response_format": {"type": "json_object"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"min_tokens": 2},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"seed": -1},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts", "name": "x"}]}]},
        {"messages": [{"role": "user", "content": "x", "name": "Ann"}]},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_what_is_not_plain_is_left_to_vllm(renderer: VllmRenderer, changes: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **changes}
    assert renderer._plain is not None
    assert not renderer._plain.takes_chat(body)
    assert (await renderer.render_chat(body)).token_ids


async def test_prompts_over_the_context_are_refused_with_their_length(renderer: VllmRenderer) -> None:
    messages = {"messages": [{"role": "user", "content": "word " * 9000}]}
    with pytest.raises(ContextLengthExceeded, match=r"8192 tokens, but messages has 90\d\d$") as refused:
        await renderer.render_chat(messages)
    assert refused.value.param == "messages"
    with pytest.raises(ContextLengthExceeded):
        await by_vllm(renderer, messages)
    with pytest.raises(ContextLengthExceeded, match=r"8192 tokens, but prompt has 90\d\d$") as refused:
        await renderer.render_completion({"prompt": "word " * 9000})
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x" * 2_000_000}],
        [{"role": "assistant", "content": [{"type": "text", "text": "x" * 1000}] * 2000}],
        [{"role": "assistant", "content": "x" * 1000}] * 2000,
    ],
    ids=["system", "parts", "messages"],
)
async def test_texts_that_no_context_holds_are_rendered_once_at_most(
    renderer: VllmRenderer, messages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer._vllm, "chat", None)
    with pytest.raises(ContextLengthExceeded, match=r"characters at most, but messages has 20\d{5}$") as refused:
        await renderer.render_chat({"messages": messages})
    assert refused.value.param == "messages"


class Parts:
    """Counts the parts in which a renderer takes lists of prompts."""

    def __init__(self, renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = 0
        self.begun = threading.Event()
        assert renderer._plain is not None
        self._render = renderer._plain.completions
        monkeypatch.setattr(renderer._plain, "completions", self.completions)

    def completions(self, body: Mapping[str, Any], prompts: list[str], salt: CacheSalt) -> list[Rendered] | None:
        self.num_begun += 1
        self.begun.set()
        return self._render(body, prompts, salt=salt)


async def test_a_long_list_of_prompts_lets_others_between(
    renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(renderer, monkeypatch)
    several = asyncio.create_task(renderer.render_completion({"prompt": ["word " * 1900] * 200}))
    for number in range(3):
        await renderer.render_chat({"messages": [{"role": "user", "content": f"{number} words " * 500}]})
    assert not several.done()
    assert len(await several) == parts.num_begun == 200


async def test_a_list_of_prompts_ends_with_its_client(renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(renderer, monkeypatch)
    several = asyncio.create_task(renderer.render_completion({"prompt": ["word " * 1900] * 200}))
    assert await asyncio.to_thread(parts.begun.wait, 60)
    several.cancel()
    await asyncio.gather(several, return_exceptions=True)
    await renderer.render_chat({"messages": [{"role": "user", "content": "words " * 500}]})
    assert parts.num_begun <= 2


async def test_the_first_prompt_over_the_context_ends_a_list(
    renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(renderer, monkeypatch)
    with pytest.raises(ContextLengthExceeded, match=r"but prompt has 90\d\d$"):
        await renderer.render_completion({"prompt": ["word " * 9000, *["word " * 1900] * 50]})
    assert parts.num_begun == 1


async def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer(renderer: VllmRenderer) -> None:
    num_words = 8190
    while (num_tokens := len((await renderer._vllm.completions({"prompt": "word " * num_words}))[0].token_ids)) != 8191:
        num_words += 8191 - num_tokens
    (fits,) = await renderer.render_completion({"prompt": "word " * num_words, "max_tokens": 1})
    assert len(fits.token_ids) == 8191
    with pytest.raises(ContextLengthExceeded, match="8193: 8191 in the prompt and 2 to generate"):
        await renderer.render_completion({"prompt": "word " * num_words, "max_tokens": 2})


async def test_errors_are_vllms(renderer: VllmRenderer) -> None:
    far_over = {"messages": [{"role": "user", "content": "x" * 5_000_000}]}
    with pytest.raises(ContextLengthExceeded) as ours:
        await renderer.render_chat(far_over)
    with pytest.raises(ContextLengthExceeded) as vllms:
        await by_vllm(renderer, far_over)
    assert ours.value.message == vllms.value.message
    with pytest.raises(InvalidRequest):
        await renderer.render_chat({"messages": [{"role": "user", "content": "half a pair \ud83d"}]})


async def test_a_long_prompt_does_not_hold_up_the_loop(renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    chat = PlainPrompts.chat

    def noting(self: PlainPrompts, body: Mapping[str, Any], *, salt: CacheSalt) -> Rendered | None:
        try:
            asyncio.get_running_loop()
            seen.append(True)
        except RuntimeError:
            seen.append(False)
        return chat(self, body, salt=salt)

    monkeypatch.setattr(PlainPrompts, "chat", noting)
    for text in ("short", "x " * vllm_renderer.MOST_CHARS_AT_ONCE):
        await renderer.render_chat({"messages": [{"role": "user", "content": text}]})
    assert seen == [True, False]


async def test_it_is_switched_off_where_it_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rendered = PlainPrompts._rendered

    def wrong(self: PlainPrompts, *arguments: Any, **named: Any) -> Rendered | None:
        right = rendered(self, *arguments, **named)
        return right and Rendered([*right.token_ids, 1], right.sampling)

    monkeypatch.setattr(plain_prompts.PlainPrompts, "_rendered", wrong)
    with caplog.at_level(logging.WARNING):
        made = await asyncio.to_thread(VllmRenderer, str(model_folder.resolve("default")), "m", ModelConfig())
    assert not made.renders_plain_prompts_itself
    assert "other tokens" in caplog.text


@pytest.mark.parametrize("prompt", [[1, 2, 10_000_000], [[1], [10_000_000]]])
async def test_token_ids_that_the_model_does_not_know_are_refused(renderer: VllmRenderer, prompt: list[Any]) -> None:
    with pytest.raises(
        InvalidRequest, match="prompt: 10000000 is not a token id of this model, which has 49152"
    ) as refused:
        await renderer.render_completion({"prompt": prompt})
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
async def test_token_ids_of_sampling_are_in_the_vocabulary(renderer: VllmRenderer, field: str) -> None:
    last = json.loads((model_folder.resolve("default") / "config.json").read_text())["vocab_size"] - 1

    async def render(token_id: int) -> None:
        value = {str(token_id): 1.0} if field == "logit_bias" else [token_id]
        await renderer.render_completion({"prompt": "x", field: value})

    await render(last)
    with pytest.raises(InvalidRequest, match=f"{field}: {last + 1} is not a token id of this model") as refused:
        await render(last + 1)
    assert refused.value.param == field


async def test_allowed_tokens_that_other_fields_exclude_are_refused(renderer: VllmRenderer) -> None:
    """vLLM masks all tokens then, and answers with any."""
    tokenizer = Tokenizer.from_file(str(model_folder.resolve("default") / "tokenizer.json"))
    (river,), (ferry,) = (tokenizer.encode(text, add_special_tokens=False).ids for text in (" river", " with"))
    end = tokenizer.token_to_id("<|im_end|>")

    async def render(**fields: Any) -> None:
        await renderer.render_completion({"prompt": "x", "max_tokens": 4, **fields})
        await renderer.render_chat({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields})

    await render(allowed_token_ids=[river, ferry], bad_words=["river"], min_tokens=1)
    await render(allowed_token_ids=[river, end], min_tokens=1)
    await render(allowed_token_ids=[end])
    await render(allowed_token_ids=[river], stop_token_ids=[river])
    for fields, words in (
        ({"allowed_token_ids": [river, ferry], "bad_words": ["river", "with"]}, "bad_words exclude all of them"),
        ({"allowed_token_ids": [end], "min_tokens": 1}, "all of them end the answer"),
        ({"allowed_token_ids": [end], "min_tokens": 1, "ignore_eos": True}, "all of them end the answer"),
        ({"allowed_token_ids": [river], "stop_token_ids": [river], "min_tokens": 1}, "all of them end the answer"),
        ({"allowed_token_ids": [river, end], "bad_words": ["river"], "min_tokens": 1}, "all of them end the answer"),
    ):
        with pytest.raises(InvalidRequest, match=f"^allowed_token_ids: {words}") as refused:
            await render(**fields)
        assert refused.value.param == "allowed_token_ids"


STRUCTURES = (
    pb.StructuredOutput(json_schema='{"type": "object"}'),
    pb.StructuredOutput(json_object=True),
    pb.StructuredOutput(regex="a+"),
    pb.StructuredOutput(grammar='root ::= "a"'),
    pb.StructuredOutput(one_of=pb.Choices(texts=["a", "b"])),
)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.WhichOneof("kind"))
@pytest.mark.parametrize("kind", ["text", "conversation"])
async def test_structured_output_asked_for_over_grpc_reaches_the_engines_parameters(
    renderer: VllmRenderer, structure: pb.StructuredOutput, kind: str
) -> None:
    message = pb.GenerateRequest(model="m", structured_output=structure)
    if kind == "text":
        message.text = "x"
    else:
        message.conversation.messages.add(role="user", content="x")
    _, body = read_generate(message.SerializeToString())
    render = renderer.render_chat if kind == "conversation" else renderer.render_completion
    rendered: Any = await render(for_renderer(body))
    rendered = rendered if kind == "conversation" else rendered[0]
    expected = {
        "json_schema": {"json": prepared_schema({"type": "object"}, SpecialTokens({}))},
        "json_object": {"json": prepared_schema({"type": "object"}, SpecialTokens({}))},
        "regex": {"regex": "a+"},
        "grammar": {"grammar": 'root ::= "a"'},
        "one_of": {"choice": ["a", "b"]},
    }[structure.WhichOneof("kind") or ""]
    assert json.loads(rendered.sampling.structured_outputs) == expected


@pytest.mark.parametrize("content", ["x" * 4_000_000, [{"type": "text", "text": "x" * 2_000_000}] * 2])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_rendered(
    renderer: VllmRenderer, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "_loop", None)
    with pytest.raises(ContextLengthExceeded, match="characters at most, but messages has 4000000"):
        await renderer.render_chat({"messages": [{"role": "user", "content": content}]})
    if isinstance(content, str):
        with pytest.raises(ContextLengthExceeded, match="but prompt has 4000000"):
            await renderer.render_completion({"prompt": ["short", content]})


async def test_a_template_of_the_configuration_takes_the_place_of_the_models(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[answer]")
    folder = str(model_folder.resolve("default"))
    made = await asyncio.to_thread(VllmRenderer, folder, "m", ModelConfig(chat_template=file))
    assert made.renders_plain_prompts_itself, "and gives what vLLM's renderer gives with this template"
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    # Tools are of vLLM's renderer.
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for more in ({}, {"tools": tools, "tool_choice": "none"}):
        (expected,) = await made.render_completion({"prompt": "[user] hello\n[answer]", "max_tokens": 4})
        assert list((await made.render_chat({**body, **more})).token_ids) == list(expected.token_ids)


async def test_a_message_that_vllm_does_not_take_is_told_by_its_place(renderer: VllmRenderer) -> None:
    """Without the names of vLLM's classes, one for each kind of message."""
    body = {"messages": [{"role": "user", "content": "hi", "name": 5}]}
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.name: Input should be a valid string$") as refused:
        await renderer._loop.run(renderer._vllm.chat(body))
    assert refused.value.param == "messages[0].name"


async def test_a_template_that_takes_too_long_is_no_end_of_the_requests_time(
    renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_out(rendering: Awaitable[Any]) -> None:
        await rendering
        raise TimeoutError("Chat template rendering timed out after 30.0s.")

    hf = renderer._vllm.online.renderer
    assert "raise TimeoutError(" in inspect.getsource(type(hf)._render_with_timeout)
    monkeypatch.setattr(hf, "_render_with_timeout", time_out)
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": 1}, "max_tokens": 4}
    with pytest.raises(InvalidRequest, match=r"messages: the model's chat template takes over 30 s for them"):
        await renderer.render_chat(body)
    monkeypatch.undo()
    assert (await renderer.render_chat(body)).token_ids


def asker(tenant: str) -> Asker:
    return Asker(TenantName(tenant), CacheSalt(f"salt of {tenant}"))


async def test_parameters_are_kept_for_their_salt_alone(
    renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop strings are texts: time must tell nobody what others sent."""
    plain, resolved = renderer._plain, []
    assert plain is not None
    resolve = plain._resolve

    def note(kind: str, asked: bytes, salt: CacheSalt) -> Any:
        resolved.append((kind, salt))
        return resolve(kind, asked, salt)

    monkeypatch.setattr(plain, "_sampling_of", functools.lru_cache(8)(note))
    for tenant in ("acme", "evil", "acme", "evil"):
        await renderer.render_chat({"messages": [{"role": "user", "content": "hi"}], "stop": "x"}, asker=asker(tenant))
        await renderer.render_completion({"prompt": "hi", "stop": "x"}, asker=asker(tenant))
    salts = [asker(tenant).salt for tenant in ("acme", "evil")]
    assert resolved == [(kind, salt) for salt in salts for kind in ("chat", "completion")]


@pytest.mark.parametrize("kind", ["prompt", "messages"])
async def test_of_a_text_that_cannot_fit_a_part_is_tokenized(
    renderer: VllmRenderer, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may send it, and others' texts wait meanwhile."""
    plain, lengths = renderer._plain, []
    assert plain is not None
    encode = plain._encode

    def note(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(plain, "_encode", note)
    text = "The ferry left. " * 40_000
    turns = [{"role": "user", "content": text[i : i + 60_000]} for i in range(0, len(text), 60_000)]
    of_chat, of_prompt = renderer.render_chat({"messages": turns}), renderer.render_completion({"prompt": text})
    asked, other = (of_prompt, of_chat) if kind == "prompt" else (of_chat, of_prompt)
    other.close()
    reason = f"the first 40000 characters of {kind} alone have"
    with pytest.raises(ContextLengthExceeded, match=reason) as refused:
        await asked
    assert refused.value.param == kind
    assert lengths == [10_000] * 4, "no more than it takes, each part in a turn of its own"


async def test_tenants_take_turns_with_long_texts(renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sends many waits behind its own."""
    plain, order = renderer._plain, []
    assert plain is not None
    may_go_on = threading.Event()

    def work(body: Mapping[str, Any], prompts: Any, salt: CacheSalt) -> None:
        may_go_on.wait(PATIENCE_S)
        order.append(prompts[0].partition(" ")[0])

    monkeypatch.setattr(plain, "completions", work)
    monkeypatch.setattr(renderer._vllm, "completions", lambda body: asyncio.sleep(0, []))
    asked = [
        asyncio.create_task(renderer.render_completion({"prompt": f"{tenant}{i} " + "x" * 3_000}, asker=asker(tenant)))
        for tenant, count in (("evil", 20), ("good", 2))
        for i in range(count)
    ]
    await until(lambda: renderer._turns.num_waiting == 21)
    may_go_on.set()
    await asyncio.gather(*asked)
    assert order[:3] == ["evil0", "good0", "good1"], "evil's first turn took longer than good's"


async def test_a_client_that_leaves_gives_its_turn_back_when_its_text_is_done(
    renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, may_go_on = renderer._plain, threading.Event()
    assert plain is not None
    monkeypatch.setattr(plain, "completions", lambda body, prompts, salt: may_go_on.wait(PATIENCE_S) and None)
    asked = asyncio.create_task(renderer.render_completion({"prompt": "x" * 3_000}, asker=asker("acme")))
    await until(lambda: not renderer._turns.num_free)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not renderer._turns.num_free
    may_go_on.set()
    await until(lambda: renderer._turns.num_free == 1)


async def test_the_longest_line_is_shortened(renderer: VllmRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, may_go_on = renderer._plain, threading.Event()
    assert plain is not None
    monkeypatch.setattr(plain, "completions", lambda body, prompts, salt: may_go_on.wait(PATIENCE_S) and None)
    monkeypatch.setattr(renderer._vllm, "completions", lambda body: asyncio.sleep(0, []))
    monkeypatch.setattr(renderer._turns, "_max_waiting", 3)
    body = {"prompt": "x" * 3_000}
    of_evil = [asyncio.create_task(renderer.render_completion(body, asker=asker("evil"))) for _ in range(4)]
    await until(lambda: renderer._turns.num_waiting == 3)
    of_good = asyncio.create_task(renderer.render_completion(body, asker=asker("good")))
    await until(of_evil[3].done)
    may_go_on.set()
    assert await of_good == []
    with pytest.raises(Overloaded, match="texts wait to be rendered"):
        await of_evil[3]
    await asyncio.gather(*of_evil[:3])
