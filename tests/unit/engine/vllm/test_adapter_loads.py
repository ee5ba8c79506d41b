"""Loads of adapters that fail, by an engine whose vLLM is a stand-in."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engine.vllm.adapter_folder import CONFIG, WEIGHTS, StagedAdapter
from kvferry.engine.vllm.adapters import RETRY_AFTER_S, Adapters
from kvferry.errors import EngineError


class Loader:
    """Refuses adapters while `error` is set."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.num_loads = 0

    async def add_lora(self, request: object) -> None:
        self.num_loads += 1
        if self.error is not None:
            raise self.error


def staged(folder: Path, now: Callable[[], float] = time.monotonic) -> Adapters:
    for name in (CONFIG, WEIGHTS):
        (folder / name).touch()
    return Adapters([StagedAdapter("german", "0" * 32, folder)], 4, now)


async def test_files_that_are_away_cost_the_adapters_own_requests(tmp_path: Path) -> None:
    """vLLM would look for them in a step, and end."""
    adapters, loader = staged(tmp_path), Loader()
    (key,) = adapters.keys
    await adapters.lora_request(key, loader)
    (tmp_path / WEIGHTS).rename(tmp_path / "away")
    with pytest.raises(EngineError, match="'german' cannot be loaded; the worker's log says why"):
        await adapters.lora_request(key, loader)
    (tmp_path / "away").rename(tmp_path / WEIGHTS)
    await adapters.lora_request(key, loader)


async def test_a_load_that_failed_is_tried_again_after_a_while_and_not_before(tmp_path: Path) -> None:
    now_s = 0.0
    adapters = staged(tmp_path, lambda: now_s)
    (key,) = adapters.keys
    loader = Loader()
    loader.error = RuntimeError("no memory left")
    for _ in range(3):
        with pytest.raises(EngineError, match="'german' cannot be loaded; the worker's log says why"):
            await adapters.lora_request(key, loader)
    assert loader.num_loads == 1
    assert not adapters.loaded

    now_s, loader.error = RETRY_AFTER_S, None
    for _ in range(3):
        assert (await adapters.lora_request(key, loader)).lora_name == key
    assert loader.num_loads == 2
    assert adapters.loaded == {key}
