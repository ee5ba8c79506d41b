"""A local cluster's private run folder, with everything that a clean end needs.

Unix sockets require a short path: 107 bytes with the socket's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError, LocalError
from kvferry.util.shared_memory import RECORDS_FOLDER
from kvferry_local.processes import Marks, ProcessIdentity

RUN_DIR_VARIABLE = "KVFERRY_RUN_DIR"

# The longest socket below a run folder is Ray's: /ray/t/session_<date>_<time>_<microseconds>_<pid of
# 7>/sockets/plasma_store
_SOCKET_PATH_LIMIT_BYTES = 107
_LONGEST_SOCKET = "/ray/t/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
PATH_LIMIT_BYTES = _SOCKET_PATH_LIMIT_BYTES - len(_LONGEST_SOCKET)


class ClusterBusy(LocalError):
    pass


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """`cluster.json`: facts about a started cluster for later commands."""

    name: str
    ready: bool
    started_unix_s: float
    url: str  # of the gateway
    etcd_endpoints: tuple[str, ...]  # host:port
    ray_address: str  # host:port
    pillars: tuple[ProcessIdentity, ...]  # processes without which the cluster is dead: etcd, if ours, and Ray's own
    config: Mapping[str, Any]  # as handed to the application
    asked: Mapping[str, Any] = field(default_factory=dict)  # the configuration that `kvferry up` was given


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def record_file(self) -> Path:
        return self.path / "cluster.json"

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def ray_token_file(self) -> Path:
        return self.path / "ray-token"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def etcd(self) -> Path:
        return self.path / "etcd"

    @property
    def ray_parent(self) -> Path:
        return self.path / "ray"

    @property
    def ray(self) -> Path:
        # Ray opens its folder to every user of the machine; the parent keeps them out.
        return self.ray_parent / "t"

    @property
    def shm(self) -> Path:
        return self.path / RECORDS_FOLDER

    @property
    def keeper(self) -> Path:
        return self.path / "keeper"

    @property
    def tls(self) -> Path:
        return self.path / "tls"

    @property
    def temporary(self) -> Path:
        """TMPDIR of every process, so that leftover sockets are removed too."""
        return self.path / "tmp"

    @property
    def work(self) -> Path:
        """Working folder of every process: an empty folder, used as a mark."""
        return self.path / "work"

    @property
    def process_folders(self) -> tuple[Path, ...]:
        return (self.logs, self.etcd, self.ray, self.temporary, self.work)

    def marks(self) -> Marks:
        return Marks(token=self.token(), work_folder=self.work, written_folders=self.process_folders)

    def prepare(self) -> None:
        """Make the folder and its private ones. Raises ConfigError if untrusted or too long a path."""
        if len(os.fsencode(self.path)) > PATH_LIMIT_BYTES:
            raise ConfigError(
                f"{RUN_DIR_VARIABLE}: {str(self.path)!r} is longer than {PATH_LIMIT_BYTES} bytes, "
                "and the Unix sockets below it would be longer than the kernel allows; choose a shorter folder"
            )
        _make_private(self.path)
        for part in (self.ray_parent, *self.process_folders, self.shm):
            part.mkdir(mode=0o700, exist_ok=True)

    def new_tokens(self) -> str:
        token = secrets.token_hex(16)
        _write_private(self.token_file, token)
        _write_private(self.ray_token_file, secrets.token_hex(32))
        return token

    def token(self) -> str | None:
        with contextlib.suppress(OSError):
            return self.token_file.read_text(encoding="ascii").strip() or None
        return None

    def write_record(self, record: ClusterRecord) -> None:
        _write_private(self.record_file, json.dumps(asdict(record), indent=2, default=str) + "\n")

    def write_config(self, text: str) -> None:
        _write_private(self.config_file, text)

    def record(self) -> ClusterRecord | None:
        """Return cluster.json's contents, or None if missing or invalid."""
        try:
            values = json.loads(self.record_file.read_text(encoding="utf-8"))
            return ClusterRecord(
                name=values["name"],
                ready=values["ready"],
                started_unix_s=values["started_unix_s"],
                url=values["url"],
                etcd_endpoints=tuple(values["etcd_endpoints"]),
                ray_address=values["ray_address"],
                pillars=tuple(ProcessIdentity(**pillar) for pillar in values["pillars"]),
                config=values["config"],
                asked=values.get("asked", {}),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def clear(self, *, keep_logs: bool) -> None:
        """Remove a cluster's files and the empty folder. The lock stays with its holder."""
        if keep_logs:
            for number, session_logs in enumerate(sorted(self.ray.glob("session_2*/logs"))):
                shutil.rmtree(self.logs / f"ray-{number}", ignore_errors=True)
                shutil.move(session_logs, self.logs / f"ray-{number}")
        else:
            shutil.rmtree(self.logs, ignore_errors=True)
        engines = self.path.glob("engine-*")  # what an engine keeps its sockets in
        folders = (self.etcd, self.ray_parent, self.shm, self.temporary, self.work, self.keeper, self.tls, *engines)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.record_file, self.config_file, self.token_file, self.ray_token_file):
            file.unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Remove lock file and folder unless foreign files remain. Requires the lock."""
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {self.lock_file.name}:
            self.lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
                if self.path.parent == _default_root():
                    self.path.parent.rmdir()

    @contextlib.contextmanager
    def locked(self, purpose: str) -> Iterator[None]:
        """Lock the folder against other `up` and `down` commands, until its holder dies. Raises ClusterBusy at once."""
        _make_private(self.path)
        descriptor = self._open_locked()
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor, json.dumps(asdict(ProcessIdentity.of(os.getpid())) | {"purpose": purpose}).encode(), 0
            )
            yield
        finally:
            os.close(descriptor)

    def lock_holder(self, purpose: str | None = None) -> ProcessIdentity | None:
        """Return the live process that holds the lock (for `purpose`), or None."""
        try:
            values = json.loads(self.lock_file.read_text(encoding="utf-8"))
            holder = ProcessIdentity(values["pid"], values["start_ticks"])
            wanted = purpose is None or values["purpose"] == purpose
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return holder if wanted and holder.is_alive() else None

    def _open_locked(self) -> int:
        while True:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A holder that left may have removed the file between our open and our lock: then the lock is on
                # nothing.
                if os.fstat(descriptor).st_ino == self.lock_file.stat().st_ino:
                    return descriptor
            except FileNotFoundError:
                _make_private(self.path)
            except BlockingIOError:
                os.close(descriptor)
                holder = self.lock_holder()
                who = f" (process {holder.pid})" if holder is not None else ""
                raise ClusterBusy(f"another kvferry command{who} is starting or ending this cluster") from None
            os.close(descriptor)


def run_folder(name: str, environ: Mapping[str, str] = os.environ) -> RunFolder:
    """Return cluster `name`'s folder: $KVFERRY_RUN_DIR, or a private one below /tmp."""
    chosen = environ.get(RUN_DIR_VARIABLE)
    if chosen:
        return RunFolder(Path(chosen).expanduser().resolve())
    path = _default_root() / name
    if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        room = PATH_LIMIT_BYTES - len(os.fsencode(_default_root())) - len(digest) - 2
        path = _default_root() / f"{name[: max(room, 0)]}-{digest}"
    return RunFolder(path)


