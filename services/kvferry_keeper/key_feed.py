"""Reports the loadable keys of one layout to engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkKey, LayoutDigest
from kvferry_keeper.engine_session import EngineSession
from kvferry_keeper.volumes.volume_set import VolumeSet

# Changes are collected for this long and sent as one message.
_FLUSH_AFTER_S = 0.005


class KeyFeed:
    """Snapshot for each new engine, then numbered changes. Belongs to one event loop."""

    def __init__(self, layout: LayoutDigest, volumes: VolumeSet) -> None:
        self._layout = layout
        self._volumes = volumes
        self._sessions: set[EngineSession] = set()
        self._sequence = 0
        self._changed: set[ChunkKey] = set()
        self._flush_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<KeyFeed of {self._layout.hex()} at {self._sequence}, {len(self._sessions)} engines>"

    def add(self, session: EngineSession) -> None:
        self._sessions.add(session)
        session.begin_updates(self._snapshot)

    def discard(self, session: EngineSession) -> None:
        self._sessions.discard(session)

    def change(self, keys: Iterable[ChunkKey]) -> None:
        self._changed.update(keys)
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_AFTER_S, self._flush)

    def begin_snapshots(self) -> None:
        for session in self._sessions:
            session.begin_snapshot()

    def close(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()

    def _flush(self) -> None:
        self._flush_timer = None
        changed, self._changed = self._changed, set()
        if not self._sessions:
            return
        added = [key for key in changed if self._volumes.is_loadable(self._layout, key)]
        removed = changed.difference(added)
        self._sequence += 1
        # A frame is bounded, but a purge may remove a million chunks at once.
        if len(changed) > messages.MAX_PART_KEYS:
            self.begin_snapshots()
            return
        change = messages.encode(
            messages.ChangedKeys(self._sequence, messages.pack_chunk_keys(added), messages.pack_chunk_keys(removed))
        )
        for session in self._sessions:
            session.send_change(change)

    def _snapshot(self) -> Iterator[bytes]:
        return _snapshot_frames(self._sequence, self._volumes.loadable_keys(self._layout))


def _snapshot_frames(sequence: int, keys: list[ChunkKey]) -> Iterator[bytes]:
    num_parts = max(1, -(-len(keys) // messages.MAX_PART_KEYS))
    for part in range(num_parts):
        chosen = keys[part * messages.MAX_PART_KEYS : (part + 1) * messages.MAX_PART_KEYS]
        yield messages.encode(messages.SnapshotKeys(sequence, part, num_parts, messages.pack_chunk_keys(chosen)))
