"""Load formats: the same weights, so that engines exchange pages and answer token for token as with `auto`.

Also that vLLM reads the files, and knows the names, that `engine/vllm/start/weights.py` counts on.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from pathlib import Path
from typing import Any

import pytest

from bench.engine_device import model_config
from bench.tiny_models import make_model
from bench.vllm_engines import answer, prefill, start_pair
from kvferry.arguments.vllm_arguments import SAFETENSORS, STREAMED
from kvferry.engine.base import EngineRequest, RequestId, Sampling
from kvferry.pages.exchange import exchange_digest
from support.all_models import only_with_all_models

pytestmark = [pytest.mark.model]

ANSWER = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
THREADS = {"load_format": SAFETENSORS, "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 2}}
STREAMS = {"load_format": STREAMED, "model_loader_extra_config": {"concurrency": 2, "memory_limit": 0}}


async def exchanged(folder: Path, args: dict[str, Any], of_decode: dict[str, Any]) -> list[list[int]]:
    """Return answers of an engine of each kind alone, and of both together, to the same prompts."""
    pair = await start_pair(model_config(path=str(folder), max_model_len=1024), args=args, decode={"args": of_decode})
    try:
        assert exchange_digest(pair.prefill.info.exchange) == exchange_digest(pair.decode.info.exchange)
        answers, seeded = [], random.Random(4)
        for length in (40, 700):
            prompt = [seeded.randrange(10, 40_000) for _ in range(length)]
            transfer = await prefill(pair.prefill, f"kept-{length}", prompt)
            both = EngineRequest(RequestId(f"b-{length}"), prompt, ANSWER, cache_salt="b", transfer_params=transfer)
            tokens, last = await answer(pair.decode, both)
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
            answers.append(tokens)
            for engine in (pair.prefill, pair.decode):
                request = EngineRequest(RequestId(f"a-{length}"), prompt, ANSWER, cache_salt="a")
                assert (await answer(engine, request))[0] == tokens
        return answers
    finally:
        await pair.stop()


@only_with_all_models
async def test_engines_with_other_load_formats_answer_as_auto_and_exchange_pages(tmp_path: Path) -> None:
    pytest.importorskip("runai_model_streamer")
    folder = await asyncio.to_thread(make_model, "qwen3", tmp_path / "qwen3")
    streamed = await exchanged(folder, {"load_format": "auto"}, STREAMS)
    assert await exchanged(folder, THREADS, {"load_format": SAFETENSORS, "model_loader_extra_config": {}}) == streamed


def test_vllm_reads_the_files_that_the_check_counts_on() -> None:
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

    def loader_of(**values: Any) -> Any:
        from vllm.config.load import LoadConfig

        return get_model_loader(LoadConfig(**values))

    for args, kind in (({}, DefaultModelLoader), (THREADS, DefaultModelLoader), (STREAMS, RunaiModelStreamerLoader)):
        assert type(loader_of(**args)) is kind
    with pytest.raises(ValueError, match="Unexpected extra config keys"):
        loader_of(load_format=STREAMED, model_loader_extra_config={"num_threads": 2})
    source = inspect.getsource(DefaultModelLoader._prepare_weights)
    assert 'allow_patterns=["consolidated*.safetensors"]' in source
    assert "filter_duplicate_safetensors_files" in source
    assert "filter" not in inspect.getsource(RunaiModelStreamerLoader._prepare_weights)


@pytest.mark.parametrize("load_format", ["auto", SAFETENSORS])
def test_vllm_leaves_out_what_the_index_does(load_format: str, tmp_path: Path) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).touch()
    loader: Any = get_model_loader(LoadConfig(load_format=load_format))
    _, files, _, _ = loader._prepare_weights(str(tmp_path), None, None, True, None)
    assert [Path(file).name for file in files] == ["1.safetensors"]
