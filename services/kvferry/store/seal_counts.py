"""How many chunks each sealing key of a volume has sealed: random nonces repeat after too many."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from pathlib import Path

import msgspec

from kvferry.store import paths

WARN_AT = 1 << 31
MAX_SEALS = 1 << 32
MAX_FILE_BYTES = 16 << 20

log = logging.getLogger(__name__)


class SealCounts:
    """Thread-safe. `path` is the volume's."""

    def __init__(self, path: Path, writer: str) -> None:
        self._file = path / paths.KEYS / f"{writer}.json"
        self._path = path
        self._lock = threading.Lock()
        self._ours: Counter[str] = Counter()
        self._others: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._is_changed = False

    def __repr__(self) -> str:
        return f"<SealCounts of {len(self._ours)} keys>"

    def load(self) -> None:
        with self._lock:
            self._ours = _read(self._file)
        self.load_others()

    def load_others(self) -> None:
        others = read_all(self._path, without=self._file.name)
        with self._lock:
            self._others = others

    def may_seal(self, fingerprint: bytes) -> bool:
        name = fingerprint.hex()
        with self._lock:
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

    def absorb(self, writer: str) -> None:
        """Count the seals of a writer that is gone among ours."""
        file = self._file.with_name(f"{writer}.json")
        with self._lock:
            self._ours += _read(file)
            self._is_changed = True
        self.save()
        with contextlib.suppress(OSError):
            file.unlink()

    def save(self) -> None:
        with self._lock:
            if not self._is_changed:
                return
            content, self._is_changed = msgspec.json.encode(dict(self._ours)), False
        draft = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            # Made by `open`; making it here could fill the drive below the mount point.
            draft.write_bytes(content)
            os.replace(draft, self._file)  # noqa: PTH105


def read_all(path: Path, *, without: str = "") -> Counter[str]:
    """Return all writers' counts by fingerprint, without one file's."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for file in (path / paths.KEYS).iterdir():
            if file.suffix == ".json" and file.name != without:
                counts += _read(file)
    return counts


def _read(file: Path) -> Counter[str]:
    with contextlib.suppress(OSError, msgspec.MsgspecError), file.open("rb") as opened:
        return Counter(msgspec.json.decode(opened.read(MAX_FILE_BYTES), type=dict[str, int]))
    return Counter()
