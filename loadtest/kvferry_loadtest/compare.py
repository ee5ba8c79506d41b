"""Deployments side by side: what differs, by how much, and whether the repeats are enough to say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.figures import FIGURES, MISSING, Figure, by_deployment, shown_interval, values
from kvferry_loadtest.intervals import Estimate, Ratio, estimate, ratio
from kvferry_loadtest.result import Result


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one deployment. `ratio` is to the base, the first deployment; None for the base itself, and where
    either lacks the figure."""

    figure: str  # key of `figures.FIGURES`
    estimate: Estimate | None  # None where the deployment lacks the figure
    ratio: Ratio | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Every figure of every deployment; the first deployment is the base of all ratios."""

    base: str
    deployments: dict[str, tuple[Compared, ...]]  # in the order of `figures.FIGURES`
    repeats: dict[str, int]
    untrusted: dict[str, str] = {}  # deployments with a run whose harness cannot be trusted, and why
    differences: tuple[str, ...] = ()  # in what the runs are not alike, where that was allowed
    notes: tuple[str, ...] = ()

    @property
    def judged(self) -> bool:
        """Whether every deployment was repeated, so that differences can be told from chance."""
        return all(repeats > 1 for repeats in self.repeats.values())


def differences(results: Sequence[Result]) -> list[str]:
    """In what the runs are not alike, a line each: scenario, objective, machine, loop and, within one scenario, its
    parameters. The seed may differ, since repeats differ in it."""
    aspects: dict[str, Callable[[Result], Any]] = {
        "scenario": lambda result: result.scenario,
        "objective": lambda result: msgspec.to_builtins(result.objective),
        "machine": lambda result: result.machine,
        "loop": lambda result: result.loop,
    }
    one_scenario = len({result.scenario for result in results}) == 1
    keys = sorted({key for result in results for key in result.parameters} - {"seed"}) if one_scenario else []
    for key in keys:
        aspects[f"parameter {key}"] = lambda result, key=key: result.parameters.get(key)  # type: ignore[misc]
    found = []
    for name, of in aspects.items():
        text_to_deployments: dict[str, list[str]] = {}
        for result in results:
            deployments = text_to_deployments.setdefault(_text(of(result)), [])
            if result.deployment not in deployments:
                deployments.append(result.deployment)
        if len(text_to_deployments) > 1:
            sides = (f"{text} ({', '.join(deployments)})" for text, deployments in text_to_deployments.items())
            found.append(f"{name}: {' or '.join(sides)}")
    return found


def _text(value: Any) -> str:
    if isinstance(value, dict):
        value = {key: inner for key, inner in value.items() if inner is not None}
    if value is None or value in ("", {}):
        return "not known"
    return value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode()


def compare(results: Sequence[Result], allow_different: bool = False) -> Comparison:
    """Means with Student's 95 % intervals and ratios to the first deployment with Fieller's (see `intervals`).

    Raises ResultError, naming what differs, when the runs were not alike, unless that is allowed.
    """
    if not results:
        raise ResultError("nothing to compare")
    differing = differences(results)
    if differing and not allow_different:
        raise ResultError(f"these runs are not alike: {'; '.join(differing)}")
    groups = by_deployment(results)
    base = next(iter(groups))
    return Comparison(
        base=base,
        deployments={
            name: tuple(_compared(figure, group, None if name == base else groups[base]) for figure in FIGURES)
            for name, group in groups.items()
        },
        repeats={name: len(group) for name, group in groups.items()},
        untrusted={
            name: "; ".join(sorted({result.harness.reason for result in group if not result.harness.ok}))
            for name, group in groups.items()
            if not all(result.harness.ok for result in group)
        },
        differences=tuple(differing),
        notes=tuple(_notes(groups)),
    )


def _compared(figure: Figure, group: Sequence[Result], base: Sequence[Result] | None) -> Compared:
    mine = values(group, figure)
    return Compared(
        figure=figure.key,
        estimate=estimate(mine),
        ratio=None if base is None else ratio(mine, values(base, figure)),
    )


def _notes(groups: dict[str, list[Result]]) -> list[str]:
    notes = []
    single = [name for name, group in groups.items() if len(group) == 1]
    if single:
        notes.append(f"One run only of {', '.join(single)}: whether differences are more than chance cannot be judged.")
    seeds = {
        tuple(sorted(result.seed for result in group if "seed" not in result.missing)) for group in groups.values()
    }
    if len(seeds) > 1:
        notes.append("The deployments were not run with the same seeds: part of a difference may be the plans'.")
    if len(groups) > 1 and not single:
        notes.append(
            "At 95 %, about one in twenty figures of equal deployments differs significantly all the same: "
            "look for several that agree."
        )
    imported = {name: group[0].imported_from for name, group in groups.items() if group[0].imported_from}
    if imported:
        notes.append(
            f"Imported from another tool: {', '.join(f'{name} ({tool})' for name, tool in imported.items())}. "
            "Its TTFT counts from sending and is comparable with nothing that counts from the schedule."
        )
    return notes


def print_comparison(console: Console, comparison: Comparison) -> None:
    """A table of figures × deployments; ratios to the base stand beside each mean, "differs" where significant."""
    table = Table(
        title=f"Compared with {comparison.base}", title_justify="left", header_style="bold", box=box.SIMPLE_HEAD
    )
    table.add_column("", no_wrap=True)
    for name in comparison.deployments:
        runs = comparison.repeats[name]
        mark = " (!)" if name in comparison.untrusted else ""
        table.add_column(Text(f"{name}{mark}\n{runs} run{'s' * (runs > 1)}"), justify="right")
        if name != comparison.base:
            table.add_column(Text("ratio\n(95 %)"), justify="right")
            table.add_column(Text("differs"), justify="left")
    for index, figure in enumerate(FIGURES):
        cells: list[Text] = [Text(figure.label)]
        for name, row in comparison.deployments.items():
            cells.append(_estimate_cell(row[index].estimate, figure))
            if name != comparison.base:
                cells.append(Text(ratio_text(row[index].ratio)))
                cells.append(_verdict_cell(row[index].ratio, figure))
        if any(row[index].estimate is not None for row in comparison.deployments.values()):
            table.add_row(*cells)
    console.print(table)
    for line in comparison.differences:
        console.print(Text(f"not alike: {line}", style="yellow"))
    for name, reason in comparison.untrusted.items():
        console.print(Text(f"(!) {name}: the harness itself was at its limit, do not trust these figures: {reason}"))
    for note in comparison.notes:
        console.print(Text(note, style="dim"))


def _estimate_cell(found: Estimate | None, figure: Figure) -> Text:
    return Text(MISSING if found is None else shown_interval(found.mean, found.half_width, figure.unit))


def ratio_text(found: Ratio | None) -> str:
    """ "1.24× (1.10 to 1.39)"; without the interval where there is none."""
    if found is None:
        return MISSING
    if found.value is None:
        return "from 0"
    text = f"{found.value:.2f}×"
    if found.low is not None and found.high is not None:
        text += f" ({found.low:.2f} to {found.high:.2f})"
    return text


def verdict(found: Ratio | None, figure: Figure) -> str:
    """better, worse, "no" when the repeats cannot tell the two apart, "?" when there are too few to judge."""
    if found is None:
        return ""
    if found.significant is None:
        return "?"
    if not found.significant:
        return "no"
    lower = found.value is not None and found.value < 1
    return "better" if lower == (figure.better == "lower") else "worse"


def _verdict_cell(found: Ratio | None, figure: Figure) -> Text:
    text = verdict(found, figure)
    return Text(text, style={"better": "bold green", "worse": "bold red"}.get(text, "dim"))
