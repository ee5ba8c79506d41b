from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvferry.engine import fork_process, grammar_checks
from kvferry.engine.base import ANYBODY, Asker, CacheSalt, TenantName
from kvferry.engine.fork_process import ForkProcess, environment_of_process
from kvferry.engine.forks import ForkLimits, ForkServer
from kvferry.engine.grammar_checks import MAX_GRAMMAR_BYTES, MAX_WAITING, NUM_FORKS, GrammarChecks
from kvferry.errors import InvalidRequest, NotReady, Overloaded
from support.waiting import PATIENCE_S, until, until_async

COMMAND = [sys.executable, "-m", "tests.support.grammar_process"]
LIMITS = ForkLimits(cpu_s=0.3, wall_s=PATIENCE_S, memory_bytes=256 << 20, stack_bytes=8 << 20)
# Is ready once there is the file that its first argument names, and uses CPU time until then.
SLOW_START = """
import os, pathlib, runpy, sys
while not os.path.exists(sys.argv[1]):
    pass
runpy.run_module("tests.support.grammar_process", run_name="__main__")
"""


def made(limits: ForkLimits = LIMITS, command: Sequence[str] = COMMAND) -> GrammarChecks:
    return GrammarChecks(ForkProcess(command, limits, "grammars cannot be tried now"))


def asker(tenant: str, salt: str = "") -> Asker:
    return Asker(TenantName(tenant), CacheSalt(salt))


@pytest.fixture
async def checks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GrammarChecks]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    monkeypatch.setattr(fork_process, "_SLOW_START_S", PATIENCE_S)
    checks = made()
    yield checks
    await checks.close()


def pid_of(checks: GrammarChecks) -> int:
    assert checks._process.pid is not None
    return checks._process.pid


def forks_of(checks: GrammarChecks) -> list[psutil.Process]:
    return psutil.Process(pid_of(checks)).children()


