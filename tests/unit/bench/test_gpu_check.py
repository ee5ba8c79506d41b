"""bench/gpu_check: which parts run, what ends them, and what is written of them. No GPU is needed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.gpu_check import __main__ as checking
from bench.gpu_check import report, runner
from bench.gpu_check.gpus import Gpu, NoGpu, parse
from bench.gpu_check.parts import PARTS, TOTAL_LIMIT_S, Part, why_skipped
from bench.gpu_check.runner import Outcome, run_all, run_part
from support.waiting import PATIENCE_S, until, wait_until
from tools import gpu_check

ROOT = Path(__file__).resolve().parents[3]
H200 = "NVIDIA H200, 143771, 9.0, 580.95.05\n"


def part(name: str, program: str = "", **values: object) -> Part:
    values = {"kind": "bench", "command": ("-c", program), "limit_s": 60} | values
    return Part(name, f"what {name} shows", **values)  # type: ignore[arg-type]


def test_each_part_has_a_name_of_its_own_and_fits_the_limit_of_all() -> None:
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert all(each.limit_s < TOTAL_LIMIT_S for each in PARTS)
    # On one GPU, the first ones at their limits leave the last one time.
    assert sum(each.limit_s for each in PARTS[:-1] if each.num_gpus == 1) <= TOTAL_LIMIT_S


def test_gpus_are_read_as_nvidia_smi_prints_them() -> None:
    assert parse(H200 * 2) == [Gpu("NVIDIA H200", 143771, 90, "580.95.05")] * 2
    assert parse("\n") == []


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("No devices were found", "which is no GPU"),
        ("NVIDIA H100, [N/A], 9.0, 580.1", "which is no GPU"),
        ("NVIDIA H100, 81559, 9.0, 550.54.15", "the driver 550.54.15 is too old for CUDA 13: 580 is the oldest"),
        ("x" * 100_000, "which is no GPU"),
    ],
)
def test_what_is_no_usable_gpu_is_named(said: str, message: str) -> None:
    with pytest.raises(NoGpu, match=message) as refused:
        parse(said)
    assert len(str(refused.value)) < 300


def run_tool(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/gpu_check.py", *arguments],
        cwd=ROOT,
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def nvidia_smi(folder: Path, script: str) -> Path:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "there is no nvidia-smi"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "version mismatch"),
        ("echo", "nvidia-smi lists none"),
        ("echo 'NVIDIA A100, 81559, 8.0, 535.1'", "the driver 535.1 is too old"),
        (r"printf 'NVIDIA \377, 81559, 8.0, 535.1\n'", "the driver 535.1 is too old"),
    ],
)
def test_without_a_gpu_it_says_so_and_installs_nothing(tmp_path: Path, script: str | None, said: str) -> None:
    if script is not None:
        nvidia_smi(tmp_path, script)
    before = (ROOT / ".venv-gpu").exists()
    done = run_tool(tmp_path)
    assert done.returncode == 3
    assert said in done.stderr
    assert "--dry-run` needs none" in done.stderr
    assert (ROOT / ".venv-gpu").exists() == before


def test_parts_are_listed_without_a_gpu(tmp_path: Path) -> None:
    done = run_tool(tmp_path, "--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [each.name for each in PARTS]
    assert run_tool(tmp_path, "--list", "--only", "no-such-part").returncode == 2


def test_arguments_are_read_before_anything_is_looked_for_or_installed(tmp_path: Path) -> None:
    done = run_tool(tmp_path, "--only", "no-such-part")
    assert done.returncode == 2
    assert "no-such-part" in done.stderr


@pytest.mark.parametrize(
    ("code", "reason", "status", "expected"),
    [("print('{\"a\": 1}')", "", "passed", 0), ("exit(1)", "", "failed", 1), ("", "it needs 2 GPUs", "skipped", 4)],
)
def test_the_exit_code_says_whether_anything_was_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str, status: str, expected: int
) -> None:
    gpu = Gpu(name="A100", memory_mib=81_559, capability=80, driver="580.1")
    monkeypatch.setattr(checking, "gpus_here", lambda: [gpu])
    monkeypatch.setattr(checking, "why_skipped", lambda *_: reason)
    assert checking._run([part("only", code)], tmp_path, 600.0) == expected
    values = json.loads((tmp_path / "report.json").read_text())
    assert [each["status"] for each in values["parts"] if each["name"] == "only"] == [status]


def test_files_that_cannot_be_written_fail_their_part_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu(name="A100", memory_mib=81_559, capability=80, driver="580.1")
    monkeypatch.setattr(checking, "gpus_here", lambda: [gpu])
    parts = [part("blocked", "print('{\"a\": 1}')"), part("good", 'print(\'{"a": NaN, "b": 1}\')')]
    (tmp_path / "blocked").write_text("a file in the place of its folder")
    assert checking._run(parts, tmp_path, 600.0) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    values = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert [(each["name"], each["status"]) for each in values["parts"]] == [("blocked", "failed"), ("good", "passed")]
    assert "it could not run: " in values["parts"][0]["reason"]
    assert values["parts"][1]["figures"] == {"a": "NaN", "b": 1}
    capsys.readouterr()
    (tmp_path / "report.json").unlink()
    (tmp_path / "report.json").mkdir()
    assert checking._run(parts[1:], tmp_path, 600.0) == 1
    shown = capsys.readouterr()
    assert "the report cannot be written: " in shown.out + shown.err
    assert checking._run(parts, tmp_path / "blocked" / "deeper", 600.0) == 2
    assert "gpu-check: --out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "capabilities", "memories_mib", "missing", "reason"),
    [
        ({}, [90], [80_000], [], ""),
        ({"num_gpus": 2}, [90], [80_000], [], r"it needs 2 GPU\(s\) .* here are 1"),
        ({"num_gpus": 2}, [90, 75], [80_000, 80_000], [], "here are 1"),
        ({"capability": 89}, [80], [80_000], [], r"compute capability 8\.9 or more .* here are 0"),
        ({}, [90], [8_000], [], "20000 MiB; here are 0"),
        ({"programs": ("fio",)}, [90], [80_000], ["fio", "other"], "fio is not installed"),
        ({"programs": ("fio",)}, [90], [80_000], ["other"], ""),
    ],
)
def test_a_part_is_skipped_with_its_reason(
    values: dict[str, object], capabilities: list[int], memories_mib: list[int], missing: list[str], reason: str
) -> None:
    found = why_skipped(part("p", **values), capabilities, memories_mib, missing)
    if reason:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(found)
    else:
        assert found == ""


def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    said: list[str] = []
    written: list[int] = []
    parts = [
        part("broken", "print('what went wrong'); raise SystemExit(7)"),
        part("lacking", "raise AssertionError"),
        part("silent", "print('no figures')"),
        part("half", 'print(\'{"gb_s": 4, "failure": "vllm-rr: it did not come up"}\'); raise SystemExit(1)'),
        part("good", "print('{\"gb_s\": 5}')"),
    ]
    outcomes = run_all(
        parts,
        tmp_path,
        lambda each: "no second GPU" if each.name == "lacking" else "",
        limit_s=300,
        say=said.append,
        on_outcome=lambda seen: written.append(len(seen)),
    )
    assert [(each.name, each.status) for each in outcomes] == [
        ("broken", "failed"), ("lacking", "skipped"), ("silent", "failed"), ("half", "failed"), ("good", "passed"),
    ]  # fmt: skip
    assert outcomes[0].reason == "exit code 7: what went wrong"
    assert outcomes[1].reason == "no second GPU"
    assert "no figures" in outcomes[2].reason
    assert outcomes[3].reason == "exit code 1: vllm-rr: it did not come up"
    assert outcomes[3].figures["gb_s"] == 4
    assert outcomes[4].figures == {"gb_s": 5}
    assert written == [1, 2, 3, 4, 5]
    assert any("[5/5] good: passed" in line for line in said)
    page = report.write(tmp_path, outcomes, report.machine([Gpu("H200", 143771, 90, "580.1")]), ["left-out"])
    text = page.read_text()
    assert "1 skipped" in text
    assert "| left-out | not run |" in text
    assert "H200, 143771 MiB, compute capability 9" in text
    values = json.loads((tmp_path / "report.json").read_text())
    assert [each["status"] for each in values["parts"]] == [each.status for each in outcomes]
    assert values["machine"]["driver"] == ["580.1"]


def test_parts_beyond_the_limit_of_all_are_skipped(tmp_path: Path) -> None:
    (outcome,) = run_all([part("late", "print(1)")], tmp_path, lambda each: "", limit_s=1, say=lambda line: None)
    assert (outcome.status, outcome.reason) == ("skipped", "the limit of 1 s for all parts is reached")


_FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import time; time.sleep(600)"
detached = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
# Its environment is empty, as of a process that sets its title.
cleared = subprocess.Popen([sys.executable, "-c", child], env={})
print(detached.pid, cleared.pid, flush=True)
time.sleep(600)
"""


