"""Residency as messages of worker.proto, for gateways."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.pages.keys import pack_keys, unpack_keys
from kvferry.residency.feed import Delta, SnapshotPart
from kvferry.residency.index import Tier
from kvferry.wire.v1 import worker_pb2 as pb


def delta_to_wire(delta: Delta) -> pb.Residency:
    return pb.Residency(
        sequence=delta.sequence,
        cleared=delta.cleared,
        stored=[_tier_to_wire(tier, keys) for tier, keys in delta.stored.items()],
        removed=[_tier_to_wire(tier, keys) for tier, keys in delta.removed.items()],
    )


def part_to_wire(part: SnapshotPart) -> pb.Residency:
    return pb.Residency(
        sequence=part.sequence,
        snapshot=True,
        part=part.part,
        num_parts=part.num_parts,
        stored=[_tier_to_wire(part.tier, part.keys)],
    )


def residency_from_wire(message: pb.Residency) -> Delta | SnapshotPart:
    """Raises ValueError for invalid tiers and keys."""
    if message.snapshot:
        if len(message.stored) != 1:
            raise ValueError(f"a part of a snapshot names {len(message.stored)} tiers")
        tier, keys = _tier_from_wire(message.stored[0])
        return SnapshotPart(message.sequence, message.part, message.num_parts, tier, keys)
    return Delta(
        message.sequence,
        dict(map(_tier_from_wire, message.stored)),
        dict(map(_tier_from_wire, message.removed)),
        message.cleared,
    )


def _tier_to_wire(tier: Tier, keys: Sequence[int]) -> pb.TierKeys:
    return pb.TierKeys(tier=tier.value, keys=pack_keys(keys))


def _tier_from_wire(message: pb.TierKeys) -> tuple[Tier, Sequence[int]]:
    return Tier(message.tier), unpack_keys(message.keys)
