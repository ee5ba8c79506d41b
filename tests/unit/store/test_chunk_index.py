"""A volume's books, against a drive that is modelled: whatever order threads take, every byte is counted."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.store.chunk_index import ChunkIndex, File, Kept, Room
from kvferry.store.eviction import Lru
from kvferry.store.layout import ChunkId, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.tenancy.namespace import Namespace
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

    room: Room
    is_written: bool = False


@dataclass
class Remover:
    layout: LayoutDigest
    chunk: ChunkId
    file: File


@dataclass
class Quarantiner:
    kept: Kept
    file: File


class Drive:
    """Threads at work on one volume, each at its own step, and the files that are really there."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.books = ChunkIndex("/v", "me", CAPACITY, Lru())
        self.books.begin_telling()
        self.files: dict[str, int] = {}
        self._at_work: list[Writer | Remover | Quarantiner] = []
        self._pinned: list[Kept] = []
        self._told: set[tuple[LayoutDigest, ChunkId]] = set()
        self._number = 0

    def step(self) -> None:
        begin = [self._write, self._write, self._write, self._remove, self._pin, self._quarantine, self._forget]
        if self._at_work and self._random.random() < 0.6:
            self._go_on(self._at_work.pop(self._random.randrange(len(self._at_work))))
        elif self._pinned and self._random.random() < 0.2:
            self.books.unpin(self._pinned.pop(self._random.randrange(len(self._pinned))))
        elif self._random.random() < 0.05:
            for file in self.books.take_abandoned():
                self.books.put_down(file, is_removed=self._unlink(file.path))
        else:
            self._random.choice(begin)()
        self._check()

    def finish(self) -> None:
        while self._at_work:
            self._go_on(self._at_work.pop())
            self._check()
        for kept in self._pinned:
            self.books.unpin(kept)
        self._tell()
        assert self.books.check(0.0) == self.files
        assert self._told == {(kept.layout, kept.chunk) for kept in self.books.all_kept()}
        assert self.books.num_chunks == len(self._told)

    def _check(self) -> None:
        on_drive = sum(self.files.values())
        assert on_drive <= self.books.bytes_used <= CAPACITY, f"{on_drive} {self.books!r}"
        kept_paths = {self.books.path_of(kept) for kept in self.books.all_kept()}
        assert kept_paths <= self.files.keys(), "a page without its file"

    def _some(self) -> tuple[LayoutDigest, ChunkId]:
        layout = self._random.choice(list(DIGEST_TO_BYTES))
        return layout, chunk(self._random.randrange(6), self._random.choice(TENANTS))

    def _some_kept(self) -> Kept | None:
        kept_chunks = self.books.all_kept()
        return self._random.choice(kept_chunks) if kept_chunks else None

    def _write(self) -> None:
        layout, of = self._some()
        # One that was removed meanwhile is nobody's any more: its reader finds it gone.
        kept_chunks = self.books.all_kept()
        pinned = {self.books.path_of(kept) for kept in self._pinned if kept in kept_chunks}
        room = self.books.begin_write(layout, of, DIGEST_TO_BYTES[layout], 0.0)
        if isinstance(room, Room):
            assert room.recycled is None or room.recycled.path not in pinned, "a page that is being read is recycled"
            self._at_work.append(Writer(room))
        else:
            assert room in (Outcome.EXISTS, Outcome.REFUSED)

    def _remove(self) -> None:
        layout, of = self._some()
        file = self.books.begin_remove(layout, of)
        if file is not None:
            self._at_work.append(Remover(layout, of, file))

    def _pin(self) -> None:
        layout, of = self._some()
        kept = self.books.pin(layout, of.key)
        if kept is not None:
            self._pinned.append(kept)

    def _quarantine(self) -> None:
        kept = self._some_kept()
        if kept is not None:
            file = self.books.begin_quarantine(kept)
            assert file is not None
            self._at_work.append(Quarantiner(kept, file))

    def _forget(self) -> None:
        kept = self._some_kept()
        if kept is not None:
            del self.files[self.books.path_of(kept)]
            self.books.forget(kept)
            self.books.forget(kept)

    def _go_on(self, work: Writer | Remover | Quarantiner) -> None:
        match work:
            case Remover(layout, of, file):
                self.books.end_remove(layout, of, file, is_removed=self._unlink(file.path))
            case Quarantiner(kept, file):
                self._number += 1
                target = f"/v/quarantine/{kept.chunk.namespace}/{self._number}"
                is_moved = self._rename(file.path, target)
                moved = File(target, kept.num_bytes) if is_moved else None
                for old in self.books.end_quarantine(kept, file, moved):
                    self.books.put_down(old, is_removed=self._unlink(old.path))
            case Writer(room, False):
                self._clear(work, room)
            case Writer(room, True):
                self.files[f"/v/{id(room)}.tmp"] = room.chunk_bytes
                if self._random.random() < 0.2:
                    self._fail(work, room)
                else:
                    kept = Kept(room.layout, room.chunk, "me", room.chunk_bytes)
                    assert self._rename(f"/v/{id(room)}.tmp", self.books.path_of(kept), always=True)
                    self.books.commit(room, 0.0)
        self._tell()

    def _clear(self, work: Writer, room: Room) -> None:
        left = [file for file in room.removed if not self._unlink(file.path)]
        if room.recycled is not None and not self._rename(room.recycled.path, f"/v/{id(room)}.tmp"):
            left.append(room.recycled)
        self.books.clear(room, left)
        if left:
            self.books.empty(room)
            self.books.give_up(room)
        else:
            work.is_written = True
            self._at_work.append(work)

    def _fail(self, work: Writer, room: Room) -> None:
        temporary = f"/v/{id(room)}.tmp"
        if self._unlink(temporary):
            self.books.empty(room)
        else:
            # Names of rooms are used again in this model, those of temporary files are not.
            self._number += 1
            self.files[f"{temporary}{self._number}"] = self.files.pop(temporary)
            self.books.empty(room, File(f"{temporary}{self._number}", room.chunk_bytes))
        if self.books.recycle_instead(room, 0.0):
            work.is_written = False
            self._at_work.append(work)
        else:
            self.books.give_up(room)

    def _unlink(self, path: str) -> bool:
        assert path in self.files, "somebody else moved what is in hand"
        if self._random.random() < 0.1:
            return False
        del self.files[path]
        return True

    def _rename(self, source: str, target: str, *, always: bool = False) -> bool:
        assert source in self.files, "somebody else moved what is in hand"
        if not always and self._random.random() < 0.1:
            return False
        self.files[target] = self.files.pop(source)
        return True

    def _tell(self) -> None:
        while (change := self.books.next_change()) is not None:
            assert self.books.next_change() is None, "two tell at once"
            for added in change.added:
                assert (change.layout, added) not in self._told
                self._told.add((change.layout, added))
            for removed in change.removed:
                self._told.remove((change.layout, removed))
            self.books.told()


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_every_byte_is_counted_whatever_order_threads_take(seed: int) -> None:
    drive = Drive(seed)
    for _ in range(150):
        drive.step()
    drive.finish()