def test_a_part_over_its_limit_ends_with_all_that_it_started_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log.txt"

    def has_begun() -> bool:
        return log.exists() and len(log.read_text().split()) == 2

    def reach_the_limit(*_: object) -> bool:
        wait_until(has_begun, what="the part's family")
        return False

    monkeypatch.setattr(runner, "PATIENCE_S", 0.2)
    monkeypatch.setattr(runner, "_wait", reach_the_limit)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as bystander:
        try:
            outcome = run_part(part("p", _FAMILY), tmp_path, 5.0)
            assert bystander.poll() is None
        finally:
            bystander.kill()
    assert (outcome.status, outcome.reason) == ("timed out", "its limit of 5 s")
    for pid in map(int, log.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_limit_is_noticed_and_said_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SAY_EVERY_S", 0.01)
    said: list[None] = []
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        try:
            assert not runner._wait(process, 0.05, lambda: said.append(None))
        finally:
            process.kill()
        assert runner._wait(process, 600, lambda: None)
    assert said


def test_what_outlives_a_part_is_ended_and_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "KILL_WAIT_S", 0.5)
    child = "import time; time.sleep(600)"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); print('{{\"a\": 1}}')"
    outcome = run_part(part("p", program), tmp_path, 30.0)
    assert (outcome.status, outcome.reason) == ("failed", "1 processes outlived it")


