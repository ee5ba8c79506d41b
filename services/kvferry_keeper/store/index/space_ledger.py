"""Accounts of a writer's capacity: the state of every byte."""

from __future__ import annotations

from typing import NamedTuple

# The quarantine may hold this fraction (1/16) of the capacity: a failing drive must not fill itself with bad files.
QUARANTINE_DIVISOR = 16


class File(NamedTuple):
    """`num_bytes` is 0 for the files of other writers."""

    path: str
    num_bytes: int


class SpaceLedger:
    """A writer's bytes by state. Not thread-safe.

    The sum is at least the bytes on the drive, and at most the capacity.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.stored_bytes = 0  # chunks in the index
        self.bytes_in_transit = 0  # files being written, moved or removed by one thread
        self._quarantined: dict[str, int] = {}  # chunks that failed verification, oldest first
        self._quarantined_bytes = 0
        self._abandoned: dict[str, int] = {}  # files that could not be removed yet
        self._abandoned_bytes = 0
        # An abandoned file may have the path of a chunk that another thread wants to write.
        self._abandoned_in_transit: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"<SpaceLedger {self.stored_bytes} bytes stored, {self._quarantined_bytes} quarantined, "
            f"{self._abandoned_bytes} abandoned, {self.bytes_in_transit} in transit, of {self.capacity_bytes}>"
        )

    @property
    def bytes_used(self) -> int:
        return self.stored_bytes + self._quarantined_bytes + self._abandoned_bytes + self.bytes_in_transit

    @property
    def quarantined(self) -> list[File]:
        return [File(path, num_bytes) for path, num_bytes in self._quarantined.items()]

    @property
    def abandoned(self) -> list[File]:
        return [File(path, num_bytes) for path, num_bytes in self._abandoned.items()]

    def abandoned_at(self, path: str) -> File | None:
        num_bytes = self._abandoned.get(path)
        return None if num_bytes is None else File(path, num_bytes)

    def is_removing_abandoned(self, path: str) -> bool:
        return path in self._abandoned_in_transit

    def add_quarantined(self, file: File) -> None:
        """Replaces an older file of the same path."""
        self._quarantined_bytes += file.num_bytes - self._quarantined.pop(file.path, 0)
        self._quarantined[file.path] = file.num_bytes

    def forget_quarantined(self, file: File) -> None:
        self._quarantined_bytes -= self._quarantined.pop(file.path, 0)

    def withdraw(self, file: File) -> None:
        """The caller counts the file's bytes from now on."""
        if file.path in self._abandoned:
            self._abandoned_bytes -= self._abandoned.pop(file.path)
            self._abandoned_in_transit.add(file.path)
        self._quarantined_bytes -= self._quarantined.pop(file.path, 0)

    def begin_transit(self, file: File) -> File:
        self.withdraw(file)
        self.bytes_in_transit += file.num_bytes
        return file

    def end_transit(self, file: File, *, is_removed: bool) -> None:
        """A file that was not removed is abandoned."""
        self.bytes_in_transit -= file.num_bytes
        self._abandoned_in_transit.discard(file.path)
        if not is_removed and file.num_bytes:
            self._abandoned_bytes += file.num_bytes - self._abandoned.pop(file.path, 0)
            self._abandoned[file.path] = file.num_bytes

    def withdraw_quarantine_excess(self, newest: str) -> list[File]:
        excess: list[File] = []
        left = self._quarantined_bytes
        for path, num_bytes in self._quarantined.items():
            if path == newest or left * QUARANTINE_DIVISOR <= self.capacity_bytes:
                break
            excess.append(File(path, num_bytes))
            left -= num_bytes
        return [self.begin_transit(file) for file in excess]

    def check(self) -> dict[str, int]:
        """Raise AssertionError for a broken invariant while idle. Return path -> size."""
        assert not self._abandoned_in_transit, f"abandoned files in transit: {self._abandoned_in_transit}"
        assert not self.bytes_in_transit, f"{self.bytes_in_transit} bytes in transit"
        assert self._abandoned_bytes == sum(self._abandoned.values()), "bytes of abandoned files"
        assert self._quarantined_bytes == sum(self._quarantined.values()), "bytes of quarantined files"
        assert self.bytes_used <= self.capacity_bytes, f"{self.bytes_used} bytes are over the capacity"
        assert not self._abandoned.keys() & self._quarantined.keys(), "a file in two states"
        return self._abandoned | self._quarantined
