"""I/O without the page cache, and the test double that injects faults."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_keeper.store.direct_io import DirectIo, Fault, FaultyIo, Operation, aligned_buffer

SIZE = 3 * 4096


def filled(seed: int = 1) -> memoryview:
    buffer = aligned_buffer(SIZE)
    buffer[:] = bytes((seed + i) % 251 for i in range(SIZE))
    return buffer


def write(io: DirectIo, path: Path, buffers: list[memoryview]) -> None:
    fd = io.open(str(path), os.O_WRONLY | os.O_CREAT)
    try:
        io.write(fd, buffers)
    finally:
        os.close(fd)


def read(io: DirectIo, path: Path, buffers: list[memoryview]) -> int:
    fd = io.open(str(path), os.O_RDONLY)
    try:
        return io.read(fd, buffers)
    finally:
        os.close(fd)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    io = DirectIo()
    io.probe(tmp_path)
    assert list(tmp_path.iterdir()) == []
    write(io, tmp_path / "f", [filled()[:4096], filled()[4096:]])
    header, rest = aligned_buffer(4096), aligned_buffer(SIZE - 4096)
    assert read(io, tmp_path / "f", [header, rest]) == SIZE
    assert bytes(header) + bytes(rest) == bytes(filled())


def test_a_file_that_ends_early_gives_fewer_bytes(tmp_path: Path) -> None:
    io = DirectIo()
    io.probe(tmp_path)
    (tmp_path / "f").write_bytes(bytes(5000))
    assert read(io, tmp_path / "f", [aligned_buffer(SIZE)]) == 5000


def test_memory_that_is_not_aligned_works_too(tmp_path: Path) -> None:
    io = DirectIo()
    io.probe(tmp_path)
    skewed = aligned_buffer(SIZE + 4096)[8 : 8 + SIZE]
    skewed[:] = filled()
    write(io, tmp_path / "f", [skewed])
    into = aligned_buffer(SIZE + 4096)[24 : 24 + SIZE]
    assert read(io, tmp_path / "f", [into]) == SIZE
    assert bytes(into) == bytes(filled())


def test_where_direct_io_is_refused_it_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def without_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", without_direct)
    io = DirectIo()
    assert not io.probe(tmp_path)
    write(io, tmp_path / "f", [filled()])
    into = aligned_buffer(SIZE)
    assert read(io, tmp_path / "f", [into]) == SIZE
    assert bytes(into) == bytes(filled())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DirectIo().probe(tmp_path / "absent")


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    io = DirectIo()
    (tmp_path / "f").write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(tmp_path / "f")
    with pytest.raises(OSError) as error:
        io.open(str(tmp_path / "link"), os.O_RDONLY)
    assert error.value.errno == errno.ELOOP


@given(pieces=st.lists(st.integers(1, SIZE), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_short_transfers_are_continued(tmp_path_factory: pytest.TempPathFactory, pieces: list[int]) -> None:
    folder = tmp_path_factory.mktemp("short")
    left = list(pieces)

    def short(operation: Operation, path: str) -> Fault | None:
        if operation in (Operation.READ, Operation.WRITE) and left:
            return Fault(num_bytes=left.pop())
        return None

    io = FaultyIo(short)
    io.probe(folder)
    write(io, folder / "f", [filled()[:4096], filled()[4096:]])
    left[:] = pieces
    into = aligned_buffer(SIZE)
    assert read(io, folder / "f", [into[:4096], into[4096:]]) == SIZE
    assert bytes(into) == bytes(filled())


@pytest.mark.parametrize("operation", list(Operation))
def test_the_twin_fails_where_it_is_told(tmp_path: Path, operation: Operation) -> None:
    spoiled: Operation | None = None
    io = FaultyIo(lambda seen, path: Fault(error=errno.EIO) if seen is spoiled else None)
    io.probe(tmp_path)
    write(io, tmp_path / "f", [filled()])
    spoiled = operation

    def all_of_it() -> None:
        write(io, tmp_path / "f", [filled()])
        read(io, tmp_path / "f", [aligned_buffer(SIZE)])
        io.rename(str(tmp_path / "f"), str(tmp_path / "g"))
        io.unlink(str(tmp_path / "g"))

    with pytest.raises(OSError, match="Input/output error"):
        all_of_it()


def test_a_torn_write_leaves_its_beginning(tmp_path: Path) -> None:
    io = FaultyIo(lambda seen, path: Fault(errno.ENOSPC, 4096) if seen is Operation.WRITE else None)
    io.probe(tmp_path)
    with pytest.raises(OSError, match="No space"):
        write(io, tmp_path / "f", [filled()])
    assert (tmp_path / "f").read_bytes() == bytes(filled()[:4096])


def test_a_stall_lasts_until_it_is_told_to_end(tmp_path: Path) -> None:
    end = threading.Event()
    stalled = threading.Event()

    def stall(operation: Operation, path: str) -> Fault | None:
        if operation is not Operation.READ:
            return None
        stalled.set()
        return Fault(until=end)

    io = FaultyIo(stall)
    io.probe(tmp_path)
    write(io, tmp_path / "f", [filled()])
    into = aligned_buffer(SIZE)
    reader = threading.Thread(target=read, args=(io, tmp_path / "f", [into]))
    reader.start()
    assert stalled.wait(10)
    assert reader.is_alive()
    end.set()
    reader.join(10)
    assert bytes(into) == bytes(filled())


@pytest.mark.skipif(os.geteuid() != 0, reason="changes owners")
def test_another_owners_file_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its owner may read a file without an access time."""
    (tmp_path / "f").write_bytes(bytes(4096))
    (tmp_path / "f").chmod(0o644)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # its parents are open to root only
    os.seteuid(65534)
    try:
        fd = DirectIo().open("f", os.O_RDONLY)
    finally:
        os.seteuid(0)
    os.close(fd)
