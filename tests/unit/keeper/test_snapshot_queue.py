"""A subscriber that reads slowly."""

from __future__ import annotations

from kvferry_keeper.snapshot_queue import SnapshotQueue


def drain(queue: SnapshotQueue[str]) -> list[str]:
    items = []
    while (item := queue.pop()) is not None:
        items.append(item)
    return items


def test_changes_come_in_order() -> None:
    queue: SnapshotQueue[str] = SnapshotQueue(lambda: ["snapshot"], 3)
    for change in "abc":
        queue.put(change)
    assert drain(queue) == ["a", "b", "c"]
    assert drain(queue) == []


def test_too_many_changes_become_a_snapshot_made_when_it_is_read() -> None:
    state = ["old"]
    queue: SnapshotQueue[str] = SnapshotQueue(lambda: list(state), 2)
    for change in "abcd":
        queue.put(change)
    state[:] = ["new", "parts"]
    assert queue.pop() == "new"
    queue.put("e")
    assert drain(queue) == ["parts", "e"]


def test_sizes_are_summed() -> None:
    queue: SnapshotQueue[str] = SnapshotQueue(lambda: ["snapshot"], 4, len)
    queue.put("ab")
    queue.put("cd")
    assert queue.pop() == "ab"
    queue.put("ef")
    assert drain(queue) == ["cd", "ef"]
    queue.put("abcde")
    assert drain(queue) == ["snapshot"]


def test_a_change_put_while_the_snapshot_is_made_is_part_of_it() -> None:
    queue: SnapshotQueue[str] = SnapshotQueue(list, 9)

    def snapshot() -> list[str]:
        queue.put("flushed")
        return ["with flushed"]

    queue = SnapshotQueue(snapshot, 9)
    queue.begin_snapshot()
    assert drain(queue) == ["with flushed"]


def test_a_new_snapshot_replaces_the_rest_of_an_older_one() -> None:
    number = iter(range(9))
    queue: SnapshotQueue[str] = SnapshotQueue(lambda: [f"{n} of {next(number)}" for n in range(2)], 9)
    queue.begin_snapshot()
    assert queue.pop() == "0 of 0"
    queue.begin_snapshot()
    assert len(drain(queue)) == 2
    queue.begin_snapshot()
    queue.clear()
    assert drain(queue) == []
