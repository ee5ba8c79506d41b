"""Publishes to gateways which pages this worker's engine holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator

from kvferry.engine.base import Engine
from kvferry.link.gateway_session import GatewaySession
from kvferry.residency.codec import delta_to_wire, part_to_wire
from kvferry.residency.feed import SnapshotPart
from kvferry.worker.page_mirror import PageMirror

log = logging.getLogger(__name__)

# 128 KiB a part, which holds up a gateway's streams for about 10 ms.
MAX_SNAPSHOT_KEYS = 16_384

# How long changes are collected: with small pages every step stores some, and a message costs a gateway as much as
# several tokens. Gateways expect the pages of their own requests anyway.
FLUSH_AFTER_S = 0.05

MAX_WAITING_BYTES = 4 << 20  # of a gateway's unread messages, beyond which parts of a snapshot wait
PART_PAUSE_S = 0.02
RESTART_PAUSE_S = 1.0  # before an engine's events are read anew

# Includes removed pages, whose hashes the engine may name again.
_PAGES_PER_ENGINE_PAGE = 4


class ResidencyPublisher:
    """Owns the engine's PageMirror. `start` it once the engine is up."""

    def __init__(self, engine: Engine, read_sessions: Callable[[], Collection[GatewaySession]]) -> None:
        self._engine = engine
        self._read_sessions = read_sessions
        self._subscribers: set[GatewaySession] = set()  # receive deltas since their snapshot
        self._unsent: dict[GatewaySession, Iterator[SnapshotPart]] = {}  # parts of snapshots
        self._task: asyncio.Task[None] | None = None
        self._flush_scheduled = False
        self.mirror: PageMirror | None = None

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
        while True:
            try:
                async for batch in self._engine.kv_events():
                    mirror.apply(batch)
                    self._schedule_flush()
                return  # the engine is gone
            except Exception:
                log.exception("the engine's events cannot be read; they are read anew")
            # What this worker holds is unknown now: gateways must not go by what it once held.
            mirror.restart()
            self._schedule_flush()
            await asyncio.sleep(RESTART_PAUSE_S)

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_later(FLUSH_AFTER_S, self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        delta = self.mirror.next_delta() if self.mirror is not None else None
        self._subscribers.intersection_update(self._read_sessions())
        if delta is None:
            return
        message = delta_to_wire(delta)
        for session in self._subscribers:
            # A gateway that reads too slowly (False) sees the gap and asks for a snapshot.
            session.send_residency(message)

    def send_snapshot(self, session: GatewaySession) -> None:
        if self.mirror is None:
            return
        self._subscribers.add(session)
        is_sending = session in self._unsent
        self._unsent[session] = self.mirror.snapshot(MAX_SNAPSHOT_KEYS)
        if not is_sending:
            self._send_parts(session)

    def _send_parts(self, session: GatewaySession) -> None:
        """Send parts while the gateway reads them: a large snapshot is more than may wait for it."""
        parts = self._unsent.get(session)
        if parts is None or session not in self._read_sessions():
            self._unsent.pop(session, None)
            return
        while session.pending_bytes < MAX_WAITING_BYTES:
            part = next(parts, None)
            if part is None or not session.send_residency(part_to_wire(part)):
                del self._unsent[session]  # complete, or the gateway sees that parts are missing
                return
        asyncio.get_running_loop().call_later(PART_PAUSE_S, self._send_parts, session)
