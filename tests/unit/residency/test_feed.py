from __future__ import annotations

import pytest

from kvferry.residency.feed import Delta, ResidencyFollower, SnapshotPart, snapshot_parts
from kvferry.residency.index import Holder, ResidencyIndex, Tier

GPU = Holder("w", Tier.GPU)
CPU = Holder("w", Tier.CPU)


def following(keys: list[int], sequence: int = 3) -> tuple[ResidencyIndex, ResidencyFollower]:
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    for part in snapshot_parts(sequence, {Tier.GPU: keys}, 2):
        follower.apply_part(part)
    assert not follower.needs_snapshot
    return index, follower


def stored(sequence: int, *keys: int) -> Delta:
    return Delta(sequence, stored={Tier.GPU: keys})


def test_a_snapshot_is_cut_into_bounded_parts() -> None:
    parts = list(snapshot_parts(7, {Tier.GPU: [1, 2, 3], Tier.CPU: [4]}, 2))
    assert [(part.tier, list(part.keys)) for part in parts] == [(Tier.GPU, [1, 2]), (Tier.GPU, [3]), (Tier.CPU, [4])]
    assert {(part.sequence, part.num_parts) for part in parts} == {(7, 3)}
    assert list(snapshot_parts(7, {}, 2)) == [SnapshotPart(7, 0, 1, Tier.GPU, ())]
    with pytest.raises(ValueError, match="0 keys"):
        list(snapshot_parts(7, {}, 0))


def test_parts_of_a_snapshot_count_as_they_come_and_deltas_when_it_is_whole() -> None:
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    assert follower.needs_snapshot
    assert not follower.apply_delta(stored(1, 9))
    first, second = snapshot_parts(1, {Tier.GPU: [1], Tier.CPU: [2]}, 1)
    assert not follower.apply_part(first)
    assert not follower.needs_snapshot
    assert index.keys_of(GPU) == {1}
    assert follower.apply_part(second)
    assert index.keys_of(GPU) == {1}
    assert index.keys_of(CPU) == {2}
    assert follower.sequence == 1


def test_deltas_are_applied_in_their_order() -> None:
    index, follower = following([1, 2, 3])
    assert follower.apply_delta(Delta(4, stored={Tier.GPU: [5], Tier.CPU: [1]}, removed={Tier.GPU: [1]}))
    assert index.keys_of(GPU) == {2, 3, 5}
    assert index.keys_of(CPU) == {1}
    assert follower.apply_delta(Delta(5, stored={Tier.GPU: [8]}, cleared=True))
    assert index.keys_of(GPU) == {8}
    assert index.keys_of(CPU) == frozenset()


def test_an_old_delta_changes_nothing() -> None:
    index, follower = following([1], sequence=3)
    assert follower.apply_delta(stored(3, 7))
    assert index.keys_of(GPU) == {1}


def test_a_gap_asks_for_a_snapshot_and_keeps_what_was_known() -> None:
    index, follower = following([1], sequence=3)
    assert not follower.apply_delta(stored(5, 7))
    assert follower.needs_snapshot
    assert follower.num_gaps == 1
    assert index.keys_of(GPU) == {1}
    assert not follower.apply_delta(stored(6, 8))
    assert index.keys_of(GPU) == {1}
    (part,) = snapshot_parts(6, {Tier.GPU: [7, 8]}, 10)
    assert follower.apply_part(part)
    assert index.keys_of(GPU) == {7, 8}
    assert follower.apply_delta(stored(7, 9))


def test_deltas_that_arrive_between_parts_are_applied_after_them() -> None:
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    first, second = snapshot_parts(3, {Tier.GPU: [1, 2]}, 1)
    follower.apply_part(first)
    follower.apply_delta(Delta(4, removed={Tier.GPU: [2]}))
    follower.apply_delta(stored(5, 6))
    assert follower.apply_part(second)
    assert index.keys_of(GPU) == {1, 6}
    assert follower.sequence == 5


def test_a_gap_between_parts_is_seen_when_the_snapshot_is_whole() -> None:
    follower = ResidencyFollower(ResidencyIndex(), "w")
    first, second = snapshot_parts(3, {Tier.GPU: [1, 2]}, 1)
    follower.apply_part(first)
    follower.apply_delta(stored(5, 6))
    assert not follower.apply_part(second)
    assert follower.needs_snapshot


def test_a_lost_part_asks_for_a_new_snapshot() -> None:
    follower = ResidencyFollower(ResidencyIndex(), "w")
    first, _lost, third = snapshot_parts(3, {Tier.GPU: [1, 2, 3]}, 1)
    follower.apply_part(first)
    assert not follower.apply_part(third)
    assert follower.needs_snapshot
    assert not follower.apply_part(third)
    assert follower.needs_snapshot


def test_a_new_snapshot_may_begin_in_the_middle_of_one() -> None:
    index = ResidencyIndex()
    follower = ResidencyFollower(index, "w")
    first, *_rest = snapshot_parts(3, {Tier.GPU: [1, 2, 3]}, 1)
    follower.apply_part(first)
    (whole,) = snapshot_parts(4, {Tier.GPU: [7]}, 10)
    assert follower.apply_part(whole)
    assert index.keys_of(GPU) == {7}


def test_what_waits_for_a_snapshot_is_bounded() -> None:
    follower = ResidencyFollower(ResidencyIndex(), "w", max_waiting_deltas=2)
    first, *_rest = snapshot_parts(0, {Tier.GPU: [1, 2]}, 1)
    follower.apply_part(first)
    for sequence in (1, 2):
        follower.apply_delta(stored(sequence, sequence))
        assert not follower.needs_snapshot
    follower.apply_delta(stored(3, 3))
    assert follower.needs_snapshot


def test_a_dropped_owner_holds_nothing_and_others_keep_theirs() -> None:
    index, follower = following([1])
    index.store(Holder("other", Tier.GPU), [1])
    follower.drop()
    assert index.holders() == [Holder("other", Tier.GPU)]
    assert follower.needs_snapshot
