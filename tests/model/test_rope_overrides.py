"""`model.hf_overrides`: engines, gateways and chunks take YaRN's rotations, and compute what transformers computes.

That pages with them survive transfers and volumes is a row of `tests/model/test_models.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from bench.engine_device import engine_config, model_config
from bench.tiny_models import YARN, make_model
from bench.vllm_engines import answer
from kvferry.config import ModelConfig
from kvferry.engine.base import EngineRequest, RequestId, Sampling
from kvferry.errors import ConfigError, ContextLengthExceeded
from support.all_models import only_with_all_models
from support.vllm_configs import vllm_config_of

pytestmark = [pytest.mark.model]

NUM_TOKENS = 16
CONTEXT = 2048  # four times that of config.json
ANSWER = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# As vLLM and transformers have them.
PARAMETERS = {"rope_type": "yarn", "rope_theta": 1_000_000.0, **YARN["rope_parameters"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-yarn", tmp_path_factory.mktemp("models") / "qwen3-yarn")


def prompts() -> list[list[int]]:
    seeded = random.Random(11)
    return [[seeded.randrange(10, 40_000) for _ in range(length)] for length in (100, 400, 900, CONTEXT - NUM_TOKENS)]


def expected(folder: Path, **overrides: Any) -> list[list[int]]:
    """Return answers of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, **overrides)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    answers = []
    for prompt in prompts():
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            made = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
            )
        answers.append(made[0, len(prompt) :].tolist())
    return answers


@only_with_all_models
async def test_answers_are_those_of_transformers_with_the_same_rotations(folder: Path) -> None:
    from kvferry.engine.vllm.engine import VllmEngine

    model = model_config(path=str(folder), hf_overrides=YARN)
    engine = VllmEngine(str(folder), model, engine_config("decode"), producer=False)
    await engine.start()
    try:
        assert engine.info.max_model_len == CONTEXT
        answers = [
            (await answer(engine, EngineRequest(RequestId(f"r{i}"), prompt, ANSWER)))[0]
            for i, prompt in enumerate(prompts())
        ]
    finally:
        await engine.stop()
    with_rotations = {"rope_parameters": dict(PARAMETERS), "max_position_embeddings": CONTEXT}
    assert answers == await asyncio.to_thread(expected, folder, **with_rotations)
    without = await asyncio.to_thread(expected, folder)
    assert all(ours != theirs for ours, theirs in zip(answers, without, strict=True)), "the rotations had no effect"


async def test_gateways_have_the_context_of_the_overrides(folder: Path) -> None:
    from kvferry.engine.vllm.rendering.renderer import VllmRenderer

    def make(**values: Any) -> VllmRenderer:
        return VllmRenderer(str(folder), "m", ModelConfig(path=str(folder), **values))

    plain, overridden = await asyncio.to_thread(make), await asyncio.to_thread(make, hf_overrides=YARN)
    try:
        assert (plain.max_model_len(), overridden.max_model_len()) == (512, CONTEXT)
        body = {"prompt": prompts()[2], "max_tokens": 8}
        (rendered,) = await overridden.render_completion(body)
        assert list(rendered.token_ids) == body["prompt"]
        with pytest.raises(ContextLengthExceeded, match="512 tokens"):
            await plain.render_completion(body)
    finally:
        await plain.close()
        await overridden.close()


def test_pages_and_chunks_of_other_rotations_are_others(folder: Path) -> None:
    from kvferry.engine.vllm.plugins.exchange_fields import layout_fields

    other = {"rope_parameters": {**YARN["rope_parameters"], "factor": 4.5}}
    layouts = {
        layout_fields(
            vllm_config_of(folder, ModelConfig(path=str(folder), max_model_len=512, **values)),
            model_name="m",
            weights_revision="w",
            blocks_per_chunk=4,
        )["exchange"]
        for values in ({}, {"hf_overrides": YARN}, {"hf_overrides": other})
    }
    assert len(layouts) == 3


def test_the_base_is_the_models(folder: Path, tmp_path: Path) -> None:
    """vLLM takes the parameters whole: without `rope_theta` it would take 10,000."""
    from kvferry.engine.vllm.rendering.text_model import hf_overrides

    config = json.loads((folder / "config.json").read_text())

    def overrides(**changed: Any) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        return hf_overrides(str(tmp_path), ModelConfig(path=str(tmp_path), hf_overrides=YARN))

    assert overrides() == {"max_position_embeddings": CONTEXT, "rope_parameters": PARAMETERS}
    other = overrides(rope_parameters={"rope_type": "default", "rope_theta": 5_000_000})
    assert other["rope_parameters"] == PARAMETERS | {"rope_theta": 5_000_000.0}
    assert hf_overrides(str(tmp_path), ModelConfig(path=str(tmp_path))) == {}
    with pytest.raises(ConfigError, match=r"model\.hf_overrides: the model's config\.json has no rope_theta"):
        overrides(architectures=["OPTForCausalLM"], model_type="opt", rope_parameters=None)


def test_vllm_takes_the_parameters_whole(folder: Path) -> None:
    from vllm.config import ModelConfig as VllmModelConfig

    partly = {key: value for key, value in PARAMETERS.items() if key != "rope_theta"}
    made = VllmModelConfig(model=str(folder), tokenizer=str(folder), hf_overrides={"rope_parameters": partly})
    assert "rope_theta" not in made.hf_config.rope_parameters
