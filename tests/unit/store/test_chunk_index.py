"""The chunk index against a model of threads and a drive: every byte is counted, in any order of steps."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store.index.chunk_index import ChunkIndex, Reservation
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.index.eviction import Lru, TenantRetention
from kvferry_keeper.store.index.space_ledger import File
from kvferry_keeper.store.outcome import Outcome
from support.tier_chunks import LAYOUT, chunk

UNIT = 4096
CAPACITY = 10 * UNIT
DIGEST = LAYOUT.digest
TENANTS = (Namespace("a"), Namespace("b"))
# Chunks of a layout have one size each.
DIGEST_TO_BYTES = {LayoutDigest(bytes([n]) * 16): n * UNIT for n in (1, 2, 3)}


@dataclass
class Writer:
    """A thread that writes a chunk, at one of its steps."""

    reservation: Reservation
    is_written: bool = False


@dataclass
class Remover:
    layout: LayoutDigest
    chunk: ChunkId
    file: File


@dataclass
class Quarantiner:
    entry: IndexEntry
    file: File


class Drive:
    """Threads at work on one volume, each at its own step, and the files that are really there."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.index = ChunkIndex("/v", "me", CAPACITY, Lru() if seed % 2 else TenantRetention(CAPACITY))
        self.index.changes.begin()
        self.files: dict[str, int] = {}
        self._at_work: list[Writer | Remover | Quarantiner] = []
        self._pinned: list[IndexEntry] = []
        self._readable: set[tuple[LayoutDigest, ChunkId]] = set()
        self._number = 0

    def step(self) -> None:
        begin = [self._write] * 3 + [self._remove, self._pin, self._quarantine, self._forget, self._hide]
        if self._at_work and self._random.random() < 0.6:
            self._go_on(self._at_work.pop(self._random.randrange(len(self._at_work))))
        elif self._pinned and self._random.random() < 0.2:
            self.index.unpin(self._pinned.pop(self._random.randrange(len(self._pinned))))
        elif self._random.random() < 0.05:
            for file in self.index.leftovers.withdraw_abandoned():
                self.index.leftovers.end_removal(file, is_removed=self._unlink(file.path))
        else:
            self._random.choice(begin)()
        self._check()

    def finish(self) -> None:
        while self._at_work:
            self._go_on(self._at_work.pop())
            self._check()
        for entry in self._pinned:
            self.index.unpin(entry)
        self._tell()
        assert self.index.check(0.0) == self.files
        assert self._readable == {(layout, of) for layout in DIGEST_TO_BYTES for of in self.index.chunks(layout)}
        entries = self.index.entries()
        assert self._readable == {(entry.layout, entry.chunk) for entry in entries if not entry.is_hidden}
        assert self.index.num_chunks == len(entries)

    def _check(self) -> None:
        on_drive = sum(self.files.values())
        assert on_drive <= self.index.bytes_used <= CAPACITY, f"{on_drive} {self.index!r}"
        entry_paths = {self.index.path_of(entry) for entry in self.index.entries()}
        assert entry_paths <= self.files.keys(), "a chunk without its file"

    def _some(self) -> tuple[LayoutDigest, ChunkId]:
        layout = self._random.choice(list(DIGEST_TO_BYTES))
        return layout, chunk(self._random.randrange(6), self._random.choice(TENANTS))

    def _some_entry(self) -> IndexEntry | None:
        entries = self.index.entries()
        return self._random.choice(entries) if entries else None

    def _write(self) -> None:
        layout, of = self._some()
        # A pinned chunk that was removed meanwhile does not count: its reader finds it gone.
        entries = self.index.entries()
        pinned = {self.index.path_of(entry) for entry in self._pinned if entry in entries}
        reservation = self.index.reserve(layout, of, DIGEST_TO_BYTES[layout], 0.0)
        if isinstance(reservation, Reservation):
            assert reservation.recycled is None or reservation.recycled.path not in pinned, (
                "a chunk that is being read is recycled"
            )
            self._at_work.append(Writer(reservation))
        else:
            assert reservation in (Outcome.EXISTS, Outcome.REFUSED)

    def _remove(self) -> None:
        layout, of = self._some()
        file = self.index.begin_remove(layout, of)
        if file is not None:
            self._at_work.append(Remover(layout, of, file))

    def _pin(self) -> None:
        layout, of = self._some()
        entry = self.index.pin(layout, of.key)
        if entry is not None:
            self._pinned.append(entry)

    def _quarantine(self) -> None:
        entry = self._some_entry()
        if entry is not None:
            file = self.index.begin_quarantine(entry)
            assert file is not None
            self._at_work.append(Quarantiner(entry, file))

    def _hide(self) -> None:
        entry = self._some_entry()
        if entry is not None:
            self.index.hide(entry)
            self.index.hide(entry)
            assert not self.index.contains(entry.layout, entry.chunk.key)

    def _forget(self) -> None:
        entry = self._some_entry()
        if entry is not None:
            del self.files[self.index.path_of(entry)]
            self.index.forget(entry)
            self.index.forget(entry)

    def _go_on(self, work: Writer | Remover | Quarantiner) -> None:
        match work:
            case Remover(layout, of, file):
                self.index.end_remove(layout, of, file, is_removed=self._unlink(file.path))
            case Quarantiner(entry, file):
                self._number += 1
                target = f"/v/quarantine/{entry.chunk.namespace}/{self._number}"
                is_moved = self._rename(file.path, target)
                moved = File(target, entry.num_bytes) if is_moved else None
                for old in self.index.end_quarantine(entry, file, moved):
                    self.index.leftovers.end_removal(old, is_removed=self._unlink(old.path))
            case Writer(reservation, False):
                self._clear(work, reservation)
            case Writer(reservation, True):
                self.files[f"/v/{id(reservation)}.tmp"] = reservation.chunk_bytes
                if self._random.random() < 0.2:
                    self._fail(work, reservation)
                else:
                    entry = IndexEntry(reservation.layout, reservation.chunk, "me", reservation.chunk_bytes)
                    assert self._rename(f"/v/{id(reservation)}.tmp", self.index.path_of(entry), always=True)
                    self.index.commit(reservation, 0.0)
        self._tell()

    def _clear(self, work: Writer, reservation: Reservation) -> None:
        left = [file for file in reservation.removed if not self._unlink(file.path)]
        if reservation.recycled is not None and not self._rename(
            reservation.recycled.path, f"/v/{id(reservation)}.tmp"
        ):
            left.append(reservation.recycled)
        self.index.finish_eviction(reservation, left)
        if left:
            self.index.roll_back(reservation)
            self.index.cancel(reservation)
        else:
            work.is_written = True
            self._at_work.append(work)

    def _fail(self, work: Writer, reservation: Reservation) -> None:
        temporary = f"/v/{id(reservation)}.tmp"
        if self._unlink(temporary):
            self.index.roll_back(reservation)
        else:
            # Names of rooms are used again in this model, those of temporary files are not.
            self._number += 1
            self.files[f"{temporary}{self._number}"] = self.files.pop(temporary)
            self.index.roll_back(reservation, File(f"{temporary}{self._number}", reservation.chunk_bytes))
        if self.index.reserve_by_recycling(reservation, 0.0):
            work.is_written = False
            self._at_work.append(work)
        else:
            self.index.cancel(reservation)

    def _unlink(self, path: str) -> bool:
        assert path in self.files, "another thread moved a file in transit"
        if self._random.random() < 0.1:
            return False
        del self.files[path]
        return True

    def _rename(self, source: str, target: str, *, always: bool = False) -> bool:
        assert source in self.files, "another thread moved a file in transit"
        if not always and self._random.random() < 0.1:
            return False
        self.files[target] = self.files.pop(source)
        return True

    def _tell(self) -> None:
        while (change := self.index.changes.next()) is not None:
            assert self.index.changes.next() is None, "two deliveries at once"
            for added in change.added:
                assert (change.layout, added) not in self._readable
                self._readable.add((change.layout, added))
            for removed in change.removed:
                self._readable.remove((change.layout, removed))
            self.index.changes.end_delivery()


