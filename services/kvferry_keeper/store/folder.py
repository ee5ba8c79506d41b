"""Files and folders of a volume."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId, ChunkLayout, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry.util.files import read_small
from kvferry_keeper.store import chunk_file, paths
from kvferry_keeper.store.direct_io import DirectIo

_VERSION = 1
_MAX_LAYOUT_BYTES = 1 << 20

MAX_KEEPERS_OF_A_MACHINE = 64
ALIVE_FOR_S = 300.0  # since a keeper said so; it does every 30 s
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_DESCRIPTORS = Path("/proc/self/fdinfo")
_MOUNTS = Path("/proc/self/mountinfo")
# What only one running system has mounted, so that all locks are seen there. Machines may keep those of others to
# themselves (NFS with `nolock` or `local_lock`), and two of them may be clones of a running one, with one boot id.
_LOCAL_FILE_SYSTEMS = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"))
_MAX_PLACE_BYTES = 256
_MAX_PASSES = 10  # to remove chunks while keepers run
MAX_WRITER_CHARS = 96  # of a machine's writers, before their numbers


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of `volume.json`."""

    volume_id: str
    version: int
    created_s: float
    cluster: str = ""  # whose keepers use it; empty: written before volumes named theirs


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """Unread."""

    folder: str
    name: str
    writer: str
    layout: LayoutDigest
    chunk: ChunkId
    num_bytes: int
    modified_s: float
    used_s: float  # written, or recorded as used

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"


@dataclass(frozen=True, slots=True)
class ForeignFile:
    path: str


