"""The requests of one tenant that wait for an engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

_NUM_CANDIDATES = 48
_MAX_PASSES = 32


class Queueable(Protocol):
    """A request, hashable by identity."""

    @property
    def tenant(self) -> str: ...

    @property
    def cost_ms(self) -> float:
        """Estimate of work not cached, read when the request is added and when it begins."""
        ...

    @property
    def prefix(self) -> Hashable:
        """Key of CachedTokens."""
        ...


Request = TypeVar("Request", bound=Queueable)
CachedTokens = Callable[[Hashable], int]


def nothing_cached(prefix: Hashable) -> int:
    return 0


@dataclass(slots=True, eq=False)
class Slice(Generic[Request]):
    """A part of a request, at most one engine step; `measured` must follow once."""

    request: Request
    tenant: str
    ms: float  # estimated
    is_last: bool
    factor: float  # of the charge, from debts
    due_ms: float = 0.0  # virtual time of its tenant when it is done, as estimated


class TenantQueue(Generic[Request]):
    # Order: the request that has begun, continuations, then the longest cached prefix among the oldest requests. At
    # most one request has begun: pages of half computed prompts are of use to it alone.
    __slots__ = ("_begun", "_continued", "_left_ms", "_new", "_num_passes", "backlog_ms")

    def __init__(self) -> None:
        self._begun: Request | None = None
        self._continued: OrderedDict[Request, None] = OrderedDict()
        self._new: OrderedDict[Request, None] = OrderedDict()
        self._left_ms: dict[Request, float] = {}  # of all of these
        self._num_passes = 0  # requests that went before the oldest one
        self.backlog_ms = 0.0

    def __len__(self) -> int:
        return len(self._left_ms)

    def add(self, request: Request, *, is_continued: bool) -> None:
        """Raises ValueError for an unusable estimate or a repeated request."""
        cost_ms = request.cost_ms
        if not 0 <= cost_ms < float("inf"):
            raise ValueError(f"a request of tenant {request.tenant} is estimated at {cost_ms} ms")
        if request in self._left_ms:
            raise ValueError(f"a request of tenant {request.tenant} was added twice")
        (self._continued if is_continued else self._new)[request] = None
        self._left_ms[request] = cost_ms
        self.backlog_ms += cost_ms

    def remove(self, request: Request) -> bool:
        left_ms = self._left_ms.pop(request, None)
        if left_ms is None:
            return False
        self.backlog_ms = self.backlog_ms - left_ms if self._left_ms else 0.0
        if request is self._begun:
            self._begun = None
        else:
            self._unlink(request)
        return True

    def take(self, slice_ms: float, cached_tokens: CachedTokens) -> tuple[Request, float, bool]:
        """Return the next request, the ms of its slice, and whether that is the last."""
        request = self._begun
        if request is None:
            request = self._pick(cached_tokens)
            self._unlink(request)
            # Pages that others computed while it waited make it cheaper; evicted ones make it dearer.
            cost_ms = min(max(0.0, request.cost_ms), 1e9)
            self.backlog_ms += cost_ms - self._left_ms[request]
            self._left_ms[request] = cost_ms
            self._begun = request
        left_ms = self._left_ms[request]
        if left_ms <= slice_ms:
            self.remove(request)
            return request, left_ms, True
        self._left_ms[request] = left_ms - slice_ms
        self.backlog_ms -= slice_ms
        return request, slice_ms, False

    def next_ms(self) -> float:
        """Estimated from the oldest."""
        request = self._begun or next(iter(self._continued or self._new))
        return self._left_ms[request]

    def check(self) -> None:
        begun = [] if self._begun is None else [self._begun]
        assert {*begun, *self._continued, *self._new} == self._left_ms.keys(), "a request is in no order, or in two"
        assert len(begun) + len(self._continued) + len(self._new) == len(self._left_ms)
        assert abs(self.backlog_ms - sum(self._left_ms.values())) < 1e-3 + 1e-9 * self.backlog_ms

    def _pick(self, cached_tokens: CachedTokens) -> Request:
        if self._continued:
            return next(iter(self._continued))
        oldest = next(iter(self._new))
        if self._num_passes >= _MAX_PASSES or len(self._new) == 1:
            self._num_passes = 0
            return oldest
        chosen = max(islice(self._new, _NUM_CANDIDATES), key=lambda request: cached_tokens(request.prefix))
        self._num_passes = 0 if chosen is oldest else self._num_passes + 1
        return chosen

    def _unlink(self, request: Request) -> None:
        (self._continued if request in self._continued else self._new).pop(request)
