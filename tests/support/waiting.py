"""Waiting for a condition, which names itself when it does not come."""

from __future__ import annotations

import asyncio
import linecache
import time
from collections.abc import Awaitable, Callable, Iterator

# For a condition that never comes: a busy machine that is slow stays far below it.
PATIENCE_S = 600.0
# For what must come before a limit of the product ends it: ten times what a busy machine took.
SOON_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05


async def until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    pauses = _pauses()
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, (
            f"not within {within_s:g} s: {what or _source_of(condition)}"
        )
        await asyncio.sleep(next(pauses))


async def until_async(
    condition: Callable[[], Awaitable[bool]], *, within_s: float = PATIENCE_S, what: str = ""
) -> None:
    """`until` for a condition that is awaited, which may not give way to other tasks by itself."""
    deadline = asyncio.get_running_loop().time() + within_s
    pauses = _pauses()
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, (
            f"not within {within_s:g} s: {what or _source_of(condition)}"
        )
        await asyncio.sleep(next(pauses))


def wait_until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S, what: str = "") -> None:
    """`until` for tests without an event loop."""
    deadline = time.monotonic() + within_s
    pauses = _pauses()
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or _source_of(condition)}"
        time.sleep(next(pauses))


def _source_of(condition: object) -> str:
    """Return the line that begins the condition, with its place."""
    code = getattr(condition, "__code__", None)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip() if code is not None else ""
    return f"{line} ({code.co_filename}:{code.co_firstlineno})" if line else repr(condition)


def _pauses() -> Iterator[float]:
    """Short ones first: most conditions come at once, and a look at another process costs CPU."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.1 * pause_s, _LONGEST_PAUSE_S)