@pytest.mark.parametrize("num_interrupts", [1, 2])
async def test_an_interrupt_ends_the_part_that_runs(tmp_path: Path, num_interrupts: int) -> None:
    deaf = "\n".join(
        [
            "import signal, time",
            "signal.signal(signal.SIGTERM, lambda *_: print('told', flush=True))",
            "print('ready', flush=True)",
            "while True: time.sleep(600)",
        ]
    )
    program = "\n".join(
        [
            "import sys",
            "from bench.gpu_check import runner",
            "runner.PATIENCE_S = 0.5",
            "from bench.gpu_check import __main__ as program",
            "from bench.gpu_check.gpus import Gpu",
            "from bench.gpu_check.parts import Part",
            "program.gpus_here = lambda: [Gpu('x', 100000, 90, '580')]",
            f"program.PARTS = [Part('p', 's', 'bench', ('-c', {deaf!r}), 60)]",
            "sys.exit(program.main(['--out', sys.argv[1]]))",
        ]
    )
    log = tmp_path / "p" / "log.txt"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    running = await asyncio.create_subprocess_exec(sys.executable, "-c", program, str(tmp_path), env=environment)
    await until(lambda: log.exists() and "ready" in log.read_text(), what="the part runs")
    children: list[psutil.Process] = []
    await until(lambda: bool(children.extend(psutil.Process(running.pid).children()) or children))
    running.terminate()
    await until(lambda: "told" in log.read_text(), what="the part is told to go")
    for _ in range(1, num_interrupts):
        running.terminate()
    async with asyncio.timeout(PATIENCE_S):
        assert await running.wait() == 130
    # Killed, and perhaps not collected yet by the process that inherits it.
    await until(lambda: not any(_is_alive(child) for child in children), what="the part has ended")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_TESTS = """
import pytest
def test_good(): pass
def test_bad(): assert {bad}
@pytest.mark.skip(reason="of another machine")
def test_other(): pass
"""


