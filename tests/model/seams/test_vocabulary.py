"""A tokenizer with a token that the model's embedding has no row for: in vLLM it ends the engine's process."""

from __future__ import annotations

import json
import logging
import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.tiny_models import write_config
from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.base import EngineRequest, RequestId, Sampling
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.engine.vllm.rendering.renderer import MOST_CHARS_AT_ONCE, VllmRenderer
from kvferry.engine.vllm.rendering.vocabulary import Vocabulary
from kvferry.errors import InvalidRequest

pytestmark = pytest.mark.vllm

ADDED = "<|ferry_call|>"


def make_folder(folder: Path, *, eos: str = "") -> int:
    """Write a configuration and the default model's tokenizer with a token more; return the number of the model's ids.

    `eos`: this token ends answers.
    """
    write_config("qwen3", folder)
    tokenizer = model_folder.resolve(model_folder.DEFAULT_NAME)
    values = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    num_ids = 1 + max(values["model"]["vocab"].values())
    assert all(token["id"] < num_ids for token in values["added_tokens"])
    values["added_tokens"].append({**values["added_tokens"][-1], "id": num_ids, "content": ADDED})
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"eos_token": eos} if eos else {})))
    for file in tokenizer.glob("chat_template*"):
        shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": num_ids}))
    return num_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("added")
    return path, make_folder(path)


@pytest.fixture(scope="module")
def renderer(folder: tuple[Path, int]) -> VllmRenderer:
    return VllmRenderer(str(folder[0]), "m", ModelConfig(path=str(folder[0])))


def chat(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


LONG = f"{'word ' * MOST_CHARS_AT_ONCE}{ADDED}"  # rendered in a thread


@pytest.mark.parametrize(
    "body",
    [
        chat(ADDED),
        chat(LONG),
        chat([{"type": "text", "text": f"a{ADDED}b"}]),
        {"messages": [{"role": "system", "content": ADDED}, {"role": "user", "content": "x"}], "min_tokens": 1},
        {"prompt": ADDED},
        {"prompt": ["fine", f"not {ADDED}"]},
        {"prompt": LONG},
        {"prompt": f"x{ADDED}", "min_tokens": 1},
    ],
    ids=lambda body: str(body)[:60],
)  # fmt: skip
async def test_texts_with_the_token_are_refused(renderer: VllmRenderer, folder: Any, body: dict[str, Any]) -> None:
    field, render = ("messages", renderer.render_chat) if "messages" in body else ("prompt", renderer.render_completion)
    with pytest.raises(InvalidRequest) as refused:
        await render(body)
    _, num_ids = folder
    assert refused.value.param == field
    assert refused.value.message == (
        f"{field}: {num_ids} ('{ADDED}') is not a token id of this model, which has {num_ids} (0 to {num_ids - 1})"
    )


@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words"])
async def test_each_field_that_names_it_is_refused(renderer: VllmRenderer, folder: Any, field: str) -> None:
    _, num_ids = folder

    async def render(token_id: int, word: str) -> None:
        value: Any = {"bad_words": [word], "logit_bias": {str(token_id): 1.0}}.get(field, [token_id])
        await renderer.render_completion({"prompt": "x", field: value})
        if field != "prompt":
            await renderer.render_chat(chat("x", **{field: value}))

    await render(num_ids - 1, "ferry")
    with pytest.raises(
        InvalidRequest, match=rf"^{field}: {num_ids} \('<\|ferry_call\|>'\) is not a token id"
    ) as refused:
        await render(num_ids, ADDED)
    assert refused.value.param == field


async def test_other_texts_pass(renderer: VllmRenderer) -> None:
    assert renderer.renders_plain_prompts_itself
    await renderer.render_chat(chat("hello <|im_start|> <|ferry_cal|>", min_tokens=2, bad_words=["river"]))
    await renderer.render_completion({"prompt": ["hello", "you"], "stop": [ADDED]})


async def test_min_tokens_forbids_no_end_that_the_model_does_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_ids = make_folder(tmp_path, eos=ADDED)
    with caplog.at_level(logging.WARNING):
        renderer = VllmRenderer(str(tmp_path), "m", ModelConfig(path=str(tmp_path)))
    assert f"the model's embedding has {num_ids} rows: requests with {num_ids} ('{ADDED}')" in caplog.text
    await renderer.render_completion({"prompt": "x"})
    with pytest.raises(InvalidRequest, match=f"^min_tokens: {num_ids} ") as refused:
        await renderer.render_completion({"prompt": "x", "min_tokens": 1})
    assert refused.value.param == "min_tokens"
    await renderer.close()


@pytest.mark.parametrize(
    ("tokens", "sampling", "field"),
    [
        ([1, 0, 2], {}, "prompt"),
        ([1], {"stop_token_ids": (0,)}, "stop_token_ids"),
        ([1], {"allowed_token_ids": (0,)}, "allowed_token_ids"),
        ([1], {"logit_bias": {0: 1.0}}, "logit_bias"),
        ([1], {"bad_words": (ADDED,)}, "bad_words"),
    ],
)
async def test_an_engine_refuses_what_an_older_gateway_lets_pass(
    folder: tuple[Path, int], tokens: Sequence[int], sampling: dict[str, Any], field: str
) -> None:
    """Before vLLM gets it. A 0 stands for the first id that the model does not have."""
    path, num_ids = folder
    renderer = VllmRenderer(str(path), "m", ModelConfig(path=str(path)))
    config, tokenizer = renderer._vllm.model_config, renderer._vllm.online.renderer.get_tokenizer()
    await renderer.close()
    engine = VllmEngine(str(path), ModelConfig(path=str(path)), EngineConfig(), producer=False)
    # Has no `generate`: a request that reached it would be another error.
    engine._llm = SimpleNamespace(
        model_config=config,
        errored=False,
        output_processor=SimpleNamespace(tokenizer=tokenizer, external_req_ids={}),
    )
    engine._prompt_sources = engine._continuations = SimpleNamespace(pop=lambda _: None, forget=lambda _: None)

    def beyond(value: Any) -> Any:
        if isinstance(value, dict):
            return {key or num_ids: bias for key, bias in value.items()}
        return tuple(each or num_ids for each in value)

    parameters = Sampling(max_tokens=1, **{name: beyond(value) for name, value in sampling.items()})
    request = EngineRequest(RequestId("r"), array("I", beyond(tokens)), parameters)
    with pytest.raises(InvalidRequest, match=rf"^{field}: {num_ids} \('<\|ferry_call\|>'\) is not a token id"):
        async for _ in engine.generate(request):
            pass
    assert not engine._num_queued_prompt_tokens


@pytest.mark.parametrize("num_before", [1, 1000])
def test_a_model_with_more_rows_than_tokens_has_them_all(num_before: int) -> None:
    tokenizer = SimpleNamespace(max_token_id=9, decode=lambda ids: "", eos_token_id=3)
    vocabulary = Vocabulary(SimpleNamespace(get_vocab_size=lambda: 16), tokenizer)
    assert vocabulary.mismatch == ""
    vocabulary.check_prompt("prompt", [15, 0])
    vocabulary.check_prompt("prompt", [])
    with pytest.raises(InvalidRequest, match=r"^prompt: 16 is not a token id of this model, which has 16 \(0 to 15\)$"):
        vocabulary.check_prompt("prompt", array("I", [1] * num_before + [16]))
