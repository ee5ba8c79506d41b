"""Bounded reading of gRPC's request messages, and statuses of errors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvferry.errors import BodyTimeout, InvalidRequest, KvferryError, Overloaded, RequestError

# In line, and again for the message itself.
MESSAGE_TIMEOUT_S = 30.0
# A message that took longer to arrive makes room for another call's.
PATIENCE_S = 1.0

Context = grpc.aio.ServicerContext[Any, Any]


class MessageReads:
    """Reads one message per call, of `max_reads` calls at once. Connections take turns."""

    # gRPC keeps the part of a message that has arrived, up to its limit of size, and says nothing of it before the end:
    # only the number of such messages can be limited. Calls that wait cut the slowest ones, of the connection that has
    # most: clients whose messages come at once must not be kept out by one that opens calls and sends nothing.

    def __init__(self, max_reads: int, max_waiting: int | None = None, patience_s: float | None = None) -> None:
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._max_reads = max_reads
        self._max_waiting = max_waiting
        self._num_reads = 0  # those that were cut and have not ended yet, too
        # By connection, the oldest first.
        self._reads: dict[str, dict[asyncio.Timeout, float]] = {}
        # By connection, the next one first.
        self._lines: dict[str, dict[asyncio.Timeout, asyncio.Future[None]]] = {}
        self._num_waiting = 0
        self._cut: set[asyncio.Timeout] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<MessageReads {self._num_reads}/{self._max_reads}, {self._num_waiting} wait>"

    def check(self) -> None:
        assert self._num_reads == sum(map(len, self._reads.values())) + len(self._cut) <= self._max_reads, self
        assert self._num_waiting == sum(map(len, self._lines.values())), self
        assert all(self._reads.values()), self
        assert all(self._lines.values()), self

    async def read(self, context: Context) -> bytes:
        """Return the call's first message. Raises InvalidRequest without one, BodyTimeout, or Overloaded."""
        message = await self.read_next(context)
        if message is None:
            raise InvalidRequest("the call has no message", param="message")
        return message

    async def read_next(self, context: Context) -> bytes | None:
        """Return the call's next message, None at the end. Raises as `read` does."""
        peer = context.peer()
        limit = asyncio.timeout(MESSAGE_TIMEOUT_S)
        is_begun = was_cut = False
        try:
            async with limit:
                await self._wait_in_line(peer, limit)
                is_begun = True
                try:
                    message = await context.read()
                finally:
                    was_cut = self._end(peer, limit)
        except TimeoutError:
            if not is_begun:
                raise Overloaded(
                    f"{self._max_reads} other calls were read for {MESSAGE_TIMEOUT_S:g} s while this one waited"
                ) from None
            if was_cut:
                raise Overloaded(
                    f"the message took longer than {self._patience_s:g} s, while others waited to be read"
                ) from None
            raise BodyTimeout(f"the message did not arrive within {MESSAGE_TIMEOUT_S:g} s") from None
        return message if isinstance(message, bytes) else None

    async def _wait_in_line(self, peer: str, limit: asyncio.Timeout) -> None:
        if self._num_reads < self._max_reads:
            self._begin(peer, limit)
            return
        if self._num_waiting == self._max_waiting:
            self._shorten_longest_line(peer)
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(peer, {})[limit] = turn
        self._num_waiting += 1
        if self._timer is None:
            self._make_room()
        try:
            await turn
        except asyncio.CancelledError:
            if limit in self._lines.get(peer, ()):
                self._leave_line(peer, limit)
            elif limit in self._cut or limit in self._reads.get(peer, ()):
                self._end(peer, limit)  # its turn came just now
            raise

    def _shorten_longest_line(self, newest: str) -> None:
        """Make room in line for a call of `newest`. Raises Overloaded if no other connection has more."""
        refusal = Overloaded(f"{self._max_waiting} calls wait for their messages to be read, the limit of this gateway")
        peer, line = max(self._lines.items(), key=lambda item: len(item[1]))
        if len(line) <= len(self._lines.get(newest, ())) + 1:
            raise refusal
        turn = self._leave_line(peer, next(reversed(line)))
        if not turn.done():
            turn.set_exception(refusal)

    def _leave_line(self, peer: str, limit: asyncio.Timeout) -> asyncio.Future[None]:
        line = self._lines[peer]
        self._num_waiting -= 1
        turn = line.pop(limit)
        if not line:
            del self._lines[peer]
        return turn

    def _begin(self, peer: str, limit: asyncio.Timeout) -> None:
        now_s = asyncio.get_running_loop().time()
        self._num_reads += 1
        self._reads.setdefault(peer, {})[limit] = now_s
        limit.reschedule(now_s + MESSAGE_TIMEOUT_S)

    def _end(self, peer: str, limit: asyncio.Timeout) -> bool:
        # Returns whether it was cut.
        was_cut = limit in self._cut
        if was_cut:
            self._cut.remove(limit)
        else:
            self._forget(peer, limit)
        self._num_reads -= 1
        while self._num_reads < self._max_reads and self._lines:
            self._begin_next()
        return was_cut

    def _forget(self, peer: str, limit: asyncio.Timeout) -> None:
        reads = self._reads[peer]
        del reads[limit]
        if not reads:
            del self._reads[peer]

    def _begin_next(self) -> None:
        peer, line = next(iter(self._lines.items()))
        limit = next(iter(line))
        turn = self._leave_line(peer, limit)
        if line:
            self._lines[peer] = self._lines.pop(peer)  # the others' turns come first
        if not turn.done():  # or its call is over
            self._begin(peer, limit)
            turn.set_result(None)

    def _make_room(self) -> None:
        """Cut a slow message for each call that waits, and look again when the next one is slow."""
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s, num_wanted = loop.time(), self._num_waiting - len(self._cut)
        if num_wanted <= 0:
            return
        again_s = now_s + self._patience_s
        for _, begun_s, peer, limit in self._slowest()[:num_wanted]:
            if begun_s + self._patience_s > now_s:
                again_s = begun_s + self._patience_s
                break
            if not limit.expired():
                self._forget(peer, limit)
                self._cut.add(limit)
                limit.reschedule(now_s)
        self._timer = loop.call_at(again_s, self._make_room)

    def _slowest(self) -> list[tuple[tuple[int, bool], float, str, asyncio.Timeout]]:
        # Most of its connection's first, then the oldest. A connection of which no call waits keeps its share.
        share = self._max_reads // len(self._reads.keys() | self._lines.keys())
        return sorted(
            (
                ((-num, peer not in self._lines), begun_s, peer, limit)
                for peer, reads in self._reads.items()
                for num, (limit, begun_s) in zip(range(len(reads), 0, -1), reads.items(), strict=True)
                if num > share or peer in self._lines
            ),
            key=lambda read: read[:2],
        )


DOMAIN = "kvferry"

# A status travels in headers, twice, percent-encoded the first time: far below the 8 KiB that peers take.
MAX_MESSAGE_BYTES = 1000


def status_of(error: KvferryError) -> grpc.Status:
    """Return code, message and details: ErrorInfo, BadRequest for a field, RetryInfo for a possible retry."""
    code = grpc.StatusCode[error.grpc_status]
    message = _short(error.message)
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN)]
    if isinstance(error, RequestError) and error.param and code is grpc.StatusCode.INVALID_ARGUMENT:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_short(error.param), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=error.retry_after_s)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=packed))
    return status


def _reason(error: KvferryError) -> str:
    return (error.code or "internal").upper()


def _short(text: str) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: MAX_MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "…"
