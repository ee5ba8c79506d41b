"""Pages between engines of other tensor-parallel sizes, which need a GPU for each rank: `make gpu-check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.engine_device import engine_config, model_config, on_gpu
from bench.tiny_models import make_model
from bench.vllm_engines import answer, prefill, start_pair
from kvferry.engine.base import EngineRequest, RequestId, Sampling

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not on_gpu(), reason="each rank needs a GPU; tests/model/test_models.py has equal ranks on CPUs"
    ),
]

GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


async def test_pages_of_other_ranks_are_what_was_computed(tmp_path: Path) -> None:
    assert engine_config("prefill").tensor_parallel_size != engine_config("decode").tensor_parallel_size
    pair = await start_pair(model_config(path=str(make_model("qwen3", tmp_path / "qwen3")), max_model_len=2048))
    try:
        if pair.prefill.info.exchange != pair.decode.info.exchange:
            pytest.skip("engines of unequal ranks have unequal exchange digests: they are not let exchange pages")
        for number, length in enumerate((32, 33, 200, 900)):
            prompt = [10 + (7919 * (number + 1) * (i + 1)) % 40_000 for i in range(length)]
            alone, _ = await answer(
                pair.decode, EngineRequest(RequestId(f"alone-{length}"), prompt, GREEDY, cache_salt="alone")
            )
            transfer = await prefill(pair.prefill, f"apart-{length}", prompt)
            tokens, last = await answer(
                pair.decode, EngineRequest(RequestId(f"apart-{length}"), prompt, GREEDY, transfer_params=transfer)
            )
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
            assert tokens == alone, f"{length} tokens"
    finally:
        await pair.stop()
