"""File I/O past the page cache, and a fault-injecting double."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvferry.keeper.layout import ALIGNMENT

log = logging.getLogger(__name__)

_DESCRIPTORS = "/proc/self/fd/%d"
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_NOATIME = getattr(os, "O_NOATIME", 0)


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return zeroed, page-aligned memory for O_DIRECT."""
    return memoryview(mmap.mmap(-1, num_bytes))


class DirectIo:
    """Thread-safe. Paths are absolute. Raises the kernel's OSError.

    Below the folders in `root`, where it is set, no operation goes through a symbolic link, which would lead out of a
    volume. Links in place of folders are removed, and what is asked for is absent then.
    """

    def __init__(self) -> None:
        self.is_direct = False
        self.root = ""
        self._real: dict[str, str] = {}  # folders in `root`, which may be links, and where they lead

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'direct' if self.is_direct else 'buffered'}>"

    def probe(self, folder: Path) -> bool:
        """Return whether O_DIRECT works below `folder`; if not, use the page cache from now on."""
        file = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
        self.is_direct = bool(_O_DIRECT)
        try:
            self._try_one_sector(str(file))
        except OSError as error:
            # Overlays, some network mounts and older tmpfs refuse O_DIRECT.
            if not self.is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self.is_direct = False
            self._try_one_sector(str(file))
        return self.is_direct

    def open(self, path: str, flags: int) -> int:
        """Direct if possible, closed at exec, following no symbolic link, and waiting for no end of a named pipe."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (_O_DIRECT if self.is_direct else 0)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            # Access times are the order of evictions: only `VolumeFiles.record_use` sets them.
            with contextlib.suppress(PermissionError), self.folder_of(path) as (folder, name):  # of another owner
                return os.open(name, flags | _O_NOATIME, dir_fd=folder)
        with self.folder_of(path) as (folder, name):
            return os.open(name, flags, 0o600, dir_fd=folder)

    @contextlib.contextmanager
    def folder_of(self, path: str) -> Iterator[tuple[int | None, str]]:
        """Yield a descriptor of a file's folder, for `dir_fd`, and the file's name there."""
        if not path.startswith(f"{self.root}/") or not self.root:
            yield None, path
            return
        folder, _, name = path.rpartition("/")
        fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._require_below(fd, folder)
            yield fd, name
        finally:
            os.close(fd)

    def _require_below(self, fd: int, folder: str) -> None:
        # One call, where a descriptor of each folder on the way would be two for each.
        real = os.readlink(_DESCRIPTORS % fd)  # noqa: PTH115
        first, *names = folder[len(self.root) + 1 :].split("/")
        where = f"{self.root}/{first}"
        below = folder[len(where) :]
        if real == self._real.get(where, "") + below:
            return
        self._real[where] = os.path.realpath(where)
        if real == self._real[where] + below:
            return
        for name in names:
            where = f"{where}/{name}"
            if os.path.islink(where):  # noqa: PTH114
                log.warning("%s is a symbolic link in place of a folder, and is removed", where)
                os.unlink(where)  # noqa: PTH108
                break
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def rename(self, source: str, target: str) -> None:
        with self.folder_of(source) as (folder, name), self.folder_of(target) as (target_folder, target_name):
            os.rename(name, target_name, src_dir_fd=folder, dst_dir_fd=target_folder)

    def unlink(self, path: str) -> None:
        with self.folder_of(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def read(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Read from the file's start. Return the number of bytes."""
        return self._move(self.preadv, fd, buffers)

    def write(self, fd: int, buffers: Sequence[memoryview]) -> int:
        """Write to the file's start. Raises OSError (EIO) for a short write."""
        num_bytes = self._move(self.pwritev, fd, buffers)
        if num_bytes != sum(map(len, buffers)):
            raise OSError(errno.EIO, f"wrote {num_bytes} bytes and no more")
        return num_bytes

    def _move(
        self, move: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview]
    ) -> int:
        left = list(buffers)
        offset = 0
        while left:
            try:
                moved = move(fd, left, offset)
            except OSError as error:
                # Unaligned memory, or the rest after a short transfer: go on without O_DIRECT.
                if error.errno != errno.EINVAL or not _leave_direct(fd):
                    raise
                continue
            if moved == 0:
                break
            offset += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]
        return offset

    def _try_one_sector(self, path: str) -> None:
        sector = aligned_buffer(ALIGNMENT)
        fd = self.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.pwrite(fd, sector, 0)
            os.preadv(fd, [sector], 0)
        finally:
            os.close(fd)
            Path(path).unlink()


def _leave_direct(fd: int) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & _O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_O_DIRECT)
    return True


class Operation(StrEnum):
    OPEN = "open"
    READ = "read"
    WRITE = "write"
    RENAME = "rename"
    UNLINK = "unlink"


@dataclass(frozen=True, slots=True)
class Fault:
    """Wait for `until`, move at most `num_bytes`, raise `error` (an errno)."""

    error: int | None = None
    num_bytes: int | None = None
    until: threading.Event | None = None


Choose = Callable[[Operation, str], Fault | None]


class FaultyIo(DirectIo):
    """Real I/O with the faults of `choose(operation, path)`, on any thread.

    `num_bytes` and `error` make a torn write. RENAME has its source's path.
    """

    def __init__(self, choose: Choose) -> None:
        super().__init__()
        self.choose = choose
        # A closed descriptor's number is reused by a later open, which replaces its path here.
        self._fd_to_path: dict[int, str] = {}

    def open(self, path: str, flags: int) -> int:
        self._inject(Operation.OPEN, path)
        fd = super().open(path, flags)
        self._fd_to_path[fd] = path
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._cut(Operation.READ, super().preadv, fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._cut(Operation.WRITE, super().pwritev, fd, buffers, offset)

    def rename(self, source: str, target: str) -> None:
        self._inject(Operation.RENAME, source)
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._inject(Operation.UNLINK, path)
        super().unlink(path)

    def _inject(self, operation: Operation, path: str) -> Fault | None:
        fault = self.choose(operation, path)
        if fault is not None:
            if fault.until is not None:
                fault.until.wait()
            if fault.error is not None and not fault.num_bytes:
                raise OSError(fault.error, os.strerror(fault.error), path)
        return fault

    def _cut(
        self,
        operation: Operation,
        move: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        buffers: Sequence[memoryview],
        offset: int,
    ) -> int:
        path = self._fd_to_path.get(fd, "")
        fault = self._inject(operation, path)
        if fault is None or fault.num_bytes is None:
            return move(fd, buffers, offset)
        cut: list[memoryview] = []
        left = fault.num_bytes
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= len(cut[-1])
            if not left:
                break
        moved = move(fd, cut, offset) if fault.num_bytes else 0
        if fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error), path)
        return moved
