"""How reading or writing a chunk ended."""

from __future__ import annotations

import enum


class Outcome(enum.StrEnum):
    """Every one is the label of a metric. Whatever is not OK is a miss, never an error of a request."""

    OK = "ok"
    MISSING = "missing"  # not in the index
    GONE = "gone"  # recycled or removed under us by another process: harmless
    CORRUPT_HEADER = "corrupt_header"
    CORRUPT_PAYLOAD = "corrupt_payload"
    WRONG_KEY = "wrong_key"  # a whole chunk, of another key
    WRONG_LAYOUT = "wrong_layout"
    WRONG_NAMESPACE = "wrong_namespace"  # of another tenant or epoch, in the file or in the question
    TRUNCATED = "truncated"  # a file of the wrong size, longer ones too
    UNDECRYPTABLE = "undecryptable"  # sealed with another key, with one we lack, or not sealed where it must be
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    REFUSED = "refused"  # by the write budget, the retention policy, or a capacity below one chunk
    EXISTS = "exists"  # kept already, or being written by another thread: nothing was written
