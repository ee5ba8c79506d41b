"""Engines' rows for tests of the keeper, and chunks that are numbers."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.keeper.client import Region
from kvferry.keeper.layout import ChunkKey, ChunkLayout


def layout_of(payload_bytes: int = 8192, **fields: object) -> ChunkLayout:
    values: dict[str, object] = {
        "model": "m",
        "weights_revision": "r1",
        "dtype": "float32",
        "exchange": "x",
        "kv_cache_dtype": "auto",
        "tokens_per_block": 32,
        "blocks_per_chunk": 1,
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_size": 16,
        "isa": "vec",
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "kv_layout": "LBHNC",
        "payload_bytes": payload_bytes,
    }
    return ChunkLayout(**(values | fields))  # type: ignore[arg-type]


def key_of(i: int | str) -> ChunkKey:
    return ChunkKey(hashlib.sha256(str(i).encode()).digest() + bytes(4))


def route_key_of(i: int) -> int:
    return 1 + i


def content_of(i: int | str, size: int) -> bytes:
    """Return the bytes of chunk `i`: no two chunks alike, no two blocks of a chunk alike."""
    return hashlib.shake_128(str(i).encode()).digest(size)


class Rows:
    """An engine's region in this process: a memfd and a mapping of it."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.fd = os.memfd_create("rows")
        os.ftruncate(self.fd, num_rows * row_bytes)
        self.region = Region(self.fd, num_rows, row_bytes)
        self.memory = mmap.mmap(self.fd, num_rows * row_bytes)

    def __getitem__(self, row: int) -> bytes:
        size = self.region.row_bytes
        return self.memory[row * size : (row + 1) * size]

    def __setitem__(self, row: int, content: bytes) -> None:
        size = self.region.row_bytes
        assert len(content) == size
        self.memory[row * size : (row + 1) * size] = content

    def fill(self, row: int, i: int | str) -> None:
        self[row] = content_of(i, self.region.row_bytes)

    def holds(self, row: int, i: int | str) -> bool:
        return self[row] == content_of(i, self.region.row_bytes)


@contextmanager
def rows_of(num_rows: int, row_bytes: int = 8192) -> Iterator[Rows]:
    rows = Rows(num_rows, row_bytes)
    try:
        yield rows
    finally:
        rows.memory.close()
        os.close(rows.fd)
