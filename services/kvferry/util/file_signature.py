"""Signatures of files that may be replaced while a process runs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


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