def books_with(*chunks: ChunkId) -> ChunkIndex:
    books = ChunkIndex("/v", "me", CAPACITY, Lru())
    for of in chunks:
        assert not books.add([Kept(DIGEST, of, "me", UNIT)], 0.0)
    return books


def test_the_only_file_of_the_right_size_is_recycled() -> None:
    books = books_with(*map(chunk, range(10)))
    room = books.begin_write(DIGEST, chunk(11), UNIT, 0.0)
    assert isinstance(room, Room)
    assert room.recycled is not None
    assert chunk(0).key.hex() in room.recycled.path
    assert not room.removed


def test_files_of_another_size_are_removed() -> None:
    books = books_with(*map(chunk, range(10)))
    room = books.begin_write(DIGEST, chunk(11), 2 * UNIT, 0.0)
    assert isinstance(room, Room)
    assert room.recycled is None
    assert len(room.removed) == 2


def test_a_chunk_larger_than_the_capacity_evicts_nobody() -> None:
    books = books_with(chunk(1))
    assert books.begin_write(DIGEST, chunk(2), CAPACITY + UNIT, 0.0) is Outcome.REFUSED
    assert books.contains(DIGEST, chunk(1).key)


def test_where_all_chunks_are_being_read_there_is_no_room() -> None:
    books = books_with(*map(chunk, range(10)))
    pinned = [books.pin(DIGEST, chunk(number).key) for number in range(10)]
    assert books.begin_write(DIGEST, chunk(11), UNIT, 0.0) is Outcome.REFUSED
    assert pinned[3] is not None
    books.unpin(pinned[3])
    room = books.begin_write(DIGEST, chunk(11), UNIT, 0.0)
    assert isinstance(room, Room)
    assert room.recycled is not None
    assert chunk(3).key.hex() in room.recycled.path


