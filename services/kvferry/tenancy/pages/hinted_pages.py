"""The pages of one tenant for which clients gave hints, in all tiers."""

# A hint decides which of its tenant's pages is evicted, and not when the tenant loses one: when a wanted page would be
# next, another page is evicted instead, and the wanted one gets that page's place in the order.

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from kvferry.tenancy.keyed_heap import KeyedHeap
from kvferry.tenancy.pages.page import MAX_COUNTED_REUSES, MAX_REUSES

T = TypeVar("T")

Key = tuple[float, int]  # a time, and a number that makes keys unique

NEVER: Final = float("inf")


class Place(NamedTuple):
    used_s: float
    level: int  # number of reuses, at most MAX_REUSES


class Spot(NamedTuple, Generic[T]):
    heap: KeyedHeap[T]
    key: Key


class _Want:
    __slots__ = ("is_used_since", "last_use", "number", "place", "size", "until_s")

    def __init__(self, size: int, until_s: float) -> None:
        self.size = size
        self.until_s = until_s
        self.is_used_since = False  # by a request without a hint
        self.last_use = self.place = Place(0.0, 0)
        self.number = 0


class HintedPages(Generic[T]):
    """Wanted pages, those of ended sessions, and those that were wanted."""

    __slots__ = (
        "_deadlines",
        "_ended",
        "_ending",
        "_lapsed",
        "_last_number",
        "_places",
        "_ttl_s",
        "_wants",
        "num_free",
        "num_units",
    )

    def __init__(self, ttl_s: float | None = None) -> None:
        self._ttl_s = NEVER if ttl_s is None else ttl_s
        self.num_units = 0  # that are wanted, in use or not
        self.num_free = 0  # those of them that are not in use
        self._wants: dict[T, _Want] = {}
        self._ending: set[T] = set()  # pages in use that go first afterwards
        self._deadlines: KeyedHeap[T] = KeyedHeap()
        self._places = tuple(KeyedHeap[T]() for _ in range(MAX_REUSES + 1))  # of wanted pages, by last use
        self._lapsed = tuple(KeyedHeap[T]() for _ in range(MAX_REUSES + 1))
        self._ended: KeyedHeap[T] = KeyedHeap()
        self._last_number = 0

    @property
    def is_empty(self) -> bool:
        return not (self._wants or self._ending or self._ended or any(map(len, self._lapsed)))

    # Hints

    def has_room(self, size: int, most: int) -> bool:
        return self.num_units + size <= most

    def want(self, page: T, size: int, until_s: float, most: int) -> bool:
        """Note the longest hint, for a page in use or a wanted one; return False beyond `most` units."""
        want = self._wants.get(page)
        if want is None:
            if not self.has_room(size, most):
                return False
            self._wants[page] = want = _Want(size, until_s)
            self.num_units += size
        elif want.until_s >= until_s and not want.is_used_since:
            return True  # as for each choice of a prompt
        want.until_s = max(want.until_s, until_s)
        want.is_used_since = False
        self._ending.discard(page)
        if page in self._deadlines:
            self._deadlines.put(page, (want.until_s, want.number))
        return True

    def end(self, page: T) -> None:
        """Let a page in use go first afterwards, unless it is wanted."""
        if page not in self._wants:
            self._ending.add(page)

    def use(self, page: T) -> None:
        # Without a hint, of a page in use.
        self._ending.discard(page)
        if (want := self._wants.get(page)) is not None:
            want.is_used_since = True

    def forget(self, page: T) -> None:
        """Forget the hints of a page that is not linked. Idempotent."""
        self._ending.discard(page)
        if (want := self._wants.pop(page, None)) is not None:
            self.num_units -= want.size

    # Which pages are linked

    def link(self, page: T, last_use: Place, ttl_s: float | None) -> bool:
        """Take a page that is in use no more, or return False for one without hints."""
        want = self._wants.get(page)
        if want is not None:
            want.until_s = min(want.until_s, last_use.used_s + (NEVER if ttl_s is None else ttl_s))
            if want.until_s > last_use.used_s:
                want.last_use = want.place = last_use
                self._link_wanted(page, want)
                return True
            self.forget(page)
        if page in self._ending:
            self._ending.remove(page)
            self._ended.put(page, (last_use.used_s, self._next_number()))
            return True
        return False

    def unlink(self, page: T) -> Spot[T] | None:
        """Return where the page was, or None for one that was not linked."""
        if (want := self._wants.get(page)) is not None:
            if page not in self._deadlines:
                return None
            self._deadlines.remove(page)
            heap = self._places[want.place.level]
            heap.remove(page)
            self.num_free -= want.size
            return Spot(heap, (want.place.used_s, want.number))
        for heap in (self._ended, *self._lapsed):
            if (key := heap.key_of(page)) is not None:
                heap.remove(page)
                if heap is self._ended:
                    self._ending.add(page)  # it is not a use to be in use
                return Spot(heap, key)
        return None

    def put_back(self, page: T, spot: Spot[T]) -> None:
        self._ending.discard(page)
        spot.heap.put(page, spot.key)
        if (want := self._wants.get(page)) is not None:
            self._deadlines.put(page, (want.until_s, want.number))
            self.num_free += want.size

    def move(self, page: T, place: Place) -> Place:
        """Give a wanted page another place; return its old one."""
        want = self._wants[page]
        old, want.place = want.place, place
        self._places[old.level].remove(page)
        self._places[place.level].put(page, (place.used_s, want.number))
        return old

    def place_of(self, page: T) -> Place | None:
        want = self._wants.get(page)
        return None if want is None else want.place

    def used_s(self, page: T) -> float:
        # For a linked page that no hint wants.
        return next(float(key[0]) for heap in (self._ended, *self._lapsed) if (key := heap.key_of(page)) is not None)

    def shorten(self, ttl_s: float | None) -> None:
        before, self._ttl_s = self._ttl_s, NEVER if ttl_s is None else ttl_s
        for page in list(self._deadlines) if self._ttl_s < before else ():
            want = self._wants[page]
            want.until_s = min(want.until_s, want.last_use.used_s + self._ttl_s)
            self._deadlines.put(page, (want.until_s, want.number))

    # Deadlines

    @property
    def due_s(self) -> float:
        first = self._deadlines.first
        return NEVER if first is None else float(first[0][0])

    def end_due(self, now_s: float, max_pages: int) -> int:
        """Return the number of hints that ended."""
        for num_ended in range(max_pages):
            first = self._deadlines.first
            if first is None or first[0][0] > now_s:
                return num_ended
            page = first[1]
            want = self._wants[page]
            self.unlink(page)
            self.forget(page)
            heap = self._lapsed[want.last_use.level] if want.is_used_since else self._ended
            heap.put(page, (want.last_use.used_s, want.number))
        return max_pages

    # Which page goes

    def ended(self) -> tuple[float, T] | None:
        first = self._ended.first
        return None if first is None else (first[0][0], first[1])

    def oldest(self) -> tuple[float, T] | None:
        """Return the least recently used unwanted page."""
        firsts = [heap.first for heap in (self._ended, *self._lapsed)]
        found = min((first[0] for first in firsts if first is not None), default=None)
        return next(((first[0][0], first[1]) for first in firsts if first is not None and first[0] == found), None)

    def choose(self, found: tuple[float, T] | None, bonus_s: float) -> tuple[float, T, T | None] | None:
        """Return the lowest score, the page that goes, and the wanted page whose place it is.

        `found` is the lowest among the tenant's other pages.
        """
        lapsed, due = _lowest(self._lapsed, bonus_s), _lowest(self._places, bonus_s)
        if lapsed is not None and (found is None or lapsed[0] < found[0]):
            found = lapsed
        if due is None:
            return None if found is None else (*found, None)
        score, wanted = due
        if found is not None:
            return (*found, None) if found[0] <= score else (score, found[1], wanted)
        first = self._deadlines.first
        assert first is not None, "a wanted page without a deadline"
        return score, first[1], None if first[1] == wanted else wanted

    def used_before(self, used_s: float, max_pages: int) -> list[T]:
        """Return unwanted pages, those of a heap in the order of their last use."""
        found: list[T] = []
        for heap in (self._ended, *self._lapsed):
            spots: list[tuple[T, tuple[float, int]]] = []
            while len(found) < max_pages and (first := heap.first) is not None and first[0][0] <= used_s:
                spots.append((first[1], first[0]))
                found.append(first[1])
                heap.remove(first[1])
            for page, key in spots:
                heap.put(page, key)
        return found

    def linked(self) -> list[T]:
        return [page for heap in (self._deadlines, self._ended, *self._lapsed) for page in heap]

    def _link_wanted(self, page: T, want: _Want) -> None:
        want.number = self._next_number()
        self._deadlines.put(page, (want.until_s, want.number))
        self._places[want.place.level].put(page, (want.place.used_s, want.number))
        self.num_free += want.size

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def check(self) -> None:
        for heap in (self._deadlines, self._ended, *self._lapsed, *self._places):
            heap.check()
        placed = [page for heap in self._places for page in heap]
        assert sorted(map(id, placed)) == sorted(map(id, self._deadlines)), "places and deadlines"
        assert self.num_units == sum(want.size for want in self._wants.values()), "wanted units"
        assert self.num_free == sum(self._wants[page].size for page in placed), "wanted units that are not in use"
        assert not self._ending & self._wants.keys(), "a wanted page of an ended session"
        linked = self.linked()
        assert len(set(linked)) == len(linked), "a page in two lists"
        assert not self._ending.intersection(linked), "a page in use in a list"


def first_private(reuses: Sequence[int]) -> int:
    """Return the index of the first page that only one conversation used; `reuses` are in a prompt's order."""
    # Each turn of a conversation uses all pages before it, so that counts fall by one where a turn ends. Where they
    # fall by more, conversations part, and share what is before.
    for index in range(len(reuses) - 1, -1, -1):
        following = reuses[index + 1] if index + 1 < len(reuses) else 0
        if reuses[index] >= min(following + 2, MAX_COUNTED_REUSES):
            return index + 1
    return 0


def _lowest(heaps: Sequence[KeyedHeap[T]], bonus_s: float) -> tuple[float, T] | None:
    best: tuple[float, T] | None = None
    for level, heap in enumerate(heaps):
        if (first := heap.first) is not None:
            score = first[0][0] + bonus_s * (level + 1)
            if best is None or score < best[0]:
                best = score, first[1]
    return best