def read_description(path: Path) -> Description:
    """Raises TierError if `path` is no volume."""
    file = path / paths.DESCRIPTION
    try:
        description = msgspec.json.decode(read_small(file, _MAX_LAYOUT_BYTES), type=Description)
    except OSError as error:
        raise TierError(f"{path} is no volume: {paths.DESCRIPTION}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise TierError(f"{file}: {error}; remove it to have a new one made") from None
    if description.version != _VERSION:
        raise TierError(f"{file}: version {description.version}; this kvferry knows {_VERSION}")
    return description


def make_description(path: Path, now_s: float, cluster: str) -> Description:
    """Read or make it; concurrent makers agree. Raises TierError, also for one of another cluster, OSError."""
    file = path / paths.DESCRIPTION
    if not file.exists():
        made = Description(volume_id=f"v-{secrets.token_hex(8)}", version=_VERSION, created_s=now_s, cluster=cluster)
        # A link, unlike a rename, never replaces another process's file.
        with _draft(path, made) as draft, contextlib.suppress(FileExistsError):
            file.hardlink_to(draft)
    found = read_description(path)
    if cluster and not found.cluster:
        with _draft(path, msgspec.structs.replace(found, cluster=cluster)) as draft:
            draft.replace(file)
        found = read_description(path)
    if cluster and found.cluster != cluster:
        # Both have tenants of the same names, and each would remove the pages of the other's.
        raise TierError(
            f"volume {path} is of the cluster {found.cluster!r}, and this one is {cluster!r}: give each cluster a "
            f"folder of its own. To give this one away, end the keepers of {found.cluster!r} and empty the folder"
        )
    return found


@contextlib.contextmanager
def _draft(path: Path, description: Description) -> Iterator[Path]:
    draft = path / f".{paths.DESCRIPTION}-{secrets.token_hex(4)}"
    try:
        with draft.open("wb") as out:
            out.write(msgspec.json.encode(description))
            out.flush()
            os.fsync(out.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def lock(file: Path, *, shared: bool) -> int | None:
    """Return a descriptor that holds the lock until closed, or None."""
    while True:
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # Its holder may have removed the file meanwhile: others would make and lock another one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(file)):  # noqa: PTH116
                    return fd
            os.close(fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise


def free_writer(path: Path, name: str) -> str:
    """Return the first of `name`, `name.2` to `name.64` whose lock no process holds; `name` if all are held."""
    names = [name, *(f"{name}.{number}" for number in range(2, MAX_KEEPERS_OF_A_MACHINE + 1))]
    for each in names:
        file = path / paths.TEMPORARY / f"{each}.lock"
        with contextlib.suppress(OSError):
            if not file.exists():
                return each
            held = lock(file, shared=False)
            if held is not None:
                os.close(held)
                return each
    return name


def note_holder(lock_fd: int) -> None:
    """Write into a writer's lock file which machine holds it, for `living_writers`."""
    # On a full drive the file stays empty: its holder may be anywhere then.
    with contextlib.suppress(OSError):
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, _place_of(lock_fd), 0)


def _place_of(lock_fd: int) -> bytes:
    # Locks of one mount reach all processes of its machine. Another mount there may keep its own, as with FUSE.
    return f"{_BOOT_ID.read_text().strip()} {os.fstat(lock_fd).st_dev}".encode()


def _is_local(fd: int) -> bool:
    """Return whether a file is on a file system of `_LOCAL_FILE_SYSTEMS`. Raises OSError."""
    # By the number of its mount: mountinfo has other devices than the files of btrfs.
    number = re.search(rb"^mnt_id:\s*(\d+)$", (_DESCRIPTORS / str(fd)).read_bytes(), re.MULTILINE)
    kinds = {
        mount.split(b" ", 1)[0]: mount.partition(b" - ")[2].split(b" ", 1)[0]
        for mount in _MOUNTS.read_bytes().splitlines()
    }
    return number is not None and kinds.get(number[1], b"").decode(errors="replace") in _LOCAL_FILE_SYSTEMS


def _has_ended(lock_file: Path) -> bool:
    """Return whether a writer's lock was held where this process would see it, and is not."""
    with contextlib.suppress(OSError):
        fd = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if not _is_local(fd):
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Read under the lock: before it, another keeper may come and go. As in `lock`, the file may be another one.
            return os.path.samestat(os.fstat(fd), os.stat(lock_file)) and (  # noqa: PTH116
                os.pread(fd, _MAX_PLACE_BYTES, 0) == _place_of(fd)
            )
        finally:
            os.close(fd)
    return False


def living_writers(path: Path) -> set[str]:
    """Return the writers whose keepers, perhaps on other nodes, said of late that they live. Raises OSError."""
    # Clocks of nodes may differ: all times are the volume's.
    clock = path / paths.LOCK
    clock.touch(mode=0o600)
    now_s = clock.stat().st_mtime
    living = set()
    for file in (path / paths.TEMPORARY).glob("*.lock"):
        with contextlib.suppress(FileNotFoundError):
            if abs(now_s - file.lstat().st_mtime) < ALIVE_FOR_S and not _has_ended(file):
                living.add(file.stem)
    return living


def save_layout(path: Path, layout: ChunkLayout) -> None:
    file = path / paths.LAYOUTS / f"{layout.digest.hex()}.json"
    if _read_layout(file) == layout:
        return
    # Also where a file is there that cannot be read: a loss of power may leave it empty.
    draft = file.with_name(f".{file.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("wb") as out:
            out.write(layout.to_json() + b"\n")
            out.flush()
            os.fsync(out.fileno())
        draft.rename(file)
    finally:
        draft.unlink(missing_ok=True)


def load_layouts(path: Path) -> dict[LayoutDigest, ChunkLayout]:
    """Return the layouts that match their file names."""
    layouts: dict[LayoutDigest, ChunkLayout] = {}
    for file in (path / paths.LAYOUTS).glob("*.json"):
        layout = _read_layout(file)
        if layout is not None:
            layouts[layout.digest] = layout
    return layouts


def _read_layout(file: Path) -> ChunkLayout | None:
    with contextlib.suppress(ValueError, OSError):
        layout = ChunkLayout.from_json(read_small(file, _MAX_LAYOUT_BYTES))
        if layout.digest.hex() == file.stem:
            return layout
    return None


def writers(path: Path) -> list[str]:
    """Raises OSError."""
    return _writers_in(path / paths.CHUNKS)


def _writers_in(path: Path) -> list[str]:
    entries = os.scandir(path)
    return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and _is_writer(entry.name))


def _is_writer(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return paths.validate_writer(name) == name
    return False


def walk(
    path: Path, writer: str, *, only: Callable[[Namespace], bool] | None = None
) -> Iterator[FoundChunk | ForeignFile]:
    """Yield a writer's files of some namespaces or all, in a second per 100,000; none where it has no folder.

    Raises OSError for an unreadable folder or a drive that is not mounted.
    """
    top = path / paths.CHUNKS / writer
    # Another node removes the folder of a writer whose chunks it took over.
    for layout_folder in _folders(top, must_exist=top.exists() or not top.parent.exists()):
        layout = paths.parse_layout_name(layout_folder.name)
        if layout is None:
            yield ForeignFile(layout_folder.path)
            continue
        for namespace_folder in _folders(layout_folder.path):
            namespace = paths.parse_namespace(namespace_folder.name)
            if namespace is None:
                yield ForeignFile(namespace_folder.path)
                continue
            if only is not None and not only(namespace):
                continue
            for keys_folder in _folders(namespace_folder.path):
                where = keys_folder.path
                for entry in _entries(where):
                    chunk = paths.parse_chunk_name(entry.name, namespace)
                    if chunk is None or keys_folder.name != entry.name[:2]:
                        yield ForeignFile(entry.path)
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield FoundChunk(
                            where,
                            entry.name,
                            writer,
                            layout,
                            chunk,
                            status.st_size,
                            status.st_mtime,
                            max(status.st_atime, status.st_mtime),
                        )
                    else:
                        yield ForeignFile(entry.path)


def walk_quarantine(path: Path, writer: str) -> Iterator[FoundChunk]:
    """Yield quarantined chunks by former name and quarantine time."""
    for layout_folder in _folders(path / paths.QUARANTINE / writer):
        layout = paths.parse_layout_name(layout_folder.name)
        for namespace_folder in _folders(layout_folder.path):
            namespace = paths.parse_namespace(namespace_folder.name)
            for entry in _entries(namespace_folder.path):
                chunk = None if namespace is None else paths.parse_quarantine_name(entry.name, namespace)
                if layout is not None and chunk is not None and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    where = namespace_folder.path
                    moved_s = status.st_ctime
                    yield FoundChunk(where, entry.name, writer, layout, chunk, status.st_size, moved_s, moved_s)


def files_of(path: Path, writer: str) -> list[Path]:
    roots = [path / name / writer for name in paths.OF_WRITERS]
    # A link to a folder would lead out of the volume.
    return [file for root in roots if not root.is_symlink() for file in root.rglob("*") if not file.is_dir()]


def unlink_link(path: Path) -> None:
    """Remove a symbolic link in place of a folder, if it is one."""
    if path.is_symlink():
        path.unlink()


def namespaces(path: Path) -> set[Namespace]:
    """Return those of chunks and of quarantine, of all writers. Raises OSError."""
    return {
        namespace
        for writer in writers(path)
        for root in (path / paths.CHUNKS / writer, path / paths.QUARANTINE / writer)
        for layout_folder in _folders(root)
        for namespace_folder in _folders(layout_folder.path)
        if (namespace := paths.parse_namespace(namespace_folder.name)) is not None
    }


def remove_namespaces(path: Path, is_wanted: Callable[[Namespace], bool]) -> int:
    """Return the number of chunks. Raises OSError, and TierError if new ones are found again and again."""
    num_chunks = num_clean = 0
    for _ in range(_MAX_PASSES):
        num_found = 1
        try:
            num_found, num_removed = _remove_once(path, is_wanted)
        finally:
            if num_found:
                _mark_purge(path)
        num_chunks += num_removed
        num_clean = 0 if num_found else num_clean + 1
        # A keeper may take over a chunk while a pass is between the two writers. The next pass finds it.
        if num_clean == 2:
            return num_chunks
    raise TierError(f"volume {path}: chunks were still written or moved while they were removed; try again")


def purge_mark(path: Path) -> tuple[int, int] | None:
    """Return what each purge changes, None before the first. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        status = (path / paths.PURGED).lstat()
        return status.st_ino, status.st_mtime_ns
    return None


def _mark_purge(path: Path) -> None:
    # A new file: another user may own the old one.
    draft = path / f".{paths.PURGED}-{secrets.token_hex(4)}"
    try:
        draft.touch(mode=0o600)
        draft.rename(path / paths.PURGED)
    finally:
        draft.unlink(missing_ok=True)


def _remove_once(path: Path, is_wanted: Callable[[Namespace], bool]) -> tuple[int, int]:
    num_found = num_removed = 0
    living = living_writers(path)
    for writer in _writers_in(path / paths.TEMPORARY):
        num_found += _remove_left_overs(path, writer, is_wanted, is_alive=writer in living)
    for writer in sorted({*writers(path), *_writers_in(path / paths.QUARANTINE)}):
        for found in walk(path, writer, only=is_wanted):
            num_found += 1
            with contextlib.suppress(FileNotFoundError):
                Path(found.path).unlink()
                num_removed += 1
        for quarantined in walk_quarantine(path, writer):
            if is_wanted(quarantined.chunk.namespace):
                num_found += 1
                Path(quarantined.path).unlink(missing_ok=True)
        for root in (path / paths.CHUNKS / writer, path / paths.QUARANTINE / writer):
            for layout_folder in _folders(root):
                for namespace_folder in _folders(layout_folder.path):
                    namespace = paths.parse_namespace(namespace_folder.name)
                    if namespace is None or not is_wanted(namespace):
                        continue
                    for emptied in (*_folders(namespace_folder.path), namespace_folder):
                        # A chunk written meanwhile stays, and so does its folder.
                        with contextlib.suppress(OSError):
                            Path(emptied.path).rmdir()
    return num_found, num_removed


def _remove_left_overs(path: Path, writer: str, is_wanted: Callable[[Namespace], bool], *, is_alive: bool) -> int:
    """Return the number of removed files, which a killed keeper was writing."""
    lock_file = path / paths.TEMPORARY / f"{writer}.lock"
    held = None
    if lock_file.exists() and (held := lock(lock_file, shared=False)) is None:
        return 0
    num_removed = 0
    try:
        for entry in _entries(path / paths.TEMPORARY / writer):
            if not entry.is_file(follow_symlinks=False):
                continue
            # A recycled file may hold chunks of others than its header names. Without shared locks it may be in use.
            namespace = _namespace_of(entry.path)
            if not is_alive or (namespace is not None and is_wanted(namespace)):
                Path(entry.path).unlink(missing_ok=True)
                num_removed += 1
    finally:
        if held is not None:
            os.close(held)
    return num_removed


def _namespace_of(file: str) -> Namespace | None:
    try:
        fd = DirectIo().open(file, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        header = chunk_file.parse_header(memoryview(os.pread(fd, chunk_file.HEADER_BYTES, 0)))
    finally:
        os.close(fd)
    return None if header is None else header.chunk.namespace


def _folders(path: str | os.PathLike[str], *, must_exist: bool = False) -> Iterator[os.DirEntry[str]]:
    # A file between the folders is no chunk and is ignored.
    for entry in _entries(path, must_exist=must_exist):
        if entry.is_dir(follow_symlinks=False):
            yield entry


def _entries(path: str | os.PathLike[str], *, must_exist: bool = False) -> list[os.DirEntry[str]]:
    try:
        # Not through a link, which would lead out of the volume.
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a symbolic link", os.fspath(path))
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise
        return []
