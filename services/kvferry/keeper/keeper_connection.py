"""The engine's end of one connection to a keeper."""

from __future__ import annotations

import enum
import os
import selectors
import socket
from collections.abc import Iterable, Iterator

from kvferry.keeper import messages
from kvferry.keeper.client_jobs import ClientJob
from kvferry.keeper.layout import ChunkKey
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.unix_socket import PeerProcess


class KeyMirror:
    def __init__(self) -> None:
        self.keys: set[ChunkKey] = set()
        self.is_complete = False
        self._sequence = 0
        self._next_part = 0

    def __repr__(self) -> str:
        return f"<KeyMirror of {len(self.keys)} keys at {self._sequence}>"

    def apply_part(self, message: messages.SnapshotKeys) -> None:
        """Raises ProtocolError for a part out of order."""
        if message.part == 0:
            self.keys, self.is_complete = set(), False
        elif self.is_complete or (message.sequence, message.part) != (self._sequence, self._next_part):
            raise ProtocolError(f"part {message.part} of keys after change {message.sequence}")
        self._sequence, self._next_part = message.sequence, message.part + 1
        self.keys.update(messages.unpack_chunk_keys(message.keys))
        self.is_complete = message.part + 1 == message.num_parts

    def apply_change(self, message: messages.ChangedKeys) -> None:
        """Raises ProtocolError for a change out of order."""
        if message.sequence != self._sequence + 1 or not self.is_complete:
            raise ProtocolError(f"change {message.sequence} after {self._sequence}")
        self._sequence = message.sequence
        self.discard(messages.unpack_chunk_keys(message.removed))
        self.keys.update(messages.unpack_chunk_keys(message.added))

    def discard(self, keys: Iterable[ChunkKey]) -> None:
        self.keys.difference_update(keys)


_CONNECT_TIMEOUT_S = 1.0
_READ_BYTES = 256 << 10


class ConnectionState(enum.Enum):
    GREETING = enum.auto()  # Hello is sent
    SERVING = enum.auto()
    LEAVING = enum.auto()  # sends no more, and waits until the keeper uses none of our rows


class KeeperConnection:
    """Outlives its socket while the keeper may use its jobs' rows.

    Registers socket and pidfd with the selector: a child process could hold the socket open.
    """

    def __init__(
        self, socket_path: str, hello: messages.Hello, region_fd: int, selector: selectors.BaseSelector, now_s: float
    ) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = None
        try:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(socket_path)
            peer = PeerProcess(connection)
            if peer.uid not in (0, os.geteuid()):
                raise PermissionError(f"{peer} may not have this engine's chunks")
            frame = messages.encode(hello)
            num_sent = socket.send_fds(connection, [frame], [region_fd])
            connection.setblocking(False)
        except OSError:
            connection.close()
            if peer is not None:
                peer.close()
            raise
        self.peer = peer
        self.state = ConnectionState.GREETING
        self.jobs: dict[int, ClientJob] = {}
        self.mirror = KeyMirror()
        self.began_s = now_s
        self.heard_s = now_s
        self.is_silent = False
        self.unsent = bytearray(frame[num_sent:])
        self._frames = messages.FrameReader()
        self._selector = selector
        self._socket: socket.socket | None = connection
        selector.register(connection, selectors.EVENT_READ, self)
        selector.register(peer.pidfd, selectors.EVENT_READ, self)

    def __repr__(self) -> str:
        return f"<KeeperConnection to process {self.peer.pid}, {self.state.name.lower()}, {len(self.jobs)} jobs>"

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def receive(self) -> bytes | None:
        """Return bytes, none at the end, None if nothing arrived. Raises OSError."""
        assert self._socket is not None
        try:
            return self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return None

    def decode(self, data: bytes) -> Iterator[messages.ToEngine]:
        """Raises ProtocolError."""
        for payload in self._frames.feed(data):
            yield messages.decode_to_engine(payload)

    def flush(self) -> None:
        connection = self._socket
        if connection is None:
            return
        try:
            while self.unsent:
                del self.unsent[: connection.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # The keeper's last messages can still be read.
            self.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
        if self._selector.get_key(connection).events != events:
            self._selector.modify(connection, events, self)

    def stop_sending(self) -> None:
        self.unsent.clear()
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                return

    def close_socket(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        self.close_socket()
        self._selector.unregister(self.peer.pidfd)
        self.peer.close()
