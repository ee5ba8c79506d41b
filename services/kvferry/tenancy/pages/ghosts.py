"""Reuse counts of evicted pages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class GhostHistory:
    """Keys of evicted pages with their reuses, first in, first out."""

    __slots__ = ("_key_to_reuses",)

    def __init__(self) -> None:
        self._key_to_reuses: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._key_to_reuses)

    def add(self, key: Hashable, reuses: int) -> None:
        self._key_to_reuses[key] = reuses
        self._key_to_reuses.move_to_end(key)

    def reuses_of(self, key: Hashable) -> int | None:
        return self._key_to_reuses.get(key)

    def forget(self, key: Hashable) -> None:
        self._key_to_reuses.pop(key, None)

    def trim(self, max_ghosts: int) -> None:
        while len(self._key_to_reuses) > max_ghosts:
            self._key_to_reuses.popitem(last=False)
