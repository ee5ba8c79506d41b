"""Publishes residency: a snapshot in parts, then deltas numbered from 1.

Deltas are idempotent, and may overlap a snapshot.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.residency.index import Holder, ResidencyIndex, Tier

Keys = Sequence[int]


@dataclass(frozen=True, slots=True)
class Delta:
    """Changes since the previous delta: `cleared` first, then disjoint `stored` and `removed`."""

    sequence: int
    stored: Mapping[Tier, Keys] = field(default_factory=dict)
    removed: Mapping[Tier, Keys] = field(default_factory=dict)
    cleared: bool = False

    @property
    def num_keys(self) -> int:
        return sum(map(len, self.stored.values())) + sum(map(len, self.removed.values()))


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Part `part` of `num_parts`, from 0, of the keys after delta `sequence`.

    An empty snapshot has one part.
    """

    sequence: int
    part: int
    num_parts: int
    tier: Tier
    keys: Keys


def snapshot_parts(sequence: int, held: Mapping[Tier, Keys], max_keys: int) -> Iterator[SnapshotPart]:
    """Raises ValueError when `max_keys` is below 1."""
    if max_keys < 1:
        raise ValueError(f"a snapshot in parts of {max_keys} keys")
    cuts = [
        (tier, keys[start : start + max_keys]) for tier, keys in held.items() for start in range(0, len(keys), max_keys)
    ]
    cuts = cuts or [(Tier.GPU, ())]
    for part, (tier, keys) in enumerate(cuts):
        yield SnapshotPart(sequence, part, len(cuts), tier, keys)


class FollowerState(enum.StrEnum):
    WAITING = "waiting"  # for the first part of a snapshot
    COLLECTING = "collecting"  # parts of one
    FOLLOWING = "following"


class ResidencyFollower:
    """Applies one owner's messages to the index, in the caller's order. Pure.

    Keys known before a gap stay until the next snapshot begins: most are still right.
    """

    def __init__(self, index: ResidencyIndex, owner: str, *, max_waiting_deltas: int = 1024) -> None:
        """More than `max_waiting_deltas` during a snapshot make it useless: a newer one is requested."""
        self._index = index
        self._owner = owner
        self._max_waiting_deltas = max_waiting_deltas
        self._state = FollowerState.WAITING
        self._sequence = 0
        self._last_part: SnapshotPart | None = None
        self._waiting: list[Delta] = []
        self.num_gaps = 0

    def __repr__(self) -> str:
        return f"<ResidencyFollower of {self._owner}: {self._state.value} at {self._sequence}, {self.num_gaps} gaps>"

    @property
    def state(self) -> FollowerState:
        return self._state

    @property
    def needs_snapshot(self) -> bool:
        """False while one is arriving."""
        return self._state is FollowerState.WAITING

    @property
    def sequence(self) -> int:
        """The last delta in the index; 0 before any."""
        return self._sequence

    def apply_part(self, part: SnapshotPart) -> bool:
        """Return whether the index is true now."""
        if part.part == 0:  # always begins a new snapshot
            self._index.drop_holder(self._owner)
            self._waiting = [delta for delta in self._waiting if delta.sequence > part.sequence]
            self._state = FollowerState.COLLECTING
        elif self._state is not FollowerState.COLLECTING or not self._continues(part):
            self._lost()
            return False
        self._index.store(Holder(self._owner, part.tier), part.keys)
        self._last_part = SnapshotPart(part.sequence, part.part, part.num_parts, part.tier, ())
        if part.part + 1 < part.num_parts:
            return False
        self._complete()
        return self._state is FollowerState.FOLLOWING

    def apply_delta(self, delta: Delta) -> bool:
        """Return whether the index is true now. Ignores old deltas."""
        if self._state is FollowerState.FOLLOWING:
            if delta.sequence == self._sequence + 1:
                self._apply(delta)
            elif delta.sequence > self._sequence:
                self._lost()
        elif self._state is FollowerState.COLLECTING:
            self._waiting.append(delta)
            if len(self._waiting) > self._max_waiting_deltas:
                self._lost()
        return self._state is FollowerState.FOLLOWING

    def drop(self) -> None:
        self._index.drop_holder(self._owner)
        self._last_part, self._waiting = None, []
        self._sequence = 0
        self._state = FollowerState.WAITING

    def _continues(self, part: SnapshotPart) -> bool:
        last = self._last_part
        assert last is not None
        return (part.sequence, part.part, part.num_parts) == (last.sequence, last.part + 1, last.num_parts)

    def _lost(self) -> None:
        self.num_gaps += 1
        self._last_part, self._waiting = None, []
        self._state = FollowerState.WAITING

    def _complete(self) -> None:
        last, self._last_part = self._last_part, None
        waiting, self._waiting = self._waiting, []
        assert last is not None
        self._sequence = last.sequence
        self._state = FollowerState.FOLLOWING
        for delta in waiting:
            self.apply_delta(delta)

    def _apply(self, delta: Delta) -> None:
        if delta.cleared:
            self._index.drop_holder(self._owner)
        for tier, keys in delta.removed.items():
            self._index.remove(Holder(self._owner, tier), keys)
        for tier, keys in delta.stored.items():
            self._index.store(Holder(self._owner, tier), keys)
        self._sequence = delta.sequence
