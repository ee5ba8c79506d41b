"""Opening files that others may have replaced by something else."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a file to read. Raises OSError, also for a named pipe or a device, which may have no end."""
    # Not blocking: opening a named pipe would wait for its writer.
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as opened:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(file))
        yield opened
