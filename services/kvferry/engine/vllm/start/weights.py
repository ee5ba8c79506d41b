"""Digest of a model's files, equal on all nodes and after copies, and a check of load formats that read other files."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvferry.arguments.vllm_arguments import LOAD_FORMAT, SAFETENSORS, STREAMED
from kvferry.engine.vllm.start.argument_parser import key_of
from kvferry.errors import ConfigError
from kvferry.model_folder import WEIGHT_SUFFIXES

log = logging.getLogger(__name__)

# Weights, their configuration, and code that comes with them.
_SUFFIXES = WEIGHT_SUFFIXES | {".json", ".py"}
_READ_BYTES = 8 << 20
_THREADS = 4

# Digests of weight files that come with the model, so that machines need not read them: `kvferry model manifest`.
MANIFEST = "kvferry-manifest.json"
_MAX_MANIFEST_BYTES = 16 << 20
_MANIFEST_VERSION = 2
# Bytes of each file that are compared with its manifest. Files of a fine-tuned model have the same names and sizes.
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10
_PROGRESS_S = 10.0


class _Known(msgspec.Struct, frozen=True):
    size: int
    modified_ns: int
    changed_ns: int  # copying may keep the modification time
    digest: str


class _Shipped(msgspec.Struct, frozen=True):
    size: int
    digest: str
    samples: str = ""  # digest of samples of the file; version 1 had none


class _Manifest(msgspec.Struct, frozen=True):
    files: dict[str, _Shipped]
    version: int = 1


def weights_revision(folder: Path, cache: Path) -> str:
    """Return 32 hexadecimal digits for the model files directly in `folder`.

    `cache` holds digests by path, size and times; an unusable one is ignored. Raises ConfigError if models are missing
    or unreadable, or if the folder's manifest does not fit them.
    """
    # One process of a machine reads the files, others wait for it. Weights of the manifest are not read.
    record = cache / f"{xxhash.xxh3_64_hexdigest(os.fsencode(folder.resolve()))}.json"
    with _alone(record):
        known = _read(record)
        try:
            files = _model_files(folder)
            shipped = _read_manifest(folder, files)
            now = _digest_all(files, known, shipped)
        except OSError as error:
            raise ConfigError(f"model.path: {folder} cannot be read: {error.strerror}", param="model.path") from None
        if not now:
            raise ConfigError(f"model.path: {folder} holds no model files", param="model.path")
        read = {name: entry for name, entry in now.items() if name not in shipped}
        if read != known:
            with contextlib.suppress(OSError):
                _write(record, msgspec.json.encode(read))
    return _digest_of_digests({name: entry.digest for name, entry in now.items()})


def weights_named(folder: Path) -> str:
    """Return `weights_revision` by the folder's manifest alone; empty without one. Raises ConfigError."""
    try:
        files = _model_files(folder)
        manifest = _decode_manifest(folder / MANIFEST)
        if manifest is None:
            return ""
        digests = {name: entry.digest for name, entry in _digest_all(files, {}, {}).items()}
    except OSError as error:
        raise ConfigError(f"model.path: {folder} cannot be read: {error.strerror}", param="model.path") from None
    return _digest_of_digests({**digests, **{name: listed.digest for name, listed in manifest.files.items()}})


def _digest_of_digests(digests: Mapping[str, str]) -> str:
    whole = xxhash.xxh3_128()
    for name in sorted(digests):
        whole.update(f"{name}\0{digests[name]}\0".encode())
    return whole.hexdigest()


