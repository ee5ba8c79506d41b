"""Fills a folder with a model of the hub."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvferry.engine.vllm.start.weights import write_manifest
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model.marker import MARKER, Marker, sync_folder, why_not_whole, write
from kvferry.model_folder import repeated

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

    from kvferry.hub_model.hub import Hub

DEFAULT_ENDPOINT = "https://huggingface.co"
PROGRESS_S = 5.0
REPORT_S = 15.0  # between two lines of a process that waits for another one
MAX_FAILURES = 6  # without another file
MAX_MISMATCHES = 3  # times that files have other hashes than the hub says
FIRST_PAUSE_S = 2.0  # after a failure; each further one doubles it
MAX_OPENS = 20  # of the lock
_WAIT_S = 0.5  # between two looks at another process
_NUM_AT_ONCE = 4
_GIB = 1 << 30
_SPARE_BYTES = 64 << 20  # for the marker, digests and the file system's own
_LOCK = "lock"

Report = Callable[[str], None]
Pause = Callable[[float], None]
_Result = TypeVar("_Result")


def fill(
    model: str,
    revision: str,
    folder: Path,
    *,
    report: Report,
    endpoint: str = DEFAULT_ENDPOINT,
    token: str = "",
    pause: Pause = time.sleep,
) -> None:
    """Raises ConfigError where another try is in vain, UnavailableError where it goes on with what is there."""
    if not re.fullmatch(r"[!-~]*", token):
        raise ConfigError("the token in HF_TOKEN has a line break, a blank or another character that no token has")
    if not _why_to_fill(folder, model, revision):
        report(f"{folder} holds {model} at {revision} already")
        return
    # In a folder beside it, which gets the name when it is whole.
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        with _locked(partial, report):
            if not _why_to_fill(folder, model, revision):  # another process did, while this one waited
                report(f"{folder} holds {model} at {revision} now")
            else:
                from kvferry.hub_model.hub import Hub

                with Hub(model, revision, endpoint=endpoint, token=token) as hub:
                    commit, files = _tried(hub.files, lambda: 0, report, pause)
                    download = _Download(hub, commit, files, _own_tree(partial))
                    download.refuse_a_small_volume()
                    with download.progress(f"{model} at {revision}", report):
                        _tried(download.run, download.num_files, report, pause)
                _finish(download, Marker(model, revision, commit, {}), report)
                _give_name(download.tree, folder, is_over=lambda: not why_not_whole(folder, model, revision))
                report(f"{folder} holds {model} at {revision} (commit {commit}), {_gib(download.num_bytes())}")
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise words_of_drive(error, partial) from None


def _why_to_fill(folder: Path, model: str, revision: str) -> str:
    why = why_not_whole(folder, model, revision)
    if why and os.path.lexists(folder / MARKER):
        raise UnavailableError(f"{folder} has a {MARKER}, and another folder cannot take its place: {why}")
    return why


@contextlib.contextmanager
def _locked(partial: Path, report: Report) -> Iterator[None]:
    """Wait until no other process has the lock. Raises OSError."""
    descriptor = _opened_lock(partial, report)
    try:
        yield
    finally:
        os.close(descriptor)


def _opened_lock(partial: Path, report: Report) -> int:
    lock = partial / _LOCK
    for _ in range(MAX_OPENS):
        if partial.is_symlink():
            partial.unlink()
        try:
            # The process that has it removes both when the model is whole.
            partial.mkdir(parents=True, exist_ok=True)
            _sweep(partial)
            descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:
            continue
        _wait_for(descriptor, report)
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), lock.lstat()):
                return descriptor
        os.close(descriptor)
    raise UnavailableError(f"{lock} was removed {MAX_OPENS} times before this process had it")


def _wait_for(descriptor: int, report: Report) -> None:
    reported_s = -math.inf
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() - reported_s >= REPORT_S:
                report("another process fills the same folder: waiting for it")
                reported_s = time.monotonic()
            time.sleep(_WAIT_S)
        except OSError as error:
            report(f"this file system has no locks ({error.strerror})")
            return


def _sweep(folder: Path) -> None:
    """Remove what is neither a folder nor a file of one name: it may lead elsewhere, or block its reader."""
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in [*folders, *files]):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                if not stat.S_ISDIR(found.st_mode) and not (stat.S_ISREG(found.st_mode) and found.st_nlink == 1):
                    path.unlink()


def _own_tree(partial: Path) -> Path:
    # With a name of its own. Where locks hold for one node alone, another process may still write under the old name.
    tree = partial / f"tree-{secrets.token_hex(8)}"
    for old in partial.iterdir():
        if old.name.startswith("tree-") and not tree.exists():
            old.rename(tree)
        elif old.is_dir():
            shutil.rmtree(old)
        elif old.name != _LOCK:
            old.unlink()
    tree.mkdir(exist_ok=True)
    return tree


def _tried(step: Callable[[], _Result], progress: Callable[[], int], report: Report, pause: Pause) -> _Result:
    """Repeat a step that raises UnavailableError, up to MAX_FAILURES times without more progress than ever."""
    most = num_failures = 0
    while True:
        try:
            return step()
        except UnavailableError as error:
            num_failures = 1 if progress() > most else num_failures + 1
            most = max(most, progress())
            if num_failures >= MAX_FAILURES:
                raise
            report(f"{error.message}; try {num_failures} of {MAX_FAILURES}")
            pause(max(FIRST_PAUSE_S * 2 ** (num_failures - 1), error.retry_after_s or 0))


class _Download:
    """Files of one commit, into `tree`."""

    def __init__(self, hub: Hub, commit: str, files: Sequence[RepoFile], tree: Path) -> None:
        self.tree = tree
        self.paths = {each.path: tree / each.path for each in files}
        self._hub = hub
        self._commit = commit
        self._files = files
        self._total_bytes = sum(each.size or 0 for each in files)  # a mirror may list no sizes
        self._right: set[str] = set()
        self._num_mismatches = 0
        # What another revision left is compared, by what huggingface_hub wrote down of it, or dropped.
        self.drop_others(keeps_metadata=True)

    def run(self) -> None:
        """Return when each file has the hash that the hub says."""
        self._hub.download(self._commit, self.tree)
        if missing := [path for path, file in self.paths.items() if not file.is_file()]:
            raise UnavailableError(f"the hub did not answer for {len(missing)} files, such as {missing[0]}")
        left = [each for each in self._files if each.path not in self._right]
        with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
            wrong = [
                each.path for each, is_right in zip(left, pool.map(self._is_right, left), strict=True) if not is_right
            ]
        if wrong:
            self._num_mismatches += 1
            said = f"{wrong[0]} does not have the hash that the hub says"
            if self._num_mismatches == MAX_MISMATCHES:
                raise ConfigError(f"{said}, {MAX_MISMATCHES} times: the hub, or a proxy, changes it")
            raise UnavailableError(said)

    def _is_right(self, file: RepoFile) -> bool:
        path = self.paths[file.path]
        path.chmod(0o644)
        if self._hub.has_hash(file, path):
            self._right.add(file.path)
            return True
        path.unlink()
        return False

    def num_files(self) -> int:
        return sum(file.is_file() for file in self.paths.values())

    def num_bytes(self) -> int:
        """Bytes of complete files and of files that huggingface_hub has begun."""
        num_bytes = 0
        for file in (*self.paths.values(), *self.tree.glob(".cache/huggingface/**/*.incomplete")):
            with contextlib.suppress(FileNotFoundError):
                num_bytes += file.stat().st_size
        return num_bytes

    def drop_others(self, *, keeps_metadata: bool = False) -> None:
        """Remove each file that is not one of the commit, and folders without files."""
        for root, _, names in os.walk(self.tree, topdown=False):
            for file in (Path(root, name) for name in names):
                path = file.relative_to(self.tree).as_posix()
                if path not in self.paths and not (keeps_metadata and path.endswith(".metadata")):
                    file.unlink()
            if not any(Path(root).iterdir()) and Path(root) != self.tree:
                Path(root).rmdir()

    def refuse_a_small_volume(self) -> None:
        missing_bytes = self._total_bytes - self.num_bytes()
        free_bytes = shutil.disk_usage(self.tree).free
        if missing_bytes + _SPARE_BYTES > free_bytes:
            raise ConfigError(
                f"{_gib(missing_bytes)} are to be downloaded, and {self.tree.parent.parent} has {_gib(free_bytes)} "
                "free: give its volume more space, and start this again"
            )

    @contextlib.contextmanager
    def progress(self, what: str, report: Report) -> Iterator[None]:
        first_bytes, started_s = self.num_bytes(), time.monotonic()

        def line() -> str:
            there = self.num_bytes()
            percent = 100 * min(there, self._total_bytes) // max(1, self._total_bytes)
            rate = max(0, there - first_bytes) / max(0.001, time.monotonic() - started_s)
            left = f", {max(0, self._total_bytes - there) / rate:.0f} s left" if rate > 0 else ""
            return f"{what}: {_gib(there)} of {_gib(self._total_bytes)} ({percent} %), {rate / 1e6:.1f} MB/s{left}"

        report(line())
        try:
            with repeated(line, PROGRESS_S, report):
                yield
        finally:
            report(line())


def _finish(download: _Download, marker: Marker, report: Report) -> None:
    tree = download.tree
    _sweep(tree)
    download.drop_others()
    with contextlib.suppress(ConfigError):  # nothing but a tokenizer, perhaps
        report("reading the weights, so that no worker has to before it serves")
        write_manifest(tree)
    for folder in (each for each in [tree, *tree.rglob("*")] if each.is_dir()):
        folder.chmod(0o755)
        sync_folder(folder)
    # Sizes as the drive has them: the hash was right, and a mirror may list no sizes.
    sizes_bytes = {path: file.lstat().st_size for path, file in download.paths.items()}
    write(tree, Marker(marker.model, marker.revision, marker.commit, sizes_bytes))


def _give_name(tree: Path, folder: Path, *, is_over: Callable[[], bool]) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # an empty one is in nobody's way
        tree.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_over():
            raise
    sync_folder(folder.parent)


def words_of_drive(error: OSError, folder: Path) -> ConfigError | UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ConfigError(f"{folder} is full ({error.strerror}): give its volume more space, and start this again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ConfigError(f"{folder} cannot be written by user {os.geteuid()}: {error.strerror}")
    return UnavailableError(f"{error.filename or folder}: {error.strerror or error} (user {os.geteuid()})")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