def test_a_chunk_of_another_epoch_makes_way_for_the_new_one() -> None:
    old, new = chunk(1, Namespace("a", 1)), chunk(1, Namespace("a", 2))
    books = books_with(old)
    room = books.begin_write(DIGEST, new, UNIT, 0.0)
    assert isinstance(room, Room)
    assert room.recycled == File(books.path_of(Kept(DIGEST, old, "me", UNIT)), UNIT)
    assert not books.contains(DIGEST, old.key)


def test_a_chunk_that_comes_or_goes_is_nobody_elses() -> None:
    books = books_with(chunk(1))
    room = books.begin_write(DIGEST, chunk(2), UNIT, 0.0)
    assert isinstance(room, Room)
    assert books.begin_write(DIGEST, chunk(2), UNIT, 0.0) is Outcome.EXISTS
    assert books.add([Kept(DIGEST, chunk(2), "other", UNIT)], 0.0)
    assert books.begin_remove(DIGEST, chunk(2)) is None
    assert books.begin_remove(DIGEST, chunk(1)) is not None
    assert books.begin_write(DIGEST, chunk(1), UNIT, 0.0) is Outcome.REFUSED


def test_chunks_of_other_writers_take_no_room_and_are_no_victims() -> None:
    books = books_with(*map(chunk, range(9)))
    assert not books.add([Kept(DIGEST, chunk(100), "other", UNIT)], 0.0)
    assert books.bytes_used == 9 * UNIT
    for number in range(20, 40):
        room = books.begin_write(DIGEST, chunk(number), UNIT, 0.0)
        assert isinstance(room, Room)
        books.clear(room, [])
        books.commit(room, 0.0)
    assert books.contains(DIGEST, chunk(100).key)
    assert books.bytes_used == CAPACITY


def test_quarantine_takes_a_sixteenth_but_always_the_newest() -> None:
    books = ChunkIndex("/v", "me", 32 * UNIT, Lru())
    for number in range(10):
        kept = Kept(DIGEST, chunk(number), "me", UNIT)
        assert not books.add([kept], 0.0)
        file = books.begin_quarantine(kept)
        assert file is not None
        surplus = books.end_quarantine(kept, file, File(f"/v/quarantine/{number}", UNIT))
        assert [old.path for old in surplus] == ([f"/v/quarantine/{number - 2}"] if number >= 2 else [])
        for old in surplus:
            books.put_down(old, is_removed=True)
    assert books.bytes_used == 2 * UNIT


def test_a_capacity_that_shrank_is_made_true() -> None:
    books = books_with(*map(chunk, range(8)))
    books.capacity_bytes = 3 * UNIT
    gone = []
    while (file := books.take_excess(0.0)) is not None:
        gone.append(file.path)
        books.put_down(file, is_removed=True)
    assert len(gone) == 5
    assert all(chunk(number).key.hex() in path for number, path in enumerate(gone))
    assert books.bytes_used == 3 * UNIT


@pytest.mark.parametrize("law", ["_kept_bytes", "_bytes_in_hand", "_num_chunks", "_abandoned_bytes"])
def test_a_broken_law_is_named(law: str) -> None:
    books = books_with(chunk(1))
    books.check(0.0)
    setattr(books, law, 5)
    with pytest.raises(AssertionError):
        books.check(0.0)
