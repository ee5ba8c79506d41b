"""What a volume holds, for gateways: route keys as a snapshot, then numbered deltas; and now and then its state."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable

from kvferry.keeper.volume_io import VolumeIoState
from kvferry.residency.feed import Delta, SnapshotPart, snapshot_parts
from kvferry.residency.index import Tier
from kvferry.store.layout import ChunkId

# 512 KiB a part, as workers send.
MAX_SNAPSHOT_KEYS = 65_536
# Changes of so long go as one message, as workers send them.
FLUSH_AFTER_S = 0.05
# What a follower that does not read may leave waiting; beyond it it gets a new snapshot.
_MAX_WAITING = 256

Update = SnapshotPart | Delta | VolumeIoState


class VolumeFeed:
    """Counts the chunks of one volume by route key and tells followers. Belongs to one event loop.

    A route key is held while at least one chunk of any layout has it. A volume that is left alone holds nothing.
    """

    def __init__(self, state: Callable[[], VolumeIoState]) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._key_to_num_chunks: Counter[int] = Counter()
        self._changed: dict[int, bool] = {}  # key -> whether it was told before this
        self._sequence = 0
        self._is_visible = True
        self._flush: asyncio.TimerHandle | None = None
        self._followers: set[_Follower] = set()

    def __repr__(self) -> str:
        return (
            f"<VolumeFeed of {len(self._key_to_num_chunks)} keys at {self._sequence}, {len(self._followers)} followers>"
        )

    @property
    def num_followers(self) -> int:
        return len(self._followers)

    def load(self, chunks: Iterable[ChunkId]) -> None:
        """What is there at the start; before anybody follows."""
        self._key_to_num_chunks.update(chunk.route_key for chunk in chunks if chunk.route_key)

    def change(self, added: Iterable[ChunkId], removed: Iterable[ChunkId]) -> None:
        """Chunks came and went."""
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
        if self._changed and self._flush is None:
            self._flush = self._loop.call_later(FLUSH_AFTER_S, self._tell)

    def show(self, is_visible: bool) -> None:
        """Whether the volume's chunks can be loaded."""
        if is_visible == self._is_visible:
            return
        self._tell()
        self._is_visible = is_visible
        if is_visible:
            for follower in self._followers:
                follower.begin_snapshot()
        else:
            self._send(cleared=True)
        self.tell_state()

    def tell_state(self) -> None:
        """Send the volume's state."""
        if self._followers:
            state = self._state()
            for follower in self._followers:
                follower.put_state(state)

    async def follow(self) -> AsyncGenerator[Update, None]:
        """State and snapshot, then what changes; it never ends by itself, and is to be closed."""
        follower = _Follower(self._snapshot)
        follower.put_state(self._state())
        follower.begin_snapshot()
        self._followers.add(follower)
        try:
            while True:
                for update in await follower.take():
                    yield update
        finally:
            self._followers.discard(follower)

    def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    def _tell(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        changed, self._changed = self._changed, {}
        stored = array(
            "Q", (key for key, was_told in changed.items() if not was_told and key in self._key_to_num_chunks)
        )
        removed = array(
            "Q", (key for key, was_told in changed.items() if was_told and key not in self._key_to_num_chunks)
        )
        if self._is_visible and (stored or removed):
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
        # What has changed and was not told yet goes out first, so that it is not told twice.
        self._tell()
        held = {Tier.VOLUME: array("Q", self._key_to_num_chunks)} if self._is_visible else {}
        return list(snapshot_parts(self._sequence, held, MAX_SNAPSHOT_KEYS))


class _Follower:
    def __init__(self, snapshot: Callable[[], list[SnapshotPart]]) -> None:
        self._snapshot = snapshot
        self._is_behind = False
        self._deltas: deque[Delta] = deque()
        self._state: VolumeIoState | None = None
        self._event = asyncio.Event()

    def begin_snapshot(self) -> None:
        self._deltas.clear()
        self._is_behind = True
        self._event.set()

    def put_delta(self, delta: Delta) -> None:
        if self._is_behind:
            return
        self._deltas.append(delta)
        if len(self._deltas) > _MAX_WAITING:
            self.begin_snapshot()
        self._event.set()

    def put_state(self, state: VolumeIoState) -> None:
        self._state = state
        self._event.set()

    async def take(self) -> list[Update]:
        await self._event.wait()
        self._event.clear()
        updates: list[Update] = []
        if self._state is not None:
            updates.append(self._state)
            self._state = None
        if self._is_behind:
            parts = self._snapshot()
            # Only now: deltas of which the snapshot is made were not for this follower.
            self._is_behind = False
            updates += parts
        updates += self._deltas
        self._deltas.clear()
        return updates
