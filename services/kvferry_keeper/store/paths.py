"""Paths inside a volume."""

from __future__ import annotations

import re
import time

from kvferry.keeper.layout import CHUNK_KEY_BYTES, LAYOUT_DIGEST_BYTES, ChunkId, ChunkKey, LayoutDigest
from kvferry.tenancy.namespace import Namespace

# volume.json                    description, with the volume's id
# volume.lock                    locked by every keeper that serves it
# purged                         replaced by each purge, for keepers to see
# layouts/<layout digest>.json   descriptions of layouts
# pages/<writer>/<layout digest>/<tenant>.<epoch>/<2 hex>/<chunk key>-<route key>.page
# quarantine/<writer>/<layout digest>/<tenant>.<epoch>/<chunk key>-<route key>.page.<outcome>.<nanoseconds>
# tmp/<writer>/                  chunks being written
# tmp/<writer>.lock              locked by the writer's keeper; says where that runs, and its time when it last lived
# keys/<writer>.json             numbers of chunks that each sealing key has sealed
#
# Digests and keys are lower-case hexadecimal. Two hex digits of the key keep folders below a few thousand files. Each
# writer has its own folders, so that nodes that mount the same volume need not agree on evictions.
DESCRIPTION = "volume.json"
LOCK = "volume.lock"
PURGED = "purged"
LAYOUTS = "layouts"
CHUNKS = "pages"
QUARANTINE = "quarantine"
TEMPORARY = "tmp"
KEYS = "keys"
OF_WRITERS = (CHUNKS, QUARANTINE, TEMPORARY)  # with a folder per writer

_SUFFIX = ".page"
_CHUNK_NAME = re.compile(rf"([0-9a-f]{{{2 * CHUNK_KEY_BYTES}}})-([0-9a-f]{{16}})\.page")
_LAYOUT_NAME = re.compile(rf"[0-9a-f]{{{2 * LAYOUT_DIGEST_BYTES}}}")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def validate_writer(writer: str) -> str:
    """Raises ValueError for an invalid folder name."""
    if not _WRITER.fullmatch(writer):
        raise ValueError(f"writer {writer!r}: letters, digits, dots, dashes and underscores, at most 100")
    return writer


def chunk_folder(writer: str, layout: LayoutDigest, chunk: ChunkId) -> str:
    return f"{CHUNKS}/{writer}/{layout.hex()}/{chunk.namespace}/{fan_out(chunk.key)}"


def chunk_path(writer: str, layout: LayoutDigest, chunk: ChunkId) -> str:
    return f"{chunk_folder(writer, layout, chunk)}/{chunk_name(chunk)}"


def quarantine_path(writer: str, layout: LayoutDigest, chunk: ChunkId, cause: str) -> str:
    """Return a path that is new on every call."""
    return f"{QUARANTINE}/{writer}/{layout.hex()}/{chunk.namespace}/{chunk_name(chunk)}.{cause}.{time.monotonic_ns()}"


def fan_out(key: ChunkKey) -> str:
    return f"{key[0]:02x}"


def chunk_name(chunk: ChunkId) -> str:
    return f"{chunk.key.hex()}-{chunk.route_key:016x}{_SUFFIX}"


def parse_chunk_name(name: str, namespace: Namespace) -> ChunkId | None:
    """Return None for a foreign file."""
    found = _CHUNK_NAME.fullmatch(name)
    if found is None:
        return None
    return ChunkId(ChunkKey(bytes.fromhex(found[1])), int(found[2], 16), namespace)


def parse_quarantine_name(name: str, namespace: Namespace) -> ChunkId | None:
    """Return None for a foreign file."""
    start, suffix, _ = name.partition(f"{_SUFFIX}.")
    return parse_chunk_name(start + _SUFFIX, namespace) if suffix else None


def parse_layout_name(name: str) -> LayoutDigest | None:
    return LayoutDigest(bytes.fromhex(name)) if _LAYOUT_NAME.fullmatch(name) else None


def parse_namespace(name: str) -> Namespace | None:
    try:
        return Namespace.parse(name)
    except ValueError:
        return None
