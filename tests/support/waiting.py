"""Waiting for a condition, which names itself when it does not come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# For a condition that never comes: a busy machine that is slow stays far below it.
PATIENCE_S = 600.0


async def until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {what or condition}"
        await asyncio.sleep(0.002)


async def until_async(
    condition: Callable[[], Awaitable[bool]], *, within_s: float = PATIENCE_S, what: str = ""
) -> None:
    """`until` for a condition that is awaited, which may not give way to other tasks by itself."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {what or condition}"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "") -> None:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or condition}"
        time.sleep(0.002)
