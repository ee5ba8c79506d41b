"""Outcome of a part by its files: the result of its tests, or the JSON on the last line of a benchmark."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_check.parts import Part

RESULTS = "tests.xml"
_PLOTS = ("*.html", "*.png")
_MAX_PLOTS = 20
MAX_REASON_CHARS = 600
_MAX_LOG_BYTES = 1 << 20
_MAX_TESTS_NAMED = 8


def why_failed(part: Part, out: Path, exit_code: int) -> str:
    """Return why a part that has ended did not pass; empty if it did."""
    if part.kind == "tests":
        tests = _tests(out)
        if tests is None:
            return f"exit code {exit_code}, and no results: {_last_lines(out)}"
        if failed := [name for name, result, _ in tests if result == "failed"]:
            return f"{len(failed)} of {len(tests)} tests failed: {', '.join(failed[:_MAX_TESTS_NAMED])}"
    elif exit_code == 0 and not _json_of(out):
        return f"it printed no figures: {_last_lines(out)}"
    elif failure := _json_of(out).get("failure"):
        return f"exit code {exit_code}: {str(failure)[:MAX_REASON_CHARS]}"
    return f"exit code {exit_code}: {_last_lines(out)}" if exit_code else ""


def why_nothing_tested(part: Part, out: Path) -> str:
    """Return why all tests of a part that did not fail were skipped; empty if one passed."""
    tests = _tests(out) if part.kind == "tests" else None
    if tests is None or any(result == "passed" for _, result, _ in tests):
        return ""
    reasons = sorted({reason for _, result, reason in tests if result == "skipped"})
    return f"no test ran: {'; '.join(reasons)[:MAX_REASON_CHARS]}"


def figures_of(part: Part, out: Path) -> dict[str, Any]:
    """Return a part's numbers: of tests how many there are of each result, and why some were skipped."""
    if part.kind == "bench":
        return _json_of(out)
    tests = _tests(out) or []
    counts = {result: sum(each == result for _, each, _ in tests) for result in ("passed", "failed", "skipped")}
    skipped = sorted({f"{name}: {reason}" for name, result, reason in tests if result == "skipped"})
    return {**counts, **({"skipped tests": skipped} if skipped else {})}


def plots_of(out: Path, begun_unix_ns: int) -> list[str]:
    """Return plots below a part's folder that it wrote itself: those of an earlier run may lie beside them."""
    files = sorted(file for pattern in _PLOTS for file in out.rglob(pattern))
    return [file.relative_to(out).as_posix() for file in files if file.stat().st_mtime_ns >= begun_unix_ns][:_MAX_PLOTS]


def _tests(out: Path) -> list[tuple[str, str, str]] | None:
    """Return name, result and reason of each test; None without a file of results."""
    try:
        root = ElementTree.parse(out / RESULTS).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    return list(_cases(root))


def _cases(root: ElementTree.Element) -> Iterator[tuple[str, str, str]]:
    for case in root.iter("testcase"):
        name, skipped = case.get("name", "?"), case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed", ""
        elif skipped is not None:
            yield name, "skipped", (skipped.get("message") or "")[:MAX_REASON_CHARS]
        else:
            yield name, "passed", ""


def _json_of(out: Path) -> dict[str, Any]:
    for line in reversed(_log(out).splitlines()):
        if line.startswith("{"):
            try:
                values = json.loads(line, parse_constant=str)  # a report with NaN would be no JSON
            except ValueError:
                continue
            return values if isinstance(values, dict) else {}
    return {}


def _last_lines(out: Path) -> str:
    return " | ".join(line.strip() for line in _log(out).splitlines()[-4:] if line.strip())[-MAX_REASON_CHARS:]


def _log(out: Path) -> str:
    try:
        with (out / "log.txt").open("rb") as opened:
            opened.seek(0, 2)
            opened.seek(max(0, opened.tell() - _MAX_LOG_BYTES))
            return opened.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
