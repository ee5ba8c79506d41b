"""Allocator of the memory lent to other keepers. Pure."""

from __future__ import annotations

from bisect import insort

from kvferry.keeper.layout import ALIGNMENT


class Staging:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free: list[tuple[int, int]] = [(0, num_bytes)]  # (start, length), by start, never adjacent
        self._allocated: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Staging {self.num_free} of {self.num_bytes} bytes free, {len(self._allocated)} pieces allocated>"

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    def allocate(self, num_bytes: int) -> int | None:
        """Return the start of a piece, or None if none is large enough."""
        length = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                if free == length:
                    del self._free[i]
                else:
                    self._free[i] = (start + length, free - length)
                self._allocated[start] = length
                return start
        return None

    def free(self, start: int) -> None:
        """Raises KeyError for a start that was not allocated."""
        length = self._allocated.pop(start)
        insort(self._free, (start, length))
        i = self._free.index((start, length))
        for left in (i, i - 1):
            if 0 <= left < len(self._free) - 1 and sum(self._free[left]) == self._free[left + 1][0]:
                self._free[left : left + 2] = [(self._free[left][0], self._free[left][1] + self._free[left + 1][1])]

    def check(self) -> None:
        pieces = sorted([*self._free, *self._allocated.items()])
        end = 0
        for start, length in pieces:
            assert start == end, f"{start} follows {end}"
            assert length > 0
            end = start + length
        assert end == self.num_bytes
        for (start, length), (following, _) in zip(self._free, self._free[1:], strict=False):
            assert start + length < following, "adjacent free pieces"
