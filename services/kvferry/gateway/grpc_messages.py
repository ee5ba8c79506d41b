"""Bounded reading of gRPC's request messages."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from kvferry.errors import BodyTimeout, InvalidRequest, Overloaded

MESSAGE_TIMEOUT_S = 30.0
# A message that took longer to arrive makes room for another call's.
PATIENCE_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class MessageReads:
    """Reads one message per call, of `max_reads` calls at once."""

    # gRPC keeps the part of a message that has arrived, up to its limit of size, and says nothing of it before the end:
    # only the number of such messages can be limited. Calls that wait cut the slowest one.

    def __init__(self, max_reads: int) -> None:
        self._slots = asyncio.Semaphore(max_reads)
        self._max_reads = max_reads
        self._limit_to_begun_s: dict[asyncio.Timeout, float] = {}  # the oldest first
        self._cut: set[asyncio.Timeout] = set()

    def __repr__(self) -> str:
        return f"<MessageReads {len(self._limit_to_begun_s)}/{self._max_reads}>"

    async def read(self, context: Context) -> bytes:
        """Return the call's first message. Raises InvalidRequest without one, BodyTimeout, or Overloaded if cut."""
        limit = asyncio.timeout(MESSAGE_TIMEOUT_S)
        try:
            async with limit:
                await self._acquire()
                self._limit_to_begun_s[limit] = asyncio.get_running_loop().time()
                try:
                    message = await context.read()
                finally:
                    del self._limit_to_begun_s[limit]
                    self._slots.release()
        except TimeoutError:
            if limit in self._cut:
                raise Overloaded(
                    f"the message took longer than {PATIENCE_S:g} s, while others waited to be read"
                ) from None
            raise BodyTimeout(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s") from None
        finally:
            self._cut.discard(limit)
        if not isinstance(message, bytes):
            raise InvalidRequest("the call has no message", param="message")
        return message

    async def _acquire(self) -> None:
        while True:
            if self._slots.locked():
                self._cut_oldest()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._slots.acquire()
                    return
            except TimeoutError:
                continue

    def _cut_oldest(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for limit, begun_s in self._limit_to_begun_s.items():
            if limit not in self._cut:
                if now_s - begun_s >= PATIENCE_S:
                    self._cut.add(limit)
                    limit.reschedule(now_s)
                return