def named_folder(given: str | None, configured: str) -> RunFolder:
    """Return the folder of the cluster that was `given`, or is configured.

    Raises LocalError where $KVFERRY_RUN_DIR has a cluster of another name than was given.
    """
    folder = run_folder(given or configured)
    record = folder.record()
    if given is not None and record is not None and record.name != given:
        raise LocalError(f"{RUN_DIR_VARIABLE}: {str(folder.path)!r} has the cluster {record.name!r}, and not {given!r}")
    return folder


def _default_root() -> Path:
    return Path("/tmp").resolve() / f"kvferry-{os.getuid()}"


def _make_private(path: Path) -> None:
    """Make a folder for this user only, or verify that no other user made it or may write to it."""
    folders = [path.parent, path] if path.parent == _default_root() else [path]
    for folder in folders:
        try:
            folder.mkdir(mode=0o700, parents=folder is path and len(folders) == 1, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            reason = "it is not a folder" if error.errno == errno.EEXIST else error.strerror
            raise ConfigError(f"{RUN_DIR_VARIABLE}: cannot use {str(folder)!r}: {reason}") from None
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{RUN_DIR_VARIABLE}: cannot use {str(folder)!r}: it is not a folder")
        if status.st_uid != os.getuid():
            raise ConfigError(f"{RUN_DIR_VARIABLE}: cannot use {str(folder)!r}: it belongs to user {status.st_uid}")
        if status.st_mode & 0o022:
            raise ConfigError(
                f"{RUN_DIR_VARIABLE}: cannot use {str(folder)!r}: other users may write to it; "
                "take that right away (chmod go-w), or name a folder that does not exist"
            )


def _write_private(file: Path, text: str) -> None:
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as out:
        out.write(text)
    fresh.replace(file)
