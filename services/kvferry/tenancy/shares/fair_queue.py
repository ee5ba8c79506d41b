"""Start-time fair queue over tenants, in front of one engine."""

# Between two tenants that wait all the time, work charged in ms divided by weights differs by less than
# (turn + slice) x (1/w_i + 1/w_j), and by twice the error of the estimates inside the
# engine (docs/contributor/architecture/tenants.md).

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

from kvferry.tenancy.keyed_heap import KeyedHeap
from kvferry.tenancy.shares.debts import Debts
from kvferry.tenancy.shares.tenant_queue import CachedTokens, Request, Slice, TenantQueue, nothing_cached


class QueueLimit(enum.StrEnum):
    TENANTS = "max_queued_tenants"
    REQUESTS = "max_queued_requests"
    TENANT_REQUESTS = "max_queued_requests_of_tenant"  # as many as there is room left for


@dataclass(frozen=True, slots=True)
class QueueParameters:
    turn_ms: float = 200.0
    slice_ms: float = 51.2  # one engine step: 512 tokens at 0.1 ms
    depth_ms: float = 60.0  # inside the engine, so that it is never idle between steps
    idle_s: float = 1.0  # after which lags are forgiven
    is_ordered: bool = False  # the engine computes what is inside by `due_ms`, and not in the order in which it came
    max_tenants: int = 16_384
    max_requests: int = 65_536


