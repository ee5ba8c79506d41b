"""Runs parts one after the other, each within its limit and all within one; ends what a part started, and nothing else.

All processes of a part have its token in their environment, which Ray and vLLM pass on; those that have cleared theirs
are found as children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from bench.gpu_check.outcomes import RESULTS, figures_of, plots_of, why_failed, why_nothing_tested
from bench.gpu_check.parts import Part
from kvferry_local.processes import has_variable

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "KVFERRY_GPU_CHECK_TOKEN"
# A part that is told to go takes its cluster down.
PATIENCE_S = 60.0
KILL_WAIT_S = 10.0
SAY_EVERY_S = 30.0
_MIN_LIMIT_S = 30.0  # of what is left of all time: less is not worth an engine's start

Status = Literal["passed", "failed", "timed out", "skipped"]


@dataclass
class Outcome:
    name: str
    proves: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    command: str = ""
    log: str = ""  # below the report's folder
    figures: dict[str, Any] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)  # as `log`

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_all(
    parts: Sequence[Part],
    out: Path,
    why_not: Callable[[Part], str],
    *,
    limit_s: float,
    say: Callable[[str], None],
    python: str = sys.executable,
    on_outcome: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Run the parts in order, whatever the ones before came to. `on_outcome` gets all outcomes after each part."""
    deadline_s = time.monotonic() + limit_s
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts, 1):
        left_s = deadline_s - time.monotonic()
        say(f"[{number}/{len(parts)}] {part.name}, at most {min(part.limit_s, max(0.0, left_s)):.0f} s: {part.proves}")
        if reason := why_not(part):
            outcome = Outcome(part.name, part.proves, "skipped", reason)
        elif left_s < _MIN_LIMIT_S:
            outcome = Outcome(part.name, part.proves, "skipped", f"the limit of {limit_s:g} s for all parts is reached")
        else:
            try:
                outcome = run_part(part, out / part.name, min(float(part.limit_s), left_s), say=say, python=python)
            except OSError as error:  # a full disk, or a folder that is gone
                outcome = Outcome(part.name, part.proves, "failed", f"it could not run: {error}")
        say(f"[{number}/{len(parts)}] {part.name}: {outcome.status}{f', {outcome.reason}' if outcome.reason else ''}")
        outcomes.append(outcome)
        on_outcome(outcomes)
    return outcomes


def run_part(
    part: Part,
    out: Path,
    limit_s: float,
    *,
    say: Callable[[str], None] = lambda line: None,
    python: str = sys.executable,
) -> Outcome:
    """Run one part; its output goes to `out`/log.txt. KeyboardInterrupt ends it and passes on."""
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).unlink(missing_ok=True)  # of an earlier run: this one may end before it writes any
    log, token = out / "log.txt", secrets.token_hex(16)
    command = [python, *part.arguments(str(out))]
    outcome = Outcome(part.name, part.proves, "failed", command=" ".join(part.command), log=f"{part.name}/log.txt")
    begun_s, begun_unix_ns = time.monotonic(), time.time_ns()
    with log.open("wb") as output, contextlib.ExitStack() as held:
        held.enter_context(_interrupts_held())
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | part.environment() | {TOKEN: token, "PYTHONPATH": import_path(), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            held.close()
            is_over = _wait(started, limit_s, lambda: say(f"    {part.name}: {time.monotonic() - begun_s:.0f} s"))
        finally:
            num_left = end(started, token)
    outcome.seconds = round(time.monotonic() - begun_s, 1)
    if not is_over:
        outcome.status, outcome.reason = "timed out", f"its limit of {limit_s:.0f} s"
    elif reason := why_failed(part, out, started.returncode):
        outcome.reason = reason
    elif num_left:
        outcome.reason = f"{num_left} processes outlived it"
    elif reason := why_nothing_tested(part, out):
        outcome.status, outcome.reason = "skipped", reason
    else:
        outcome.status = "passed"
    outcome.figures = figures_of(part, out)
    outcome.plots = [f"{part.name}/{plot}" for plot in plots_of(out, begun_unix_ns)]
    return outcome


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Deliver signals that come meanwhile at the end: a process that is just being started would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came[:1]:
            os.kill(os.getpid(), number)


def import_path() -> str:
    folders = [ROOT / "services", ROOT / "loadtest", ROOT, ROOT / "tools", ROOT / "tests"]
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def _wait(started: subprocess.Popen[bytes], limit_s: float, on_period: Callable[[], None]) -> bool:
    """Return whether the process ended within the limit."""
    deadline_s = time.monotonic() + limit_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(min(left_s, SAY_EVERY_S))
            return True
        on_period()
    return started.poll() is not None


def end(started: subprocess.Popen[bytes], token: str) -> int:
    """End a part and everything of it. Return the number of processes that had outlived the part itself."""
    if started.poll() is None:
        started.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(PATIENCE_S)
    # Helpers of multiprocessing end a moment after their parent; those of one that goes on do not.
    deadline_s = time.monotonic() + (KILL_WAIT_S if started.poll() is not None else 0.0)
    while (left := belonging(token)) and time.monotonic() < deadline_s:
        psutil.wait_procs(left, timeout=0.5)
    num_left = len(left)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=KILL_WAIT_S)
    if started.poll() is None:
        started.kill()
        started.wait()
    return num_left


def belonging(token: str) -> list[psutil.Process]:
    """Return the living processes with the token in their environment, and their children; never this one."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if has_variable(process.pid, TOKEN, token):
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return [process for process in found.values() if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
