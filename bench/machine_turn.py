"""One measurement at a time on a machine: two that run beside each other measure each other."""

from __future__ import annotations

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

LOCK = Path(tempfile.gettempdir()) / "kvferry-bench.lock"


@contextlib.contextmanager
def machine_turn(console: Console) -> Iterator[None]:
    """Waits until no other measurement of this machine is inside. The end of a process ends its turn."""
    with LOCK.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with console.status("another measurement runs on this machine ..."):
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
