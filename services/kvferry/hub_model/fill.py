"""Fills a folder with a model of the hub."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.engine.vllm.weights import write_manifest
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model import marker
from kvferry.hub_model.download import MAX_FAILURES, Downloads
from kvferry.hub_model.listing import Listing, list_model

DEFAULT_ENDPOINT = "https://huggingface.co"
PROGRESS_S = 5.0
LIST_TIMEOUT_S = 60.0
_WAIT_S = 0.5  # for another process that fills the same folder
_GIB = 1 << 30
_SPARE_BYTES = 64 << 20  # for the marker, digests and the file system's own

Report = Callable[[str], None]


def fill(
    model: str,
    revision: str,
    folder: Path,
    *,
    report: Report,
    endpoint: str = DEFAULT_ENDPOINT,
    token: str = "",
    pause_s: float = 1.0,
) -> None:
    """Raises ConfigError where another try is in vain, UnavailableError where it goes on with what is there."""
    # In a folder beside it, which gets the name when it is whole.
    if not marker.why_not_whole(folder, model, revision):
        report(f"{folder} holds {model} at {revision} already")
        return
    staging = folder.with_name(f".{folder.name}.partial")
    try:
        staging.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{staging} cannot be made by user {os.geteuid()}: {error.strerror}") from None
    with _alone(staging, report):
        # By another process, while this one waited.
        if not marker.why_not_whole(folder, model, revision):
            report(f"{folder} holds {model} at {revision} now")
            return
        listing = _list(model, revision, endpoint, token, report=report, pause_s=pause_s)
        tree, parts = staging / f"tree-{listing.key(model)}", staging / "parts"
        _drop_all_but({tree, parts, staging / "lock"}, staging)
        for each in (tree, parts):
            each.mkdir(exist_ok=True)
        path = f"{model}/resolve/{listing.commit}"
        downloads = Downloads(listing.files, tree, parts, endpoint=endpoint, path=path, token=token, pause_s=pause_s)
        _drop_all_but(downloads.part_files(), parts)
        _refuse_a_small_volume(downloads.missing_bytes(), staging)
        with _progress(downloads, f"{model} at {revision}", report):
            downloads.run()
        _finish(tree, listing, model, revision, report)
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()  # an empty one is in nobody's way
        tree.rename(folder)
        marker.sync_folder(folder.parent)
    shutil.rmtree(staging, ignore_errors=True)
    report(f"{folder} holds {model} at {revision} (commit {listing.commit}), {_gib(downloads.num_bytes)}")


def _list(model: str, revision: str, endpoint: str, token: str, *, report: Report, pause_s: float) -> Listing:
    for number in range(1, MAX_FAILURES + 1):
        try:
            return list_model(model, revision, endpoint=endpoint, token=token, timeout_s=LIST_TIMEOUT_S)
        except UnavailableError as error:
            if number == MAX_FAILURES:
                raise
            report(f"{error.message}; try {number} of {MAX_FAILURES}")
            time.sleep(max(pause_s * 2 ** (number - 1), error.retry_after_s or 0))
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


def _finish(tree: Path, listing: Listing, model: str, revision: str, report: Report) -> None:
    wanted = {file.path for file in listing.files}
    for file in [each for each in tree.rglob("*") if not each.is_dir()]:
        if file.relative_to(tree).as_posix() not in wanted:
            file.unlink()  # digests and the marker of a try that ended here
    with contextlib.suppress(ConfigError):  # nothing but a tokenizer, perhaps
        report("reading the weights, so that no worker has to before it serves")
        write_manifest(tree)
    for folder in (each for each in [tree, *tree.rglob("*")] if each.is_dir()):
        folder.chmod(0o755)
        marker.sync_folder(folder)
    sizes = {file.path: file.size_bytes for file in listing.files}
    marker.write(tree, marker.Marker(model, revision, listing.commit, sizes))


@contextlib.contextmanager
def _alone(staging: Path, report: Report) -> Iterator[None]:
    # Where a file system has no locks, two may work at once: each file is verified before it gets its name.
    with (staging / "lock").open("wb") as lock:
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    report("another process fills the same folder: waiting for it")
                told = True
                time.sleep(_WAIT_S)
            except OSError as error:
                report(f"this file system has no locks ({error.strerror})")
                break
        yield


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
