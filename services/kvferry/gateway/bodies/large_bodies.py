"""Work on large bodies in a thread, which gives way to streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")

READ_IN_LOOP_BYTES = 16 << 10  # of a body: reading these takes a few milliseconds at most

JOIN_IN_LOOP_BYTES = 1 << 20  # from here on Python joins bytes without holding the interpreter


async def in_thread_if_large(read: Callable[[], _T], num_bytes: int) -> _T:
    """Return or raise what `read` does."""
    return read() if num_bytes <= READ_IN_LOOP_BYTES else await asyncio.to_thread(read)


async def join(pieces: Sequence[bytes], num_bytes: int) -> bytes:
    return b"".join(pieces) if num_bytes < JOIN_IN_LOOP_BYTES else await asyncio.to_thread(b"".join, pieces)
