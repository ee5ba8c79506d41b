"""Pages between engines of other tensor-parallel sizes: each rank reads the KV heads that it needs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.engine_device import model_config
from bench.tiny_models import make_model
from bench.vllm_engines import answer, prefill, start_pair
from kvferry.engine.base import EngineRequest, RequestId, Sampling
from support.all_models import only_with_all_models

pytestmark = [pytest.mark.model]

GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(("of_prefill", "of_decode"), [(1, 2), pytest.param(2, 1, marks=only_with_all_models)])
async def test_pages_of_other_ranks_are_what_was_computed(of_prefill: int, of_decode: int, tmp_path: Path) -> None:
    model = model_config(path=str(make_model("qwen3", tmp_path / "qwen3")), max_model_len=2048)
    pair = await start_pair(
        model,
        tensor_parallel_size=of_prefill,
        decode={"tensor_parallel_size": of_decode},
        max_num_batched_tokens=256,
    )
    try:
        assert pair.prefill.info.exchange == pair.decode.info.exchange
        assert pair.prefill.info.page_bytes == pair.decode.info.page_bytes
        seeded = random.Random(11)

        async def compare(name: str, prompt: list[int], salt: str, num_held: int) -> None:
            alone, computed = await answer(
                pair.decode, EngineRequest(RequestId(f"alone-{name}"), prompt, GREEDY, cache_salt=f"alone-{name}")
            )
            transfer = await prefill(pair.prefill, f"kept-{name}", prompt)
            request = EngineRequest(
                RequestId(f"apart-{name}"), prompt, GREEDY, cache_salt=salt, transfer_params=transfer
            )
            tokens, last = await answer(pair.decode, request)
            assert tokens == alone, name
            assert computed.sources is not None
            assert computed.sources.local_compute == len(prompt)
            assert last.sources is not None
            assert last.sources.external_kv_transfer == len(prompt) - num_held
            assert last.sources.local_cache_hit == num_held

        for length in (10, 32, 33, 200, 513, 900):
            prompt = [seeded.randrange(10, 40_000) for _ in range(length)]
            await compare(str(length), prompt, f"salt-{length}", 0)
            if length == 200:  # the decode engine holds six pages of the next one
                longer = [*prompt, *(seeded.randrange(10, 40_000) for _ in range(313))]
                await compare("longer", longer, "salt-200", 192)
        assert pair.decode.kv_transfer_stats().num_failed == dict.fromkeys(("transfer", "handshake", "lease_ended"), 0)
    finally:
        await pair.stop()
