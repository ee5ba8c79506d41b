"""The page: what stands in its tables, as plain data, and the template that lays it out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import msgspec

from kvferry_loadtest import figures
from kvferry_loadtest.compare import Comparison, compare, ratio_text, verdict
from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.figures import FIGURES, MISSING, Figure
from kvferry_loadtest.intervals import Estimate, estimate, ratio
from kvferry_loadtest.report.plots import COLOURS, Groups, Plot, draw
from kvferry_loadtest.result import Result

TITLE = "Load test"

SECTIONS = {
    "latency": "Latency",
    "goodput": "Goodput",
    "cache": "Cache",
    "tenants": "Tenants",
    "time": "Over time",
}

FLOOR = Figure(
    key="recompute_floor", label="Floor", unit="%", better="lower", of=figures.recompute_floor
)  # of the plan, not of a deployment: nobody is best at it


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` is "best", "level" when the repeats do not tell it from the best, or empty."""

    text: str
    spread: str = ""
    rank: str = ""
    note: int | None = None  # number of the footnote that says why it is missing
    n: int | None = None  # where fewer repeats have the figure than there are


def write_report(results: Sequence[Result], folder: Path, title: str = TITLE) -> Path:
    """Writes `index.html`, a PNG per plot and `results.json` into `folder`, and returns the path of the page.

    Results of one deployment are repeats of each other. Raises ResultError when there is no result, when a histogram in
    one is damaged, or when the folder cannot be written.
    """
    if not results:
        raise ResultError("nothing to report")
    groups = figures.by_deployment(results)
    plots = draw(groups)
    html = _render(results, groups, plots, title)
    page = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in plots:
            (folder / f"{plot.name}.png").write_bytes(plot.png)
        encoded = msgspec.json.format(msgspec.json.encode(list(results)), indent=1)
        (folder / "results.json").write_bytes(encoded + b"\n")
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"{folder}: {error.strerror}") from None
    return page


def _render(results: Sequence[Result], groups: Groups, plots: Sequence[Plot], title: str) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(resources.files(__package__).joinpath("page.html.j2").read_text("utf-8"))
    comparison = compare(results, allow_different=True)
    headline = Headline(groups, comparison)
    order = list(groups)
    return template.render(
        title=title,
        groups=groups,
        colours={name: COLOURS[order.index(name) % len(COLOURS)] for name in groups},
        comparison=comparison,
        headline=headline,
        ratios=_ratios(comparison),
        sections=[
            (key, heading, [(plot, markupsafe.Markup(plot.svg)) for plot in plots if plot.section == key])
            for key, heading in SECTIONS.items()
            if any(plot.section == key for plot in plots)
        ],
        facts=_facts(results),
        parameters=_parameters(results),
        runs=[_run(result) for group in groups.values() for result in group],
        outcomes=_outcomes(groups),
        servers=_servers(groups),
        errors=_errors(groups),
        has_floor=any(result.floor is not None for result in results),
        confidence="95 %",
        MISSING=MISSING,
    )


class Headline:
    """The table on top. A column has one unit and one number of decimals, so that it can be read downwards."""

    def __init__(self, groups: Groups, comparison: Comparison) -> None:
        self.notes: list[str] = []
        self.ranked = False
        self.level = False
        columns = [figure for figure in FIGURES if figure.headline]
        columns.insert(columns.index(_figure("recompute_over_floor")), FLOOR)
        self.columns = columns
        self.units: dict[str, str] = {}
        self.rows: dict[str, list[Cell]] = {name: [] for name in groups}
        for figure in columns:
            means = {name: estimate(figures.values(group, figure)) for name, group in groups.items()}
            self.units[figure.key], texts = _column(figure, list(means.values()))
            ranks = {} if figure is FLOOR else self._ranks(groups, comparison, figure)
            for (name, found), (text, spread) in zip(means.items(), texts, strict=True):
                short = found is not None and found.n < len(groups[name])
                self.rows[name].append(
                    Cell(
                        text=text,
                        spread=spread,
                        rank=ranks.get(name, ""),
                        note=self._note(name, _why_missing(groups[name], figure)) if found is None else None,
                        n=found.n if found is not None and short else None,
                    )
                )

    def _note(self, name: str, why: str) -> int:
        text = f"{name}: {why}"
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1

    def _ranks(self, groups: Groups, comparison: Comparison, figure: Figure) -> dict[str, str]:
        """Runs whose harness was at its limit are out of the contest."""
        found = {
            name: measured
            for name, group in groups.items()
            if name not in comparison.untrusted and (measured := figures.values(group, figure))
        }
        if len(found) < 2:
            return {}
        means = {name: sum(measured) / len(measured) for name, measured in found.items()}
        extreme = min(means.values()) if figure.better == "lower" else max(means.values())
        best = [name for name, mean in means.items() if mean == extreme]
        if len(best) == len(means):
            return {}  # all alike: nothing to mark
        ranks = dict.fromkeys(best, "best")
        for name in found.keys() - ranks.keys():
            against = ratio(found[name], found[best[0]])
            if against is not None and against.significant is False:
                ranks[name] = "level"
                self.level = True
        self.ranked = True
        return ranks


