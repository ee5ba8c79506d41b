"""Records which files in /dev/shm a process tree holds, while it lives.

A killed engine cannot unlink them, and their names show no owner.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

SHM_ROOT = Path("/dev/shm")
RECORDS_FOLDER = "shm"  # inside the run folder

StrPath = str | os.PathLike[str]


class SharedMemoryFile(NamedTuple):
    """A file below /dev/shm. Names are reused, but not with the inode."""

    inode: int
    name: str  # relative to /dev/shm

    @property
    def path(self) -> Path:
        return SHM_ROOT / self.name


def held_by(pids: Iterable[int]) -> frozenset[SharedMemoryFile]:
    """Return the files of /dev/shm that these processes map or have open, by inode; skip unreadable processes.

    Names differ: a semaphore is made under one and linked to another.
    """
    inodes = {inode for pid in pids for inode in (*_mapped(pid), *_opened(pid))}
    return frozenset(file for file in _present() if file.inode in inodes) if inodes else frozenset()


def record_shared_memory(run_dir: StrPath, name: str, pid: int) -> frozenset[SharedMemoryFile]:
    """Append files held by `pid` and its descendants to `<run_dir>/shm/<name>.txt`, each once; return the new ones."""
    if name == ".." or not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not a single path component")
    try:
        tree = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return frozenset()
    return write_record(run_dir, name, held_by(tree))


def write_record(run_dir: StrPath, name: str, files: Iterable[SharedMemoryFile]) -> frozenset[SharedMemoryFile]:
    folder = Path(run_dir) / RECORDS_FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{name}.txt"
    new = frozenset(files) - _read(file)
    if new:
        with file.open("a", encoding="utf-8") as out:
            out.writelines(f"{inode} {shm_name}\n" for inode, shm_name in sorted(new))
    return new


def recorded(run_dir: StrPath) -> frozenset[SharedMemoryFile]:
    """Return the recorded files of all workers, alive or not."""
    folder = Path(run_dir) / RECORDS_FOLDER
    return frozenset(entry for file in folder.glob("*.txt") for entry in _read(file))


def remove_abandoned(run_dir: StrPath) -> tuple[SharedMemoryFile, ...]:
    """Unlink and return recorded files that are unchanged, this user's, and held by no process."""
    candidates = [file for file in sorted(recorded(run_dir)) if _is_ours(file)]
    if not candidates:
        return ()
    held = held_by(psutil.pids())
    removed = []
    for file in candidates:
        if file not in held:
            file.path.unlink(missing_ok=True)
            removed.append(file)
    return tuple(removed)


def _is_ours(file: SharedMemoryFile) -> bool:
    if ".." in Path(file.name).parts:
        return False
    try:
        status = file.path.lstat()
    except OSError:
        return False
    return status.st_ino == file.inode and status.st_uid == os.getuid()


def _read(file: Path) -> frozenset[SharedMemoryFile]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    entries = (line.partition(" ") for line in lines)
    return frozenset(SharedMemoryFile(int(inode), name) for inode, _, name in entries if inode.isdigit() and name)


def _present() -> Iterable[SharedMemoryFile]:
    for folder, _, names in os.walk(SHM_ROOT):
        for name in names:
            path = Path(folder) / name
            try:
                yield SharedMemoryFile(path.lstat().st_ino, str(path.relative_to(SHM_ROOT)))
            except OSError:
                continue


# psutil's `memory_maps` has no inodes and makes the kernel count pages; its `open_files` leaves out deleted files.
def _mapped(pid: int) -> Iterable[int]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        # address, permissions, offset, device, inode, path; only the path may hold blanks
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{SHM_ROOT}/"):
            yield int(fields[4])


def _opened(pid: int) -> Iterable[int]:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for link in links:
        try:
            if str(link.readlink()).startswith(f"{SHM_ROOT}/"):
                yield link.stat().st_ino
        except OSError:
            continue
