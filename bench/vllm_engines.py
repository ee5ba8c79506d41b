"""Real engines for tests and benchmarks: one prefill and one decode engine over one model, and requests to them."""

from __future__ import annotations

import multiprocessing.forkserver
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from bench.engine_device import engine_config, model_config
from kvferry import model_folder
from kvferry.config import ModelConfig, TierConfig
from kvferry.engine.base import Engine, EngineOutput, EngineRequest, RequestId, Sampling, TransferParams
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import EngineError


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


async def start_pair(
    model: ModelConfig | None = None,
    *,
    on_prefill: Callable[[], None] = lambda: None,
    tier: TierConfig | None = None,
    keeper_socket: str = "",
    has_tenants: bool = False,
    decode: Mapping[str, Any] | None = None,
    **settings: Any,
) -> VllmPair:
    """Start both engines one after the other; nothing is left running when one fails.

    `model.path` is a folder with a tokenizer; None is the default model. `settings` are of both engines, whose device
    is that of `bench.engine_device`, and those of `decode` replace them for the decode engine; `on_prefill` is called
    between the two starts.
    """
    from tokenizers import Tokenizer

    if model is None:
        model = model_config(path=str(model_folder.resolve(model_folder.DEFAULT_NAME)))
    folder = model.path

    def make(*, is_producer: bool) -> VllmEngine:
        engine = engine_config("prefill" if is_producer else "decode", **settings)
        if not is_producer:
            args = {**engine.args, **(decode or {}).get("args", {})}
            engine = engine.model_copy(update={**(decode or {}), "args": args})
        return VllmEngine(
            folder,
            model,
            engine,
            producer=is_producer,
            tier=tier,
            keeper_socket=keeper_socket,
            has_tenants=has_tenants,
        )

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


def child_processes() -> set[int]:
    """Return the processes of this one's engines, all of which may be killed."""
    # multiprocessing's tracker and fork server outlive them.
    fork_server = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.pid != fork_server and not any("resource_tracker" in argument for argument in child.cmdline())
    }


async def answer(engine: Engine, request: EngineRequest) -> tuple[list[int], EngineOutput]:
    """Return the tokens of an answer, and its last output."""
    tokens: list[int] = []
    last = EngineOutput((), "")
    async for output in engine.generate(request):
        tokens.extend(output.token_ids)
        last = output
    return tokens, last


async def prefill(engine: Engine, request_id: str, prompt: Sequence[int]) -> TransferParams:
    """Compute a prompt whose pages are kept for a transfer. Raises EngineError if they are not kept."""
    sampling = Sampling(max_tokens=1, temperature=0.0)
    _, last = await answer(engine, EngineRequest(RequestId(request_id), prompt, sampling, keep_for_transfer=True))
    if last.transfer_params is None:
        raise EngineError(f"{request_id}: the prefill engine kept no pages")
    return last.transfer_params