def _figure(key: str) -> Figure:
    return next(figure for figure in FIGURES if figure.key == key)


def _column(figure: Figure, found: Sequence[Estimate | None]) -> tuple[str, list[tuple[str, str]]]:
    """The column's unit, and mean and ± half width of each cell in it."""
    top = max((abs(one.mean) for one in found if one is not None), default=0.0)
    unit, scale = figure.unit, 1.0
    if unit == "ms" and top >= 10_000:
        unit, scale = "s", 1e-3
    elif unit == "%":
        scale = 100.0
    top *= scale
    decimals = 1 if unit == "%" else 2 if top < 10 else 1 if top < 100 else 0
    texts = []
    for one in found:
        if one is None:
            texts.append((MISSING, ""))
            continue
        texts.append((f"{one.mean * scale:,.{decimals}f}", _spread(one.half_width, scale, decimals)))
    return unit, texts


def _spread(half_width: float | None, scale: float, decimals: int) -> str:
    """Empty without any; "< 0.1" where the column's decimals would make it 0."""
    if not half_width or half_width * scale < 1e-9:
        return "" if half_width is None else "± 0"
    if half_width * scale < 0.5 * 10**-decimals:
        return f"± < {10**-decimals:.{decimals}f}"
    return f"± {half_width * scale:,.{decimals}f}"


def _why_missing(results: Sequence[Result], figure: Figure) -> str:
    tools = {result.imported_from for result in results if result.imported_from}
    if tools:
        tool = " and ".join(sorted(tools))
        if figure.key.startswith("ttft"):
            return f"{tool} counts TTFT from sending, which is not this figure (see below)"
        return f"the file of {tool} has no such figure"
    if figure is FLOOR or figure.key == "recompute_over_floor":
        if any(result.floor is None for result in results):
            return "no floor was computed for this plan"
        if figure.key == "recompute_over_floor" and any(figures.recompute_floor(result) == 0 for result in results):
            return "the floor is 0"
    if figure.key.startswith("recompute"):
        if not any(result.server.dialect for result in results):
            return "its metrics could not be read or understood"
        return "its metrics do not say what was computed"
    return "nothing was measured"


def _ratios(comparison: Comparison) -> list[dict[str, Any]]:
    """Figures × deployments but the base."""
    rows = []
    for index, figure in enumerate(FIGURES):
        cells = [
            {"ratio": ratio_text(row[index].ratio), "verdict": verdict(row[index].ratio, figure)}
            for name, row in comparison.deployments.items()
            if name != comparison.base
        ]
        if any(cell["ratio"] != MISSING or cell["verdict"] for cell in cells):
            rows.append({"figure": figure, "cells": cells})
    return rows


def _facts(results: Sequence[Result]) -> list[tuple[str, str]]:
    def distinct(values: Sequence[str]) -> str:
        return " · ".join(dict.fromkeys(value for value in values if value)) or "not known"

    first = results[0]
    objectives = []
    for name, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "end to end")):
        limits = [getattr(result.objective, name) for result in results]
        shown = distinct([figures.shown(limit, "ms") for limit in limits if limit is not None])
        if any(limit is not None for limit in limits):
            objectives.append(f"{label} at most {shown}")
    versions: dict[str, list[str]] = {}
    for result in results:
        for name, version in result.versions.items():
            versions.setdefault(name, []).append(version)
    facts = [
        ("Scenario", distinct([result.scenario for result in results])),
        ("Loop", distinct([result.loop for result in results])),
        ("Objective", ", ".join(objectives) or "none: every request that ended well is goodput"),
        ("Machine", distinct([result.machine for result in results])),
        ("Versions", ", ".join(f"{name} {distinct(found)}" for name, found in versions.items()) or "not known"),
    ]
    if first.floor is not None:
        floor = first.floor
        facts.append(
            (
                "Prompts",
                f"{floor.prompt_tokens:,} tokens in pages of {floor.page_tokens}; of these "
                f"{floor.recompute_share * 100:.1f} % cannot be found again, "
                f"{floor.recompute_share_without_answers * 100:.1f} % when answers are not kept, "
                f"{floor.recompute_share_within_sessions * 100:.1f} % when nothing is shared across sessions",
            )
        )
    return facts


