"""Chats with images over HTTP, prefilled by one real engine and decoded by another: the answers of vLLM alone."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.tiny_models import make_image_model
from support.all_models import only_with_all_models
from support.image_answers import NUM_TOKENS, ImageAnswer, answers_of_vllm, chats, images
from support.image_reference import MAX_MODEL_LEN
from support.local_machine import Machine, a_machine
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.model, pytest.mark.cluster, only_with_all_models]

DEBUG = {"x-kvferry-debug": "disaggregate"}  # however short the prompt
MODEL = "tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_image_model("idefics3", tmp_path_factory.mktemp("images") / "model")


@pytest.fixture(scope="module")
def known(folder: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageAnswer]:
    return answers_of_vllm(folder, tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def machine(folder: Any, known: dict[str, ImageAnswer]) -> Iterator[Machine]:
    with a_machine("vllm") as machine:
        up = machine.up(
            *("--model", str(folder), "--set", f"model.served_name={MODEL}"),
            *("--set", f"model.max_model_len={MAX_MODEL_LEN}"),
            *("--set", "gateway.images.allowed_hosts=[images.example]"),
        )
        assert up.returncode == 0, up.stdout + up.stderr
        machine.prove()
        yield machine


def post(machine: Machine, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    body = {
        "model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more,
    }  # fmt: skip
    return httpx.post(f"{machine.url}/v1/chat/completions", json=body, headers=DEBUG, timeout=PATIENCE_S)


def ask(machine: Machine, name: str, **more: Any) -> dict[str, Any]:
    answer = post(machine, chats()[name], **more)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def text_of(answer: dict[str, Any], choice: int = 0) -> str:
    return str(answer["choices"][choice]["message"]["content"])


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_references_answers_depend_on_their_images(known: dict[str, ImageAnswer]) -> None:
    assert len({answer.text for answer in known.values()}) == len(known)
    assert known["a"].num_prompt_tokens == known["b"].num_prompt_tokens


@pytest.mark.parametrize("name", sorted(chats()))
def test_answers_and_tokens_are_those_of_vllm_alone(machine: Machine, known: dict[str, ImageAnswer], name: str) -> None:
    salt = f"exact {name}"
    for _ in range(2):  # computed, and of cached pages
        answer = ask(machine, name, cache_salt=salt)
        assert text_of(answer) == known[name].text
        assert answer["usage"]["prompt_tokens"] == known[name].num_prompt_tokens
        assert answer["kvferry"]["prefill_worker"]
        assert answer["kvferry"]["decode_worker"]
    assert cached(answer) >= known[name].num_prompt_tokens - 64


def test_the_same_image_hits_and_another_one_does_not(machine: Machine, known: dict[str, ImageAnswer]) -> None:
    assert cached(ask(machine, "a", cache_salt="hits")) == 0
    again = ask(machine, "a", cache_salt="hits")
    assert cached(again) >= known["a"].num_prompt_tokens - 64
    other = ask(machine, "b", cache_salt="hits")
    # Of the text before the image, which both have.
    assert 0 < cached(other) < cached(again) - 64
    assert text_of(other) == known["b"].text != text_of(again)


def test_streams_choices_and_log_probabilities_have_images_too(machine: Machine, known: dict[str, ImageAnswer]) -> None:
    streamed = post(machine, chats()["c"], stream=True)
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    assert "".join(parts) == known["c"].text
    several = ask(machine, "b", n=3, logprobs=True, top_logprobs=2)
    assert {text_of(several, choice) for choice in range(3)} == {known["b"].text}
    assert len(several["choices"][2]["logprobs"]["content"]) == NUM_TOKENS


def refused(machine: Machine, url: str) -> tuple[int, dict[str, Any]]:
    text = {"type": "text", "text": "x"}
    answer = post(machine, [{"role": "user", "content": [text, {"type": "image_url", "image_url": {"url": url}}]}])
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://169.254.169.254/latest", "images of '169.254.169.254' are not allowed here"),
        ("https://elsewhere.example/a.png", "images of 'elsewhere.example' are not allowed here"),
        ("file:///etc/passwd", "scheme is 'file'"),
        ("data:image/png;base64,QUJD", "the file's content is none of"),
        (f"data:image/png;base64,{base64.b64encode(images()['a'][:-60]).decode()}", "cannot be decoded"),
    ],
)
def test_what_may_not_be_fetched_or_decoded_is_a_bad_request(machine: Machine, url: str, reason: str) -> None:
    status, error = refused(machine, url)
    assert status == 400
    assert error["code"] == "invalid_request"
    assert error["param"] == "messages[0].content[1]"
    assert reason in error["message"]
