"""The process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

_UCRED = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


class PeerProcess:
    """Owns a pidfd until `close`.

    A readable pidfd means that all the process's threads have ended.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError if the process cannot be watched."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid: int
        self.uid: int
        self.pid, self.uid, _ = _UCRED.unpack(credentials)
        try:
            self.pidfd = int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            # Before Linux 6.5. The pid may have been reused: the caller must hear from the peer before relying on it.
            self.pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<PeerProcess {self.pid} of uid {self.uid}>"

    def close(self) -> None:
        """Idempotent."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
