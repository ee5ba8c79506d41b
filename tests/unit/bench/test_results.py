from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from bench.results import BenchFailed, Results, run_benchmark
from kvferry.errors import EngineDead


def test_each_figure_is_a_line_and_the_last_line_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(results: Results) -> None:
        results.add({"machine": "here", "replay": {"priced": {"ttft_ms": 5}}})
        results.add({"replay": {"round_robin": {"ttft_ms": 7}}, "rows": [1]})
        results.add({"machine": "there", "rows": [2, 3]})

    assert run_benchmark("bench-x", measure) == 0
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert lines == [
        {"machine": "here", "replay": {"priced": {"ttft_ms": 5}}},
        {"replay": {"round_robin": {"ttft_ms": 7}}, "rows": [1]},
        {"machine": "there", "rows": [2, 3]},
    ]
    assert last == {
        "machine": "there",
        "replay": {"priced": {"ttft_ms": 5}, "round_robin": {"ttft_ms": 7}},
        "rows": [1, 2, 3],
    }


def test_what_was_added_is_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    first = {"replay": {"priced": 1}, "rows": [1]}

    def measure(results: Results) -> None:
        results.add(first)
        results.add({"replay": {"round_robin": 2}, "rows": [2]})

    assert run_benchmark("bench-x", measure) == 0
    assert first == {"replay": {"priced": 1}, "rows": [1]}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == [1, 2]


async def _refuse() -> None:
    raise BenchFailed("request 17: 503: no worker")


async def _refuse_in_a_group() -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.sleep(3600))
        tasks.create_task(_refuse())


def _miss_a_key() -> None:
    dict[str, int]()["decode-1"]


def _interrupt() -> None:
    raise KeyboardInterrupt


def _lose_an_engine() -> None:
    raise EngineDead("the engine has ended")


@pytest.mark.parametrize(
    ("end", "failure", "exit_code", "has_traceback"),
    [
        (lambda: asyncio.run(_refuse()), "request 17: 503: no worker", 1, False),
        (lambda: asyncio.run(_refuse_in_a_group()), "request 17: 503: no worker", 1, False),
        (_lose_an_engine, "the engine has ended", 1, False),
        (_miss_a_key, "KeyError: 'decode-1'", 1, True),
        (_interrupt, "interrupted", 130, False),
    ],
)
def test_figures_survive_what_ends_a_benchmark(
    capsys: pytest.CaptureFixture[str], end: Callable[[], None], failure: str, exit_code: int, has_traceback: bool
) -> None:
    def measure(results: Results) -> None:
        results.add({"gb_s": 5})
        end()
        results.add({"never": "measured"})

    assert run_benchmark("bench-x", measure) == exit_code
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == {"gb_s": 5, "failure": failure}
    assert said.err.splitlines()[-1] == f"bench-x: {failure}"
    assert ("Traceback" in said.err) is has_traceback