@given(st.integers(0, 2**32))
def test_every_byte_is_counted_whatever_order_threads_take(seed: int) -> None:
    drive = Drive(seed)
    for _ in range(150):
        drive.step()
    drive.finish()


def index_with(*chunks: ChunkId) -> ChunkIndex:
    index = ChunkIndex("/v", "me", CAPACITY, Lru())
    for of in chunks:
        assert not index.add([IndexEntry(DIGEST, of, "me", UNIT)], 0.0)
    return index


def test_the_only_file_of_the_right_size_is_recycled() -> None:
    index = index_with(*map(chunk, range(10)))
    reservation = index.reserve(DIGEST, chunk(11), UNIT, 0.0)
    assert isinstance(reservation, Reservation)
    assert reservation.recycled is not None
    assert chunk(0).key.hex() in reservation.recycled.path
    assert not reservation.removed


def test_files_of_another_size_are_removed() -> None:
    index = index_with(*map(chunk, range(10)))
    reservation = index.reserve(DIGEST, chunk(11), 2 * UNIT, 0.0)
    assert isinstance(reservation, Reservation)
    assert reservation.recycled is None
    assert len(reservation.removed) == 2


def test_a_chunk_larger_than_the_capacity_evicts_nobody() -> None:
    index = index_with(chunk(1))
    assert index.reserve(DIGEST, chunk(2), CAPACITY + UNIT, 0.0) is Outcome.REFUSED
    assert index.contains(DIGEST, chunk(1).key)