@pytest.mark.parametrize(
    ("text", "status", "reason", "counts"),
    [
        (_TESTS.format(bad=0), "failed", "1 of 3 tests failed: test_bad", (1, 1, 1)),
        (_TESTS.format(bad=1), "passed", "", (2, 0, 1)),
        (_TESTS.partition("def test_good")[0] + "@pytest.mark.skip" + _TESTS.partition("@pytest.mark.skip")[2],
         "skipped", "no test ran: of another machine", (0, 0, 1)),
        ("import no_such_module", "failed", "1 of 1 tests failed: ", (0, 1, 0)),
    ],
)  # fmt: skip
def test_results_of_tests_are_read(
    tmp_path: Path, text: str, status: str, reason: str, counts: tuple[int, int, int]
) -> None:
    (file := tmp_path / "test_it.py").write_text(text)
    command = ("-m", "pytest", "-q", "-c", str(tmp_path / "none.ini"), str(file), "--junitxml={out}/tests.xml")
    (tmp_path / "none.ini").write_text("[pytest]\n")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # importing plugins would take most of the time
    outcome = run_part(part("p", kind="tests", command=command, environ=alone), tmp_path / "out", 60.0)
    assert (outcome.status, outcome.reason.startswith(reason)) == (status, True), outcome.reason
    assert tuple(outcome.figures[key] for key in ("passed", "failed", "skipped")) == counts


def test_a_part_whose_tests_never_began_says_what_was_said_last(tmp_path: Path) -> None:
    outcome = run_part(part("p", "raise SystemExit('no CUDA')", kind="tests"), tmp_path, 60.0)
    assert (outcome.status, outcome.reason) == ("failed", "exit code 1, and no results: no CUDA")


def test_results_of_an_earlier_run_are_not_those_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text('<testsuite><testcase name="a"><failure/></testcase></testsuite>')
    outcome = run_part(part("p", "raise SystemExit('broken')", kind="tests"), tmp_path, 30.0)
    assert outcome.reason.startswith("exit code 1, and no results: broken")
    assert not outcome.figures.get("failed")


def test_a_limit_of_the_arguments_counts_in_each_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "gpus_here", lambda: [Gpu("x", 100_000, 90, "580")])
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda *args, **_: subprocess.CompletedProcess(args, 0))
    monkeypatch.setattr(gpu_check, "_become", lambda python, program: ran.append(program) or 0)
    for arguments in ([], ["--limit=7"], ["--limit", "7"]):
        gpu_check.main(arguments)
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float)
    limits = [parser.parse_args(program[2:]).limit for program in ran]
    assert 600 <= limits[0] <= 3600
    assert limits[1:] == [7, 7]


def test_long_logs_and_reasons_are_cut(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    outcome = run_part(part("p", "print('x' * (64 << 20)); raise SystemExit(1)"), tmp_path, 60.0)
    assert len(outcome.reason) < 1000
    assert time.monotonic() - begun_s < 30


def test_a_report_names_plots_and_escapes_cells() -> None:
    text = report.render([Outcome("rag", "a | b", "passed", plots=["rag/rag/ttft.png"])], {}, [])
    assert "![rag/rag/ttft.png](rag/rag/ttft.png)" in text
    assert "a \\| b" in text


def test_plots_of_an_earlier_run_are_not_those_of_this_one(tmp_path: Path) -> None:
    (old := tmp_path / "rag" / "old.png").parent.mkdir()
    old.write_bytes(b"")
    os.utime(old, (1, 1))
    program = f"open({str(old.with_name('new.png'))!r}, 'w'); raise SystemExit(1)"
    assert run_part(part("rag", program), tmp_path / "rag", 60.0).plots == ["rag/new.png"]
