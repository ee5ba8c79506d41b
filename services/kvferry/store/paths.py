"""What the paths of a volume say.

    volume.json                                     its id
    volume.lock                                     held by every keeper that serves it
    layouts/<layout digest>.json                    what the chunks of a layout are
    chunks/<writer>/<layout digest>/<tenant>.<epoch>/<2 hex>/<chunk key>-<route key>.chunk
    quarantine/<writer>/<layout digest>/<tenant>.<epoch>/<chunk key>-<route key>.chunk.<outcome>.<nanoseconds>
    tmp/<writer>/                                   chunks being written

Digests and keys are hexadecimal, lower case. Two hex digits of the key keep a folder below a few thousand files. Every
writer has folders of its own, so that a volume that many nodes mount needs no agreement about who evicts what.
"""

from __future__ import annotations

import re
import time

from kvferry.store.layout import CHUNK_KEY_BYTES, LAYOUT_DIGEST_BYTES, ChunkId, ChunkKey, LayoutDigest
from kvferry.tenancy.namespace import Namespace

DESCRIPTION = "volume.json"
LOCK = "volume.lock"
LAYOUTS = "layouts"
CHUNKS = "pages"
QUARANTINE = "quarantine"
TEMPORARY = "tmp"

_SUFFIX = ".page"
_CHUNK_NAME = re.compile(rf"([0-9a-f]{{{2 * CHUNK_KEY_BYTES}}})-([0-9a-f]{{16}})\.page")
_LAYOUT_NAME = re.compile(rf"[0-9a-f]{{{2 * LAYOUT_DIGEST_BYTES}}}")
_WRITER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def validate_writer(writer: str) -> str:
    """Raises ValueError for what could not be a folder's name."""
    if not _WRITER.fullmatch(writer):
        raise ValueError(f"writer {writer!r}: letters, digits, dots, dashes and underscores, at most 100")
    return writer


def chunk_folder(writer: str, layout: LayoutDigest, chunk: ChunkId) -> str:
    """Relative to the volume."""
    return f"{CHUNKS}/{writer}/{layout.hex()}/{chunk.namespace}/{fan_out(chunk.key)}"


def chunk_path(writer: str, layout: LayoutDigest, chunk: ChunkId) -> str:
    """Relative to the volume."""
    return f"{chunk_folder(writer, layout, chunk)}/{chunk_name(chunk)}"


def quarantine_path(writer: str, layout: LayoutDigest, chunk: ChunkId, cause: str) -> str:
    """Relative to the volume. Another one every time: a chunk that is bad again must not replace what is in hand."""
    return f"{QUARANTINE}/{writer}/{layout.hex()}/{chunk.namespace}/{chunk_name(chunk)}.{cause}.{time.monotonic_ns()}"


def fan_out(key: ChunkKey) -> str:
    return f"{key[0]:02x}"


def chunk_name(chunk: ChunkId) -> str:
    return f"{chunk.key.hex()}-{chunk.route_key:016x}{_SUFFIX}"


def parse_chunk_name(name: str, namespace: Namespace) -> ChunkId | None:
    """What `chunk_name` made, or None for a foreign file."""
    found = _CHUNK_NAME.fullmatch(name)
    if found is None:
        return None
    return ChunkId(ChunkKey(bytes.fromhex(found[1])), int(found[2], 16), namespace)


def parse_quarantine_name(name: str, namespace: Namespace) -> ChunkId | None:
    """The chunk that `quarantine_path` was given, or None for a foreign file."""
    start, suffix, _ = name.partition(f"{_SUFFIX}.")
    return parse_chunk_name(start + _SUFFIX, namespace) if suffix else None


def parse_layout_name(name: str) -> LayoutDigest | None:
    return LayoutDigest(bytes.fromhex(name)) if _LAYOUT_NAME.fullmatch(name) else None


def parse_namespace(name: str) -> Namespace | None:
    try:
        return Namespace.parse(name)
    except ValueError:
        return None
