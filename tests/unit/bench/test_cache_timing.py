from __future__ import annotations

import argparse
import asyncio
import io

import pytest
from rich.console import Console

from bench.cache_timing import CERTAIN, LIMIT, Case, Measured, faults, measure_cases, table
from bench.paired_times import PairedTimes, Pairs
from bench.results import Results

TIMES = [1.0 + each for each in range(60)]
EVEN = Pairs(TIMES, TIMES[::-1])
GAP = Pairs([each - 0.5 for each in TIMES], TIMES)
# Larger in 40 of 60 pairs.
SMALL_GAP = Pairs([each + (0.5 if i % 3 else -0.5) for i, each in enumerate(TIMES)], TIMES)


def test_a_cache_fails_where_each_measurement_does() -> None:
    good, told, blind = Measured(EVEN, GAP), Measured(SMALL_GAP, GAP), Measured(EVEN, EVEN)
    assert faults({"a": [good], "b": [told, good], "c": [blind, good], "d": [told, blind]}) == []
    assert faults({"a": [good], "b": [told, told], "c": [blind, blind]}) == [
        "b: the time tells another tenant what was sent",
        "c: the test does not see its control",
    ]


def test_a_difference_that_is_no_chance_fails_at_once() -> None:
    # A library's cache that takes nothing more when it is full shows no difference at the second try.
    assert GAP.p < CERTAIN < SMALL_GAP.p < LIMIT
    assert faults({"a": [Measured(GAP, GAP), Measured(EVEN, GAP)]}) == [
        "a: the time tells another tenant what was sent"
    ]


def test_the_table_has_a_row_for_each_measurement() -> None:
    shown = table({"a": [Measured(GAP, GAP), Measured(EVEN, GAP)], "b": [Measured(EVEN, GAP)]})
    assert shown.row_count == 3


@pytest.mark.parametrize("is_shared", [True, False])
def test_what_fails_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_shared: bool
) -> None:
    async def ask(tenant: str, number: int) -> None:
        raise AssertionError("no request is sent here")

    async def measure(self: PairedTimes, ask: object, num_pairs: int, *, second: str, **_: object) -> Pairs:
        return GAP if is_shared or second == "one" else EVEN

    monkeypatch.setattr(PairedTimes, "measure", measure)
    arguments = argparse.Namespace(seed=1, pairs=60, only="x")
    console = Console(file=io.StringIO())
    cases = [Case("x", ask), Case("another", ask)]
    measured = asyncio.run(measure_cases(cases, arguments, Results(), console))
    assert {name: len(tries) for name, tries in measured.items()} == {"x": 2 if is_shared else 1}
    assert len(capsys.readouterr().out.splitlines()) == len(measured["x"])
