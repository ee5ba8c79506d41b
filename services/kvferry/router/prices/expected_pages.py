"""Pages that requests in flight will leave on workers. Pure.

Same-prefix requests wait for them instead of recomputing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId

# In-flight pages are noted at every 4th page and at the last one: a quarter of the work, and a request with the same
# prefix is credited with up to 3 pages less than it will find.
_NOTE_EVERY = 4

# Route key -> number of requests whose pages will be there.
PageCounts = dict[int, int]


@dataclass(frozen=True, slots=True)
class WorkerPages:
    computed: PageCounts = field(default_factory=dict)  # there once the prompts before a new one are computed
    arriving: PageCounts = field(default_factory=dict)  # there once KV transfers from other workers are done


class _Note(NamedTuple):
    counts: PageCounts
    keys: list[int]


@dataclass(slots=True)
class _Notes:
    """Notes of one request; None once its pages are computed or have arrived."""

    computing: _Note | None
    arriving: _Note | None  # None too when the decode worker computes the prompt
    is_disaggregated: bool
    decode: PageCounts


class ExpectedPages:
    """Pages are expected until their request fails or the index should know them."""

    def __init__(self, grace_s: float) -> None:
        """`grace_s` is how long computed pages are expected before the worker publishes them."""
        self._grace_s = grace_s
        self._workers: dict[MemberId, WorkerPages] = {}
        self._requests: dict[RequestId, _Notes] = {}
        # Computed pages that the index may not know yet: (until, note), soonest first.
        self._fading: deque[tuple[float, _Note]] = deque()

    def __repr__(self) -> str:
        return f"<ExpectedPages of {len(self._requests)} requests, {len(self._fading)} fading>"

    @property
    def is_idle(self) -> bool:
        has_counts = any(pages.computed or pages.arriving for pages in self._workers.values())
        return not (self._requests or self._fading or has_counts)

    def of(self, member_id: MemberId) -> WorkerPages:
        pages = self._workers.get(member_id)
        if pages is None:
            pages = self._workers[member_id] = WorkerPages()
        return pages

    def begin(
        self, request_id: RequestId, keys: Sequence[int], prefill: MemberId | None, decode: MemberId, now_s: float
    ) -> None:
        """Expect the pages where they are computed and, later, decoded."""
        self.expire(now_s)
        noted = list(keys[_NOTE_EVERY - 1 :: _NOTE_EVERY])
        if len(keys) % _NOTE_EVERY:
            noted.append(keys[-1])
        decoding = self.of(decode)
        if prefill is None:
            notes = _Notes(_add(decoding.computed, noted), None, False, decoding.computed)
        else:
            computing = self.of(prefill)
            notes = _Notes(_add(computing.computed, noted), _add(decoding.arriving, noted), True, decoding.computed)
        self._requests[request_id] = notes

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        notes = self._requests.get(request_id)
        if notes is not None and notes.is_disaggregated and notes.computing is not None:
            self._fade_later(notes.computing, now_s)
            notes.computing = None

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self.prefilled(request_id, now_s)
        notes = self._requests.get(request_id)
        if notes is None:
            return
        for note in (notes.computing, notes.arriving):
            if note is not None:
                _remove(note)
                self._fade_later(_add(notes.decode, note.keys), now_s)
        notes.computing = notes.arriving = None

    def end(self, request_id: RequestId) -> None:
        notes = self._requests.pop(request_id, None)
        if notes is not None:
            for note in (notes.computing, notes.arriving):
                if note is not None:
                    _remove(note)

    def expire(self, now_s: float) -> None:
        fading = self._fading
        while fading and fading[0][0] <= now_s:
            _remove(fading.popleft()[1])

    def forget(self, member_id: MemberId) -> None:
        self._workers.pop(member_id, None)

    def check(self) -> None:
        notes = [note for _until_s, note in self._fading]
        for request in self._requests.values():
            notes += [note for note in (request.computing, request.arriving) if note is not None]
        num_noted: dict[int, int] = {}
        for note in notes:
            num_noted[id(note.counts)] = num_noted.get(id(note.counts), 0) + len(note.keys)
        for member_id, pages in self._workers.items():
            for counts in (pages.computed, pages.arriving):
                expected = num_noted.get(id(counts), 0)
                assert sum(counts.values()) == expected, f"{member_id} expects pages that no request brings"

    def _fade_later(self, note: _Note, now_s: float) -> None:
        self._fading.append((now_s + self._grace_s, note))


def expected_depth(counts: PageCounts, keys: Sequence[int], held: int) -> int:
    """Return the future number of pages, at least `held`."""
    if not keys:
        return held
    if keys[-1] in counts:
        return len(keys)
    # Every request notes its whole prompt: expected pages are prefixes, and bisection is exact at the noted pages.
    low, high = held // _NOTE_EVERY, len(keys) // _NOTE_EVERY
    if low >= high or keys[low * _NOTE_EVERY + _NOTE_EVERY - 1] not in counts:
        return held
    low += 1
    while low < high:
        middle = (low + high + 1) >> 1
        if keys[middle * _NOTE_EVERY - 1] in counts:
            low = middle
        else:
            high = middle - 1
    return low * _NOTE_EVERY


def _add(counts: PageCounts, keys: list[int]) -> _Note:
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return _Note(counts, keys)


def _remove(note: _Note) -> None:
    counts = note.counts
    for key in note.keys:
        num_left = counts[key] - 1
        if num_left:
            counts[key] = num_left
        else:
            del counts[key]
