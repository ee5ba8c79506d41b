"""Real engines for tests: one prefill and one decode engine over the default model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry import model_folder
from kvferry.config import EngineConfig, ModelConfig
from kvferry.engine.vllm.engine import VllmEngine


@dataclass
class VllmPair:
    """A prefill and a decode engine that can exchange pages."""

    prefill: VllmEngine
    decode: VllmEngine
    tokenizer: Any
    make_prefill: Callable[[], VllmEngine]

    async def replace_prefill(self) -> None:
        """Start another prefill engine in the place of one that has ended."""
        self.prefill = self.make_prefill()
        await self.prefill.start()

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    async def stop(self) -> None:
        await self.prefill.stop()
        await self.decode.stop()


async def start_pair(*, on_prefill: Callable[[], None] = lambda: None, **settings: Any) -> VllmPair:
    """Both engines, started one after the other; nothing is left running when one fails.

    `settings` are of both engines; `on_prefill` is called between the two starts.
    """
    from tokenizers import Tokenizer

    folder = str(model_folder.resolve("default"))
    model, engine = ModelConfig(path=folder), EngineConfig(threads=1, **settings)

    def make(*, is_producer: bool) -> VllmEngine:
        return VllmEngine(folder, model, engine, producer=is_producer)

    pair = VllmPair(
        make(is_producer=True),
        make(is_producer=False),
        Tokenizer.from_file(f"{folder}/tokenizer.json"),
        lambda: make(is_producer=True),
    )
    try:
        await pair.prefill.start()
        on_prefill()
        await pair.decode.start()
    except BaseException:
        await pair.stop()
        raise
    return pair
