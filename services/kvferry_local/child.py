"""Starts a cluster's programs, each with its own session and log file."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvferry.errors import Interrupted, LocalError
from kvferry_local.gateway_access import KEY_VARIABLE
from kvferry_local.processes import TOKEN_VARIABLE, ProcessIdentity
from kvferry_local.run_folder import RUN_DIR_VARIABLE, RunFolder


class StartFailed(LocalError):
    """A part did not start; the message names it and ends with its log's last lines."""


class Child:
    """A started program, owned by the run folder: dropping this object ends nothing."""

    def __init__(self, name: str, command: Sequence[str], *, folder: RunFolder, environ: Mapping[str, str]) -> None:
        self.name = name
        self.log = folder.logs / f"{name}.log"
        with self.log.open("ab") as output:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and we end the rest in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=folder.work,
                start_new_session=True,
            )

    def __repr__(self) -> str:
        return f"Child({self.name!r}, pid={self._process.pid}, exit_code={self._process.poll()})"

    @property
    def identity(self) -> ProcessIdentity:
        return ProcessIdentity.of(self._process.pid)

    def exit_code(self) -> int | None:
        return self._process.poll()

    def has_ended(self) -> bool:
        return self.exit_code() is not None

    def failure(self) -> StartFailed:
        code = self.exit_code()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
        return StartFailed(f"{self.name} {how}:\n{tail(self.log)}")


class Pace:
    """Waits during a start, checking for interrupts.

    Signal handlers only set a flag, so no program is left half started.
    """

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self._on_step = on_step
        # No threading.Event: a second signal, or one during a wait, would wait for ever for its own thread's lock.
        self._is_interrupted = False

    def interrupt(self) -> None:
        self._is_interrupted = True

    @property
    def is_interrupted(self) -> bool:
        return self._is_interrupted

    def check(self) -> None:
        if self._is_interrupted:
            raise Interrupted("interrupted")

    def until(self, condition: Callable[[], bool], *, deadline: float, step_s: float = 0.1) -> bool:
        """Poll `condition`; return False after `deadline` (monotonic). Raises Interrupted."""
        while True:
            self.check()
            self._on_step()
            if condition():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(step_s)


def child_environment(folder: RunFolder, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the caller's environment with the cluster's marks, without foreign Ray settings and KVFERRY__
    overrides.
    """
    # The key is the command's own: nothing of the cluster needs it, and an environment is easily read and logged.
    left_out = ("RAY_", "KVFERRY__", KEY_VARIABLE)
    kept = {name: value for name, value in environ.items() if not name.startswith(left_out)}
    token = folder.token()
    if token is None:
        raise StartFailed(f"{folder.token_file} is missing")
    return kept | {RUN_DIR_VARIABLE: str(folder.path), TOKEN_VARIABLE: token, "TMPDIR": str(folder.temporary)}


def tail(log: Path, *, num_lines: int = 15) -> str:
    lines = _last_lines(log, num_lines)
    return "\n".join(f"    {line}" for line in lines) if lines else f"    (nothing in {log})"


def _last_lines(log: Path, num_lines: int) -> list[str]:
    try:
        with log.open("rb") as content:
            content.seek(max(0, log.stat().st_size - 64 * 1024))
            text = content.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]
