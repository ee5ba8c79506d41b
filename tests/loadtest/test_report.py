from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.figures import FIGURES
from kvferry_loadtest.report import write_report
from kvferry_loadtest.result import Distribution, Harness, Objective, Result, Server
from support.loadtest_results import FLOOR_SHARE, result

OVERLOADED = Harness(
    ok=False, reason="its event loop stalled 412 ms", cpu_share=0.99, lateness_p99_ms=96, loop_stall_max_ms=412
)


class Page(HTMLParser):
    """What a browser would make of it: the text that is seen, tags, and every reference to something else."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self._hidden = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden = tag == "style"
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "xlink:href", "poster"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page(results: list[Result], folder: Path, title: str = "A test") -> Page:
    return Page(write_report(results, folder, title).read_text("utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two deployments, three runs each, and one that was run once with an overloaded harness."""
    folder = tmp_path_factory.mktemp("report")
    results = [
        *(result("kvferry", repeat, tenants=("acme", "globex")) for repeat in range(3)),
        *(result("round robin", repeat, speed=0.7, recompute_share=0.48, refused=9) for repeat in range(3)),
        result("plain", speed=0.6, recompute_share=None, harness=OVERLOADED),
    ]
    write_report(results, folder, "Chat <at> 4/s")
    return folder


@pytest.fixture(scope="module")
def made(folder: Path) -> Page:
    return Page((folder / "index.html").read_text("utf-8"))


def test_the_page_needs_nothing_but_itself(made: Page) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", made.html)
    assert all(reference.startswith("#") for reference in made.references)
    assert not {"script", "link", "iframe", "img", "object"} & set(made.tags)


def test_every_reference_within_the_page_is_to_something(made: Page) -> None:
    targets = [*made.references, *re.findall(r"url\((#[^)]*)\)", made.html)]
    assert {target.removeprefix("#") for target in targets} <= set(made.ids)


def test_every_deployment_and_every_figure_is_there(made: Page) -> None:
    for name in ("kvferry", "round robin", "plain"):
        assert name in made.text
    for figure in FIGURES:
        assert figure.label in made.text
    assert f"{FLOOR_SHARE * 100:.1f}" in made.text
    assert "±" in made.text
    assert "▼ worse" in made.text
    for words in (
        "Scheduled latency",
        "Goodput",
        "Floor",
        "multi-turn",
        "2 cores, 8 GiB, Linux 6.1",
        "Chat <at> 4/s",
        "kvferry-loadtest 0.4.0",
        "TTFT at most 500 ms",
        "2026-11-21 12:02",
        "503 no worker is ready",
    ):
        assert words in made.text