def write_manifest(folder: Path) -> Path:
    """Read the weights in `folder`. Raises ConfigError."""
    try:
        files = [file for file in _model_files(folder) if file.suffix in WEIGHT_SUFFIXES]
        digests = _digest_all(files, {}, {})
        samples = {file.name: _digest_samples(file) for file in files}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from None
    if not digests:
        raise ConfigError(f"{folder} holds no weights")
    shipped = {name: _Shipped(entry.size, entry.digest, samples[name]) for name, entry in digests.items()}
    manifest = _Manifest(shipped, _MANIFEST_VERSION)
    path = folder / MANIFEST
    try:
        _write(path, msgspec.json.format(msgspec.json.encode(manifest)), mode=0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return path


def has_weights(folder: Path) -> bool:
    """Return whether weights lie directly in `folder`: a gateway may have a tokenizer only."""
    return any(file.suffix in WEIGHT_SUFFIXES for file in folder.iterdir()) if folder.is_dir() else False


def _model_files(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.iterdir() if file.suffix in _SUFFIXES and file.name != MANIFEST and file.is_file()
    )


def _read_manifest(folder: Path, files: list[Path]) -> Mapping[str, _Shipped]:
    path = folder / MANIFEST
    manifest = _decode_manifest(path)
    if manifest is None:
        return {}
    weights = {file.name: file for file in files if file.suffix in WEIGHT_SUFFIXES}
    for name in sorted(weights.keys() | manifest.files.keys()):
        listed, file = manifest.files.get(name), weights.get(name)
        if listed is None or file is None or not _fits(file, listed):
            raise ConfigError(
                f"{path} does not fit the weights beside it ({name[:200]}): write it anew, or remove it",
                param="model.path",
            )
    return manifest.files


def _decode_manifest(path: Path) -> _Manifest | None:
    try:
        with path.open("rb") as opened:
            manifest = msgspec.json.decode(opened.read(_MAX_MANIFEST_BYTES), type=_Manifest)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no manifest: {str(error)[:200]}", param="model.path") from None
    if manifest.version != _MANIFEST_VERSION:
        raise ConfigError(
            f"{path} is of version {manifest.version}, not {_MANIFEST_VERSION}: write it anew, or remove it",
            param="model.path",
        )
    return manifest


def _fits(file: Path, listed: _Shipped) -> bool:
    return listed.size == file.stat().st_size and listed.samples == _digest_samples(file)


def _digest_samples(file: Path) -> str:
    """Return a digest of parts over the whole file, its beginning and end included."""
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as opened:
        size = os.fstat(opened.fileno()).st_size
        step = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
        for start in (*range(0, size, step), max(0, size - _SAMPLE_BYTES)):
            digest.update(os.pread(opened.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


def _digest_all(files: list[Path], known: Mapping[str, _Known], shipped: Mapping[str, _Shipped]) -> dict[str, _Known]:
    with _progress(sum(file.stat().st_size for file in files)) as on_read, ThreadPoolExecutor(_THREADS) as threads:

        def digest(file: Path) -> _Known:
            return _digest(file, known.get(file.name), shipped.get(file.name), on_read)

        return dict(zip((file.name for file in files), threads.map(digest, files), strict=True))


def _digest(file: Path, before: _Known | None, shipped: _Shipped | None, on_read: Callable[[int], None]) -> _Known:
    with file.open("rb", buffering=0) as opened:
        status = os.fstat(opened.fileno())
        here = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if shipped is not None:
            return _Known(*here, shipped.digest)
        if before is not None and (before.size, before.modified_ns, before.changed_ns) == here:
            return before
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_READ_BYTES, status.st_size or 1)))
        while num_read := opened.readinto(buffer):
            digest.update(buffer[:num_read])
            on_read(num_read)
    return _Known(*here, digest.hexdigest())


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function for bytes as they are read, from any thread."""
    lock = threading.Lock()
    num_read, logged_s = 0, time.monotonic()

    def on_read(num: int) -> None:
        nonlocal num_read, logged_s
        with lock:
            num_read += num
            now_s = time.monotonic()
            if now_s - logged_s >= _PROGRESS_S:
                logged_s = now_s
                log.info("digest of the weights: %.1f of %.1f GB are read", num_read / 1e9, num_bytes / 1e9)

    yield on_read


@contextlib.contextmanager
def _alone(record: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            held = stack.enter_context(record.with_suffix(".lock").open("wb"))
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _read(record: Path) -> dict[str, _Known]:
    try:
        return msgspec.json.decode(record.read_bytes(), type=dict[str, _Known])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            os.fchmod(handle, mode)
            out.write(content)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


_INDEX = "model.safetensors.index.json"
_PACKAGE, _MODULE = "runai-model-streamer", "runai_model_streamer"


def check_load_format(args: Mapping[str, Any], folder: Path, keys: Mapping[str, str]) -> None:
    """Raises ConfigError unless a tested load format reads the files that `auto` reads. `keys`: `key_of`."""
    chosen, key = args.get(LOAD_FORMAT, "auto"), key_of(LOAD_FORMAT, keys)
    if chosen == STREAMED and importlib.util.find_spec(_MODULE) is None:
        raise ConfigError(f"{key}: {chosen} needs the package {_PACKAGE}, which is not installed")
    # Other formats are at the operator's risk, and the exchange digest includes them.
    if chosen in (SAFETENSORS, STREAMED) and (reason := _why_other_files(chosen, folder)):
        raise ConfigError(f"{key}: {chosen} {reason}; use auto")


def _why_other_files(chosen: str, folder: Path) -> str:
    files = {file.name for file in folder.glob("*.safetensors")}
    if not files:
        return "reads files *.safetensors alone, and the model's folder has none"
    if beside := sorted(name for name in files if name.startswith("consolidated")):
        return f"may read other files than auto, which takes {beside[0][:80]}"
    index = folder / _INDEX
    if chosen != STREAMED or not index.is_file():
        return ""
    # vLLM reads the index too, but not for this format.
    try:
        listed = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index}: no index of weights") from None
    return f"reads all files, also {min(files - listed)[:80]}, which {_INDEX} leaves out" if files - listed else ""
