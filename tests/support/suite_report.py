"""Reports what a run of the tests took: seconds of each test and file, peak memory and load, and the machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

_INTERVAL_S = 1.0
_NUM_FILES = 25
# Of /proc/cpuinfo: vLLM and torch choose kernels by these.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


class SuiteReport:
    """A plugin of the process that runs the tests or, with pytest-xdist, of the one that distributes them."""

    def __init__(self, file: Path | None) -> None:
        """`file` gets the report as JSON."""
        self._file = file
        self._nodeid_to_s: dict[str, float] = defaultdict(float)
        self._nodeid_to_start_s: dict[str, float] = {}
        self._started_at = time.time()
        self._started_s = time.monotonic()
        self._used_at_start = _used_bytes()
        self._peak_bytes = self._used_at_start
        self._peak_load = os.getloadavg()[0]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="suite report", daemon=True)

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._nodeid_to_s[report.nodeid] += report.duration
        self._nodeid_to_start_s.setdefault(report.nodeid, report.start - self._started_at)

    def pytest_sessionfinish(self) -> None:
        self._is_over.set()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        report = self.report()
        if self._file is not None:
            self._file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write = terminalreporter.write_line
        terminalreporter.section("this machine during the run")
        write("{processor}, {cores} cores ({features}), {memory_gib} GiB".format(**report))
        write(
            "{wall_s} s; memory at most {peak_gib} GiB more than at the start; load average at most {peak_load}".format(
                **report
            )
        )
        for path, seconds in sorted(_by_file(self._nodeid_to_s).items(), key=lambda item: -item[1])[:_NUM_FILES]:
            write(f"{seconds:8.1f} s  {path}")

    def report(self) -> dict[str, object]:
        return {
            **machine(),
            "wall_s": round(time.monotonic() - self._started_s, 1),
            "peak_gib": round((self._peak_bytes - self._used_at_start) / 2**30, 2),
            "peak_load": round(self._peak_load, 2),
            "started_s": {nodeid: round(seconds, 3) for nodeid, seconds in self._nodeid_to_start_s.items()},
            "seconds": {nodeid: round(seconds, 3) for nodeid, seconds in self._nodeid_to_s.items()},
        }

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, _used_bytes())
            self._peak_load = max(self._peak_load, os.getloadavg()[0])


def machine() -> dict[str, object]:
    """Return what tests of engines depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(fields.get("flags", "").split())
    return {
        "processor": fields.get("model name", "an unknown processor"),
        "features": " ".join(name for name in _FEATURES if name in flags) or "none of AVX2, AVX-512 and AMX",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _used_bytes() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def _by_file(nodeid_to_s: Mapping[str, float]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for nodeid, seconds in nodeid_to_s.items():
        totals[nodeid.partition("::")[0]] += seconds
    return totals
