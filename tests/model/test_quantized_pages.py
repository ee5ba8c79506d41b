"""Pages of fp8 between engines: `make gpu-check`."""

from __future__ import annotations

import pytest

from bench.engine_device import on_gpu
from bench.vllm_engines import answer, prefill, start_pair
from kvferry.engine.base import EngineRequest, RequestId, Sampling

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not on_gpu(), reason="needs a GPU: `make gpu-check` runs it"),
]

GREEDY = Sampling(max_tokens=32, temperature=0.0, ignore_eos=True)


async def test_fp8_pages_are_what_was_computed() -> None:
    """Compared with one engine whose pages are of fp8 too: `kvferry quality` measures what they cost."""
    pair = await start_pair(kv_cache_dtype="fp8_e4m3")
    try:
        assert pair.prefill.info.exchange == pair.decode.info.exchange
        assert dict(pair.decode.info.exchange)["kv_cache_dtype"] == "fp8_e4m3"
        text = "The harbour master wrote the same letter every winter morning, and the ferry carried it. "
        words = pair.tokenize(text * 60)
        for length in (32, 33, 200, 900):
            prompt = words[:length]
            alone, _ = await answer(
                pair.decode, EngineRequest(RequestId(f"alone-{length}"), prompt, GREEDY, cache_salt=f"alone-{length}")
            )
            transfer = await prefill(pair.prefill, f"apart-{length}", prompt)
            tokens, last = await answer(
                pair.decode,
                EngineRequest(
                    RequestId(f"apart-{length}"), prompt, GREEDY, transfer_params=transfer, cache_salt=f"apart-{length}"
                ),
            )
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
            assert tokens == alone, f"{length} tokens"
    finally:
        await pair.stop()
