"""The Unix socket between engines and the keeper of their node: its path, and the process at its other end."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvferry.config import TierConfig
from kvferry.errors import TierError
from kvferry.util.addresses import SOCKET_PATH_BYTES

SOCKET = "keeper.sock"
LOCK = "keeper.lock"


def socket_path(config: TierConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Equal for all of a user's processes. Raises TierError for a path too long."""
    if config.socket_dir is not None:
        folder = config.socket_dir
    elif run_dir := environ.get("KVFERRY_RUN_DIR"):
        folder = Path(run_dir) / "keeper"
    else:
        root = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
        folder = root / f"kvferry-{os.geteuid()}"
    path = folder / SOCKET
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES:
        raise TierError(f"tier.socket_dir: {path} is longer than the {SOCKET_PATH_BYTES} bytes of a socket's address")
    return path


def make_private(folder: Path) -> None:
    """Make the socket's folder. Raises TierError if other users may enter it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise TierError(f"tier.socket_dir: {folder}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TierError(f"tier.socket_dir: others may enter {folder}; allow it to its owner only (chmod 700)")


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
