"""`model.hf_overrides` on a live cluster: gateways take what engines compute, and pages come over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.tiny_models import YARN, make_model
from kvferry import model_folder
from support.all_models import only_with_all_models
from support.local_machine import Machine, a_machine
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.model, pytest.mark.cluster, only_with_all_models]

CONTEXT = 2048  # of config.json: 512


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = make_model("qwen3-yarn", tmp_path_factory.mktemp("overrides") / "qwen3-yarn")
    shutil.copy(model_folder.resolve("default") / "chat_template.jinja", folder)  # `kvferry up` asks a chat
    with a_machine("vllm") as machine:
        args = json.dumps({"load_format": "safetensors"})
        values = (f"model.hf_overrides={json.dumps(YARN)}", f"decode.engine.args={args}")
        up = machine.up("--model", str(folder), *(word for value in values for word in ("--set", value)))
        assert up.returncode == 0, up.stdout + up.stderr
        machine.prove()
        yield machine


def completion(machine: Machine, prompt: list[int], **more: Any) -> httpx.Response:
    body = {"model": "qwen3-yarn", "prompt": prompt, "temperature": 0, **more}
    headers = {"x-kvferry-debug": "disaggregate"}
    return httpx.post(f"{machine.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


def test_a_prompt_beyond_the_models_own_context_is_answered_after_a_transfer(machine: Machine) -> None:
    (listed,) = httpx.get(f"{machine.url}/v1/models").json()["data"]
    assert listed["max_model_len"] == CONTEXT
    prompt = [100 + i * 7 % 3000 for i in range(1500)]
    answers = [completion(machine, prompt, max_tokens=8, cache_salt=salt) for salt in ("a", "b")]
    texts = set()
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["kvferry"]["prompt_tokens_by_source"]["external_kv_transfer"] == len(prompt)
        texts.add(answer.json()["choices"][0]["text"])
    assert len(texts) == 1


def test_a_prompt_beyond_the_context_of_the_overrides_is_refused(machine: Machine) -> None:
    answer = completion(machine, [100] * (CONTEXT - 7), max_tokens=8)
    assert answer.status_code == 400
    assert f"{CONTEXT} tokens" in answer.json()["error"]["message"]
