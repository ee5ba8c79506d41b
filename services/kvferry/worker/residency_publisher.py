"""Publishes to gateways which pages this worker's engine holds."""

from __future__ import annotations

import asyncio
import logging

from kvferry.engine.base import Engine
from kvferry.link.gateway_session import GatewaySession
from kvferry.residency.codec import delta_to_wire, part_to_wire
from kvferry.worker.page_mirror import PageMirror
from kvferry.worker.server import WorkerServer

log = logging.getLogger(__name__)

# 512 KiB a part, so that a gateway reads steps in between.
MAX_SNAPSHOT_KEYS = 65_536

# Changes are collected for so long: with small pages every step stores some, and a message costs a gateway as much as
# several tokens. Gateways expect the pages of their own requests anyway.
FLUSH_AFTER_S = 0.05

# Includes removed pages, whose hashes the engine may name again.
_PAGES_PER_ENGINE_PAGE = 4


class ResidencyPublisher:
    """Owns the engine's PageMirror. `start` it once the engine is up."""

    def __init__(self, engine: Engine, server: WorkerServer) -> None:
        self._engine = engine
        self._server = server
        self._subscribers: set[GatewaySession] = set()  # receive deltas since their snapshot
        self._task: asyncio.Task[None] | None = None
        self._flush_scheduled = False
        self.mirror: PageMirror | None = None
        server.on_snapshot_wanted = self._send_snapshot

    def __repr__(self) -> str:
        return f"<ResidencyPublisher {self.mirror} to {len(self._subscribers)} gateways>"

    def start(self) -> None:
        info = self._engine.info
        self.mirror = PageMirror(info.block_size, _PAGES_PER_ENGINE_PAGE * info.num_pages + info.num_cpu_pages)
        self._task = asyncio.create_task(self._read_events(self.mirror))

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_events(self, mirror: PageMirror) -> None:
        try:
            async for batch in self._engine.kv_events():
                mirror.apply(batch)
                if not self._flush_scheduled:
                    self._flush_scheduled = True
                    asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self._flush)
        except Exception:
            # Requests continue without it: published pages are only hints.
            log.exception("the engine's events cannot be read; gateways hear no more of what this worker holds")

    def _flush(self) -> None:
        self._flush_scheduled = False
        delta = self.mirror.next_delta() if self.mirror is not None else None
        self._subscribers.intersection_update(self._server.sessions)
        if delta is None:
            return
        message = delta_to_wire(delta)
        for session in self._subscribers:
            # A gateway that reads too slowly (False) sees the gap and asks for a snapshot.
            session.send_residency(message)

    def _send_snapshot(self, session: GatewaySession) -> None:
        if self.mirror is None:
            return
        self._subscribers.add(session)
        for part in self.mirror.snapshot(MAX_SNAPSHOT_KEYS):
            if not session.send_residency(part_to_wire(part)):
                return  # the gateway sees that parts are missing