def test_where_all_chunks_are_being_read_there_is_no_room() -> None:
    index = index_with(*map(chunk, range(10)))
    pinned = [index.pin(DIGEST, chunk(number).key) for number in range(10)]
    assert index.reserve(DIGEST, chunk(11), UNIT, 0.0) is Outcome.REFUSED
    assert pinned[3] is not None
    index.unpin(pinned[3])
    reservation = index.reserve(DIGEST, chunk(11), UNIT, 0.0)
    assert isinstance(reservation, Reservation)
    assert reservation.recycled is not None
    assert chunk(3).key.hex() in reservation.recycled.path


def test_a_chunk_of_another_epoch_makes_way_for_the_new_one() -> None:
    old, new = chunk(1, Namespace("a", 1)), chunk(1, Namespace("a", 2))
    index = index_with(old)
    reservation = index.reserve(DIGEST, new, UNIT, 0.0)
    assert isinstance(reservation, Reservation)
    assert reservation.recycled == File(index.path_of(IndexEntry(DIGEST, old, "me", UNIT)), UNIT)
    assert not index.contains(DIGEST, old.key)


def test_a_chunk_that_comes_or_goes_is_nobody_elses() -> None:
    index = index_with(chunk(1))
    reservation = index.reserve(DIGEST, chunk(2), UNIT, 0.0)
    assert isinstance(reservation, Reservation)
    assert index.reserve(DIGEST, chunk(2), UNIT, 0.0) is Outcome.EXISTS
    assert index.add([IndexEntry(DIGEST, chunk(2), "other", UNIT)], 0.0)
    assert index.begin_remove(DIGEST, chunk(2)) is None
    assert index.begin_remove(DIGEST, chunk(1)) is not None
    assert index.reserve(DIGEST, chunk(1), UNIT, 0.0) is Outcome.REFUSED


def test_chunks_of_other_writers_take_no_room_and_are_no_victims() -> None:
    index = index_with(*map(chunk, range(9)))
    assert not index.add([IndexEntry(DIGEST, chunk(100), "other", UNIT)], 0.0)
    assert index.bytes_used == 9 * UNIT
    for number in range(20, 40):
        reservation = index.reserve(DIGEST, chunk(number), UNIT, 0.0)
        assert isinstance(reservation, Reservation)
        index.finish_eviction(reservation, [])
        index.commit(reservation, 0.0)
    assert index.contains(DIGEST, chunk(100).key)
    assert index.bytes_used == CAPACITY


def test_a_file_of_another_writer_that_cannot_be_removed_stays_counted() -> None:
    index = ChunkIndex("/v", "me", CAPACITY, Lru())
    entry = IndexEntry(DIGEST, chunk(1), "other", UNIT)
    assert not index.add([entry], 0.0)
    file = index.begin_quarantine(entry)
    assert file is not None
    index.end_quarantine(entry, file, None)
    # A rescan finds it again.
    assert not index.add([IndexEntry(DIGEST, chunk(1), "other", UNIT)], 0.0)
    again = index.begin_remove(DIGEST, chunk(1))
    assert again is not None
    index.end_remove(DIGEST, chunk(1), again, is_removed=False)
    assert index.bytes_used == UNIT
    assert index.leftovers.withdraw_abandoned() == [file]


def test_quarantine_takes_a_sixteenth_but_always_the_newest() -> None:
    index = ChunkIndex("/v", "me", 32 * UNIT, Lru())
    for number in range(10):
        entry = IndexEntry(DIGEST, chunk(number), "me", UNIT)
        assert not index.add([entry], 0.0)
        file = index.begin_quarantine(entry)
        assert file is not None
        surplus = index.end_quarantine(entry, file, File(f"/v/quarantine/{number}", UNIT))
        assert [old.path for old in surplus] == ([f"/v/quarantine/{number - 2}"] if number >= 2 else [])
        for old in surplus:
            index.leftovers.end_removal(old, is_removed=True)
    assert index.bytes_used == 2 * UNIT


def test_a_capacity_that_shrank_is_made_true() -> None:
    index = index_with(*map(chunk, range(8)))
    index._space.capacity_bytes = 3 * UNIT
    files = index.withdraw_over_capacity(0.0)
    gone = [file.path for file in files]
    for file in files:
        index.leftovers.end_removal(file, is_removed=True)
    assert len(gone) == 5
    assert all(chunk(number).key.hex() in path for number, path in enumerate(gone))
    assert index.bytes_used == 3 * UNIT


@pytest.mark.parametrize("counter", ["stored_bytes", "bytes_in_transit", "_num_chunks", "_abandoned_bytes"])
def test_a_wrong_counter_is_detected(counter: str) -> None:
    index = index_with(chunk(1))
    index.check(0.0)
    setattr(index if counter == "_num_chunks" else index._space, counter, 5)
    with pytest.raises(AssertionError):
        index.check(0.0)
