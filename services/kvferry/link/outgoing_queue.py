"""One gateway session's unsent messages, and their limits. Pure.

Outputs merge into a waiting step, so a slow gateway gets fewer and larger messages.
"""

from __future__ import annotations

import logging
from collections import deque

from kvferry.engine.base import EngineOutput
from kvferry.errors import KvferryError
from kvferry.link import codec
from kvferry.link.flow_control import Credit
from kvferry.link.frames import MAX_FRAME_BYTES
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

# When more than this waits for a gateway, it has stopped reading.
MAX_PENDING_BYTES = 16 << 20

# Outputs merge into a waiting step up to here, about 300 tokens: a gateway handles a message at once, and messages of
# other workers wait meanwhile.
MAX_STEP_BYTES = 16 << 10

_FAILURE_BYTES = 64  # beside its message
_NUMBER_BYTES = 10


class _Pending:
    __slots__ = ("message", "size_bytes")

    def __init__(self, message: pb.Upward, size_bytes: int = 0) -> None:
        self.message = message
        self.size_bytes = size_bytes  # about


class OutgoingQueue:
    def __init__(self, gateway_id: str, welcome: pb.Welcome) -> None:
        self._gateway_id = gateway_id
        self._pending: deque[_Pending] = deque([_Pending(pb.Upward(welcome=welcome))])
        self._credit = Credit()
        self._is_closing = False
        self.pending_bytes = 0  # about

    def __repr__(self) -> str:
        return f"<OutgoingQueue {self.pending_bytes} bytes {self._credit!r}{' closing' if self._is_closing else ''}>"

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def may_send(self) -> bool:
        """Whether one more message may be sent, of any size."""
        return self._credit.is_left or self._is_closing

    @property
    def ends_with_step(self) -> bool:
        return bool(self._pending) and self._pending[-1].message.HasField("step")

    @property
    def is_overfull(self) -> bool:
        return self.pending_bytes > MAX_PENDING_BYTES

    @property
    def is_half_full(self) -> bool:
        return self.pending_bytes > MAX_PENDING_BYTES // 2

    def restore_credit(self, num_messages: int, num_bytes: int) -> None:
        """Raises ValueError for counts that were never sent."""
        self._credit.restore(num_messages, num_bytes)

    def add_output(self, number: int, output: EngineOutput) -> None:
        step = self._open_step()
        codec.append_output(step.message.step, number, output)
        size_bytes = codec.approximate_bytes(output)
        step.size_bytes += size_bytes
        self.pending_bytes += size_bytes

    def add_failure(self, number: int, error: KvferryError) -> None:
        step = self._open_step()
        codec.append_failure(step.message.step, number, error)
        self._grow(step, _FAILURE_BYTES + len(error.message))

    def add_reserved(self, number: int) -> None:
        step = self._open_step()
        step.message.step.reserved.append(number)
        self._grow(step, _NUMBER_BYTES)

    def add(self, message: pb.Upward) -> None:
        self._pending.append(_Pending(message, message.ByteSize()))
        self.pending_bytes += self._pending[-1].size_bytes

    def add_stats(self, stats: pb.Load) -> None:
        self._open_step().message.step.load.CopyFrom(stats)

    def add_residency(self, message: pb.Residency) -> bool:
        """Return False and drop the message when too much waits.

        Raises ValueError when it exceeds one frame.
        """
        size_bytes = message.ByteSize()
        if size_bytes + 16 > MAX_FRAME_BYTES:
            raise ValueError(f"a Residency of {size_bytes} bytes; send it in pieces")
        if self.pending_bytes + size_bytes > MAX_PENDING_BYTES:
            return False
        self._pending.append(_Pending(pb.Upward(residency=message), size_bytes))
        self.pending_bytes += size_bytes
        return True

    def drop_residency(self) -> None:
        """The gateway sees a gap and asks for a snapshot; requests matter more."""
        others = deque(pending for pending in self._pending if not pending.message.HasField("residency"))
        if num_dropped := len(self._pending) - len(others):
            log.warning("gateway %s reads slowly: %d messages of residency are dropped", self._gateway_id, num_dropped)
            self._pending = others
            self.pending_bytes = sum(pending.size_bytes for pending in others)

    def pop_messages(self) -> list[bytes]:
        payloads: list[bytes] = []
        pending, credit = self._pending, self._credit
        while pending and (credit.is_left or self._is_closing):
            first = pending.popleft()
            payload = first.message.SerializeToString()
            self.pending_bytes -= first.size_bytes
            credit.spend(len(payload))
            payloads.append(payload)
        return payloads

    def clear(self) -> set[int]:
        steps = [pending.message.step for pending in self._pending]
        self._pending.clear()
        self.pending_bytes = 0
        return {
            n for step in steps for n in (*step.numbers, *step.reserved, *(ended.number for ended in step.finished))
        }

    def close(self) -> None:
        self._is_closing = True

    def _open_step(self) -> _Pending:
        if not self.ends_with_step or self._pending[-1].size_bytes >= MAX_STEP_BYTES:
            message = pb.Upward()
            message.step.SetInParent()
            self._pending.append(_Pending(message))
        return self._pending[-1]

    def _grow(self, pending: _Pending, size_bytes: int) -> None:
        pending.size_bytes += size_bytes
        self.pending_bytes += size_bytes
