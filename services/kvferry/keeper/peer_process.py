"""The process at the other end of a Unix socket: who it is, and when it has ended."""

from __future__ import annotations

import os
import select
import socket
import struct

_UCRED = struct.Struct("3i")  # pid, uid, gid
_SO_PEERPIDFD = 77  # Linux 6.5; not in Python's socket module


class PeerProcess:
    """The process that connected, or that listens. Owns a pidfd until `close`.

    A process whose pidfd is readable has ended with all its threads: none of them is within a system call, so nothing
    it was reading or writing goes on.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError when the process cannot be watched.

        Before Linux 6.5 the process is found by its number: whoever relies on it must hear from the peer afterwards,
        or it may be another process that has this number now.
        """
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid: int
        self.uid: int
        self.pid, self.uid, _ = _UCRED.unpack(credentials)
        try:
            self.pidfd = int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError:
            self.pidfd = os.pidfd_open(self.pid)

    def __repr__(self) -> str:
        return f"<Peer {self.pid} of uid {self.uid}>"

    @property
    def ended(self) -> bool:
        """True once the process and all its threads have ended."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """May be repeated."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
