"""A short run of three nodes on a shared volume, and proof that it sees what it looks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.fuzz_nodes import NodesStage
from bench.fuzzed_chunks import Tally
from kvferry_keeper.store.volume import Outcome, Volume


class Robber(Volume):
    """Takes the chunks of living writers for those of gone ones."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        other = path / "tmp" / f"{options['writer']}-unheld.lock"
        self._adopter._lock_of = lambda writer: other  # type: ignore[method-assign]


class Hoarder(Volume):
    """Stores more than it may."""

    def __init__(self, path: Path, *, capacity_bytes: int, **options: Any) -> None:
        super().__init__(path, capacity_bytes=2 * capacity_bytes, **options)


class Destroyer(Volume):
    """Moves chunks aside that another node sealed with a key unknown here."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._chunk_reader._note_foreign = self._move  # type: ignore[method-assign]

    def _move(self, path: str) -> None:
        for entry in self._index.entries():
            if self._index.path_of(entry) == path:
                self._quarantine.add(entry, Outcome.UNDECRYPTABLE)


def run(folder: Path, num_mutations: int, volume_class: type[Volume] = Volume) -> Tally:
    tally = Tally()
    for _ in NodesStage(folder / "nodes", 1, tally, volume_class).run(num_mutations):
        pass
    return tally


def test_nodes_share_a_volume_while_some_vanish(memory_path: Path) -> None:
    tally = run(memory_path, 1500)
    assert not tally.crashes, tally.crashes[0]
    assert (tally.num_mutations, tally.num_wrong_chunks) == (1500, 0)
    assert (tally.num_destroyed_chunks, tally.num_over_capacity) == (0, 0)
    reads = tally.by_cause["three nodes: read"]
    assert min(reads[outcome] for outcome in (Outcome.OK, Outcome.CORRUPT_PAYLOAD, Outcome.UNDECRYPTABLE)) > 0, reads
    assert sum(tally.by_cause["three nodes: vanish"].values()) > 0


def test_chunks_of_living_nodes_that_are_taken_over_are_counted(memory_path: Path) -> None:
    assert run(memory_path, 1500, Robber).num_destroyed_chunks > 0


def test_chunks_with_a_foreign_key_that_are_moved_are_counted(memory_path: Path) -> None:
    assert run(memory_path, 1500, Destroyer).num_destroyed_chunks > 0


def test_moments_over_capacity_are_counted(memory_path: Path) -> None:
    assert run(memory_path, 500, Hoarder).num_over_capacity > 0
