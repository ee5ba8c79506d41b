"""How many chunks each sealing key of a volume has sealed: random nonces repeat after too many."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from pathlib import Path

import msgspec

from kvferry.util.files import read_small
from kvferry_keeper.store import paths

WARN_AT = 1 << 31
MAX_SEALS = 1 << 32
MAX_FILE_BYTES = 16 << 20
MAX_UNSAVED = 1 << 16  # seals that a restart would forget, on a drive that takes no counts

log = logging.getLogger(__name__)


class SealCounts:
    """Thread-safe. `path` is the volume's. Nothing is sealed before `load`, nor while counts cannot be read."""

    def __init__(self, path: Path, writer: str) -> None:
        self._file = path / paths.KEYS / f"{writer}.json"
        self._path = path
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._ours: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._is_ours_unknown = True
        self._unknown_others: list[Path] = []
        self._warned: set[str] = set()
        self._is_changed = False
        self._num_unsaved = 0  # since the drive took the counts
        self._is_refused_by_drive = False

    def __repr__(self) -> str:
        return f"<SealCounts of {len(self._ours)} keys>"

    def load(self) -> None:
        self._load_ours()
        self.load_others()

    def _load_ours(self) -> None:
        counts = _read(self._file)
        with self._lock:
            self._is_ours_unknown = counts is None
            self._ours = counts or Counter()

    def load_others(self) -> None:
        others, unknown = _read_all(self._path, without=self._file.name)
        with self._lock:
            self._others, self._unknown_others = others, unknown

    def may_seal(self, fingerprint: bytes) -> bool:
        name = fingerprint.hex()
        with self._lock:
            unknown = [self._file] if self._is_ours_unknown else self._unknown_others
            if unknown:
                self._warn_unknown(unknown[0])
                return False
            if self._is_refused_by_drive and self._num_unsaved >= MAX_UNSAVED:
                self._warn(name, f"of which {self._num_unsaved} cannot be written down: none is sealed")
                return False
            num_seals = self._ours[name] + self._others[name]
            if num_seals >= MAX_SEALS:
                self._warn(name, "no chunk is sealed with it any more")
                return False
            if num_seals >= WARN_AT:
                self._warn(name, f"at most {MAX_SEALS} are")
            return True

    def add(self, fingerprint: bytes) -> None:
        with self._lock:
            self._ours[fingerprint.hex()] += 1
            self._is_changed = True
            self._num_unsaved += 1

    def _warn(self, name: str, consequence: str) -> None:
        if (name + consequence) not in self._warned:
            self._warned.add(name + consequence)
            log.error(
                "volume %s: the key %s has sealed %d chunks, %s; put a new secret before its secret in the key file",
                self._path,
                name,
                self._ours[name] + self._others[name],
                consequence,
            )

    def _warn_unknown(self, file: Path) -> None:
        if file.name not in self._warned:
            self._warned.add(file.name)
            log.error(
                "%s cannot be read: how many chunks each key has sealed is unknown, so none is sealed; "
                "put new secrets first in the key file, then remove this file",
                file,
            )

    def absorb(self, writer: str) -> None:
        """Count the seals of a writer that is gone among ours. If that cannot be saved, its file stays."""
        file = self._file.with_name(f"{writer}.json")
        counts = _read(file)
        if counts is None:
            return
        with self._lock:
            self._ours += counts
            self._is_changed = True
        if self.save():
            with contextlib.suppress(OSError):
                file.unlink()
        else:
            with self._lock:
                self._ours -= counts  # its file still has them

    def save(self) -> bool:
        """Return whether the drive has our counts."""
        with self._saving:
            if self._is_ours_unknown:
                self._load_ours()
            with self._lock:
                if self._is_ours_unknown:
                    return False
                if not self._is_changed:
                    return True
                content, self._is_changed = msgspec.json.encode(dict(self._ours)), False
                num_before, self._num_unsaved = self._num_unsaved, 0
            try:
                _replace(self._file, content)
            except OSError as error:
                log.warning("volume %s: it is not written down how many chunks were sealed: %s", self._path, error)
                with self._lock:
                    self._is_changed = self._is_refused_by_drive = True
                    self._num_unsaved += num_before
                return False
            with self._lock:
                self._is_refused_by_drive = False
            return True


def read_all(path: Path) -> Counter[str]:
    """Return all writers' counts by fingerprint."""
    counts, unknown = _read_all(path)
    for file in unknown:
        log.warning("%s cannot be read: its seals are not counted", file)
    return counts


def _read_all(path: Path, *, without: str | None = None) -> tuple[Counter[str], list[Path]]:
    counts: Counter[str] = Counter()
    unknown: list[Path] = []
    folder = path / paths.KEYS
    try:
        files = [file for file in folder.iterdir() if file.suffix == ".json" and file.name != without]
    except FileNotFoundError:
        return counts, []
    except OSError:
        return counts, [folder]
    for file in files:
        of_one = _read(file)
        if of_one is None:
            unknown.append(file)
        else:
            counts += of_one
    return counts, unknown


def _read(file: Path) -> Counter[str] | None:
    """Return None for a file that is there and cannot be read."""
    try:
        counts = msgspec.json.decode(read_small(file, MAX_FILE_BYTES), type=dict[str, int])
        # A negative number would take away what other files count.
        return None if any(num < 0 for num in counts.values()) else Counter(counts)
    except FileNotFoundError:
        return Counter()
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def _replace(file: Path, content: bytes) -> None:
    # Its folder is made by `open`; making it here could fill the drive below the mount point.
    draft = file.with_suffix(".tmp")
    with draft.open("wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())  # else a power failure may leave the name with an empty file
    os.replace(draft, file)  # noqa: PTH105
