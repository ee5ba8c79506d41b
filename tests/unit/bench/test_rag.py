"""bench/rag.py over deployments and runs that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import rag
from bench.deployments import DEPLOYMENTS, DeploymentFailed, Running, Settings
from kvferry_loadtest.record import Outcome
from kvferry_loadtest.run import Outcomes
from kvferry_loadtest.scenario import Scenario
from support.load_records import record
from support.loadtest_results import result


@contextlib.contextmanager
def _up(settings: Settings) -> Iterator[Running]:
    yield Running(("http://127.0.0.1:1",), (), "model")


@contextlib.contextmanager
def _never_up(settings: Settings) -> Iterator[Running]:
    raise DeploymentFailed("no such engine")
    yield


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Outcomes]:
    """What runs come to by deployment. Reports are a line of the folder's file `reported`."""
    runs: dict[str, Outcomes] = {}

    def run_once(scenario: Scenario, target: Any, repeat: int, out: Path, **_: Any) -> Outcomes:
        return runs[target.deployment]

    def write_report(results: list[Any], out: Path, title: str) -> Path:
        out.mkdir(exist_ok=True)
        (out / "reported").write_text(",".join(each.deployment for each in results))
        return out

    for name in ("kvferry-sim", "kvferry-sim-tier"):
        monkeypatch.setitem(rag.DEPLOYMENTS, name, dataclasses.replace(DEPLOYMENTS[name], up=_up))
    monkeypatch.setattr(rag, "run_once", run_once)
    monkeypatch.setattr(rag, "write_report", write_report)
    monkeypatch.setattr(rag, "print_comparison", lambda console, comparison: None)
    monkeypatch.setattr(rag, "machine_turn", lambda console: contextlib.nullcontext())
    monkeypatch.setattr(rag, "versions", dict)
    arguments = ["rag", "--scenario", "smoke", "--repeats", "1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*arguments, "--only", "kvferry-sim", "--only", "kvferry-sim-tier"])
    return runs


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return values


def test_runs_whose_requests_are_answered_or_refused_are_figures(
    runs: dict[str, Outcomes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [record(), record(outcome=Outcome.REFUSED), record(outcome=Outcome.TIMED_OUT)]
    for name in ("kvferry-sim", "kvferry-sim-tier"):
        runs[name] = Outcomes(result(name), answers)
    assert rag.main() == 0
    assert [run["deployment"] for run in last_line(capsys)["runs"]] == ["kvferry-sim", "kvferry-sim-tier"]
    assert (tmp_path / "out" / "reported").read_text() == "kvferry-sim,kvferry-sim-tier"


def test_a_request_that_failed_ends_it_after_its_run(
    runs: dict[str, Outcomes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = record(outcome=Outcome.FAILED, request_id=17, error="500: the engine has ended")
    runs["kvferry-sim"] = Outcomes(result("kvferry-sim"), [record(), failed])
    assert rag.main() == 1
    last = last_line(capsys)
    assert last["failure"] == "kvferry-sim, run 1: request 17: 500: the engine has ended"
    assert [run["deployment"] for run in last["runs"]] == ["kvferry-sim"]
    assert (tmp_path / "out" / "reported").read_text() == "kvferry-sim"


def test_a_deployment_that_does_not_come_up_ends_it_with_a_report_of_those_before(
    runs: dict[str, Outcomes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs["kvferry-sim"] = Outcomes(result("kvferry-sim"), [record()])
    broken = dataclasses.replace(DEPLOYMENTS["kvferry-sim-tier"], up=_never_up)
    monkeypatch.setitem(rag.DEPLOYMENTS, "kvferry-sim-tier", broken)
    assert rag.main() == 1
    last = last_line(capsys)
    assert last["failure"] == "kvferry-sim-tier: no such engine"
    assert [run["deployment"] for run in last["runs"]] == ["kvferry-sim"]
    assert (tmp_path / "out" / "reported").read_text() == "kvferry-sim"