def _parameters(results: Sequence[Result]) -> list[tuple[str, str]]:
    rows: dict[str, list[str]] = {}
    for result in results:
        for key, value in result.parameters.items():
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            if text not in rows.setdefault(key, []):
                rows[key].append(text)
    return [(key, " · ".join(texts)) for key, texts in rows.items()]


def _run(result: Result) -> dict[str, Any]:
    foreign = bool(result.imported_from)
    harness = result.harness
    return {
        "deployment": result.deployment,
        "repeat": result.repeat + 1,
        "seed": MISSING if "seed" in result.missing else str(result.seed),
        "started_at": re.sub(r"T(\d\d:\d\d:\d\d).*", r" \1", result.started_at) or MISSING,
        "duration": figures.shown(result.duration_s * 1e3, "ms"),
        "target": re.sub(r"^\w+://", "", result.target.get("url", "")) or MISSING,
        "model": result.target.get("model", "") or MISSING,
        "planned": f"{result.overall.counts.planned:,}",
        "imported_from": result.imported_from,
        "ok": harness.ok,
        "reason": harness.reason,
        "cpu": MISSING if foreign else f"{harness.cpu_share * 100:.0f} %",
        "lateness": MISSING if foreign else figures.shown(harness.lateness_p99_ms, "ms"),
        "stall": MISSING if foreign else figures.shown(harness.loop_stall_max_ms, "ms"),
    }


def _outcomes(groups: Groups) -> dict[str, list[str]]:
    names = ("planned", "ok", "refused", "failed", "timed_out", "skipped")
    table = {}
    for deployment, results in groups.items():
        row = []
        for name in names:
            known = [number for result in results if (number := figures.count(result, name)) is not None]
            row.append(f"{sum(known):,}" if known else MISSING)
        table[deployment] = row
    return table


def _servers(groups: Groups) -> list[tuple[str, list[str]]]:
    """Rows of what /metrics said beyond the headline, a column per deployment; empty when nobody said anything."""
    fields = (
        ("prompt_tokens", "Prompt tokens", ""),
        ("computed_tokens", "Computed", ""),
        ("preemptions", "Preemptions", ""),
        ("kv_utilisation_mean", "KV cache in use, mean", "%"),
        ("kv_utilisation_max", "KV cache in use, most", "%"),
        ("queue_depth_mean", "Queue depth, mean", ""),
        ("ttft_queue_correlation", "Correlation of TTFT and queue depth", ""),
    )
    rows = []
    for name, label, unit in fields:
        found = [
            estimate([value for result in results if (value := getattr(result.server, name)) is not None])
            for results in groups.values()
        ]
        if any(found):
            rows.append((label, [_interval(one, unit) for one in found]))
    tiers = dict.fromkeys(
        tier for results in groups.values() for result in results for tier in result.server.bytes_by_tier
    )
    for tier in tiers:
        cells = []
        for results in groups.values():
            found_bytes = estimate(
                [result.server.bytes_by_tier[tier] for result in results if tier in result.server.bytes_by_tier]
            )
            cells.append(MISSING if found_bytes is None else f"{found_bytes.mean / 2**20:,.0f} MiB")
        rows.append((f"Bytes, {tier}", cells))
    return rows


def _interval(found: Estimate | None, unit: str) -> str:
    return MISSING if found is None else figures.shown_interval(found.mean, found.half_width, unit)


def _errors(groups: Groups) -> list[tuple[str, str, int]]:
    rows: list[tuple[str, str, int]] = []
    for deployment, results in groups.items():
        counts: dict[str, int] = {}
        for result in results:
            for text, number in result.errors.items():
                counts[text] = counts.get(text, 0) + number
        rows.extend((deployment, text, number) for text, number in sorted(counts.items(), key=lambda item: -item[1]))
    return rows
