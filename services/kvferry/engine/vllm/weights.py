"""A digest of a model's weight files, the same on every node and after every copy."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from kvferry.errors import ConfigError

# Weights, their configuration, and code that comes with them.
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
_SUFFIXES = _WEIGHT_SUFFIXES | {".json", ".py"}
_READ_BYTES = 8 << 20
_THREADS = 4


class _Known(msgspec.Struct, frozen=True):
    size: int
    modified_ns: int
    changed_ns: int  # copying may keep the modification time
    digest: str


def weights_revision(folder: Path, cache: Path) -> str:
    """Return 32 hexadecimal digits for the model files directly in `folder`.

    `cache` holds digests by path, size and times; an unusable one is ignored. Raises ConfigError if models are missing
    or unreadable.
    """
    record = cache / f"{xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))}.json"
    known = _read(record)
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.is_file())
        with ThreadPoolExecutor(_THREADS) as threads:
            now = dict(zip((f.name for f in files), threads.map(lambda f: _digest(f, known), files), strict=True))
    except OSError as error:
        raise ConfigError(f"model.path: {folder} cannot be read: {error.strerror}", param="model.path") from None
    if not now:
        raise ConfigError(f"model.path: {folder} holds no model files", param="model.path")
    if now != known:
        _write(record, now)
    whole = xxhash.xxh3_128()
    for name, entry in now.items():
        whole.update(f"{name}\0{entry.digest}\0".encode())
    return whole.hexdigest()


def has_weights(folder: Path) -> bool:
    """Return whether weights lie directly in `folder`: a gateway may have a tokenizer only."""
    return any(file.suffix in _WEIGHT_SUFFIXES for file in folder.iterdir()) if folder.is_dir() else False


def _digest(file: Path, known: Mapping[str, _Known]) -> _Known:
    with file.open("rb", buffering=0) as opened:
        status = os.fstat(opened.fileno())
        before = known.get(file.name)
        here = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if before is not None and (before.size, before.modified_ns, before.changed_ns) == here:
            return before
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_READ_BYTES, status.st_size or 1)))
        while num_read := opened.readinto(buffer):
            digest.update(buffer[:num_read])
    return _Known(*here, digest.hexdigest())


def _read(record: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(record: Path, known: Mapping[str, _Known]) -> None:
    with contextlib.suppress(OSError):
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=record.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(known))
        os.replace(name, record)  # noqa: PTH105
