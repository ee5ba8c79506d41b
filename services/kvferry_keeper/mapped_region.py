"""An engine's region in the keeper's memory."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Callable

from kvferry.keeper.layout import ALIGNMENT

log = logging.getLogger(__name__)

# A larger region can only be a mistake.
_MAX_BYTES = 1 << 46

_F_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_F_SEAL_SHRINK = getattr(fcntl, "F_SEAL_SHRINK", 0x0002)


class MappedRegion:
    """`num_rows` rows of `row_bytes`, from a shared-memory file's start.

    Readers and writers hold the region. `row` is for any thread meanwhile, other methods for one.
    """

    def __init__(self, fd: int, num_rows: int, row_bytes: int) -> None:
        """Owns `fd`, even on failure. Raises ValueError for a file without such rows, OSError."""
        self._fd = fd
        self._memory: mmap.mmap | None = None
        self.num_rows = num_rows
        self.row_bytes = row_bytes
        self._num_users = 0
        self._closing = False
        self.on_unmapped: Callable[[], None] = lambda: None
        try:
            if num_rows < 1 or row_bytes < ALIGNMENT or row_bytes % ALIGNMENT or self.num_bytes > _MAX_BYTES:
                raise ValueError(f"{num_rows} rows of {row_bytes} bytes are no region")
            if not self.is_whole():
                raise ValueError(f"a file of {os.fstat(fd).st_size} bytes for {num_rows} rows of {row_bytes}")
            # If the file is truncated, an access to the lost memory kills this process. A seal prevents that, but files
            # of /dev/shm cannot be sealed, so callers also use `is_whole` before each access.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
            self._memory = mmap.mmap(fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise

    def __repr__(self) -> str:
        state = "unmapped" if self._memory is None else f"{self._num_users} users"
        return f"<MappedRegion of {self.num_rows} rows of {self.row_bytes} bytes, {state}>"

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def address(self) -> int:
        """Address of row 0 in this process."""
        assert self._memory is not None
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def is_whole(self) -> bool:
        return os.fstat(self._fd).st_size >= self.num_bytes

    def has(self, row: int) -> bool:
        return 0 <= row < self.num_rows

    def row(self, row: int) -> memoryview:
        """Return a writable, page-aligned view; release it before the region. Raises ValueError."""
        if not self.has(row):
            raise ValueError(f"row {row} of a region of {self.num_rows} rows")
        assert self._memory is not None
        start = row * self.row_bytes
        with memoryview(self._memory) as whole:
            return whole[start : start + self.row_bytes]

    @property
    def is_mapped(self) -> bool:
        return self._memory is not None

    def hold(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        self._unmap_unused()

    def close(self) -> None:
        """Unmap after the last release, and then call `on_unmapped`. Idempotent."""
        self._closing = True
        self._unmap_unused()

    def _unmap_unused(self) -> None:
        if not self._closing or self._num_users or self._memory is None:
            return
        memory, self._memory = self._memory, None
        try:
            memory.close()
        except BufferError:
            # The memory is unmapped with the last view.
            log.warning("a region is unmapped late: a view of it is still referenced")
        os.close(self._fd)
        self.on_unmapped()
