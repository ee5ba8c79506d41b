"""A short run of the tier's benchmark, and its arithmetic."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return importlib.import_module("bench.tier")


def test_ratios_are_of_the_same_round(bench: ModuleType) -> None:
    """A drive that gives half as much every second round changes no ratio."""

    def runs(*rates: float) -> list[object]:
        return [bench.Measured(rate, 0.1) for rate in rates]

    figures = bench.summarize(
        {"read": runs(2.0, 1.0, 2.2), "fio_read": runs(2.0, 1.0, 2.0), "write": runs(1.0), "fio_write": runs(2.0)}
    )
    assert figures["read_gb_s"] == 2.0
    assert figures["read_ratio"] == 1.0
    assert figures["write_ratio"] == 0.5
    assert figures["vllm_fs_read_ratio"] is None
    assert figures["cpu_s_per_gib"] == 0.1


def test_everything_takes_its_turn_first(bench: ModuleType) -> None:
    order: list[str] = []

    def thing(name: str) -> object:
        def run() -> object:
            order.append(name)
            return bench.Measured(1.0, 0.0)

        return run

    said: list[str] = []
    bench.measure({name: thing(name) for name in "abc"}, 3, lambda name, one: said.append(name))
    assert "".join(order) == "".join(said) == "abcbcacab"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_last_line_is_json(tmp_path: Path) -> None:
    arguments = ["--folder", str(tmp_path), "--page-kib", "64", "--mib", "2", "--rounds", "1", "--scan-pages", "500"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.tier", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert json.loads(lines[1]) == {"gb_s_of_rounds": {"read": figures["gb_s_of_rounds"]["read"]}}
    assert figures["page_bytes"] == 65536
    for name in ("read_gb_s", "write_gb_s", "fio_read_gb_s", "fio_write_gb_s", "read_ratio", "write_ratio"):
        assert figures[name] > 0
    assert {"vllm_fs_read_ratio", "cpu_s_per_gib", "machine", "queue_depth", "scan_s_per_100k_pages"} <= figures.keys()
    assert not list(tmp_path.iterdir())


def test_without_fio_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.tier"],
        check=False,
        capture_output=True,
        text=True,
        env=ENVIRONMENT | {"PATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "needs fio" in done.stderr
