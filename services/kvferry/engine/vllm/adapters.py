"""The LoRA adapters of one engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.engine.vllm.adapter_folder import CONFIG, WEIGHTS, StagedAdapter
from kvferry.errors import EngineDead, EngineError, InvalidRequest

log = logging.getLogger(__name__)

# A load that failed may have failed for want of memory, or of a disk that answers.
RETRY_AFTER_S = 60.0


class Adapters:
    # Each is loaded before its first request: one that fails in a step of vLLM would end the engine. Later loads, of
    # adapters that have left vLLM's cache, read the same files.

    def __init__(
        self, staged: Sequence[StagedAdapter], max_loaded: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        # vLLM knows adapters by numbers above 0, which are of one engine.
        self._numbered = {adapter.key: (number, adapter) for number, adapter in enumerate(staged, start=1)}
        self._max_loaded = max_loaded
        self._now = now
        self._loaded_once: set[str] = set()
        self._retry_at_s: dict[str, float] = {}  # those whose last load failed
        self._loaded: OrderedDict[str, None] = OrderedDict()  # least recently used first, as in vLLM's cache
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Adapters {len(self._numbered)}, loaded {list(self._loaded)}>"

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._numbered)

    @property
    def loaded(self) -> frozenset[str]:
        """About those in memory: vLLM's cache changes with its steps."""
        return frozenset(self._loaded)

    async def lora_request(self, key: str, llm: Any) -> Any:
        """Return vLLM's LoRARequest, once the adapter is loaded.

        Raises InvalidRequest for an unknown one, EngineError for one that vLLM refused in the last minute, and
        EngineDead.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        name = key.rpartition("@")[0]
        if key not in self._numbered:
            raise InvalidRequest(f"this engine has no adapter {name[:64]!r} with the files that were asked for")
        number, adapter = self._numbered[key]
        # vLLM loads an adapter again in a step that all requests share, where files that are away end the engine.
        if missing := [file for file in (CONFIG, WEIGHTS) if not (adapter.folder / file).is_file()]:
            log.error("the worker's copy of an adapter is away: %s", adapter.folder / missing[0])
            raise EngineError(f"the adapter {name!r} cannot be loaded; the worker's log says why")
        request = LoRARequest(lora_name=key, lora_int_id=number, lora_path=str(adapter.folder))
        if key not in self._loaded_once:
            async with self._lock:
                if key not in self._loaded_once and self._now() >= self._retry_at_s.get(key, 0.0):
                    try:
                        await llm.add_lora(request)
                    except EngineDeadError:
                        raise EngineDead("the engine's process died") from None
                    except Exception as error:
                        # vLLM raises errors of any kind, from another process.
                        log.error("the adapter %s cannot be loaded: %s", name, str(error)[:2000])
                        self._retry_at_s[key] = self._now() + RETRY_AFTER_S
                    else:
                        self._loaded_once.add(key)
            if key not in self._loaded_once:
                raise EngineError(f"the adapter {name!r} cannot be loaded; the worker's log says why")
        self._note_used(key)
        return request

    def _note_used(self, key: str) -> None:
        self._loaded[key] = None
        self._loaded.move_to_end(key)
        while len(self._loaded) > self._max_loaded:
            self._loaded.popitem(last=False)
