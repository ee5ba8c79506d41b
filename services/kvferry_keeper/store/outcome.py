"""Outcomes of reading and writing a chunk."""

from __future__ import annotations

import enum
import errno


class Outcome(enum.StrEnum):
    """Metric labels. A failed read is a cache miss, never a request's error."""

    OK = "ok"
    MISSING = "missing"  # not in the index
    GONE = "gone"  # recycled or removed by another process meanwhile: harmless
    CORRUPT_HEADER = "corrupt_header"
    CORRUPT_PAYLOAD = "corrupt_payload"
    WRONG_KEY = "wrong_key"  # a valid chunk, of another key
    WRONG_LAYOUT = "wrong_layout"
    WRONG_NAMESPACE = "wrong_namespace"  # of another tenant or epoch, in the file or in the request
    TRUNCATED = "truncated"  # a file of the wrong size, too long included
    UNDECRYPTABLE = "undecryptable"  # sealed with another or an unknown key, or not sealed where it must be
    UNREADABLE = "unreadable"  # this file alone: of another owner, a socket, a folder
    IO_ERROR = "io_error"  # the drive's or the file system's
    NO_RESOURCES = "no_resources"  # this process, or its machine, has no descriptor or memory for it
    NO_SPACE = "no_space"
    REFUSED = "refused"  # by the eviction policy, a capacity below one chunk, or for lack of a key
    EXISTS = "exists"  # in the volume already, or being written by another thread


# Errors of opening one file; they say nothing about the drive.
_OF_ONE_FILE = frozenset({errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENOTDIR, errno.EISDIR, errno.EINVAL})
_OUTCOMES = {
    errno.ENOENT: Outcome.GONE,
    errno.ESTALE: Outcome.GONE,  # on NFS: removed by another node
    errno.ENOSPC: Outcome.NO_SPACE,
    errno.EDQUOT: Outcome.NO_SPACE,
    errno.EMFILE: Outcome.NO_RESOURCES,
    errno.ENFILE: Outcome.NO_RESOURCES,
    errno.ENOMEM: Outcome.NO_RESOURCES,
}


def outcome_of(error: OSError) -> Outcome:
    """Return the outcome of an operation that failed. Only IO_ERROR tells against the drive."""
    return _OUTCOMES.get(error.errno or 0, Outcome.IO_ERROR)


def outcome_of_open(error: OSError) -> Outcome:
    """Return the outcome of a file that cannot be opened for reading."""
    return Outcome.UNREADABLE if error.errno in _OF_ONE_FILE else outcome_of(error)
