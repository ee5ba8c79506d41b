"""Real engines for tests: one prefill and one decode engine, started once for the whole session (about a minute)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest_asyncio
from tokenizers import Tokenizer

from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.vllm_engine import VllmEngine


@dataclass(frozen=True)
class VllmPair:
    """A prefill and a decode engine that can exchange pages."""

    prefill: VllmEngine
    decode: VllmEngine
    tokenizer: Tokenizer

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_pair() -> AsyncIterator[VllmPair]:
    folder = str(model_folder.resolve("default"))
    model, engine = ModelConfig(path=folder), EngineConfig(threads=1)
    prefill = VllmEngine(folder, model, engine, producer=True)
    decode = VllmEngine(folder, model, engine, producer=False)
    try:
        await prefill.start()
        await decode.start()
        yield VllmPair(prefill, decode, Tokenizer.from_file(f"{folder}/tokenizer.json"))
    finally:
        await prefill.stop()
        await decode.stop()
