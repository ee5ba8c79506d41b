"""The fixtures are real runs of aiperf 0.13.0 and guidellm 0.8.1 against a server that answers nine requests and then
fails with status 500, cut down to what an importer may look at."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry_loadtest import figures
from kvferry_loadtest.compare import compare
from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.importers import import_result
from kvferry_loadtest.result import LATENCIES, Result, read_result, write_result

FIXTURES = Path(__file__).parent / "fixtures"
AIPERF = FIXTURES / "aiperf-0.13" / "profile_export_aiperf.json"
GUIDELLM = FIXTURES / "guidellm-0.8.json"


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(source.read_text())
    change(content)
    path = folder / source.name
    path.write_text(json.dumps(content))
    return path


def goodput(result: Result) -> float | None:
    return next(figure for figure in figures.FIGURES if figure.key == "goodput_share").of(result)


def test_aiperf_with_records() -> None:
    result = import_result(AIPERF, "other")
    assert (result.deployment, result.imported_from, result.loop, result.seed) == ("other", "aiperf", "open", 1)
    assert result.versions == {"aiperf": "0.13.0"}
    assert result.target == {"url": "http://127.0.0.1:18333", "model": "mock"}
    assert result.started_at == "2026-11-21T15:51:56Z"
    counts = result.overall.counts
    assert (counts.planned, counts.ok, counts.failed, counts.refused) == (12, 9, 3, 0)
    content = json.loads(AIPERF.read_text())
    assert set(result.overall.latencies) == {"ttft_sent", "tpot", "itl", "e2e_sent"}
    for kind, metric in (("ttft_sent", "time_to_first_token"), ("e2e_sent", "request_latency")):
        found = result.overall.latencies[kind]
        assert found.count == 9
        assert found.mean == pytest.approx(content[metric]["avg"])
        assert found.max == pytest.approx(content[metric]["max"])
        assert found.p50 == pytest.approx(content[metric]["p50"], rel=0.1)  # nearest rank, not between two
        assert len(Latencies.restored(found)) == 9
    duration_s = content["benchmark_duration"]["avg"]
    assert result.overall.output_tokens_per_s == pytest.approx(content["usage_completion_tokens"]["sum"] / duration_s)
    assert result.overall.requests_per_s == content["request_throughput"]["avg"]
    assert result.errors == {next(iter(result.errors)): 3}
    assert next(iter(result.errors)).startswith("500 Internal Server Error")


def test_aiperf_counts_tokens_of_tpot_as_the_server_does() -> None:
    # Sixteen tokens by the server in fifteen gaps; aiperf's tokenizer sees fewer, and its own figure is higher by half.
    result = import_result(AIPERF, "other")
    assert result.overall.latencies["tpot"].p50 == pytest.approx(result.overall.latencies["itl"].mean, rel=0.1)


def test_aiperf_without_records(tmp_path: Path) -> None:
    shutil.copy(AIPERF, tmp_path)
    result = import_result(tmp_path / AIPERF.name, "other")
    content = json.loads(AIPERF.read_text())
    found = result.overall.latencies["ttft_sent"]
    assert found.p99 == content["time_to_first_token"]["p99"]
    assert found.p999 == found.max  # of nine
    assert found.histogram == ""
    assert result.overall.latencies["tpot"].p50 == content["inter_token_latency"]["p50"]
    many = changed(AIPERF, tmp_path, lambda content: content["time_to_first_token"].update(count=5000))
    assert figures.latency(import_result(many, "other"), "ttft_sent", "p999") is None


def test_guidellm() -> None:
    result = import_result(GUIDELLM, "other")
    assert (result.imported_from, result.loop, result.seed) == ("guidellm", "open", 42)
    assert result.versions == {"guidellm": "0.8.1", "python": "3.11.7"}
    counts = result.overall.counts
    assert (counts.planned, counts.ok, counts.failed, counts.refused) == (14, 9, 5, 0)
    metrics = json.loads(GUIDELLM.read_text())["benchmarks"][0]["metrics"]
    assert "ttft" not in result.overall.latencies
    for kind, metric, scale in (
        ("ttft_sent", "time_to_first_token_ms", 1),
        ("e2e", "request_scheduled_latency", 1e3),
        ("e2e_sent", "request_latency", 1e3),
        ("lateness", "turn_scheduling_delay", 1e3),
    ):
        found, theirs = result.overall.latencies[kind], metrics[metric]["successful"]
        assert found.mean == pytest.approx(theirs["mean"] * scale)
        assert found.p50 == pytest.approx(theirs["percentiles"]["p50"] * scale, rel=1e-3)
        assert found.max == pytest.approx(theirs["max"] * scale)
    assert result.overall.latencies["e2e"].mean > result.overall.latencies["e2e_sent"].mean
    assert result.overall.output_tokens_per_s == pytest.approx(
        metrics["output_tokens_per_second"]["successful"]["mean"], rel=0.02
    )
    assert list(result.errors.values()) == [5]


def test_guidellm_with_a_sample_of_its_requests_has_summaries_only(tmp_path: Path) -> None:
    def sample(content: dict[str, Any]) -> None:
        requests = content["benchmarks"][0]["requests"]
        requests["successful"], requests["errored"] = requests["successful"][:3], []

    result = import_result(changed(GUIDELLM, tmp_path, sample), "other")
    assert set(result.overall.latencies) == {"ttft_sent", "e2e", "e2e_sent", "predecessor_wait", "lateness"}
    assert result.overall.latencies["ttft_sent"].count == 9
    assert result.overall.latencies["ttft_sent"].histogram == ""
    assert figures.count(result, "refused") is None


def test_guidellm_refusals_are_those_with_such_a_status(tmp_path: Path) -> None:
    def refuse(content: dict[str, Any]) -> None:
        errored = content["benchmarks"][0]["requests"]["errored"]
        errored[0]["info"]["error"] = "HTTPStatusError(\"Client error '429 Too Many Requests' for url 'x'\")"

    counts = import_result(changed(GUIDELLM, tmp_path, refuse), "other").overall.counts
    assert (counts.refused, counts.failed) == (1, 4)


def test_of_several_benchmarks_one_is_chosen(tmp_path: Path) -> None:
    def double(content: dict[str, Any]) -> None:
        content["benchmarks"].append({**content["benchmarks"][0], "duration": 7.0})

    several = changed(GUIDELLM, tmp_path, double)
    with pytest.raises(ResultError, match=r"2 benchmarks in it, say which: 1 poisson 4\.0, 2 poisson 4\.0"):
        import_result(several, "other")
    assert import_result(several, "other", benchmark=2).duration_s == 7.0
    with pytest.raises(ResultError, match="no benchmark 3"):
        import_result(several, "other", benchmark=3)


@pytest.mark.parametrize("path", [AIPERF, GUIDELLM])
def test_what_such_files_do_not_have_is_missing(path: Path, tmp_path: Path) -> None:
    result = import_result(path, "other")
    assert goodput(result) is None
    assert "ttft" not in result.overall.latencies
    assert set(result.overall.latencies) <= set(LATENCIES)
    assert figures.recompute_share(result) is result.floor is None
    assert result.tenants == {}
    write_result(tmp_path / "result.json", result)
    assert read_result(tmp_path / "result.json") == result


def test_imports_are_compared_with_others_only_when_told() -> None:
    both = [import_result(AIPERF, "a"), import_result(GUIDELLM, "b")]
    with pytest.raises(ResultError, match="not alike: scenario: aiperf"):
        compare(both)
    assert any("counts from sending" in note for note in compare(both, allow_different=True).notes)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no JSON object"),
        ("[]", "no JSON object"),
        ("{}", "neither of aiperf"),
        ('{"metadata": 3}', "neither of aiperf"),
        ('{"aiperf_version": "0.13.0"}', "missing required field `request_count`"),
        ('{"metadata": {"guidellm_version": "0.8.1"}}', "missing required field `benchmarks`"),
        ('{"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": []}', "no benchmark in it"),
        (
            '{"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [{"metrics": {}}]}',
            r"\$\.benchmarks\[0\]\.metrics",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ResultError, match=named) as caught:
        import_result(path, "other")
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="No such file"):
        import_result(tmp_path / "none.json", "other")


def test_a_run_of_aiperf_in_which_nothing_worked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no figure in request_count"):
        import_result(changed(AIPERF, tmp_path, lambda content: content["request_count"].update(avg=0)), "other")


def test_records_that_are_broken_or_of_another_run_are_refused(tmp_path: Path) -> None:
    shutil.copy(AIPERF, tmp_path)
    lines = AIPERF.with_name("profile_export.jsonl").read_text().splitlines()
    records = tmp_path / "profile_export.jsonl"
    records.write_text("\n".join(lines[:3]))
    with pytest.raises(ResultError, match=r"not the records of profile_export_aiperf\.json, which has 9"):
        import_result(tmp_path / AIPERF.name, "other")
    records.write_text(f"{lines[0]}\n{{}}\n")
    with pytest.raises(ResultError, match=r"profile_export\.jsonl: line 2: "):
        import_result(tmp_path / AIPERF.name, "other")