class _Tenant(Generic[Request]):
    __slots__ = ("name", "num_inside", "queue", "virtual_ms", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.virtual_ms = 0.0  # charged ms / weight
        self.num_inside = 0
        self.queue: TenantQueue[Request] = TenantQueue()


class FairQueue(Generic[Request]):
    """Gives slices to an engine; charges tenants the measured ms."""

    def __init__(
        self,
        parameters: QueueParameters | None = None,
        cached_tokens: CachedTokens = nothing_cached,
        debts: Debts | None = None,
    ) -> None:
        self.parameters = parameters or QueueParameters()
        self.debts = debts or Debts(self.parameters.turn_ms + self.parameters.slice_ms)
        self.served_ms: dict[str, float] = {}  # measured, since the start
        self.num_requests = 0
        self.inside_ms = 0.0  # estimated
        self._cached_tokens = cached_tokens
        self._weights: dict[str, float] = {}
        self._tenants: dict[str, _Tenant[Request]] = {}
        self._waiting = KeyedHeap[str]()  # by virtual time, without the tenant whose turn it is
        self._lagging = KeyedHeap[str]()  # tenants without requests whose virtual time is ahead
        self._inside: set[Slice[Request]] = set()
        self._turn: _Tenant[Request] | None = None
        self._turn_left_ms = 0.0
        self._virtual_ms = 0.0
        self._max_virtual_ms = 0.0
        self._idle_since_s: float | None = None

    def __repr__(self) -> str:
        turn = "none" if self._turn is None else f"{self._turn.name} {self._turn_left_ms:.0f} ms"
        return f"<FairQueue {self.num_requests} of {self.num_waiting} tenants, turn {turn}, {len(self._inside)} inside>"

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + (self._turn is not None and len(self._turn.queue) > 0)

    def add(self, request: Request, now_s: float, *, is_continued: bool = False) -> QueueLimit | None:
        """Return the limit that refuses it; continuations are never refused. Raises as TenantQueue.add."""
        tenant = self._tenants.get(request.tenant)
        if not is_continued and (limit := self._refusal(tenant)) is not None:
            return limit
        if self._idle_since_s is not None and now_s - self._idle_since_s >= self.parameters.idle_s:
            self._advance(self._max_virtual_ms)
            tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = _Tenant(request.tenant, self._weights.get(request.tenant, 1.0))
        had_none = not tenant.queue
        tenant.queue.add(request, is_continued=is_continued)
        self._tenants[tenant.name] = tenant
        self._idle_since_s = None
        self.num_requests += 1
        if had_none:
            self._lagging.remove(tenant.name)
            tenant.virtual_ms = max(tenant.virtual_ms, self._virtual_ms)
            if tenant is not self._turn:
                self._waiting.put(tenant.name, tenant.virtual_ms)
                if self._turn is not None and tenant.virtual_ms < self._turn.virtual_ms:
                    self._end_turn()
        return None

    def cancel(self, request: Request, now_s: float) -> bool:
        """Return whether it waited; slices inside the engine are still to be measured."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None or not tenant.queue.remove(request):
            return False
        self.num_requests -= 1
        self._settle(tenant, now_s)
        return True

    def next_slice(self, done_ms: float = 0.0) -> Slice[Request] | None:
        """Return None while the engine has enough; it has done `done_ms` of the slice that it computes."""
        if not self.num_requests:
            return None
        is_full = self.inside_ms - done_ms >= self.parameters.depth_ms
        if is_full and not (self.parameters.is_ordered and self._has_little_before(done_ms)):
            return None
        if self._turn is None or not self._turn.queue or self._turn_left_ms <= 0:
            self._begin_turn()
        tenant = self._turn
        assert tenant is not None
        request, ms, is_last = tenant.queue.take(self.parameters.slice_ms, self._cached_tokens)
        self.num_requests -= is_last
        piece = Slice(request, tenant.name, ms, is_last, self.debts.factor(tenant.name))
        self._inside.add(piece)
        self.inside_ms += ms
        tenant.num_inside += 1
        self._charge(tenant, ms, piece.factor)
        piece.due_ms = tenant.virtual_ms
        return piece

    def _has_little_before(self, done_ms: float) -> bool:
        tenant, first = self._turn, self._waiting.first
        if tenant is None or not tenant.queue:
            tenant = None
        if first is not None and (tenant is None or (self._turn_left_ms <= 0 and first[0] < tenant.virtual_ms)):
            tenant = self._tenants[first[1]]
        assert tenant is not None
        factor = self.debts.factor(tenant.name)
        due_ms = tenant.virtual_ms + factor * min(tenant.queue.next_ms(), self.parameters.slice_ms) / tenant.weight
        before_ms = sum(piece.ms for piece in self._inside if piece.due_ms <= due_ms)
        return before_ms - done_ms < self.parameters.depth_ms

    def measured(self, piece: Slice[Request], ms: float, now_s: float) -> None:
        """Correct the charge of a slice that left the engine. Raises ValueError for unknown ones."""
        if not 0 <= ms < float("inf"):
            raise ValueError(f"a slice of tenant {piece.tenant} was measured at {ms} ms")
        if piece not in self._inside:
            raise ValueError(f"a slice of tenant {piece.tenant} is not inside the engine")
        self._inside.discard(piece)
        self.inside_ms = self.inside_ms - piece.ms if self._inside else 0.0
        self.served_ms[piece.tenant] = self.served_ms.get(piece.tenant, 0.0) + ms
        tenant = self._tenants[piece.tenant]
        tenant.num_inside -= 1
        self._charge(tenant, ms - piece.ms, piece.factor)
        self.debts.decay(now_s)  # also where no worker tells of work any more
        self._settle(tenant, now_s)

    def set_weight(self, tenant: str, weight: float) -> None:
        """Raises ValueError unless above 0 and finite."""
        if not 0 < weight < float("inf"):
            raise ValueError(f"tenant {tenant} has weight {weight}")
        self._weights[tenant] = weight
        known = self._tenants.get(tenant)
        if known is not None:
            # What the tenant is ahead stays the same in ms.
            ahead = known.virtual_ms - self._virtual_ms
            known.virtual_ms = self._virtual_ms + ahead * known.weight / weight
            known.weight = weight
            self._update_keys(known)

    def weight_of(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def forget(self, tenant: str) -> None:
        self._weights.pop(tenant, None)
        self.served_ms.pop(tenant, None)

    def elsewhere(self, got_ms: Mapping[str, float], num_workers: int, now_s: float) -> None:
        """Note work of other workers since the last call, for the tenants that it names."""
        weights = {tenant.name: tenant.weight for tenant in self._with_requests() if tenant.name in got_ms}
        self.debts.elsewhere(got_ms, weights, num_workers, now_s)

    def backlogs(self) -> dict[str, tuple[float, float]]:
        """Return (ms, weight) by tenant."""
        return {tenant.name: (tenant.queue.backlog_ms, tenant.weight) for tenant in self._with_requests()}

    def check(self) -> None:
        turn = set() if self._turn is None else {self._turn.name}
        for name, tenant in self._tenants.items():
            tenant.queue.check()
            assert (name in self._waiting) == (bool(tenant.queue) and name not in turn), f"{name} is not in its heap"
            assert tenant.queue or tenant.num_inside or name in self._lagging or name in turn, f"{name} is left over"
        assert self.num_requests == sum(len(tenant.queue) for tenant in self._tenants.values())
        assert len(self._inside) == sum(tenant.num_inside for tenant in self._tenants.values())
        assert abs(self.inside_ms - sum(piece.ms for piece in self._inside)) < 1e-3

    def _refusal(self, tenant: _Tenant[Request] | None) -> QueueLimit | None:
        room = self.parameters.max_requests - self.num_requests
        if room <= 0:
            return QueueLimit.REQUESTS
        if tenant is not None:
            return QueueLimit.TENANT_REQUESTS if len(tenant.queue) >= room else None
        if len(self._tenants) >= self.parameters.max_tenants:
            lagging = self._lagging.first
            if lagging is None:
                return QueueLimit.TENANTS
            self._drop(lagging[1])
        return None

    def _with_requests(self) -> Iterator[_Tenant[Request]]:
        return (tenant for tenant in self._tenants.values() if tenant.queue)

    def _begin_turn(self) -> None:
        self._end_turn()
        first = self._waiting.first
        assert first is not None
        virtual_ms, name = first
        self._waiting.remove(name)
        self._turn = self._tenants[name]
        self._turn_left_ms = self.parameters.turn_ms
        self._advance(virtual_ms)

    def _end_turn(self) -> None:
        tenant, self._turn = self._turn, None
        if tenant is not None and tenant.queue:
            self._waiting.put(tenant.name, tenant.virtual_ms)

    def _advance(self, virtual_ms: float) -> None:
        self._virtual_ms = max(self._virtual_ms, virtual_ms)
        while (first := self._lagging.first) is not None and first[0] <= self._virtual_ms:
            self._drop(first[1])

    def _charge(self, tenant: _Tenant[Request], ms: float, factor: float) -> None:
        tenant.virtual_ms += factor * ms / tenant.weight
        self._max_virtual_ms = max(self._max_virtual_ms, tenant.virtual_ms)
        if factor != 1.0:
            self.debts.settle(tenant.name, (factor - 1.0) * ms)
        if tenant is self._turn:
            self._turn_left_ms -= ms
        self._update_keys(tenant)

    def _update_keys(self, tenant: _Tenant[Request]) -> None:
        for heap in (self._waiting, self._lagging):
            if tenant.name in heap:
                heap.put(tenant.name, tenant.virtual_ms)

    def _settle(self, tenant: _Tenant[Request], now_s: float) -> None:
        if tenant.queue or tenant.num_inside:
            if not tenant.queue:
                self._waiting.remove(tenant.name)
            return
        self._waiting.remove(tenant.name)
        if tenant is self._turn:
            self._turn = None
        self._lagging.put(tenant.name, tenant.virtual_ms)
        self._advance(self._virtual_ms)
        if not self.num_requests and not self._inside:
            self._idle_since_s = now_s

    def _drop(self, name: str) -> None:
        self._lagging.remove(name)
        del self._tenants[name]
