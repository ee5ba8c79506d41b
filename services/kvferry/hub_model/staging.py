"""The folder in which a model is put together: of one process at a time, and of regular files alone.

Locks hold on some file systems for one node alone. So the process that fills it also writes a lease again and again;
another one takes over when it has seen no change for a while, by its own clock. Files have names of their process, so
that one that was only slow spoils nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from kvferry.errors import UnavailableError

BEAT_S = 10.0
STALE_S = 90.0  # longer than file systems of a network show an old state of a file
LOST_S = 45.0  # without a beat of its own, after which a process changes nothing more
_WAIT_S = 0.5  # between two looks at another process
_LOCK, _LEASE = "lock", "lease"
_MAX_LEASE_BYTES = 1000

Report = Callable[[str], None]


class Staging:
    """A folder that this process holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = secrets.token_hex(8)  # in names of what this process writes
        self.own_files = {folder / _LOCK, folder / _LEASE}
        self.may_be_written = False  # by the process that had it before
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{self.token}"
        self._lease = -1
        self._beats = threading.Thread(target=self._go_on, name="staging-lease", daemon=True)
        self._beaten_s = 0.0
        self._over = threading.Event()

    @property
    def is_lost(self) -> bool:
        """Whether another process may have taken over."""
        return self._lease >= 0 and time.monotonic() - self._beaten_s > LOST_S

    def check(self) -> None:
        """Raises UnavailableError if another process may have taken over."""
        if self.is_lost or _owner(_read(self.folder / _LEASE)) != self._owner:
            raise UnavailableError(f"{self.folder}: another process has taken over, as this one was away for long")

    def take(self, report: Report, *, is_over: Callable[[], bool], has_lock: bool) -> bool:
        """Waits for the lease. Returns False once `is_over`."""
        lease = self.folder / _LEASE
        seen, seen_s = None, 0.0
        while not is_over():
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                self._lease = os.open(lease, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o644)
                self._beat(0)
                self._beats.start()
                return True
            found = _read(lease)
            if found != seen:
                if seen is None:
                    report(f"another process fills the same folder: waiting for it ({_owner(found)})")
                seen, seen_s = found, time.monotonic()
            # With the lock, a process of the same kernel is gone: it would have it.
            is_dead = has_lock and bool(kernel()) and found.splitlines()[1:2] == [kernel()]
            if is_dead or time.monotonic() - seen_s >= STALE_S:
                self.may_be_written = not is_dead
                # One of those that wait gets it. A process whose lease it was notices.
                with contextlib.suppress(FileNotFoundError):
                    lease.rename(self.folder / f"{_LEASE}-{self.token}")
            else:
                time.sleep(_WAIT_S)
        return False

    def release(self) -> None:
        self._over.set()
        if self._beats.is_alive():
            self._beats.join()
        if self._lease >= 0:
            if _owner(_read(self.folder / _LEASE)) == self._owner:
                (self.folder / _LEASE).unlink(missing_ok=True)
            os.close(self._lease)
            self._lease = -1

    def adopt(self, old: Path, new: Path) -> None:
        """Gives a file of another process a name of this one."""
        if self.may_be_written:
            # That process may have it open.
            shutil.copyfile(old, new, follow_symlinks=False)
            old.unlink()
        else:
            old.rename(new)

    def sweep(self, folder: Path) -> None:
        """Removes what is neither a folder nor a file of one name: it may lead elsewhere."""
        for root, folders, files in os.walk(folder):
            for path in (Path(root, name) for name in [*folders, *files]):
                with contextlib.suppress(FileNotFoundError):
                    found = path.lstat()
                    if not stat.S_ISDIR(found.st_mode) and not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
                        path.unlink()

    def _go_on(self) -> None:
        for number in range(1, 1 << 62):
            if self._over.wait(BEAT_S):
                return
            with contextlib.suppress(OSError):  # is_lost, if it goes on
                self._beat(number)

    def _beat(self, number: int) -> None:
        # In place: the name of another file may be seen late.
        os.pwrite(self._lease, f"{self._owner}\n{kernel()}\n{number:020}\n".encode(), 0)
        os.fsync(self._lease)
        self._beaten_s = time.monotonic()


@contextlib.contextmanager
def claimed(folder: Path, report: Report, *, is_over: Callable[[], bool]) -> Iterator[Staging | None]:
    """Waits until no other process holds the folder. Yields None once `is_over`. Raises OSError."""
    staging = Staging(folder)
    for name in (_LOCK, _LEASE):
        if (folder / name).is_symlink():
            (folder / name).unlink()
    with open(folder / _LOCK, "wb", opener=_not_elsewhere) as lock:
        has_lock = _lock(lock.fileno(), report)
        try:
            if staging.take(report, is_over=is_over, has_lock=has_lock):
                staging.sweep(folder)
                yield staging
            else:
                yield None
        except FileNotFoundError:
            staging.check()  # its files have other names by now
            raise
        finally:
            staging.release()


def _lock(descriptor: int, report: Report) -> bool:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not told:
                report("another process fills the same folder: waiting for it")
            told = True
            time.sleep(_WAIT_S)
        except OSError as error:
            report(f"this file system has no locks ({error.strerror})")
            return False


def _not_elsewhere(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def open_to_append(path: Path) -> BinaryIO:
    """Opens a file that is no link to another one. Raises OSError."""
    return open(path, "ab", opener=_not_elsewhere)


def kernel() -> str:
    """Return what tells the running kernel from all others; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read(lease: Path) -> str:
    try:
        descriptor = os.open(lease, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        return os.read(descriptor, _MAX_LEASE_BYTES).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _owner(lease: str) -> str:
    return lease.partition("\n")[0]
