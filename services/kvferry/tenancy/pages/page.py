"""Pages of a tier, lists of them, and reuse counts of evicted ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

MAX_REUSES = 4  # that count in the order of pages
MAX_COUNTED_REUSES = 255


class Page:
    """A tier's handle of a page or chunk; only the policy writes its fields."""

    __slots__ = (
        "home", "is_resident", "key", "next", "num_pins", "previous", "reuses", "size", "tenant", "used_s",
    )  # fmt: skip

    def __init__(self, tenant: str, key: Hashable, size: int, used_s: float, reuses: int = 0) -> None:
        self.tenant = tenant
        self.key = key
        self.size = size
        self.used_s = used_s
        self.reuses = reuses
        self.num_pins = 0
        self.is_resident = True
        self.home: object = None  # the list or the hinted pages that have it; None while pinned
        self.previous = self.next = self

    @property
    def level(self) -> int:
        return min(self.reuses, MAX_REUSES)

    def __repr__(self) -> str:
        return f"<Page {self.key!r} of {self.tenant}, used at {self.used_s:g}, {self.reuses} reuses>"


class PageList:
    """Pages by last use; the links are in the pages."""

    __slots__ = ("_end",)

    def __init__(self) -> None:
        self._end = Page("", None, 0, 0.0, 0)

    def __iter__(self) -> Iterator[Page]:
        page = self._end.next
        while page is not self._end:
            yield page
            page = page.next

    @property
    def oldest(self) -> Page | None:
        page = self._end.next
        return None if page is self._end else page

    def append(self, page: Page) -> None:
        self._insert(page, self._end.previous, self._end)

    def put_back(self, page: Page) -> None:
        """Insert as the oldest."""
        self._insert(page, self._end, self._end.next)

    def remove(self, page: Page) -> None:
        page.previous.next, page.next.previous = page.next, page.previous
        page.previous = page.next = self._end  # no cycle: an evicted page is freed with its last reference

    def _insert(self, page: Page, previous: Page, following: Page) -> None:
        page.previous, page.next = previous, following
        previous.next = following.previous = page


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
