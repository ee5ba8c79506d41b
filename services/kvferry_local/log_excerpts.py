"""The one log line that explains why a start takes long or failed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from kvferry.errors import printable
from kvferry.util.deployment_causes import CAUSE_MARK, GIVEN_UP
from kvferry_local.run_folder import RunFolder

_READ_BYTES = 32 * 1024
_FAULT = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|^\S*(Error|Exception|Exit)\b.*:|Killed|out of memory", re.IGNORECASE)
# Ray reports its own surroundings as errors; none of these is why a model does not load.
_NOISE = re.compile(r"metrics|dashboard|event_stats|usage|opentelemetry|autoscaler", re.IGNORECASE)
_MAX_CHARS = 220


def newest_fault(folder: RunFolder) -> str | None:
    """Return the last line that looks like a fault, from the newest such log of workers or application."""
    for log in _newest_first(_logs(folder)):
        for line in reversed(_end_of(log)):
            if _FAULT.search(line) and not _NOISE.search(line):
                return _shortened(line)
    return None


def newest_cause(log: Path) -> str:
    """Return the cause that the deploying process wrote last, or an empty string."""
    last = "".join(_end_of(log)[-1:])
    return last.removeprefix(CAUSE_MARK) if last.startswith((CAUSE_MARK, GIVEN_UP)) else ""


def newest_line(folder: RunFolder) -> str | None:
    """Return the newest fault, else the newest log's last line, else None."""
    if (fault := newest_fault(folder)) is not None:
        return fault
    lines = next((lines for log in _newest_first(_logs(folder)) if (lines := _end_of(log))), None)
    return _shortened(lines[-1]) if lines else None


def _logs(folder: RunFolder) -> Iterable[Path]:
    session = folder.ray / "session_latest" / "logs"
    yield from folder.logs.glob("deploy.log")
    yield from session.glob("serve/replica_*.log")
    yield from session.glob("worker-*.err")
    yield from session.glob("worker-*.out")


def _newest_first(logs: Iterable[Path]) -> list[Path]:
    dated = []
    for log in logs:
        try:
            dated.append((log.stat().st_mtime, log))
        except OSError:
            continue
    return [log for _, log in sorted(dated, reverse=True)]


def _end_of(log: Path) -> list[str]:
    try:
        with log.open("rb") as content:
            content.seek(max(0, log.stat().st_size - _READ_BYTES))
            text = content.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [printable(line.strip()) for line in text.splitlines() if line.strip()]


def _shortened(line: str) -> str:
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 1]}…"
