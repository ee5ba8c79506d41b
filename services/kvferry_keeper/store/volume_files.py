"""One writer's file operations in a volume's folder."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from pathlib import Path

from kvferry.errors import TierError
from kvferry_keeper.store import folder, paths
from kvferry_keeper.store.chunk_file import HEADER_BYTES
from kvferry_keeper.store.direct_io import DirectIo, aligned_buffer

Inode = tuple[int, int]  # device and number
NO_INODE: Inode = (0, 0)


class ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.header = aligned_buffer(HEADER_BYTES)
        self._bounce = memoryview(b"")

    def bounce(self, num_bytes: int) -> memoryview:
        """For a sealed payload; the content is undefined."""
        if len(self._bounce) < num_bytes:
            self._bounce = aligned_buffer(num_bytes)
        return self._bounce[:num_bytes]


class VolumeFiles:
    """Thread-safe. Paths are absolute."""

    def __init__(self, path: Path, writer: str, io: DirectIo) -> None:
        self.path = path
        self.root = str(path)
        self.writer = writer
        self.io = io
        io.root = self.root
        self.buffers = ThreadBuffers()
        self.temporary = f"{self.root}/{paths.TEMPORARY}/{writer}"
        self.volume_id = ""  # known once the volume is open
        self.writer_lock = Path(f"{self.temporary}.lock")
        self.last_error = ""  # with path and errno
        self.locks: list[int] = []  # held while the volume is open
        self._temporary_numbers = itertools.count()

    def __repr__(self) -> str:
        return f"<VolumeFiles of {self.writer} at {self.root}>"

    def temporary_path(self) -> str:
        return f"{self.temporary}/{next(self._temporary_numbers):x}.page"

    def remove(self, path: str) -> bool:
        try:
            self.io.unlink(path)
        except OSError as error:
            return self.is_absent(error)
        return True

    def say_alive(self) -> None:
        try:
            os.utime(self.writer_lock)
        except FileNotFoundError:
            self._make_own_folders()
        except OSError:
            pass

    def say_gone(self) -> None:
        """Let tools on other nodes go to work at once."""
        with contextlib.suppress(OSError):
            os.utime(self.writer_lock, (0, 0))

    def record_use(self, path: str, used_ns: int) -> None:
        with contextlib.suppress(OSError), self.io.folder_of(path) as (folder, name):
            modified_ns = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns
            os.utime(name, ns=(used_ns, modified_ns), dir_fd=folder, follow_symlinks=False)

    def is_absent(self, error: OSError) -> bool:
        return error.errno == errno.ENOENT and self.is_mounted()

    def is_mounted(self) -> bool:
        """While the drive is unmounted, chunks only seem gone."""
        if not self.writer_lock.exists():
            self._make_own_folders()
        return self.writer_lock.exists()

    def inode_at(self, path: str) -> Inode | None:
        """Return NO_INODE without a file, None if undetermined."""
        try:
            status = os.lstat(path)
        except OSError as error:
            if self.is_absent(error):
                return NO_INODE
            self.last_error = str(error)
            return None
        return (status.st_dev, status.st_ino)

    def spare_descriptor(self) -> int:
        """Return a descriptor to be closed before another one is needed. Raises OSError without a free one."""
        return os.dup(self.locks[0])

    def rename(self, source: str, target: str) -> None:
        """Make the target's folder, which others may remove while empty."""
        for _ in range(3):
            try:
                return self.io.rename(source, target)
            except FileNotFoundError:
                self._make_folder_of(target)
        return self.io.rename(source, target)

    def write(self, path: str, parts: list[memoryview], num_bytes: int, *, is_recycled: bool) -> None:
        if is_recycled and os.lstat(path).st_nlink > 1:
            # Other names of the file, of a backup perhaps, keep its bytes.
            self.io.unlink(path)
            is_recycled = False
        flags = os.O_WRONLY if is_recycled else os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            fd = self.io.open(path, flags)
        except FileNotFoundError:
            self._make_own_folders()
            fd = self.io.open(path, flags)
        try:
            if is_recycled and os.fstat(fd).st_size != num_bytes:
                os.ftruncate(fd, num_bytes)
            self.io.write(fd, parts)
        finally:
            os.close(fd)

    def truncate(self, path: str, num_bytes: int) -> int:
        status = os.lstat(path)
        if status.st_size <= num_bytes or not stat.S_ISREG(status.st_mode):
            return status.st_size
        fd = self.io.open(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, num_bytes)
        finally:
            os.close(fd)
        return num_bytes

    def _make_folder_of(self, path: str) -> None:
        *folders, _ = path.removeprefix(f"{self.root}/").split("/")
        folder.unlink_link(Path(self.root, *folders[:2]))
        if not Path(self.root, *folders[:2]).exists():
            self._make_own_folders()
        for depth in range(3, len(folders) + 1):
            made = Path(self.root, *folders[:depth])
            folder.unlink_link(made)
            with contextlib.suppress(FileExistsError):
                made.mkdir(0o700)

    def _make_own_folders(self) -> None:
        # They exist since `open`. Where locks are kept on one node only, another node may have removed them meanwhile.
        # They are missing too if the volume is unmounted; making them then would fill the drive below the mount point.
        with contextlib.suppress(OSError, TierError):
            if not self.locks or folder.read_description(self.path).volume_id != self.volume_id:
                return
            for name in paths.OF_WRITERS:
                Path(self.root, name, self.writer).mkdir(0o700, exist_ok=True)
            if not self.writer_lock.exists() and (held := folder.lock(self.writer_lock, shared=False)) is not None:
                self.locks.append(held)
                folder.note_holder(held)
