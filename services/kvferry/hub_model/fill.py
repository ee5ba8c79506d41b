"""Fills a folder with a model of the hub."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.engine.vllm.start.weights import write_manifest
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model import marker
from kvferry.hub_model.download import FIRST_PAUSE_S, MAX_FAILURES, Downloads, Pause
from kvferry.hub_model.listing import Listing, list_model
from kvferry.hub_model.staging import Report, Staging, claimed

DEFAULT_ENDPOINT = "https://huggingface.co"
PROGRESS_S = 5.0
LIST_TIMEOUT_S = 60.0
_GIB = 1 << 30
_SPARE_BYTES = 64 << 20  # for the marker, digests and the file system's own


def fill(
    model: str,
    revision: str,
    folder: Path,
    *,
    report: Report,
    endpoint: str = DEFAULT_ENDPOINT,
    token: str = "",
    pause: Pause = threading.Event.wait,
) -> None:
    """Raises ConfigError where another try is in vain, UnavailableError where it goes on with what is there."""
    # In a folder beside it, which gets the name when it is whole.
    if not marker.why_not_whole(folder, model, revision):
        report(f"{folder} holds {model} at {revision} already")
        return
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if partial.is_symlink():
            partial.unlink()
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made by user {os.geteuid()}: {error.strerror}") from None

    def is_over() -> bool:
        # By another process, while this one waited.
        return not marker.why_not_whole(folder, model, revision)

    with claimed(partial, report, is_over=is_over) as staging:
        if staging is None:
            report(f"{folder} holds {model} at {revision} now")
            return
        listing = _list(model, revision, endpoint, token, report=report, pause=pause)
        tree = _own_tree(staging, f"tree-{listing.key(model)}")
        parts = staging.folder / "parts"
        _drop_all_but({tree, parts, *staging.own_files}, staging.folder)
        parts.mkdir(exist_ok=True)
        downloads = Downloads(
            listing.files,
            tree,
            parts,
            staging,
            endpoint=endpoint,
            path=f"{model}/resolve/{listing.commit}",
            token=token,
            pause=pause,
        )
        _drop_all_but(downloads.part_files(), parts)
        _refuse_a_small_volume(downloads.missing_bytes(), staging.folder)
        with _progress(downloads, f"{model} at {revision}", report):
            downloads.run()
        _finish(tree, staging, listing, model, revision, report)
        _give_name(tree, staging, folder, is_over=is_over)
        shutil.rmtree(staging.folder, ignore_errors=True)
    report(f"{folder} holds {model} at {revision} (commit {listing.commit}), {_gib(downloads.num_bytes)}")


def _own_tree(staging: Staging, name: str) -> Path:
    # Of a process that is gone, or only slow: what it still writes under the old name is lost.
    tree = staging.folder / f"{name}.{staging.token}"
    for old in staging.folder.glob(f"{name}.*"):
        if not tree.exists():
            old.rename(tree)
    tree.mkdir(exist_ok=True)
    return tree


def _give_name(tree: Path, staging: Staging, folder: Path, *, is_over: Callable[[], bool]) -> None:
    staging.check()
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # an empty one is in nobody's way
        tree.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not is_over():
            raise
    marker.sync_folder(folder.parent)


def _list(model: str, revision: str, endpoint: str, token: str, *, report: Report, pause: Pause) -> Listing:
    never = threading.Event()
    for number in range(1, MAX_FAILURES + 1):
        try:
            return list_model(model, revision, endpoint=endpoint, token=token, timeout_s=LIST_TIMEOUT_S)
        except UnavailableError as error:
            if number == MAX_FAILURES:
                raise
            report(f"{error.message}; try {number} of {MAX_FAILURES}")
            pause(never, max(FIRST_PAUSE_S * 2 ** (number - 1), error.retry_after_s or 0))
    raise AssertionError("unreachable")


def _drop_all_but(wanted: set[Path], folder: Path) -> None:
    for each in set(folder.iterdir()) - wanted:
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _refuse_a_small_volume(missing_bytes: int, staging: Path) -> None:
    free_bytes = shutil.disk_usage(staging).free
    if missing_bytes + _SPARE_BYTES > free_bytes:
        raise ConfigError(
            f"{_gib(missing_bytes)} are to be downloaded, and {staging.parent} has {_gib(free_bytes)} free: give its "
            "volume more space, and start this again"
        )


def _finish(tree: Path, staging: Staging, listing: Listing, model: str, revision: str, report: Report) -> None:
    staging.check()
    staging.sweep(tree)
    wanted = {file.path for file in listing.files}
    for file in [each for each in tree.rglob("*") if not each.is_dir()]:
        if file.relative_to(tree).as_posix() not in wanted:
            file.unlink()  # digests and the marker of a try that ended here
    for listed in listing.files:
        if not (tree / listed.path).is_file() or (tree / listed.path).stat().st_size != listed.size_bytes:
            raise UnavailableError(f"{tree / listed.path} was changed by somebody else")
    with contextlib.suppress(ConfigError):  # nothing but a tokenizer, perhaps
        report("reading the weights, so that no worker has to before it serves")
        write_manifest(tree)
    for folder in (each for each in [tree, *tree.rglob("*")] if each.is_dir()):
        folder.chmod(0o755)
        marker.sync_folder(folder)
    sizes = {file.path: file.size_bytes for file in listing.files}
    marker.write(tree, marker.Marker(model, revision, listing.commit, sizes))


@contextlib.contextmanager
def _progress(downloads: Downloads, what: str, report: Report) -> Iterator[None]:
    over = threading.Event()
    missing_first, started_s = downloads.missing_bytes(), time.monotonic()

    def line() -> str:
        missing = downloads.missing_bytes()
        there = downloads.num_bytes - missing
        percent = 100 * there // max(1, downloads.num_bytes)
        rate = (missing_first - missing) / max(0.001, time.monotonic() - started_s)
        left = f", {missing / rate:.0f} s left" if rate > 0 else ""
        return f"{what}: {_gib(there)} of {_gib(downloads.num_bytes)} ({percent} %), {rate / 1e6:.1f} MB/s{left}"

    def repeat() -> None:
        while not over.wait(PROGRESS_S):
            report(line())

    report(line())
    reporter = threading.Thread(target=repeat, name="download-progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()
        report(line())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
