"""Kinds of attention: pages come through a transfer as they were computed, or the model is refused."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from bench.tiny_models import REFUSED, SHOWN, make_model, write_config
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.base import EngineRequest, RequestId, Sampling
from kvferry.engine.vllm.engine import VllmEngine

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

# An engine takes half a minute to start: `make test-models` runs them all.
IS_COMPLETE = bool(os.environ.get("KVFERRY_ALL_MODELS"))
TRIED = list(SHOWN) if IS_COMPLETE else ["gemma3"]
# vLLM inspects each in a process of its own.
CONFIGURED = [*SHOWN, *REFUSED] if IS_COMPLETE else ["gemma3", "deepseek-v2"]
MAX_MODEL_LEN = 2048  # beyond the context that LongRoPE was trained with
ANSWER = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


async def answer(engine: VllmEngine, request: EngineRequest) -> tuple[list[int], int]:
    """Return the tokens, and how many of the prompt's came from the other engine."""
    tokens: list[int] = []
    num_transferred = 0
    async for output in engine.generate(request):
        tokens.extend(output.token_ids)
        if output.sources is not None:
            num_transferred = output.sources.external_kv_transfer
    return tokens, num_transferred


@pytest.mark.parametrize("name", TRIED)
async def test_disaggregated_equals_aggregated(name: str, tmp_path: Path) -> None:
    folder = str(await asyncio.to_thread(make_model, name, tmp_path / name))
    model, config = ModelConfig(path=folder, max_model_len=MAX_MODEL_LEN), EngineConfig(threads=1)
    prefill = VllmEngine(folder, model, config, producer=True)
    decode = VllmEngine(folder, model, config, producer=False)
    seeded = random.Random(3)
    try:
        await prefill.start()
        await decode.start()
        for length in (10, 32, 33, 64, 100, 200, 513, 900):
            prompt = [seeded.randrange(10, 40_000) for _ in range(length)]
            # Other tokens before the last one, in every window.
            kept_before = max(0, length - 40)
            other = [*prompt[:kept_before], *seeded.sample(range(10, 40_000), length - kept_before - 1), prompt[-1]]
            alone, _ = await answer(decode, EngineRequest(RequestId(f"a-{length}"), prompt, ANSWER, cache_salt="alone"))
            changed, _ = await answer(
                decode, EngineRequest(RequestId(f"c-{length}"), other, ANSWER, cache_salt="alone")
            )
            kept = None
            request = EngineRequest(
                RequestId(f"p-{length}"), prompt, Sampling(max_tokens=1, temperature=0.0), keep_for_transfer=True
            )
            async for output in prefill.generate(request):
                kept = output.transfer_params or kept
            transferred, num_tokens = await answer(
                decode, EngineRequest(RequestId(f"d-{length}"), prompt, ANSWER, transfer_params=kept, cache_salt="d")
            )
            assert num_tokens == length
            assert transferred == alone, f"{length} tokens"
            assert changed != alone, "this model's answers do not depend on their prompts"
    finally:
        await prefill.stop()
        await decode.stop()


@pytest.mark.parametrize("name", CONFIGURED)
def test_models_that_were_not_shown_to_be_right_are_refused(name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.engine.vllm.plugins.model_kinds import why_refused

    folder = write_config(name, tmp_path)
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=512, dtype="float32")
    config = arguments.create_engine_config()
    reason = why_refused(config, has_tiers=False)
    assert bool(reason) == (name in REFUSED), reason
    expected = {
        "deepseek-v2": "latent attention",
        "llama4": "chunked local attention",
        "gpt-oss": "sinks",
        "falcon-h1": "recurrent state",
        "qwen3-next": "recurrent state",
    }
    assert expected.get(name, "") in reason
    assert ("sliding window" in why_refused(config, has_tiers=True)) == (name in ("gemma3", "mistral", "gpt-oss"))
    config.cache_config.cache_dtype = "fp8_e5m2"
    assert "fp8_e5m2" in why_refused(config, has_tiers=False)
