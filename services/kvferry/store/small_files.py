"""Reads small files of a folder that others may write to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_small(file: Path, max_bytes: int) -> bytes:
    """Raises OSError for a file that is larger, or none: a named pipe would keep its reader waiting for ever."""
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as opened:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        content = opened.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"over {max_bytes} bytes", str(file))
    return content
