"""The processes of a local cluster, recognized by any one of four marks.

Parents die first, and a process may overwrite its environment, so one mark suffices:

    environment   KVFERRY_CLUSTER_TOKEN holds the token of this run folder
    cwd           the working folder is the run folder's `work`
    files         a file is open for writing where only the cluster writes (logs, etcd, ray, tmp)
    ancestry      the parent belongs

"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.errors import LocalError

TOKEN_VARIABLE = "KVFERRY_CLUSTER_TOKEN"

_LOOK_AGAIN_S = 0.1


class ProcessesRemain(LocalError):
    pass


@dataclass(frozen=True, slots=True, order=True)
class ProcessIdentity:
    pid: int
    start_ticks: int  # clock ticks after boot, /proc/PID/stat field 22

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        state = _stat(pid)
        if state is None:
            raise ProcessLookupError(pid)
        return cls(pid, state.start_ticks)

    def is_alive(self) -> bool:
        """Whether the process has not ended; a zombie has."""
        state = _stat(self.pid)
        return state is not None and state.start_ticks == self.start_ticks and state.letter not in "ZX"

    def send(self, signal_number: int) -> bool:
        """Signal this process; False if gone, even with a reused pid."""
        with contextlib.suppress(ProcessLookupError), self._pinned() as pidfd:
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal_number)
                return True
        return False

    def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(ProcessLookupError), self._pinned() as pidfd:
            if pidfd is not None:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                return bool(poll.poll(max(0.0, timeout_s) * 1000))
        return True

    @contextlib.contextmanager
    def _pinned(self) -> Iterator[int | None]:
        """Return a pidfd, or None if the process is gone."""
        pidfd = os.pidfd_open(self.pid)
        try:
            # Read after the descriptor is open: it names whoever had the pid then, and the pid cannot pass on while
            # that one is alive.
            yield pidfd if self.is_alive() else None
        finally:
            os.close(pidfd)


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of one cluster's processes. Paths are canonical, as the kernel reports them."""

    token: str | None
    work_folder: Path
    written_folders: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    letter: str  # R, S, D, T, Z, ...
    start_ticks: int


def belonging(marks: Marks) -> tuple[ProcessIdentity, ...]:
    """Return every live process of the cluster by pid, never the caller and its ancestors."""
    stats = {pid: state for pid in psutil.pids() if (state := _stat(pid)) is not None and state.letter not in "ZX"}
    spared = {0, 1, *_lineage(os.getpid(), stats)}
    mine = {pid for pid in stats if pid not in spared and _is_marked(pid, marks)}
    # Ancestry: a child is found only after its parent, so repeat until nothing is added.
    grew = True
    while grew:
        children = {pid for pid, state in stats.items() if state.parent in mine} - mine - spared
        mine |= children
        grew = bool(children)
    return tuple(sorted(ProcessIdentity(pid, stats[pid].start_ticks) for pid in mine))


def end_all(
    marks: Marks,
    *,
    grace_s: float = 5.0,
    deadline_s: float = 30.0,
    before_signal: Callable[[tuple[ProcessIdentity, ...]], None] = lambda _: None,
    needs_no_grace: Callable[[ProcessIdentity], bool] = lambda _: False,
) -> int:
    """End every process: SIGTERM, after `grace_s` SIGKILL, until none is left; return their number.

    `before_signal` gets each living set. Those that `needs_no_grace` are killed once no others are left.
    Raises ProcessesRemain after `deadline_s`.
    """
    ended: set[ProcessIdentity] = set()
    deadline = time.monotonic() + deadline_s
    kill_from = time.monotonic() + grace_s
    while found := belonging(marks) or _belonging_later(marks):
        now = time.monotonic()
        if now >= deadline:
            pids = ", ".join(str(process.pid) for process in found)
            raise ProcessesRemain(f"processes {pids} do not end although they were killed")
        before_signal(found)
        waited_for = [process for process in found if not needs_no_grace(process)]
        # A process gets SIGTERM once: it may be half way through its own end.
        for process in found:
            if now >= kill_from or not waited_for:
                process.send(signal.SIGKILL)
            elif process not in ended:
                process.send(signal.SIGTERM)
        ended.update(found)
        wait_gone(waited_for or found, timeout_s=min(deadline - now, max(kill_from - now, 1.0)))
    return len(ended)


def _belonging_later(marks: Marks) -> tuple[ProcessIdentity, ...]:
    # A process that begins another program has no environment for a moment, and may have lost its parent.
    time.sleep(_LOOK_AGAIN_S)
    return belonging(marks)


def wait_gone(processes: Iterable[ProcessIdentity], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    # The deadline is shared: once it has passed, what is left is only looked at.
    return all(process.wait(deadline - time.monotonic()) for process in processes)


def has_variable(pid: int, name: str, value: str) -> bool:
    """Return whether a process began with this variable; False also where its environment cannot be read."""
    with contextlib.suppress(OSError):
        # Not psutil's `environ`: it ends at the first empty entry, which a process that sets its title leaves behind.
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def _is_marked(pid: int, marks: Marks) -> bool:
    if marks.token and has_variable(pid, TOKEN_VARIABLE, marks.token):
        return True
    with contextlib.suppress(OSError):
        # Not psutil's `cwd`: of a path over 4096 bytes it raises an error that is none of its own.
        if _is_below(Path(f"/proc/{pid}/cwd").readlink(), (marks.work_folder,)):
            return True
    return _writes_below(pid, marks.written_folders)


def _writes_below(pid: int, folders: tuple[Path, ...]) -> bool:
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):
            if _is_below(link.readlink(), folders):
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(encoding="ascii")
                flags = int(info.partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    return True
    return False


def _is_below(target: Path, folders: tuple[Path, ...]) -> bool:
    path = str(target).removesuffix(" (deleted)")
    return any(path == str(folder) or path.startswith(f"{folder}/") for folder in folders)


def _lineage(pid: int, stats: dict[int, _Stat]) -> list[int]:
    line = []
    while pid in stats and pid not in line:
        line.append(pid)
        pid = stats[pid].parent
    return line


# psutil gives start times in seconds since the epoch, which change with the clock; ticks since boot do not. Its
# `open_files` leaves out deleted files, which are a mark here.
def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # pid (name) state parent ...: the name may hold blanks and parentheses, so split after the last one
    fields = text.rpartition(")")[2].split()
    return _Stat(parent=int(fields[1]), letter=fields[0], start_ticks=int(fields[19]))
