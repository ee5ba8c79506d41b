from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvferry_loadtest.compare import Comparison, compare, print_comparison, verdict
from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.figures import FIGURES
from kvferry_loadtest.intervals import Ratio
from kvferry_loadtest.result import Harness, Objective, Result, Server
from support.loadtest_results import result

TTFT_P50 = next(index for index, figure in enumerate(FIGURES) if figure.key == "ttft_p50")


def printed(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_comparison(console, comparison)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def repeats(deployment: str, speed: float, count: int = 4) -> list[Result]:
    return [result(deployment, repeat=repeat, speed=speed) for repeat in range(count)]


def test_a_slower_deployment_is_found_to_be_slower() -> None:
    comparison = compare([*repeats("kvferry", 1.0), *repeats("plain", 0.5)])
    assert comparison.base == "kvferry"
    assert comparison.judged
    base, slower = (comparison.deployments[name][TTFT_P50] for name in ("kvferry", "plain"))
    assert base.ratio is None
    assert base.estimate is not None
    assert base.estimate.n == 4
    assert slower.ratio is not None
    assert slower.ratio.value == pytest.approx(2, rel=0.2)
    assert slower.ratio.significant
    assert verdict(slower.ratio, FIGURES[TTFT_P50]) == "worse"
    text = printed(comparison)
    assert "worse" in text
    assert "4 runs" in text


def test_equal_deployments_are_not_told_apart() -> None:
    comparison = compare([*repeats("one", 1.0), *repeats("other", 1.0)])
    found = comparison.deployments["other"][TTFT_P50].ratio
    assert found is not None
    assert found.significant is False
    assert verdict(found, FIGURES[TTFT_P50]) == "no"


def test_single_runs_have_ratios_and_no_verdict() -> None:
    comparison = compare([result("kvferry"), result("plain", speed=0.5)])
    assert not comparison.judged
    found = comparison.deployments["plain"][TTFT_P50].ratio
    assert found is not None
    assert found.significant is None
    assert found.low is None
    text = printed(comparison)
    assert "cannot be judged" in text
    assert "±" not in text
    assert "?" in text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"scenario": "agents"}, "scenario: multi-turn (a) or agents (b)"),
        ({"parameters": {"sessions": 41}}, "parameter sessions: 40 (a) or 41 (b)"),
        (
            {"objective": Objective(ttft_ms=900.0)},
            'objective: {"tpot_ms":25.0,"ttft_ms":500.0} (a) or {"ttft_ms":900.0} (b)',
        ),
        ({"machine": ""}, "machine: 2 cores, 8 GiB, Linux 6.1 (a) or not known (b)"),
        ({"loop": "closed"}, "loop: open (a) or closed (b)"),
    ],
)
def test_unlike_runs_are_refused_unless_allowed(changes: dict[str, object], named: str) -> None:
    unlike = [result("a"), result("b", **changes)]  # type: ignore[arg-type]
    with pytest.raises(ResultError) as caught:
        compare(unlike)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    comparison = compare(unlike, allow_different=True)
    assert named in comparison.differences
    assert named in printed(comparison)


def test_repeats_may_differ_in_their_seed_but_deployments_should_not() -> None:
    assert compare([result("a", repeat=0), result("a", repeat=1)]).notes == ()
    noted = compare([result("a", repeat=0), result("b", repeat=1)]).notes
    assert any("same seeds" in note for note in noted)


def test_a_figure_that_a_deployment_lacks_is_no_zero() -> None:
    comparison = compare([result("a"), result("b", server=Server(dialect=""))])
    at = next(index for index, figure in enumerate(FIGURES) if figure.key == "recompute_share")
    assert comparison.deployments["b"][at].estimate is None
    assert comparison.deployments["b"][at].ratio is None
    assert "–" in printed(comparison)


def test_an_overloaded_harness_is_named() -> None:
    bad = Harness(ok=False, reason="event loop stalled 400 ms", cpu_share=1, lateness_p99_ms=90, loop_stall_max_ms=400)
    comparison = compare([result("a"), result("b", harness=bad)])
    assert comparison.untrusted == {"b": "event loop stalled 400 ms"}
    assert "event loop stalled 400 ms" in printed(comparison)


def test_markup_in_a_name_is_only_text() -> None:
    assert "[red]x[/]" in printed(compare([result("[red]x[/]")]))


def test_nothing_cannot_be_compared() -> None:
    with pytest.raises(ResultError, match="nothing to compare"):
        compare([])


def test_more_than_nothing_failing_is_worse() -> None:
    failed = next(figure for figure in FIGURES if figure.key == "failed")
    assert verdict(Ratio(value=None, significant=True), failed) == "worse"
