"""An event loop whose time passes at once: pauses of hours take none, and are exact on any machine."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Whoever waits for what no timer and no task brings gets an AssertionError."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def pass_time(self, elapsed_s: float | None) -> None:
        assert elapsed_s is not None, "all tasks wait, and no timer runs"
        self._now_s += elapsed_s


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.pass_time(timeout)
        return super().select(0)  # type: ignore[no-any-return]


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in virtual time; tasks that it left are cancelled."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
