"""Chunks that failed verification: where they go, and what their bytes are counted for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry_keeper.store.chunk_quarantine import Quarantine
from kvferry_keeper.store.direct_io import Fault, FaultyIo, Operation
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import CHUNK_BYTES, LAYOUT, chunk, chunk_files, empty, payload, quarantined
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        yield open_volume


def spoil(volume: Volume, number: int, num_bytes: int = CHUNK_BYTES) -> Path:
    """Write a chunk, replace its file's bytes by others, and return the file."""
    of = chunk(number)
    assert volume.write(DIGEST, of, payload(of)) is Outcome.OK
    (file,) = (file for file in chunk_files(volume.path) if of.key.hex() in file.name)
    file.write_bytes(b"x" * num_bytes)
    return file


def read(volume: Volume, number: int) -> Outcome:
    return volume.read(DIGEST, chunk(number), empty())


class Io(FaultyIo):
    """Fails an operation on files whose path has a part."""

    def __init__(self, operation: Operation | None = None, part: str = "") -> None:
        super().__init__(lambda failing, path: Fault(errno.EIO) if failing is operation and part in path else None)


def test_a_bad_file_is_kept_for_whoever_looks_into_it(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    volume = opened()
    file = spoil(volume, 1)
    caplog.clear()
    assert read(volume, 1) is Outcome.CORRUPT_HEADER
    (bad,) = quarantined(volume.path)
    assert bad.read_bytes() == b"x" * CHUNK_BYTES
    assert bad.name.startswith(f"{file.name}.corrupt_header.")
    assert bad.parent == volume.path / "quarantine" / "local" / DIGEST.hex() / "default.0"
    assert not file.exists()
    assert caplog.messages == [f"{file}: corrupt_header"]
    assert (volume.stats.quarantined, volume.stats.bytes_used) == (1, CHUNK_BYTES)
    volume.check()


def test_a_file_that_is_too_long_is_cut_to_the_bytes_that_are_counted(opened: Opened) -> None:
    volume = opened()
    spoil(volume, 1, 3 * CHUNK_BYTES)
    assert read(volume, 1) is Outcome.TRUNCATED
    assert [file.stat().st_size for file in quarantined(volume.path)] == [CHUNK_BYTES]
    assert volume.stats.bytes_used == CHUNK_BYTES
    volume.check()


def test_a_file_that_cannot_be_moved_is_removed(opened: Opened) -> None:
    volume = opened(io=Io(Operation.RENAME, "/pages/"))
    file = spoil(volume, 1)
    assert read(volume, 1) is Outcome.CORRUPT_HEADER
    assert not file.exists()
    assert not quarantined(volume.path)
    assert (volume.stats.quarantined, volume.stats.bytes_used) == (0, 0)
    volume.check()


def test_the_bytes_of_a_file_that_can_neither_be_moved_nor_removed_stay_counted(opened: Opened) -> None:
    def fail(operation: Operation, path: str) -> Fault | None:
        return Fault(errno.EIO) if operation in (Operation.RENAME, Operation.UNLINK) and "/pages/" in path else None

    volume = opened(io=FaultyIo(fail))
    file = spoil(volume, 1)
    assert read(volume, 1) is Outcome.CORRUPT_HEADER
    assert file.exists()
    assert (volume.stats.quarantined, volume.stats.bytes_used) == (0, CHUNK_BYTES)
    assert read(volume, 1) is Outcome.MISSING, "it is offered no more"
    volume.check()


def test_older_files_make_room_for_newer_ones(opened: Opened) -> None:
    volume = opened(chunks=16)
    for number in range(3):
        spoil(volume, number)
        assert read(volume, number) is Outcome.CORRUPT_HEADER
        (bad,) = quarantined(volume.path)
        assert chunk(number).key.hex() in bad.name, "the newest is kept"
        assert volume.stats.bytes_used == CHUNK_BYTES
    assert volume.stats.quarantined == 3
    volume.check()


def test_older_files_that_cannot_be_removed_stay_counted(opened: Opened) -> None:
    volume = opened(chunks=16, io=Io(Operation.UNLINK, "/quarantine/"))
    for number in range(2):
        spoil(volume, number)
        assert read(volume, number) is Outcome.CORRUPT_HEADER
    assert len(quarantined(volume.path)) == 2
    assert volume.stats.bytes_used == 2 * CHUNK_BYTES
    volume.check()


@pytest.mark.parametrize(("chunks", "num_kept"), [(2, 1), (1, 0)])
def test_a_bad_file_of_another_writer_is_kept_where_ones_own_capacity_has_room(
    opened: Opened, chunks: int, num_kept: int
) -> None:
    writer, reader = (opened(shared=True, writer="writer"), opened(shared=True, writer="reader", chunks=chunks))
    own = chunk(9)
    assert reader.write(DIGEST, own, payload(own)) is Outcome.OK
    file = spoil(writer, 1)
    reader.rescan()
    assert read(reader, 1) is Outcome.CORRUPT_HEADER
    assert not file.exists()
    assert [bad.relative_to(reader.path).parts[1] for bad in quarantined(reader.path)] == ["reader"] * num_kept
    assert reader.stats.quarantined == num_kept
    assert reader.stats.bytes_used == (1 + num_kept) * CHUNK_BYTES
    assert read(writer, 1) is Outcome.GONE
    reader.check()


def test_an_empty_file_of_ones_own_is_kept_too(opened: Opened) -> None:
    volume = opened()
    volume.add_layout(LAYOUT)
    file = spoil(volume, 1)
    volume.close()
    os.truncate(file, 0)
    again = opened()
    assert [(bad.stat().st_size, bad.name.split(".page.")[1].split(".")[0]) for bad in quarantined(again.path)] == [
        (0, "truncated")
    ]
    assert (again.stats.quarantined, again.stats.bytes_used) == (1, 0)
    again.check()


def test_a_chunk_that_left_the_index_is_not_quarantined(opened: Opened) -> None:
    volume = opened()
    spoil(volume, 1)
    entry = volume._index.pin(DIGEST, chunk(1).key)
    assert entry is not None
    volume._index.unpin(entry)
    quarantine = Quarantine(volume._index, volume._files)
    assert quarantine.add(entry, Outcome.CORRUPT_HEADER)
    assert not quarantine.add(entry, Outcome.CORRUPT_HEADER)
    assert repr(quarantine) == "<Quarantine of local: 1 files>"
    volume.rescan()
