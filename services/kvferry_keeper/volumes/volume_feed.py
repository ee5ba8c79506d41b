"""Reports a volume to gateways: route keys (snapshot, numbered deltas) and state."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable

from kvferry.keeper.layout import ChunkId
from kvferry.keeper.volume_state import VolumeState
from kvferry.residency.feed import Delta, SnapshotPart, snapshot_parts
from kvferry.residency.index import Tier
from kvferry_keeper.snapshot_queue import SnapshotQueue

# 512 KiB per part, like the parts of workers.
MAX_SNAPSHOT_KEYS = 65_536
# Changes are collected for this long and sent as one message, like those of workers.
FLUSH_AFTER_S = 0.05
# Deltas that may wait for a slow follower; beyond this it gets a new snapshot instead.
_MAX_WAITING = 256

Update = SnapshotPart | Delta | VolumeState


class VolumeFeed:
    """Counts a volume's chunks by route key. Belongs to one event loop.

    A key is reported while the volume is visible and a chunk of any layout has it.
    """

    def __init__(self, state: Callable[[], VolumeState]) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._key_to_num_chunks: Counter[int] = Counter()
        self._changed: dict[int, bool] = {}  # key -> whether followers know it
        self._sequence = 0
        self._is_readable = True
        self._flush_timer: asyncio.TimerHandle | None = None
        self._followers: set[_Follower] = set()

    def __repr__(self) -> str:
        return (
            f"<VolumeFeed of {len(self._key_to_num_chunks)} keys at {self._sequence}, {len(self._followers)} followers>"
        )

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def load(self, chunks: Iterable[ChunkId]) -> None:
        self._key_to_num_chunks.update(chunk.route_key for chunk in chunks if chunk.route_key)

    def change(self, added: Iterable[ChunkId], removed: Iterable[ChunkId]) -> None:
        counts = self._key_to_num_chunks
        for chunk in removed:
            key = chunk.route_key
            if key and counts[key]:
                counts[key] -= 1
                if not counts[key]:
                    del counts[key]
                    self._changed.setdefault(key, True)
        for chunk in added:
            key = chunk.route_key
            if key:
                if not counts[key]:
                    self._changed.setdefault(key, False)
                counts[key] += 1
        if self._changed and self._flush_timer is None:
            self._flush_timer = self._loop.call_later(FLUSH_AFTER_S, self._flush)

    def set_readable(self, is_readable: bool) -> None:
        if is_readable == self._is_readable:
            return
        self._flush()
        self._is_readable = is_readable
        if is_readable:
            for follower in self._followers:
                follower.begin_snapshot()
        else:
            self._send(cleared=True)
        self.send_state()

    def send_state(self) -> None:
        if self._followers:
            state = self._state()
            for follower in self._followers:
                follower.put_state(state)

    async def follow(self) -> AsyncGenerator[Update, None]:
        follower = _Follower(self._snapshot)
        follower.put_state(self._state())
        follower.begin_snapshot()
        self._followers.add(follower)
        try:
            while True:
                for update in await follower.pop_updates():
                    yield update
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        changed, self._changed = self._changed, {}
        stored = array(
            "Q", (key for key, was_known in changed.items() if not was_known and key in self._key_to_num_chunks)
        )
        removed = array(
            "Q", (key for key, was_known in changed.items() if was_known and key not in self._key_to_num_chunks)
        )
        if self._is_readable and (stored or removed):
            self._send(stored, removed)

    def _send(
        self, stored: array[int] | None = None, removed: array[int] | None = None, *, cleared: bool = False
    ) -> None:
        self._sequence += 1
        delta = Delta(
            self._sequence,
            {Tier.VOLUME: stored} if stored else {},
            {Tier.VOLUME: removed} if removed else {},
            cleared,
        )
        for follower in self._followers:
            follower.put_delta(delta)

    def _snapshot(self) -> list[SnapshotPart]:
        # Pending changes go out before the snapshot, so that no follower receives them twice.
        self._flush()
        keys = {Tier.VOLUME: array("Q", self._key_to_num_chunks)} if self._is_readable else {}
        return list(snapshot_parts(self._sequence, keys, MAX_SNAPSHOT_KEYS))


class _Follower:
    def __init__(self, snapshot: Callable[[], Iterable[SnapshotPart]]) -> None:
        self._changes: SnapshotQueue[SnapshotPart | Delta] = SnapshotQueue(snapshot, _MAX_WAITING)
        self._state: VolumeState | None = None
        self._event = asyncio.Event()

    def begin_snapshot(self) -> None:
        self._changes.begin_snapshot()
        self._event.set()

    def put_delta(self, delta: Delta) -> None:
        self._changes.put(delta)
        self._event.set()

    def put_state(self, state: VolumeState) -> None:
        self._state = state
        self._event.set()

    async def pop_updates(self) -> list[Update]:
        await self._event.wait()
        self._event.clear()
        updates: list[Update] = []
        if self._state is not None:
            updates.append(self._state)
            self._state = None
        while (change := self._changes.pop()) is not None:
            updates.append(change)
        return updates
