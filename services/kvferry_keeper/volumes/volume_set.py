"""The volumes of a keeper, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkKey, LayoutDigest
from kvferry_keeper.store import paths
from kvferry_keeper.volumes.breaker import Cause
from kvferry_keeper.volumes.volume_io import VolumeIo

# Limits the writes that wait for all volumes, in the memory of engines: further ones are refused.
MAX_QUEUED_WRITE_BYTES = 512 << 20


class VolumeSet:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._volumes: dict[str, VolumeIo] = {}
        self._pools: dict[str, VolumeSet] = {}

    def __repr__(self) -> str:
        return f"<VolumeSet {list(self._volumes.values())}>"

    def __iter__(self) -> Iterator[VolumeIo]:
        return iter(self._volumes.values())

    def add(self, volume: VolumeIo) -> None:
        """Raises TierError for a copy of another volume."""
        if (other := self._volumes.get(volume.volume_id)) is not None:
            raise TierError(
                f"volume {volume.volume.path} is a copy of {other.volume.path}: both are {volume.volume_id}; "
                f"remove {paths.DESCRIPTION} from one of them to have a new one made"
            )
        self._volumes[volume.volume_id] = volume
        self.of(volume.pool)._volumes[volume.volume_id] = volume

    def of(self, pool: str) -> VolumeSet:
        """Return the volumes of a pool, also those that are added later. Its waiting writes have their own bound."""
        if pool not in self._pools:
            self._pools[pool] = VolumeSet(self._clock)
        return self._pools[pool]

    def get(self, volume_id: str) -> VolumeIo | None:
        return self._volumes.get(volume_id)

    def payload_bytes(self, layout: LayoutDigest) -> int | None:
        """Return the size, or None if neither an engine nor a volume has described the layout."""
        for volume in self:
            num_bytes = volume.layout_to_payload_bytes.get(layout)
            if num_bytes is not None:
                return num_bytes
        return None

    def loadable_keys(self, layout: LayoutDigest) -> list[ChunkKey]:
        return [chunk.key for volume in self if volume.is_readable for chunk in volume.volume.keys(layout)]

    def is_loadable(self, layout: LayoutDigest, key: ChunkKey) -> bool:
        return any(volume.is_readable and volume.volume.contains(layout, key) for volume in self)

    def with_chunk(self, layout: LayoutDigest, key: ChunkKey) -> VolumeIo | None:
        """The shortest queue wins."""
        holders = [volume for volume in self if volume.is_readable and volume.volume.contains(layout, key)]
        return min(holders, key=lambda volume: volume.queued_bytes, default=None)

    def for_new_chunk(self, num_bytes: int) -> VolumeIo | Cause:
        now_s = self._clock()
        volumes = [volume for volume in self if volume.accepts_writes(now_s)]
        if not volumes:
            return Cause.UNAVAILABLE
        volumes = [volume for volume in volumes if volume.budget.allows(now_s)]
        if not volumes:
            return Cause.BUDGET
        if sum(volume.queued_write_bytes for volume in self) + num_bytes > MAX_QUEUED_WRITE_BYTES:
            return Cause.QUEUE_FULL
        if len(volumes) == 1:
            return volumes[0]
        levels = {volume: volume.fill_level(num_bytes) for volume in volumes}
        return min(volumes, key=lambda volume: (levels[volume] > 1, volume.queued_bytes, levels[volume]))
