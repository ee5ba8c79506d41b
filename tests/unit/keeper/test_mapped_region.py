"""Rows of an engine's memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry_keeper.mapped_region import MappedRegion
from support.tier_rows import rows_of


def test_rows_are_the_engines() -> None:
    with rows_of(4, 4096) as rows:
        region = MappedRegion(os.dup(rows.fd), 4, 4096)
        with region.row(2) as row:
            row[:] = b"x" * 4096
        assert rows[2] == b"x" * 4096
        assert rows[1] == bytes(4096)
        assert region.address % 4096 == 0
        region.close()


def test_it_is_unmapped_when_nobody_uses_it() -> None:
    with rows_of(4, 4096) as rows:
        inode = os.fstat(rows.fd).st_ino
        rows.memory.close()
        region = MappedRegion(os.dup(rows.fd), 4, 4096)
        unmapped = []
        region.on_unmapped = lambda: unmapped.append(True)
        region.hold()
        region.hold()
        region.close()
        region.release()
        assert is_mapped(inode)
        assert not unmapped
        region.release()
        assert not is_mapped(inode)
        assert unmapped == [True]
        region.close()
        assert unmapped == [True]


@pytest.mark.parametrize("row", [-1, 4, 1 << 40])
def test_no_row_outside(row: int) -> None:
    with rows_of(4, 4096) as rows:
        region = MappedRegion(os.dup(rows.fd), 4, 4096)
        with pytest.raises(ValueError, match=str(row)):
            region.row(row)
        region.close()


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(0, 4096), (-1, 4096), (5, 4096), (1, 100), (1 << 60, 4096)])
def test_what_is_no_region_is_refused(num_rows: int, row_bytes: int) -> None:
    with rows_of(4, 4096) as rows:
        num_fds = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(ValueError, match="rows"):
            MappedRegion(os.dup(rows.fd), num_rows, row_bytes)
        assert len(list(Path("/proc/self/fd").iterdir())) == num_fds


def test_what_can_be_sealed_cannot_shrink() -> None:
    fd = os.memfd_create("sealable", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    region = MappedRegion(os.dup(fd), 2, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)
    region.close()
    os.close(fd)


def test_a_file_that_shrinks_is_seen() -> None:
    with rows_of(4, 4096) as rows:
        region = MappedRegion(os.dup(rows.fd), 4, 4096)
        assert region.is_whole()
        rows.memory.close()
        os.ftruncate(rows.fd, 4096)
        assert not region.is_whole()
        region.close()


def is_mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split(maxsplit=5)[4] == str(inode) for line in lines)
