"""The keeper's end of one engine's connection."""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkLayout
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.unix_socket import PeerProcess
from kvferry_keeper.mapped_region import MappedRegion
from kvferry_keeper.snapshot_queue import SnapshotQueue

log = logging.getLogger(__name__)

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 256 << 10
# Changes that may wait for a slow engine; beyond this it gets a new snapshot instead.
_MAX_CHANGE_BYTES = 8 << 20
_GREETING_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0


class EngineSessionOwner(Protocol):
    def why_refused(self, hello: messages.Hello) -> str:
        """Return why the engine is not served; empty if it is."""
        ...

    def on_hello(self, session: EngineSession, hello: messages.Hello) -> None:
        pass

    def on_request(self, session: EngineSession, message: messages.Store | messages.Load | messages.Touch) -> None:
        pass

    def on_left(self, session: EngineSession) -> None:
        pass

    def on_closed(self, session: EngineSession) -> None:
        pass


class EngineSession:
    """Reads until the engine leaves or violates the protocol. Belongs to one event loop.

    Its owner calls `say_bye` once the engine's region is unused.
    """

    def __init__(self, connection: socket.socket, peer: PeerProcess, owner: EngineSessionOwner) -> None:
        self._connection: socket.socket | None = connection
        self._peer = peer
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = messages.FrameReader()
        self._fds: list[int] = []
        self._is_reading = False
        self._is_writing = False
        self._greeting: asyncio.TimerHandle | None = None
        self._goodbye: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._answers: deque[bytes] = deque()
        self._updates: SnapshotQueue[bytes] = SnapshotQueue(tuple, _MAX_CHANGE_BYTES, len)
        self._is_finishing = False
        self.engine_id = ""
        self.pool = ""  # whose volumes it uses
        self.layout: ChunkLayout | None = None
        self.region: MappedRegion | None = None
        self.refusal = ""

    def __repr__(self) -> str:
        return f"<EngineSession {self.engine_id or 'not greeted'} of process {self._peer.pid}, {self.region}>"

    @property
    def pid(self) -> int:
        return self._peer.pid

    def start(self) -> None:
        assert self._connection is not None
        self._connection.setblocking(False)
        self._is_reading = True
        self._loop.add_reader(self._connection.fileno(), self._receive)
        # The socket alone does not show the engine's end: a child process could hold it open.
        self._loop.add_reader(self._peer.pidfd, self._leave)
        self._greeting = self._loop.call_later(_GREETING_TIMEOUT_S, self.refuse, "it did not say who it is")

    def answer(self, message: messages.ToEngine) -> None:
        if self._connection is not None:
            self._answers.append(messages.encode(message))
            self._pump()

    def begin_updates(self, snapshot: Callable[[], Iterator[bytes]]) -> None:
        self._updates = SnapshotQueue(snapshot, _MAX_CHANGE_BYTES, len)
        self.begin_snapshot()

    def begin_snapshot(self) -> None:
        if self._connection is not None:
            self._updates.begin_snapshot()
            self._pump()

    def send_change(self, change: bytes) -> None:
        if self._connection is not None:
            self._updates.put(change)
            self._pump()

    def pulse(self) -> None:
        if not self._unsent and not self._is_finishing:
            self.answer(messages.Pulse())

    def refuse(self, reason: str) -> None:
        if self._is_reading:
            log.warning("engine %s (process %d): %s", self.engine_id or "unknown", self._peer.pid, reason)
            self.refusal = reason
            self._leave()

    def say_bye(self) -> None:
        if self._connection is None or self._is_finishing:
            return
        self._leave()
        self._is_finishing = True
        self._updates.clear()
        self.answer(messages.Bye(self.refusal))
        if self._connection is not None:
            self._goodbye = self._loop.call_later(_GOODBYE_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Close without Bye: the engine then waits for this process to end. Idempotent."""
        self._leave()
        if self._connection is None:
            return
        if self._is_writing:
            self._loop.remove_writer(self._connection.fileno())
        if self._goodbye is not None:
            self._goodbye.cancel()
        self._connection.close()
        self._connection = None
        self._peer.close()
        self._owner.on_closed(self)

    def _leave(self) -> None:
        if not self._is_reading or self._connection is None:
            return
        self._is_reading = False
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_reader(self._peer.pidfd)
        if self._greeting is not None:
            self._greeting.cancel()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._owner.on_left(self)

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data, ancillary, _, _ = self._connection.recvmsg(
                _READ_BYTES, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            self._leave()
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds += fds
        if not data:
            self._leave()
            return
        try:
            for payload in self._reader.feed(data):
                self._dispatch(messages.decode_to_keeper(payload))
                if not self._is_reading:
                    return
            if self.region is not None and self._fds:
                raise ProtocolError("it sends unexpected descriptors")
        except ProtocolError as error:
            self.refuse(str(error))
        except Exception:
            log.exception("a request of engine %s fails", self.engine_id)
            self.refuse("a fault of the keeper's")

    def _dispatch(self, message: messages.ToKeeper) -> None:
        if not isinstance(message, messages.Hello):
            if self.region is None:
                raise ProtocolError("its first message is not Hello")
            self._owner.on_request(self, message)
            return
        if self.region is not None:
            raise ProtocolError("it says Hello twice")
        self.engine_id = message.engine_id
        if message.protocol != messages.PROTOCOL:
            raise ProtocolError(f"it speaks version {message.protocol}, this keeper {messages.PROTOCOL}")
        if why := self._owner.why_refused(message):
            raise ProtocolError(why)
        self.pool = message.pool
        if len(self._fds) != 1:
            raise ProtocolError(f"its Hello comes with {len(self._fds)} descriptors instead of its region's")
        try:
            self.layout = ChunkLayout.from_json(message.layout)
            if message.row_bytes != self.layout.payload_bytes:
                raise ValueError(f"rows of {message.row_bytes} bytes for chunks of {self.layout.payload_bytes}")
            self.region = MappedRegion(self._fds.pop(), message.num_rows, message.row_bytes)
        except (ValueError, TypeError, OSError) as error:
            raise ProtocolError(f"its region cannot be used: {error}") from None
        if self._greeting is not None:
            self._greeting.cancel()
        self._owner.on_hello(self, message)

    def _pump(self) -> None:
        """Send as much as the socket takes: answers first, then updates."""
        connection = self._connection
        if connection is None:
            return
        try:
            while True:
                self._fill()
                if not self._unsent:
                    break
                del self._unsent[: connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The engine is gone; reading will find the end of the stream.
            self._unsent.clear()
            self._answers.clear()
            self._updates.clear()
        has_unsent = bool(self._unsent)
        if has_unsent != self._is_writing:
            self._is_writing = has_unsent
            if has_unsent:
                self._loop.add_writer(connection.fileno(), self._pump)
            else:
                self._loop.remove_writer(connection.fileno())
        if self._is_finishing and not has_unsent:
            self.close()

    def _fill(self) -> None:
        while len(self._unsent) < _MAX_UNSENT_BYTES:
            frame = self._answers.popleft() if self._answers else self._updates.pop()
            if frame is None:
                return
            self._unsent += frame
