from __future__ import annotations

from typing import Any

import pytest

from kvferry.engine.base import Sampling
from kvferry.errors import ContextLengthExceeded, InvalidRequest
from kvferry_sim import SimRenderer, SimTokenizer
from kvferry_sim.tokenizer import BOS, END_OF_TURN, ROLE_TO_MARKER

MAX_MODEL_LEN = 64

renderer = SimRenderer(MAX_MODEL_LEN)
tokenizer = SimTokenizer()


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


async def test_a_chat_is_rendered_with_its_roles() -> None:
    rendered = await renderer.render_chat(
        {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]}
    )
    assert rendered.token_ids == tokenizer.encode_chat(
        [("system", "be brief"), ("user", "hello")], open_turn="assistant"
    )


async def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    assert (await renderer.render_chat(user(parts))).token_ids == (
        await renderer.render_chat(user("hello there"))
    ).token_ids


async def test_the_final_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I say"}]
    rendered = await renderer.render_chat({"messages": messages, "continue_final_message": True})
    assert rendered.token_ids[-2:] == tokenizer.encode("I say")
    closed = await renderer.render_chat({"messages": messages, "add_generation_prompt": False})
    assert closed.token_ids == [*rendered.token_ids, END_OF_TURN]
    opened = await renderer.render_chat({"messages": messages})
    assert opened.token_ids == [*closed.token_ids, ROLE_TO_MARKER["assistant"]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a b", [[BOS, *tokenizer.encode("a b")]]),
        (["a b", "c"], [[BOS, *tokenizer.encode("a b")], [BOS, *tokenizer.encode("c")]]),
        ([17, 18, 19], [[17, 18, 19]]),
        ([[17, 18], [19]], [[17, 18], [19]]),
    ],
)
async def test_completion_prompts_come_in_four_kinds(prompt: object, expected: list[list[int]]) -> None:
    rendered = await renderer.render_completion({"prompt": prompt})
    assert [list(one.token_ids) for one in rendered] == expected
    assert {one.sampling.max_tokens for one in rendered} == {16}


async def test_a_completion_prompt_without_marker() -> None:
    (rendered,) = await renderer.render_completion({"prompt": "a b", "add_special_tokens": False})
    assert rendered.token_ids == tokenizer.encode("a b")


async def test_defaults() -> None:
    rendered = await renderer.render_chat(user("hello"))
    assert rendered.sampling == Sampling(max_tokens=MAX_MODEL_LEN - len(rendered.token_ids))


async def test_everything_that_can_be_asked_for() -> None:
    rendered = await renderer.render_chat(
        user("hello")
        | {
            "max_completion_tokens": 9,
            "max_tokens": 8,
            "min_tokens": 2,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "seed": 7,
            "stop": "end",
            "stop_token_ids": [20],
            "logprobs": True,
            "top_logprobs": 4,
            "ignore_eos": True,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "repetition_penalty": 1.1,
            "logit_bias": {"30": 5},
            "allowed_token_ids": [30, 31],
            "bad_words": ["never"],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "n": 3,
            "response_format": {"type": "text"},
        }
    )
    assert rendered.sampling == Sampling(
        max_tokens=9,
        min_tokens=2,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=7,
        stop=("end",),
        stop_token_ids=(20,),
        logprobs=4,
        ignore_eos=True,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={30: 5.0},
        allowed_token_ids=(30, 31),
        bad_words=("never",),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
async def test_chat_logprobs(body: dict[str, Any], expected: int | None) -> None:
    assert (await renderer.render_chat(user("hello") | body)).sampling.logprobs == expected


async def test_completion_logprobs_are_a_number() -> None:
    (rendered,) = await renderer.render_completion({"prompt": "a", "logprobs": 3, "stop": ["x", "y"]})
    assert rendered.sampling.logprobs == 3
    assert rendered.sampling.stop == ("x", "y")


async def test_prompt_and_answer_may_fill_the_context() -> None:
    (rendered,) = await renderer.render_completion({"prompt": [17] * 60, "max_tokens": 4})
    assert rendered.sampling.max_tokens == 4


async def test_prompt_and_answer_over_the_context_name_all_numbers() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        await renderer.render_completion({"prompt": [17] * 60, "max_tokens": 5})
    for number in ("64 tokens", "65 are asked for", "60 in the prompt", "5 to generate"):
        assert number in caught.value.message
    assert caught.value.param == "max_tokens"

    with pytest.raises(ContextLengthExceeded) as caught:
        await renderer.render_chat(user("hello") | {"max_completion_tokens": 100})
    assert caught.value.param == "max_completion_tokens"


@pytest.mark.parametrize("num_tokens", [64, 65, 1000])
async def test_a_prompt_that_leaves_no_room_is_refused(num_tokens: int) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        await renderer.render_completion({"prompt": [17] * num_tokens})
    assert f"alone has {num_tokens}" in caught.value.message
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as caught:
        await renderer.render_chat(user("word " * num_tokens))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [50_000]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"50000": 1}}, "logit_bias"),
        ({"logit_bias": {"20": 101}}, "logit_bias"),
        ({"logit_bias": []}, "logit_bias"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": ["x"]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ],
)
async def test_nonsense_in_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await renderer.render_chat(user("hello") | body)
    assert caught.value.param == param
    assert caught.value.message


@pytest.mark.parametrize(
    "prompt", [None, "", "  ", [], [[]], [""], [1, "a"], [-1], [50_000], [[1], "a"], [True], [1.5], {"a": 1}]
)
async def test_nonsense_for_a_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await renderer.render_completion({"prompt": prompt, "add_special_tokens": False})
    assert caught.value.param == "prompt"


def test_the_context_is_told() -> None:
    assert renderer.max_model_len() == MAX_MODEL_LEN