async def refusal(checks: GrammarChecks, spec: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await checks.check(spec, ANYBODY)
    return refused.value.message


async def test_what_passed_is_kept_for_its_salt_alone(checks: GrammarChecks) -> None:
    """So that time tells nobody what others sent."""
    for number, salt in enumerate(("a", "b"), 1):
        for _ in range(3):
            await checks.check("ok", asker("acme", salt))
        assert checks.outcomes["ok"] == number
    for _ in range(2):
        assert await refusal(checks, "refuse") == "refused because\nof a second line"
    assert checks.outcomes["refused"] == 2


async def test_what_exhausts_a_fork_is_refused_and_ends_nothing_else(checks: GrammarChecks) -> None:
    await checks.check("ok", ANYBODY)
    pid = pid_of(checks)
    assert await refusal(checks, "spin") == ("its grammar takes over 0.3 s of CPU time, the limit")
    for spec in ("allocate", "segfault", "recurse"):
        assert "over 256 MiB of memory, or nests too deeply" in await refusal(checks, spec)
    await checks.check("ok again", ANYBODY)
    assert pid_of(checks) == pid
    assert not forks_of(checks)
    assert checks.outcomes == {"ok": 2, "refused": 0, "cpu_time": 1, "memory": 1, "crashed": 2, "late": 0}


async def test_a_fork_that_waits_is_killed_and_its_verdict_forgotten(checks: GrammarChecks) -> None:
    late = made(ForkLimits(cpu_s=30.0, wall_s=0.05, memory_bytes=256 << 20))
    for _ in range(2):
        with pytest.raises(Overloaded, match="too busy"):
            await late.check("wait", ANYBODY)
    assert late.outcomes["late"] == 2
    await late.close()


async def test_a_client_that_leaves_gives_its_turn_back_when_its_fork_ends(checks: GrammarChecks) -> None:
    await checks.check("ok", ANYBODY)
    leaving = asyncio.create_task(checks.check("wait", ANYBODY))
    await until(lambda: len(forks_of(checks)) == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert checks._turns.num_free == NUM_FORKS - 1
    forks_of(checks)[0].kill()
    await until(lambda: checks._turns.num_free == NUM_FORKS)


async def test_no_more_run_and_wait_than_are_allowed(checks: GrammarChecks) -> None:
    await checks.check("ok", asker("evil"))
    held = [
        asyncio.create_task(checks.check(f"wait {i}", asker("evil", f"salt {i}")))
        for i in range(NUM_FORKS + MAX_WAITING)
    ]
    await until(lambda: len(forks_of(checks)) == NUM_FORKS)
    with pytest.raises(Overloaded, match=f"{MAX_WAITING} grammars wait"):
        await checks.check("ok again", asker("evil", "one more salt"))
    # Another tenant takes the place of the last one, whatever salts the first tenant sends.
    good = asyncio.create_task(checks.check("ok again", asker("good")))
    await until(lambda: held[-1].done())
    assert isinstance(held[-1].exception(), Overloaded)
    for fork in forks_of(checks):
        fork.kill()
    await good
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def test_equal_grammars_of_a_salt_that_wait_are_tried_once(checks: GrammarChecks) -> None:
    await checks.check("ok", ANYBODY)
    await asyncio.gather(*(checks.check("ok again", ANYBODY) for _ in range(NUM_FORKS + MAX_WAITING)))
    assert checks.outcomes["ok"] <= 1 + NUM_FORKS


async def test_what_passed_is_kept_up_to_a_number(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_PASSED", 2)
    for spec in ("ok 1", "ok 2", "ok 1", "ok 3", "ok 1", "ok 2"):
        await checks.check(spec, ANYBODY)
    assert checks.outcomes["ok"] == 4


async def test_a_spec_that_is_too_long_is_refused_before_any_process(checks: GrammarChecks) -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_GRAMMAR_BYTES} are the limit"):
        await checks.check("ok" + "x" * MAX_GRAMMAR_BYTES, ANYBODY)
    assert checks._process.pid is None


async def test_a_process_that_dies_is_started_again(checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_process, "_FIRST_PAUSE_S", 0.0)
    await checks.check("ok", ANYBODY)
    with pytest.raises(NotReady, match="ended or hangs"):
        await checks.check("kill", ANYBODY)
    await checks.check("ok again", ANYBODY)


async def test_a_process_that_does_not_start_is_tried_again_later_and_later(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = made(command=[sys.executable, "-c", "0"])
    with pytest.raises(NotReady, match="does not start: it ended"):
        await broken.check("ok", ANYBODY)
    with pytest.raises(NotReady, match="starts again soon"):
        await broken.check("ok", ANYBODY)
    await broken.close()


async def test_a_slow_start_is_waited_for_and_requests_are_refused_meanwhile(
    checks: GrammarChecks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fork_process, "_SLOW_START_S", 0.0)
    monkeypatch.setattr(fork_process, "_START_PERIOD_S", 0.01)
    caplog.set_level(logging.INFO, fork_process.__name__)
    may_start = tmp_path / "may start"
    slow = made(command=[sys.executable, "-c", SLOW_START, str(may_start)])

    async def refused() -> float:
        with pytest.raises(NotReady) as caught:
            await slow.check("ok", ANYBODY)
        so_far = re.search(r"has been starting for \d+ s and had (\S+) s of CPU time$", caught.value.message)
        assert so_far is not None
        assert caught.value.retry_after_s is not None
        return float(so_far[1])

    async def has_used_cpu_time() -> bool:
        return await refused() > 0.1

    await until_async(has_used_cpu_time)
    (record,) = caplog.records
    assert "has been starting" in record.getMessage()
    may_start.touch()
    await until(lambda: slow._process.pid is not None)
    await slow.check("ok", ANYBODY)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    await slow.close()


@pytest.mark.parametrize(
    ("constant", "program", "why"),
    [
        ("_STILL_START_S", "import signal; signal.pause()", r"it used less than 1 s of CPU time in 0\.2 s"),
        ("_STILL_START_S", "import time\nwhile True: time.sleep(1e-3)", r"it used less than 1 s of CPU time in 0\.2 s"),
        ("_MOST_START_CPU_S", "while True: pass", r"it used \S+ s of CPU time"),
    ],
)
async def test_a_start_that_hangs_is_ended(
    constant: str, program: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_process, constant, 0.2)
    monkeypatch.setattr(fork_process, "_START_PERIOD_S", 0.01)
    before = set(psutil.Process().children())
    hung = made(command=[sys.executable, "-c", program])
    with pytest.raises(NotReady, match=f"does not start: {why}"):
        await hung.check("ok", ANYBODY)
    assert set(psutil.Process().children()) <= before
    await hung.close()


async def test_the_process_has_no_secrets_and_forks_no_connection(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("KVFERRY_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert "secret" not in environment_of_process(os.environ).values()
    seen = await refusal(checks, "environment")
    assert "VLLM_LOGGING_LEVEL" in seen
    assert not any(name in seen for name in ("VLLM_API_KEY", "KVFERRY_API_KEY", "HF_TOKEN"))


async def test_a_fork_can_neither_answer_for_others_nor_write_a_log(checks: GrammarChecks) -> None:
    assert await refusal(checks, "files") == "/dev/null,/dev/null,/dev/null"


async def test_forks_and_process_end_with_the_one_that_asks(checks: GrammarChecks) -> None:
    await checks.check("ok", ANYBODY)
    held = asyncio.create_task(checks.check("wait", ANYBODY))
    await until(lambda: len(forks_of(checks)) == 1)
    process = psutil.Process(pid_of(checks))
    (fork,) = forks_of(checks)
    assert checks._process._process is not None
    checks._process._process.writer.close()  # as the end of this process would
    await until(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE)
    await until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(NotReady):
        await held


def test_a_process_whose_other_end_left_while_it_started_ends_quietly() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        server = ForkServer(theirs, bytes, LIMITS)
        server.run()
    assert repr(server) == "<ForkServer 0 forks>"
