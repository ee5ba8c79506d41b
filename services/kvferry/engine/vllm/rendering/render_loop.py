"""An event loop in a thread of its own, for work that would hold up the streams of the main one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class RenderLoop:
    """Runs coroutines, in their order up to each one's first wait. Owns its thread until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="render-loop", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return not self._loop.is_closed()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Cancelling this cancels the work."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def run_and_wait(self, work: Coroutine[Any, Any, R]) -> R:
        """For callers without an event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call_soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Idempotent. Work that still runs is abandoned."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
