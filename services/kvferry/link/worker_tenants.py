"""What a gateway hears from one worker of tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvferry.engine.base import Turn
from kvferry.wire.v1 import worker_pb2 as pb

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
