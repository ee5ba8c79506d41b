"""The keeper's end of one engine's connection: frames in and out, and whose process it is."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from kvferry.keeper import messages
from kvferry.keeper.mapped_region import MappedRegion
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.peer_process import PeerProcess
from kvferry.store.layout import ChunkKey, ChunkLayout

log = logging.getLogger(__name__)

_READ_BYTES = 256 << 10
_MAX_UNSENT_BYTES = 256 << 10
# What an engine that does not read may leave waiting; beyond it the changes are dropped, and it gets a new snapshot.
_MAX_CHANGE_BYTES = 8 << 20
_GREETING_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 5.0


class EngineSessionOwner(Protocol):
    """What a link tells whoever owns it."""

    def greeted(self, link: EngineSession, hello: messages.Hello) -> None:
        """The engine has said who it is; `link.region` is mapped. May raise ProtocolError."""

    def asked(self, link: EngineSession, message: messages.Store | messages.Load | messages.Touch) -> None:
        """May raise ProtocolError."""

    def left(self, link: EngineSession) -> None:
        """The engine is gone, or will not be listened to any more. Once."""


class EngineSession:
    """Reads from a connection until the engine is gone or says what it should not. Belongs to one event loop.

    `left` is called once; from then on nothing is read. What happens to the region then is its owner's to say:
    `say_bye` once nothing touches it any more, which closes the connection too.
    """

    def __init__(self, connection: socket.socket, peer: PeerProcess, keeper: EngineSessionOwner) -> None:
        """Takes both over. `start` begins to read."""
        self._connection: socket.socket | None = connection
        self._peer = peer
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._reader = messages.FrameReader()
        self._fds: list[int] = []
        self._is_reading = False
        self._is_writing = False
        self._greeting: asyncio.TimerHandle | None = None
        self._goodbye: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._answers: deque[bytes] = deque()
        self._parts: Iterator[bytes] | None = None
        self._changes: deque[bytes] = deque()
        self._num_change_bytes = 0
        self._is_behind = False  # changes were dropped
        self._is_finishing = False
        self.engine_id = ""
        self.layout: ChunkLayout | None = None
        self.region: MappedRegion | None = None
        self.snapshot: Callable[[], Iterator[bytes]] = lambda: iter(())
        self.on_closed: Callable[[EngineSession], None] = lambda link: None
        self.refusal = ""

    def __repr__(self) -> str:
        return f"<EngineLink {self.engine_id or 'not greeted'} of process {self._peer.pid}, {self.region}>"

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._peer.pid

    @property
    def is_listening(self) -> bool:
        return self._is_reading

    def start(self) -> None:
        assert self._connection is not None
        self._connection.setblocking(False)
        self._is_reading = True
        self._loop.add_reader(self._connection.fileno(), self._receive)
        # A child of the engine's could hold its socket open.
        self._loop.add_reader(self._peer.pidfd, self._engine_ended)
        self._greeting = self._loop.call_later(_GREETING_TIMEOUT_S, self.refuse, "it did not say who it is")

    def answer(self, message: messages.ToEngine) -> None:
        """Send something that must arrive."""
        if self._connection is not None:
            self._answers.append(messages.encode(message))
            self._pump()

    def tell(self, change: bytes) -> None:
        """Send a change of keys, after the snapshot if one is being sent. Who does not read gets a new one instead."""
        if self._connection is None or self._is_behind:
            return
        self._changes.append(change)
        self._num_change_bytes += len(change)
        if self._num_change_bytes > _MAX_CHANGE_BYTES:
            self._fall_behind()
        self._pump()

    def pulse(self) -> None:
        """Show that the keeper lives, unless the engine has enough to read."""
        if not self._unsent and not self._is_finishing:
            self.answer(messages.Pulse())

    def begin_snapshot(self) -> None:
        """Send all keys anew; the changes before it are in it."""
        if self._connection is not None:
            self._fall_behind()
            self._pump()

    def refuse(self, reason: str) -> None:
        """Listen to it no more."""
        if self._is_reading:
            log.warning("engine %s (process %d): %s", self.engine_id or "unknown", self._peer.pid, reason)
            self.refusal = reason
            self._leave()

    def say_bye(self, reason: str = "") -> None:
        """Nothing of its region is touched any more. Closes the connection once that was sent."""
        if self._connection is None or self._is_finishing:
            return
        self._leave()
        self._is_finishing = True
        self._parts, self._is_behind = None, False
        self._changes.clear()
        self.answer(messages.Bye(reason or self.refusal))
        if self._connection is not None:
            self._goodbye = self._loop.call_later(_GOODBYE_TIMEOUT_S, self.close)

    def close(self) -> None:
        """Without a word: the engine waits for this process to end then. May be repeated."""
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
        self.on_closed(self)

    def _engine_ended(self) -> None:
        # What it asked for by then is not worth doing: nobody waits for it.
        self._leave()

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
        self._keeper.left(self)

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
                self._take(messages.decode_to_keeper(payload))
                if not self._is_reading:
                    return
            if self.region is not None and self._fds:
                raise ProtocolError("it sends descriptors nobody asked for")
        except ProtocolError as error:
            self.refuse(str(error))
        except Exception:
            log.exception("what engine %s asks for fails", self.engine_id)
            self.refuse("a fault of the keeper's")

    def _take(self, message: messages.ToKeeper) -> None:
        if not isinstance(message, messages.Hello):
            if self.region is None:
                raise ProtocolError("its first message is not Hello")
            self._keeper.asked(self, message)
            return
        if self.region is not None:
            raise ProtocolError("it says Hello twice")
        self.engine_id = message.engine_id
        if message.protocol != messages.PROTOCOL:
            raise ProtocolError(f"it speaks version {message.protocol}, this keeper {messages.PROTOCOL}")
        if len(self._fds) != 1:
            raise ProtocolError(f"its Hello comes with {len(self._fds)} descriptors instead of its region's")
        try:
            self.layout = ChunkLayout.from_json(message.layout)
            if message.row_bytes != self.layout.payload_bytes:
                raise ValueError(f"rows of {message.row_bytes} bytes for pages of {self.layout.payload_bytes}")
            self.region = MappedRegion(self._fds.pop(), message.num_rows, message.row_bytes)
        except (ValueError, TypeError, OSError) as error:
            raise ProtocolError(f"its region cannot be used: {error}") from None
        if self._greeting is not None:
            self._greeting.cancel()
        self._keeper.greeted(self, message)

    def _fall_behind(self) -> None:
        self._changes.clear()
        self._num_change_bytes = 0
        self._is_behind = True

    def _pump(self) -> None:
        """Send as much as goes: answers first, then a snapshot, then what changed since it."""
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
            # It is gone, as the end of its stream will say.
            self._unsent.clear()
            self._answers.clear()
            self._changes.clear()
            self._parts, self._is_behind = None, False
        wants = bool(self._unsent)
        if wants != self._is_writing:
            self._is_writing = wants
            if wants:
                self._loop.add_writer(connection.fileno(), self._pump)
            else:
                self._loop.remove_writer(connection.fileno())
        if self._is_finishing and not wants:
            self.close()

    def _fill(self) -> None:
        while len(self._unsent) < _MAX_UNSENT_BYTES:
            if self._answers:
                self._unsent += self._answers.popleft()
            elif self._is_behind:
                # Only now: what it holds is what is told, and the changes from here on come after it.
                self._is_behind = False
                self._parts = self.snapshot()
            elif self._parts is not None:
                part = next(self._parts, None)
                if part is None:
                    self._parts = None
                else:
                    self._unsent += part
            elif self._changes:
                change = self._changes.popleft()
                self._num_change_bytes -= len(change)
                self._unsent += change
            else:
                return


class Listener:
    """The socket that engines connect to, from `start` to `close`."""

    def __init__(self, path: str, on_connection: Callable[[socket.socket, PeerProcess], None]) -> None:
        self._path = path
        self._on_connection = on_connection
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Raises OSError. The caller holds the folder: what stands at the path is a dead keeper's."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
            listener.bind(self._path)
            os.chmod(self._path, 0o600)  # noqa: PTH101
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """May be repeated."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it has gone already, or there are too many
        try:
            peer = PeerProcess(connection)
        except OSError as error:
            log.warning("an engine that cannot be watched is refused: %s", error)
            connection.close()
            return
        if peer.uid not in (0, os.geteuid()):
            log.warning("%r is refused: it is of another user", peer)
            connection.close()
            peer.close()
            return
        self._on_connection(connection, peer)


def parts_of(sequence: int, keys: list[ChunkKey]) -> Iterator[bytes]:
    """A snapshot as frames."""
    num_parts = max(1, -(-len(keys) // messages.MAX_PART_KEYS))
    for part in range(num_parts):
        chosen = keys[part * messages.MAX_PART_KEYS : (part + 1) * messages.MAX_PART_KEYS]
        yield messages.encode(messages.SnapshotKeys(sequence, part, num_parts, messages.pack_chunk_keys(chosen)))
