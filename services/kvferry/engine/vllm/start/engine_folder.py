"""The folder of one engine: its sockets and copies of adapters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry.util.addresses import SOCKET_PATH_BYTES

_SOCKETS = "VLLM_RPC_BASE_PATH"
_MAX_BYTES = SOCKET_PATH_BYTES - len("/") - 36  # vLLM names its sockets by UUIDs
_LOCK = "lock"
_PREFIX = "engine-"


class EngineFolder:
    # A worker that is killed leaves its folder behind, of GiB where there are adapters. The next engine on the node
    # removes it: nothing holds the lock of a process that is gone.

    def __init__(self, parent: Path | None = None) -> None:
        """Make the folder below `parent`, or in the temporary folder. Raises OSError."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        parent.mkdir(0o700, parents=True, exist_ok=True)
        _remove_abandoned(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock_fd = os.open(self.path / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        (self.path / f"{_LOCK}.new").rename(self.path / _LOCK)  # under its name it is always held, or abandoned

    @contextlib.contextmanager
    def holds_sockets(self) -> Iterator[None]:
        # vLLM makes its sockets here meanwhile, unless the operator has named another folder, or their paths would be
        # too long. In the temporary folder those of a killed engine would stay for ever.
        if _SOCKETS in os.environ or len(os.fsencode(self.path)) > _MAX_BYTES:
            yield
            return
        os.environ[_SOCKETS] = str(self.path)
        try:
            yield
        finally:
            del os.environ[_SOCKETS]

    def remove(self) -> None:
        """Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            # Folders of earlier releases have no lock and stay.
            lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock_fd)
