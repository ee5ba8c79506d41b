"""Real engines for tests: one prefill and one decode engine over the default model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.vllm.engine import VllmEngine


@dataclass(frozen=True)
class VllmPair:
    """A prefill and a decode engine that can exchange pages."""

    prefill: VllmEngine
    decode: VllmEngine
    tokenizer: Any

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def stop(self) -> None:
        await self.prefill.stop()
        await self.decode.stop()


async def start_pair() -> VllmPair:
    """Both engines, started one after the other; nothing is left running when one fails."""
    from tokenizers import Tokenizer

    folder = str(model_folder.resolve("default"))
    model, engine = ModelConfig(path=folder), EngineConfig(threads=1)
    pair = VllmPair(
        VllmEngine(folder, model, engine, producer=True),
        VllmEngine(folder, model, engine, producer=False),
        Tokenizer.from_file(f"{folder}/tokenizer.json"),
    )
    try:
        await pair.prefill.start()
        await pair.decode.start()
    except BaseException:
        await pair.stop()
        raise
    return pair
