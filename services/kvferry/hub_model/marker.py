"""The marker of a whole model: a file in its folder, written last."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvferry.errors import ConfigError

MARKER = "kvferry-model.json"
MAX_FILES = 10_000
_MAX_MARKER_BYTES = 16 << 20
_VERSION = 1


class Marker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str  # as on the hub: owner/name
    revision: str  # as it was asked for
    commit: str  # that the revision named when the folder was filled
    sizes_bytes: dict[str, int]  # path below the folder -> size
    version: int = _VERSION


def why_not_whole(folder: Path, model: str, revision: str, *, again: bool = True) -> str:
    """Return what is missing of the model; empty if nothing is. Raises ConfigError for a folder of something else."""
    file = folder / MARKER
    try:
        with file.open("rb") as opened:
            marker = msgspec.json.decode(opened.read(_MAX_MARKER_BYTES), type=Marker)
    except FileNotFoundError:
        names = _names(folder)
        if MARKER in names and again:  # it got its name between the two looks
            return why_not_whole(folder, model, revision, again=False)
        if names and MARKER not in names:
            raise ConfigError(
                f"{folder} holds files and no {MARKER}: it was not filled by this command. Move it away"
            ) from None
        return f"{folder} is not there yet"
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is no marker: {str(error)[:200]}. Move the folder away") from None
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if not marker.sizes_bytes or any("\0" in name for name in marker.sizes_bytes):
        raise ConfigError(f"{file} lists no files, or one that cannot be of a folder. Move the folder away")
    found = (marker.version, marker.model, marker.revision)
    if found != (_VERSION, model, revision):
        raise ConfigError(
            f"{folder} holds {marker.model} at {marker.revision} (marker of version {marker.version}), not {model} at "
            f"{revision}. Move it away"
        )
    return _why_damaged(folder, marker.sizes_bytes)


def _names(folder: Path) -> set[str]:
    try:
        return {each.name for each in folder.iterdir()}
    except FileNotFoundError:
        return set()


def _why_damaged(folder: Path, sizes_bytes: Mapping[str, int]) -> str:
    for name, size in sizes_bytes.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            raise ConfigError(f"{folder / name} is gone, and {MARKER} lists it. Move {folder} away") from None
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if found != size:
            raise ConfigError(f"{folder / name} has {found} bytes, and {MARKER} says {size}. Move {folder} away")
    return ""


def write(folder: Path, marker: Marker) -> None:
    """Raises OSError."""
    file = folder / MARKER
    unfinished = folder / f"{MARKER}.{secrets.token_hex(8)}"
    with unfinished.open("xb") as opened:
        opened.write(msgspec.json.format(msgspec.json.encode(marker)))
        opened.flush()
        os.fsync(opened.fileno())
    unfinished.chmod(0o644)
    unfinished.rename(file)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
