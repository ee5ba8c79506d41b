"""Tenants on a link: their work on a worker, the tenants of a session's requests, and reports of both to the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvferry.engine.base import EngineRequest, Turn
from kvferry.wire.v1 import worker_pb2 as pb

MAX_TENANTS: Final = 10_000  # that a meter keeps; idle ones go first


@dataclass(slots=True)
class TenantCounts:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0


_NONE: Final = TenantCounts()


class TenantMeter:
    def __init__(self) -> None:
        self._counts: dict[str, TenantCounts] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, tenant: str) -> TenantCounts:
        return self._counts.get(tenant, _NONE)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return requests and tokens by tenant."""
        return {
            tenant: (counts.num_requests, counts.num_prompt_tokens + counts.num_generated_tokens)
            for tenant, counts in self._counts.items()
        }

    def tenants(self) -> list[str]:
        return list(self._counts)

    def begin(self, tenant: str, num_prompt_tokens: int, *, is_resumed: bool) -> None:
        """A request that is resumed was counted where it began."""
        counts = self._counts.get(tenant)
        if counts is None:
            self._make_room()
            counts = self._counts[tenant] = TenantCounts()
        counts.num_running += 1
        if not is_resumed:
            counts.num_requests += 1
            counts.num_prompt_tokens += num_prompt_tokens

    def end(self, tenant: str, num_generated_tokens: int) -> None:
        counts = self._counts[tenant]
        counts.num_running -= 1
        counts.num_generated_tokens += num_generated_tokens

    def _make_room(self) -> None:
        if len(self._counts) >= MAX_TENANTS:
            idle = next((tenant for tenant, counts in self._counts.items() if not counts.num_running), None)
            if idle is not None:
                del self._counts[idle]


# How often, and of how many tenants at once, the work done for tenants is sent with the statistics.
SERVED_INTERVAL_S: Final = 0.5
MAX_SERVED: Final = 64

_NUM_KEPT: Final = 64  # requests that are gone, beside those that are not


class SessionTenants:
    # `is_there` tells whether a request of this number is on the worker, or has a place.
    def __init__(self, is_there: Callable[[int], bool], meter: TenantMeter | None) -> None:
        """`meter` counts the requests of all sessions, on decode workers."""
        self._is_there = is_there
        self._all = meter
        self._own = TenantMeter()
        self._before = {} if meter is None else meter.totals()  # this session began
        self._by_number: dict[int, str] = {}
        self._max_numbers = _NUM_KEPT
        self._told: dict[str, tuple[float, int, int, int]] = {}  # by tenant, told longest ago first
        self._told_s = 0.0

    def __len__(self) -> int:
        return len(self._by_number)

    def note(self, number: int, message: pb.Reserve | pb.Submit) -> None:
        if not message.HasField("turn"):
            return
        self._by_number[number] = message.turn.tenant
        if len(self._by_number) > self._max_numbers:
            self._by_number = {each: tenant for each, tenant in self._by_number.items() if self._is_there(each)}
            self._max_numbers = 2 * len(self._by_number) + _NUM_KEPT

    def num_requests(self, tenant: str) -> int:
        """O(requests)."""
        return sum(each == tenant and self._is_there(number) for number, each in self._by_number.items())

    def add_served(self, stats: pb.Load, served_ms: Mapping[str, float], now_s: float) -> None:
        """Add totals that changed since they were told."""
        if now_s - self._told_s < SERVED_INTERVAL_S:
            return
        self._told_s = now_s
        num_left = MAX_SERVED
        for tenant in self._by_age(served_ms):
            ms, num_requests, num_tokens, num_running = work = self._work_of(tenant, served_ms)
            if self._told.get(tenant) == work:
                continue
            stats.served.add(
                tenant=tenant, ms=ms, num_requests=num_requests, num_tokens=num_tokens, num_running=num_running
            )
            self._told.pop(tenant, None)
            self._told[tenant] = work
            num_left -= 1
            if not num_left:
                break

    def begin(self, request: EngineRequest) -> None:
        if self._all is not None and request.turn is not None:
            for meter in (self._all, self._own):
                meter.begin(request.turn.tenant, len(request.prompt_token_ids), is_resumed=request.is_resumed)

    def end(self, request: EngineRequest, num_generated_tokens: int) -> None:
        if self._all is not None and request.turn is not None:
            for meter in (self._all, self._own):
                meter.end(request.turn.tenant, num_generated_tokens)

    def _work_of(self, tenant: str, served_ms: Mapping[str, float]) -> tuple[float, int, int, int]:
        ms = served_ms.get(tenant, 0.0)
        if self._all is None:
            return ms, 0, 0, 0
        every, own = self._all.of(tenant), self._own.of(tenant)
        num_requests, num_tokens = self._before.get(tenant, (0, 0))
        return (
            ms,
            max(0, every.num_requests - own.num_requests - num_requests),
            max(0, every.num_prompt_tokens - own.num_prompt_tokens + every.num_generated_tokens - num_tokens),
            max(0, every.num_running - own.num_running),
        )

    def _by_age(self, served_ms: Mapping[str, float]) -> Iterator[str]:
        known = dict.fromkeys(served_ms)
        if self._all is not None:
            known.update(dict.fromkeys(self._all.tenants()))
        self._told = {tenant: work for tenant, work in self._told.items() if tenant in known}
        yield from [tenant for tenant in known if tenant not in self._told]
        yield from list(self._told)


PAUSE_S: Final = 0.1  # after a refusal for want of room for its tenant


class WorkerTenants:
    def __init__(self) -> None:
        self.served_ms: dict[str, float] = {}  # of the worker's engine, as far as this connection heard
        self.used: dict[str, tuple[int, int]] = {}  # totals of requests and tokens that this gateway does not count
        self.running: dict[str, int] = {}  # requests of other gateways
        self._no_room: dict[str, float] = {}  # tenants that it refused, and until when they are not tried again

    def attach(self) -> None:
        for known in (self.served_ms, self.used, self.running):
            known.clear()

    def take(self, load: pb.Load) -> None:
        for entry in load.served:
            self.served_ms[entry.tenant] = entry.ms
            self.used[entry.tenant] = entry.num_requests, entry.num_tokens
            if entry.num_running:
                self.running[entry.tenant] = entry.num_running
            else:
                self.running.pop(entry.tenant, None)

    def has_room(self, turn: Turn | None, now_s: float) -> bool:
        return turn is None or not self._no_room or self._no_room.get(turn.tenant, 0.0) <= now_s

    def note_no_room(self, turn: Turn | None, now_s: float) -> None:
        if turn is not None:
            self._no_room = {tenant: until_s for tenant, until_s in self._no_room.items() if until_s > now_s}
            self._no_room[turn.tenant] = now_s + PAUSE_S


def elsewhere(served_ms: Mapping[str, float], num_workers: int) -> pb.Downward:
    message = pb.Elsewhere(num_workers=num_workers)
    for tenant, ms in served_ms.items():
        message.served.add(tenant=tenant, ms=ms)
    return pb.Downward(elsewhere=message)
