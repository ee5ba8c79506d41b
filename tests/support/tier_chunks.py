"""Small chunks for tests of the tier, whose bytes are derived from their identity."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

from kvferry.keeper.layout import ChunkId, ChunkKey, ChunkLayout, LayoutDigest
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace
from kvferry_keeper.store.chunk_file import chunk_file_bytes
from kvferry_keeper.store.direct_io import aligned_buffer

LAYOUT = ChunkLayout(
    model="smollm2",
    exchange="x",
    weights_revision="main",
    dtype="float32",
    kv_cache_dtype="auto",
    tokens_per_block=16,
    blocks_per_chunk=4,
    num_layers=2,
    num_kv_heads=3,
    head_size=64,
    isa="avx512",
    tensor_parallel=1,
    pipeline_parallel=1,
    kv_layout="NHD",
    payload_bytes=8192,
)
LARGER = dataclasses.replace(LAYOUT, dtype="bfloat16", payload_bytes=16384)
SIZE = {layout.digest: layout.payload_bytes for layout in (LAYOUT, LARGER)}
CHUNK_BYTES = chunk_file_bytes(LAYOUT.payload_bytes)
SECRET = bytes(range(32))


def chunk(number: int, namespace: Namespace = DEFAULT_NAMESPACE) -> ChunkId:
    """Return a chunk whose key is spread over the folders like a hash."""
    return ChunkId(ChunkKey(random.Random(number).randbytes(36)), number, namespace)


def truth(of: ChunkId, layout: LayoutDigest = LAYOUT.digest) -> bytes:
    """Return the payload of a chunk, a function of its identity."""
    name = f"{of.key.hex()} {layout.hex()} {of.namespace}"
    return random.Random(name).randbytes(SIZE[layout])


def payload(of: ChunkId, layout: LayoutDigest = LAYOUT.digest) -> memoryview:
    """Return `truth` in aligned memory."""
    buffer = aligned_buffer(SIZE[layout])
    buffer[:] = truth(of, layout)
    return buffer


def empty(layout: LayoutDigest = LAYOUT.digest) -> memoryview:
    return aligned_buffer(SIZE[layout])


def chunk_files(path: Path) -> list[Path]:
    return sorted((path / "pages").rglob("*.page"))


def quarantined(path: Path) -> list[Path]:
    return sorted(file for file in (path / "quarantine").rglob("*") if not file.is_dir())


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        (byte,) = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))
