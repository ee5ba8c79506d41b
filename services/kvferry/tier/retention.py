"""Which page goes next. Pure: the time is passed in, and whoever asks does what is answered."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvferry.tier.layout import LayoutDigest, Namespace, PageId


class KeptPage(Protocol):
    """A page that takes room; told apart from others by identity."""

    @property
    def layout(self) -> LayoutDigest: ...

    @property
    def page(self) -> PageId: ...

    @property
    def num_bytes(self) -> int:
        """Its whole file."""
        ...


class Retention(Protocol):
    """The order of eviction. Not thread-safe: a volume asks under its own lock. `now_s` never goes back."""

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        """Whether a page of this size may be kept at all; otherwise the write is refused."""
        ...

    def add(self, page: KeptPage, now_s: float) -> None:
        """It is kept from now on, as the most recently used."""
        ...

    def touch(self, page: KeptPage, now_s: float) -> None:
        """It was used. Nothing where it is not kept."""
        ...

    def discard(self, page: KeptPage) -> None:
        """It is not kept any more. May be repeated."""
        ...

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[KeptPage]:
        """Pages that may go to make room for one of `namespace`, first to last. Nothing is called while it is read."""
        ...


class Lru:
    """The least recently used page goes first, whoever it belongs to."""

    def __init__(self) -> None:
        self._pages: OrderedDict[KeptPage, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Lru of {len(self._pages)} pages>"

    def __len__(self) -> int:
        return len(self._pages)

    def admits(self, namespace: Namespace, num_bytes: int, now_s: float) -> bool:
        return True

    def add(self, page: KeptPage, now_s: float) -> None:
        self._pages[page] = None
        self._pages.move_to_end(page)

    def touch(self, page: KeptPage, now_s: float) -> None:
        if page in self._pages:
            self._pages.move_to_end(page)

    def discard(self, page: KeptPage) -> None:
        self._pages.pop(page, None)

    def victims(self, namespace: Namespace, now_s: float) -> Iterator[KeptPage]:
        return iter(self._pages)
