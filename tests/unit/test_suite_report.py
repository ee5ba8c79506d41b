"""tests/support/suite_report.py, by a run of pytest of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_TEST = "tests/unit/test_suite_schedule.py::test_never_more_than_the_machine_has"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_run_reports_its_seconds_memory_and_machine(tmp_path: Path, processes: str) -> None:
    file = tmp_path / "folder that is made" / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", processes, f"--report={file}"]
    ran = subprocess.run([*command, ONE_TEST], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads(file.read_text())
    assert list(report["seconds"]) == [ONE_TEST]
    assert 0 < report["seconds"][ONE_TEST] < report["wall_s"]
    assert report["processor"]
    assert report["features"]
    assert report["cores"] >= 1
    assert report["memory_gib"] > 0
    assert f"{report['wall_s']} s; memory at most {report['peak_gib']} GiB more than at the start" in ran.stdout
    assert ONE_TEST.partition("::")[0] in ran.stdout