def test_every_plot_is_in_the_page_and_beside_it(folder: Path, made: Page) -> None:
    names = {path.stem for path in folder.glob("*.png")}
    latency, others = {"ttft_cdf", "scheduled_and_sent", "percentiles"}, {"throughput", "goodput", "tenants"}
    assert names == latency | others | {"recompute", "prefill_sources"} | {f"over_time_{at}" for at in (1, 2, 3)}
    assert {f"plot-{name}" for name in names} <= set(made.ids)
    assert made.tags.count("svg") == len(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_all_results_are_beside_it(folder: Path) -> None:
    results = msgspec.json.decode((folder / "results.json").read_bytes(), type=list[Result])
    assert [one.deployment for one in results] == ["kvferry"] * 3 + ["round robin"] * 3 + ["plain"]


def test_an_overloaded_harness_is_said_loudly_and_takes_no_part_in_the_ranking(made: Page) -> None:
    assert "Do not trust these figures" in made.text
    assert made.text.count("its event loop stalled 412 ms") == 2  # banner and runs
    rows = re.findall(r"<tr class=\"untrusted\">.*?</tr>", made.html, flags=re.DOTALL)
    assert len(rows) == 1
    assert "plain" in rows[0]
    assert 'class="best' not in rows[0]
    assert 'class="best' in made.html


def test_without_one_there_is_no_banner(tmp_path: Path) -> None:
    alone = page([result(seconds=())], tmp_path)
    assert 'class="banner' not in alone.html
    assert "One run each" in alone.text
    assert "±" not in alone.text.split("How to read this")[0]
    assert "●" not in alone.text  # with nobody to compare with, nothing is best


def test_missing_figures_are_dashes_with_a_reason(made: Page) -> None:
    row = re.findall(r"<tr class=\"untrusted\">.*?</tr>", made.html, flags=re.DOTALL)[0]
    assert (
        row.count('<span class="value">–</span><sup><a href="#note-1">1</a></sup>') == 2
    )  # recomputed, times the floor
    assert "– plain: its metrics could not be read or understood" in made.text


EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """One of everything that is unusual, each a deployment: hostile names, an import, a run in which nothing worked."""
    full = result("imported").overall
    dead = result("dead", floor=None, server=Server(dialect=""), seconds=()).overall
    results = [
        result(EVIL, errors={f"500 {EVIL}": 2}, parameters={EVIL: EVIL}, machine=EVIL),
        result("$a_{b$ _[x]", objective=Objective(ttft_ms=900.0), seconds=()),
        result("_模型" + "x" * 99, seconds=()),
        result(
            "imported",
            imported_from="aiperf",
            missing=("seed", "overall.goodput_share", "overall.goodput_requests_per_s", "overall.counts.refused"),
            overall=replace(full, latencies={"ttft_sent": replace(full.latencies["ttft"], histogram="")}),
            floor=None,
            server=Server(dialect=""),
            seconds=(),
        ),
        result(
            "dead",
            overall=replace(
                dead,
                counts=replace(dead.counts, ok=0, failed=240, refused=0),
                latencies={},
                requests_per_s=0.0,
                output_tokens_per_s=0.0,
                goodput_share=0.0,
                goodput_requests_per_s=0.0,
            ),
            floor=None,
            server=Server(dialect=""),
            seconds=(),
            errors={"connection refused": 240},
        ),
    ]
    return page(results, tmp_path_factory.mktemp("odd"), title=EVIL)


def row_of(made: Page, name: str) -> str:
    rows: list[str] = re.findall(r"<tr>\s*<th scope=\"row\">.*?</tr>", made.html, flags=re.DOTALL)
    return next(row for row in rows if name in row)


def test_an_imported_result_has_dashes_for_whatever_its_file_lacks(odd: Page) -> None:
    assert "– imported: aiperf counts TTFT from sending" in odd.text
    assert "– imported: the file of aiperf has no such figure" in odd.text
    assert "aiperf: not known" in odd.text
    # TTFT twice, TPOT, goodput, three of recomputation, refused
    assert row_of(odd, "imported").count('<span class="value">–</span>') == 8


def test_what_others_wrote_is_only_text(odd: Page) -> None:
    assert "<script" not in odd.html
    assert "script" not in odd.tags
    assert odd.text.count(EVIL) > 5
    assert "$a_{b$ _[x]" in odd.text
    assert "_模型" in odd.text


def test_runs_that_were_not_alike_are_named(odd: Page) -> None:
    assert "These runs were not alike" in odd.text
    assert "objective: " in odd.text
    assert "machine: " in odd.text


def test_a_run_in_which_nothing_worked_is_still_reported(odd: Page) -> None:
    assert "– dead: nothing was measured" in odd.text
    assert "connection refused" in odd.text


def test_a_damaged_histogram_is_refused(tmp_path: Path) -> None:
    good = result()
    damaged: Distribution = replace(good.overall.latencies["ttft"], histogram="HIST!")
    overall = replace(good.overall, latencies={"ttft": damaged})
    with pytest.raises(ResultError, match="not a histogram"):
        write_report([replace(good, overall=overall)], tmp_path)


def test_no_results_and_no_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="nothing to report"):
        write_report([], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="file"):
        write_report([result(seconds=(), server=Server(dialect=""))], tmp_path / "file")
