"""Files that others may write, replace, or replace by something else, while a process runs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple


class FileSignature(NamedTuple):
    inode: int
    changed_ns: int  # its bytes, mode, owner or name
    size_bytes: int


def file_signature(file: Path) -> FileSignature | None:
    """Return a value that differs after the file was written, replaced or made readable; None for an absent file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return FileSignature(status.st_ino, status.st_ctime_ns, status.st_size)


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a file to read. Raises OSError, also for a named pipe or a device, which may have no end."""
    # Not blocking: opening a named pipe would wait for its writer.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(file))
        yield opened


def read_small(file: Path, max_bytes: int) -> bytes:
    """Raises OSError for a file that is larger, or none: a named pipe would keep its reader waiting for ever."""
    with open_regular(file) as opened:
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", str(file))
    return content
