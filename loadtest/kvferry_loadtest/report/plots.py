"""The plots of a report: matplotlib figures without any global state, as SVG for the page and PNG beside it.

A deployment has the same colour and line style in every plot; both tell it apart, so that colour is never needed.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import matplotlib
import msgspec
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.image import imread, imsave
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from kvferry_loadtest import figures
from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.intervals import Estimate, estimate
from kvferry_loadtest.result import Distribution, Group, Result

# Okabe and Ito's palette (Color Universal Design, 2008), without black and yellow: each is seen on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.6, 1.2, 1.6)), (0, (3, 1)), (0, (8, 2)))
HATCHES = ("", "///", "\\\\\\", "---", "xxx", "|||")  # no dots: they make an SVG of hundreds of kilobytes

SOURCES = ("#5b6472", "#009E73", "#56B4E9", "#E69F00", "#CC79A7", "#0072B2")  # grey: what no cache served

# Ink that the page replaces by its own, so that plots follow its light or dark scheme.
INK, MUTED, GRID, PAPER = "#22272e", "#667081", "#dde1e7", "#fefefe"
_PAGE_COLOURS = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--line)", PAPER: "var(--paper)"}

_STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.facecolor": "white",
    "font.family": "DejaVu Sans",  # comes with matplotlib; the page has its own
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.color": PAPER,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.7,
    "svg.fonttype": "none",
    "svg.hashsalt": "kvferry-loadtest",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelsize": 8.5,
}

Groups = dict[str, list[Result]]
Floats = NDArray[np.float64]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """`svg` is an element to be put into a page; `wide` ones want the whole width of it."""

    name: str  # of its file, without the suffix
    section: str
    title: str
    caption: str
    svg: str
    png: bytes
    wide: bool = False


def draw(groups: Groups) -> list[Plot]:
    """Every plot that the results have figures for, in the order of the page."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script that the font lacks is a box in the PNG; the page's own font has it.
        warnings.filterwarnings("ignore", message="Glyph")
        return list(_draw({_marked(name, results): results for name, results in groups.items()}))


def _marked(deployment: str, results: Sequence[Result]) -> str:
    return deployment if all(result.harness.ok for result in results) else f"(!) {deployment}"


def _draw(groups: Groups) -> Iterator[Plot]:
    drawn: Sequence[tuple[str, str, str, str, Callable[[Groups], Canvas | None]]] = (
        (
            "ttft_cdf",
            "latency",
            "Time to first token",
            "Share of requests that had their first token within the time, counted from when each was due. Histograms "
            "of all repeats are merged.",
            _ttft_cdf,
        ),
        (
            "scheduled_and_sent",
            "latency",
            "From the schedule and from sending",
            "TTFT from when a request was due (filled) and from when it was sent (hollow). The gap is the waiting that "
            "a measurement from sending leaves out: coordinated omission.",
            _scheduled_and_sent,
        ),
        (
            "percentiles",
            "latency",
            "Latency by percentile",
            "From the scheduled time, all repeats merged. A line ends at its slowest request.",
            _percentiles,
        ),
        (
            "goodput",
            "goodput",
            "What became of the requests",
            "All planned requests. Only those that ended well and kept to the objective are goodput; refusals count as "
            "misses. Whiskers: 95 % confidence interval of the mean over repeats.",
            _goodput,
        ),
        (
            "throughput",
            "goodput",
            "Output tokens per second",
            "Of requests that ended well, whether or not they kept to the objective; mean over repeats.",
            _throughput,
        ),
        (
            "recompute",
            "cache",
            "Prompt tokens computed again",
            "Share of prompt tokens whose prefill was computed. The black mark is the floor: what no cache can avoid "
            "with these prompts.",
            _recompute,
        ),
        (
            "prefill_sources",
            "cache",
            "Where prefill came from",
            "Prompt tokens by what served them, as the server's own counters say; mean over repeats.",
            _prefill_sources,
        ),
        (
            "tenants",
            "tenants",
            "By tenant",
            "Goodput share and TTFT p99 from the scheduled time, by tenant; mean over repeats.",
            _tenants,
        ),
    )
    for name, section, title, caption, make in drawn:
        canvas = make(groups)
        if canvas is not None:
            caption += _left_out(name, groups)
            yield _plot(name, section, title, caption, canvas, wide=name in ("percentiles", "tenants"))
    for at, (deployment, results) in enumerate(groups.items()):
        canvas = _over_time(results, COLOURS[at % len(COLOURS)])
        if canvas is not None:
            yield _plot(
                f"over_time_{at + 1}",
                "time",
                deployment,
                "Per second of the run. "
                + ("The first run is drawn strongly, its repeats faintly." if len(results) > 1 else "One run."),
                canvas,
            )


def _left_out(name: str, groups: Groups) -> str:
    """Says whom a plot of merged histograms does without."""
    kinds = {"ttft_cdf": ("ttft",), "percentiles": ("ttft", "e2e")}.get(name, ())
    absent = [
        deployment
        for deployment, results in groups.items()
        if not all(kind in result.overall.latencies and result.overall.latencies[kind].histogram
                   for result in results for kind in kinds)
    ]  # fmt: skip
    return f" Not, or not in full, known of {', '.join(absent)}." if absent else ""


def _plot(name: str, section: str, title: str, caption: str, canvas: Canvas, wide: bool = False) -> Plot:
    canvas.draw_without_rendering()
    canvas.set_layout_engine("none")  # it stays as it is laid out now, once for both
    svg = io.StringIO()
    canvas.savefig(svg, format="svg", transparent=True)
    return Plot(
        name=name,
        section=section,
        title=title,
        caption=caption,
        svg=_element(svg.getvalue(), name),
        png=_headed(canvas, _name(title)),
        wide=wide,
    )


def _headed(canvas: Canvas, title: str) -> bytes:
    """As PNG, with the heading that the page has as text."""
    strip = Canvas(figsize=(canvas.get_figwidth(), 0.34))
    strip.text(0.08 / canvas.get_figwidth(), 0.4, title, va="center", fontsize=11, fontweight="bold")
    parts = []
    for part in (strip, canvas):
        png = io.BytesIO()
        part.savefig(png, format="png", dpi=144)
        png.seek(0)
        parts.append(imread(png))
    whole = io.BytesIO()
    imsave(whole, np.vstack(parts), format="png", dpi=144)
    return whole.getvalue()


def _element(svg: str, name: str) -> str:
    """An `svg` element for a page of HTML: no prologue, no namespaces, no metadata, ids of its own, the page's ink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None, head  # matplotlib writes one
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]*)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"font: ([0-9.]+px|bold [0-9.]+px|[0-9]+ [0-9.]+px) [^;\"]*", _font, body)
    for colour, variable in _PAGE_COLOURS.items():
        body = body.replace(colour, variable)
    return f'<svg {view_box.group(0)} role="img" aria-labelledby="{name}-title">{body}'


def _font(found: re.Match[str]) -> str:
    *weight, size = found.group(1).split()
    return f"font-size: {size}" + (f"; font-weight: {weight[0]}" if weight else "")


# Parts of plots.


def _canvas(width: float, height: float) -> Canvas:
    return Canvas(figsize=(width, height), layout="constrained")


def _name(deployment: str) -> str:
    short = deployment if len(deployment) <= 36 else f"{deployment[:34]}…"
    return f" {short}" if short.startswith("_") else short  # matplotlib leaves labels with an underscore out


def _legend(canvas: Canvas, handles: Sequence[Line2D | Patch]) -> None:
    """Above the plot, in as many columns as fit."""
    widths = [0.62 + 0.078 * len(str(handle.get_label())) for handle in handles]  # inches, estimated
    columns = len(handles)
    while columns > 1:
        of_columns = np.array_split(widths, columns)  # as matplotlib fills them: downwards, the first ones longer
        if sum(float(column.max()) for column in of_columns) < canvas.get_figwidth():
            break
        columns -= 1
    canvas.legend(handles=list(handles), loc="outside upper left", ncols=columns, handlelength=2.4, columnspacing=1.5)


def _line_handles(groups: Groups, names: Sequence[str]) -> list[Line2D]:
    order = list(groups)
    return [Line2D([], [], label=_name(name), **_line(order.index(name))) for name in names]


def _line(at: int) -> dict[str, Any]:
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[(at + at // len(COLOURS)) % len(DASHES)]}


def _bar(at: int) -> dict[str, Any]:
    return {"facecolor": COLOURS[at % len(COLOURS)], "hatch": HATCHES[at % len(HATCHES)], "linewidth": 0}


def _time_axis(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: _ms(value)))


def _ms(value: float) -> str:
    if value == 0:
        return "0"
    if value >= 1000:
        return f"{value / 1000:g} s"
    return f"{value:g} ms"


def _log_time_axis(axes: Axes, which: str, low: float, high: float) -> None:
    """Ticks at 1, 2, 5 and 10 where there is room for them, at decades where there is not."""
    decades = np.log10(max(high, low * 1.01) / low)
    steps = (1, 2, 5) if decades <= 2.2 else (1, 3) if decades <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(-3, 8) for step in steps]
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]))
    axis.set_minor_locator(NullLocator())
    _time_axis(axis)


def _merged(results: Sequence[Result], kind: str) -> Latencies | None:
    """All repeats' histograms in one. None where a repeat has none: a part would not stand for all."""
    merged = Latencies()
    for result in results:
        found: Distribution | None = result.overall.latencies.get(kind)
        if found is None or not found.histogram:
            return None
        merged.merge(Latencies.restored(found))
    return merged if len(merged) else None


def _bars(canvas: Canvas, groups: Groups) -> Axes:
    axes = canvas.subplots()
    axes.set_yticks(range(len(groups)), [_name(name) for name in groups])
    axes.tick_params(axis="y", labelcolor=INK, length=0, labelsize=9)
    axes.set_ylim(len(groups) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    return axes


def _height(rows: int, each: float = 0.5) -> float:
    return max(1.5, 1.0 + each * rows)


def _percent(axes: Axes, which: str = "x") -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
    axis.set_major_locator(MaxNLocator(6))


# The plots. Each returns None when no deployment has what it shows.


def _ttft_cdf(groups: Groups) -> Canvas | None:
    curves = {name: merged for name, results in groups.items() if (merged := _merged(results, "ttft"))}
    if not curves:
        return None
    canvas = _canvas(5.6, 3.7)
    axes = canvas.subplots()
    low = min(float(merged.steps()[0][0]) for merged in curves.values())
    high = max(merged.max_ms for merged in curves.values())
    for name, merged in curves.items():
        values_ms, shares = _thinned(*merged.steps())
        at = list(groups).index(name)
        axes.plot(
            np.concatenate([values_ms[:1], values_ms]),
            np.concatenate([[0.0], shares]),
            drawstyle="steps-post",
            **_line(at),
        )
    objective = {result.objective.ttft_ms for results in groups.values() for result in results}
    if len(objective) == 1 and (wanted := objective.pop()) is not None and low < wanted < high:
        axes.axvline(wanted, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            f"objective {_ms(wanted)}",
            (wanted, 0.03),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
        )
    axes.set_xscale("log")
    axes.set_xlim(low * 0.95, high * 1.05)
    _log_time_axis(axes, "x", low * 0.95, high * 1.05)
    axes.set_ylim(0, 1.005)
    _percent(axes, "y")
    axes.set_xlabel("TTFT from the scheduled time (log scale)")
    axes.set_ylabel("requests")
    _legend(canvas, _line_handles(groups, list(curves)))
    return canvas


def _thinned(values_ms: Floats, shares: Floats, points: int = 600) -> tuple[Floats, Floats]:
    """Fewer steps, of which none is higher than 1 / `points` or longer than a 1 / `points` of the axis needs."""
    if len(values_ms) <= points:
        return values_ms, shares
    logs = np.log(np.maximum(values_ms, 1e-3))
    along = shares + (logs - logs[0]) / max(logs[-1] - logs[0], 1e-9)  # 0 to 2, with every step forward or up
    kept = np.unique(np.searchsorted(along, np.linspace(along[0], along[-1], points)).clip(0, len(along) - 1))
    return values_ms[kept], shares[kept]


def _percentiles(groups: Groups) -> Canvas | None:
    panels = {"ttft": "Time to first token", "e2e": "End to end"}
    curves = {
        kind: {name: merged for name, results in groups.items() if (merged := _merged(results, kind))}
        for kind in panels
    }
    if not any(curves.values()):
        return None
    canvas = _canvas(11.4, 3.6)
    canvas.set_layout_engine("constrained", wspace=0.06)
    shown = set()
    for axes, (kind, title) in zip(canvas.subplots(1, 2), panels.items(), strict=True):
        bottom, top = np.inf, 0.0
        for name, merged in curves[kind].items():
            shown.add(name)
            last = min(max(len(merged), 2), 1000)  # p99.9 and no further
            rarity = np.geomspace(2, max(2.01, last), 120)
            values_ms = np.array(merged.percentiles_ms([100 * (1 - 1 / one) for one in rarity]))
            axes.plot(rarity, values_ms, **_line(list(groups).index(name)))
            bottom, top = min(bottom, float(values_ms[0])), max(top, float(values_ms[-1]))
        axes.set_title(title)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator([2, 10, 100, 1000]))
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda value, _: {2: "p50", 10: "p90", 100: "p99", 1000: "p99.9"}[round(value)])
        )
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(2, 1050)
        if curves[kind]:
            axes.set_ylim(bottom * 0.85, top * 1.15)
            _log_time_axis(axes, "y", bottom * 0.85, top * 1.15)
    _legend(canvas, _line_handles(groups, [name for name in groups if name in shown]))
    return canvas


def _mean(results: Sequence[Result], of: Callable[[Result], float | None]) -> Estimate | None:
    return estimate([value for value in map(of, results) if value is not None])


def _scheduled_and_sent(groups: Groups) -> Canvas | None:
    statistics = {"p50": "p50", "p90": "p90", "p99": "p99"}
    rows = [(name, statistic) for name in groups for statistic in statistics]
    canvas = _canvas(5.6, max(3.7, 0.9 + 0.26 * len(rows)))
    axes = canvas.subplots()
    seen: list[float] = []
    for row, (name, statistic) in enumerate(rows):
        at = list(groups).index(name)
        colour = COLOURS[at % len(COLOURS)]
        place = row + at * 0.7
        due, sent = (
            _mean(groups[name], lambda result, kind=kind: figures.latency(result, kind, statistic))  # type: ignore[misc]  # noqa: B023
            for kind in ("ttft", "ttft_sent")
        )
        if due is not None and sent is not None:
            axes.plot([sent.mean, due.mean], [place, place], color=colour, linewidth=2.2, alpha=0.6)
        for found, face in ((sent, PAPER), (due, colour)):
            if found is not None:
                axes.plot(
                    [found.mean], [place], marker="o", markersize=6.5, markeredgecolor=colour, markerfacecolor=face,
                    markeredgewidth=1.6, linestyle="none",
                )  # fmt: skip
                seen.append(found.mean)
    if not seen:
        return None
    places = [row + row // len(statistics) * 0.7 for row in range(len(rows))]
    axes.set_yticks(places, [statistic for _, statistic in rows])
    axes.set_ylim(places[-1] + 0.6, -1.0)
    for at, name in enumerate(groups):
        axes.annotate(
            _name(name), (0, places[at * len(statistics)] - 0.62), xycoords=("axes fraction", "data"),
            xytext=(3, 0), textcoords="offset points", fontsize=8.5, va="center", color=INK, fontweight="bold",
        )  # fmt: skip
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    low, high = min(seen) * 0.8, max(seen) * 1.25
    axes.set_xlim(low, high)
    _log_time_axis(axes, "x", low, high)
    axes.set_xlabel("TTFT (log scale)")
    marker: dict[str, Any] = {
        "linestyle": "none",
        "marker": "o",
        "markersize": 6.5,
        "markeredgecolor": MUTED,
        "markeredgewidth": 1.6,
    }
    _legend(
        canvas,
        [
            Line2D([], [], label="from sending", markerfacecolor=PAPER, **marker),
            Line2D([], [], label="from the scheduled time", markerfacecolor=MUTED, **marker),
        ],
    )
    return canvas


def _goodput(groups: Groups) -> Canvas | None:
    share = next(figure for figure in figures.FIGURES if figure.key == "goodput_share")
    kept = {name: _mean(results, share.of) for name, results in groups.items()}
    if not any(kept.values()):
        return None
    canvas = _canvas(5.6, _height(len(groups)))
    axes = _bars(canvas, groups)
    rest = (
        ("late", "", "#c3cad4"),
        ("refused", "///", "#9aa3b0"),
        ("failed", "xxx", "#5b6472"),
        ("not sent", "---", "#b9c0ca"),
    )
    for at, (name, found) in enumerate(kept.items()):
        if found is None:
            _absent(axes, at)
            continue
        axes.barh(at, found.mean, height=0.56, color=COLOURS[at % len(COLOURS)])
        left = found.mean
        means = _outcome_shares(groups[name])
        late = max(0.0, 1 - found.mean - sum(means))
        for length, (_, hatch, colour) in zip((late, *means), rest, strict=True):
            axes.barh(at, length, left=left, height=0.56, color=colour, hatch=hatch, linewidth=0)
            left += length
        if found.half_width is not None:
            axes.errorbar(found.mean, at, xerr=found.half_width, color=INK, linewidth=1.2, capsize=3)
        axes.annotate(
            f"{found.mean * 100:.1f} %", (0.012, at), va="center", color="white", fontsize=9, fontweight="bold"
        )
    axes.set_xlim(0, 1)
    _percent(axes)
    _legend(
        canvas,
        [
            Patch(facecolor=MUTED, label="goodput"),
            *(Patch(facecolor=colour, hatch=hatch, label=label, linewidth=0) for label, hatch, colour in rest),
        ],
    )
    return canvas


def _throughput(groups: Groups) -> Canvas | None:
    tokens = next(figure for figure in figures.FIGURES if figure.key == "output_tokens_per_s")
    rates = {name: _mean(results, tokens.of) for name, results in groups.items()}
    if not any(rates.values()):
        return None
    canvas = _canvas(5.6, _height(len(groups)))
    axes = _bars(canvas, groups)
    _measured_bars(axes, list(rates.values()), lambda value: figures.shown(value, "/s"))
    axes.set_xlim(0, max(_end(found) for found in rates.values()) * 1.16 or 1)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens/s")
    return canvas


def _end(found: Estimate | None) -> float:
    return 0.0 if found is None else found.mean + (found.half_width or 0.0)


def _measured_bars(axes: Axes, rows: Sequence[Estimate | None], text: Callable[[float], str]) -> None:
    """Bars with whiskers and their mean beside them, in the colours of the deployments."""
    for at, found in enumerate(rows):
        if found is None:
            _absent(axes, at)
            continue
        axes.barh(at, found.mean, height=0.56, color=COLOURS[at % len(COLOURS)])
        if found.half_width is not None:
            axes.errorbar(found.mean, at, xerr=found.half_width, color=INK, linewidth=1.2, capsize=3)
        axes.annotate(text(found.mean), (_end(found), at), xytext=(5, 0), textcoords="offset points", va="center")


def _outcome_shares(results: Sequence[Result]) -> list[float]:
    """Refused, failed or timed out, and skipped, of all planned; 0 where not known: then they are among the late."""
    outcomes: tuple[tuple[str, ...], ...] = (("refused",), ("failed", "timed_out"), ("skipped",))
    shares = []
    for names in outcomes:
        total = sum(figures.count(result, name) or 0 for result in results for name in names)
        shares.append(total / max(1, sum(result.overall.counts.planned for result in results)))
    return shares


def _absent(axes: Axes, at: int) -> None:
    axes.annotate(
        f"{figures.MISSING}  not known", (0, at), xytext=(5, 0), textcoords="offset points", va="center", color=MUTED
    )


def _recompute(groups: Groups) -> Canvas | None:
    measured = {name: _mean(results, figures.recompute_share) for name, results in groups.items()}
    floors = {name: _mean(results, figures.recompute_floor) for name, results in groups.items()}
    if not any(measured.values()):
        return None
    canvas = _canvas(5.6, _height(len(groups)))
    axes = _bars(canvas, groups)
    _measured_bars(axes, list(measured.values()), lambda share: f"{share * 100:.1f} %")
    for at, floor in enumerate(floors.values()):
        if floor is not None:
            axes.plot([floor.mean, floor.mean], [at - 0.38, at + 0.38], color=INK, linewidth=2.4, solid_capstyle="butt")
    reach = max(_end(found) for found in (*measured.values(), *floors.values()))
    axes.set_xlim(0, min(1.0, reach) * 1.16 or 1)
    _percent(axes)
    labels = sorted({f"{floor.mean * 100:.1f} %" for floor in floors.values() if floor is not None})
    handles: list[Line2D | Patch] = [Patch(facecolor=MUTED, label="measured")]
    if labels:
        text = f"floor ({labels[0]})" if len(labels) == 1 else "floor"
        handles.append(Line2D([], [], color=INK, linewidth=2.4, label=text))
    _legend(canvas, handles)
    return canvas


def _prefill_sources(groups: Groups) -> Canvas | None:
    shares = {name: _source_shares(results) for name, results in groups.items()}
    sources = list(dict.fromkeys(source for found in shares.values() for source in found))
    if not sources:
        return None
    styles: dict[str, dict[str, Any]] = {
        source: {"facecolor": SOURCES[at % len(SOURCES)], "hatch": HATCHES[at % len(HATCHES)], "linewidth": 0}
        for at, source in enumerate(sources)
    }
    canvas = _canvas(5.6, _height(len(groups)))
    axes = _bars(canvas, groups)
    for at, found in enumerate(shares.values()):
        if not found:
            _absent(axes, at)
        left = 0.0
        for source, share in found.items():
            axes.barh(at, share, left=left, height=0.56, **styles[source])
            if share > 0.085:
                plate = {"boxstyle": "round,pad=0.2", "facecolor": PAPER, "edgecolor": "none", "alpha": 0.85}
                middle = (left + share / 2, at)
                axes.annotate(f"{share * 100:.0f} %", middle, ha="center", va="center", fontsize=8.5, bbox=plate)
            left += share
    axes.set_xlim(0, 1)
    _percent(axes)
    _legend(canvas, [Patch(label=_name(source), **styles[source]) for source in sources])
    return canvas


def _source_shares(results: Sequence[Result]) -> dict[str, float]:
    """Shares of the prompt tokens, computed ones first; empty when the server does not say what it computed."""
    servers = [result.server for result in results if result.server.computed_tokens is not None]
    prompt_tokens = sum(server.prompt_tokens or 0.0 for server in servers)
    if not prompt_tokens:
        return {}
    tokens = {"computed": sum(server.computed_tokens or 0.0 for server in servers)}
    for server in servers:
        for source, number in server.cached_tokens_by_source.items():
            tokens[source] = tokens.get(source, 0.0) + number
    return {source: number / prompt_tokens for source, number in tokens.items()}


def _tenants(groups: Groups) -> Canvas | None:
    tenants = list(dict.fromkeys(name for results in groups.values() for one in results for name in one.tenants))
    if not tenants:
        return None
    panels: tuple[tuple[str, Callable[[Group], float | None]], ...] = (
        ("Goodput share", lambda group: group.goodput_share),
        ("TTFT p99", lambda group: found.p99 if (found := group.latencies.get("ttft")) else None),
    )
    each = 0.8 / len(groups)
    canvas = _canvas(11.4, _height(len(tenants), each=0.24 + 0.22 * len(groups)))
    for panel, (axes, (title, of)) in enumerate(zip(canvas.subplots(1, 2, sharey=True), panels, strict=True)):
        for at, results in enumerate(groups.values()):
            for row, tenant in enumerate(tenants):
                found = _mean(results, lambda result: of(result.tenants[tenant]) if tenant in result.tenants else None)  # noqa: B023
                if found is None:
                    continue
                place = row - 0.4 + each * (at + 0.5)
                axes.barh(place, found.mean, height=each * 0.88, **_bar(at))
                label = f"{found.mean * 100:.1f} %" if panel == 0 else figures.shown(found.mean, "ms")
                axes.annotate(
                    label, (found.mean, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
                )
        axes.set_title(title)
        axes.set_yticks(range(len(tenants)), [_name(tenant) for tenant in tenants])
        axes.set_ylim(len(tenants) - 0.45, -0.55)
        axes.tick_params(axis="y", labelcolor=INK, length=0, labelsize=9)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.14)
        if panel == 0:
            axes.set_xlim(0, 1.14)
            axes.xaxis.set_major_locator(FixedLocator([0, 0.2, 0.4, 0.6, 0.8, 1.0]))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
        else:
            _time_axis(axes.xaxis)
            axes.xaxis.set_major_locator(MaxNLocator(6))
    _legend(
        canvas,
        [Patch(label=_name(name), **_bar(at)) for at, name in enumerate(groups)],
    )
    return canvas


def _over_time(results: Sequence[Result], colour: str) -> Canvas | None:
    runs = [result.seconds for result in results if result.seconds]
    if not runs:
        return None
    panels = {
        "TTFT p50 and p99": ("ttft_p50_ms", "ttft_p99_ms"),
        "Requests in flight": ("in_flight",),
        "Queue depth": ("queue_depth",),
        "KV cache in use": ("kv_utilisation",),
    }
    panels = {
        title: fields
        for title, fields in panels.items()
        if any(getattr(second, fields[0]) is not None for run in runs for second in run)
    }
    canvas = _canvas(5.6, 0.7 + 1.15 * len(panels))
    rows = canvas.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    missed = False
    for axes, (title, fields) in zip(rows, panels.items(), strict=True):
        for order, run in reversed(list(enumerate(runs))):
            at_s = [second.t_s for second in run]
            for field, alpha, dashes in zip(fields, (1.0, 0.55), ("-", (0, (2, 1))), strict=False):
                values = [getattr(second, field) for second in run]
                axes.plot(
                    at_s,
                    [np.nan if value is None else value for value in values],
                    color=colour,
                    linestyle=dashes,
                    alpha=alpha if order == 0 else alpha * 0.28,
                    linewidth=1.5 if order == 0 else 0.9,
                )
        axes.set_title(title, fontweight="normal", fontsize=9, pad=3)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if fields[0] == "ttft_p50_ms":
            axes.set_yscale("log")
            values = [
                value for run in runs for second in run for value in (second.ttft_p50_ms, second.ttft_p99_ms) if value
            ]
            low, high = min(values) * 0.8, max(values) * 1.25
            axes.set_ylim(low, high)
            _log_time_axis(axes, "y", low, high)
        elif fields[0] == "kv_utilisation":
            axes.set_ylim(0, 1.02)
            axes.yaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))
        else:
            axes.set_ylim(bottom=0)
        if fields[0] == "in_flight":
            bad = [(second.t_s, second.in_flight) for second in runs[0] if second.missed]
            if bad:
                missed = True
                axes.plot(*zip(*bad, strict=True), linestyle="none", marker="x", markersize=5, color=INK)
    rows[-1].set_xlabel("seconds from the start")
    rows[-1].set_xlim(0, max(second.t_s for run in runs for second in run) + 1)
    handles: list[Line2D | Patch] = []
    if "TTFT p50 and p99" in panels:
        handles = [
            Line2D([], [], color=colour, label="p50"),
            Line2D([], [], color=colour, alpha=0.55, linestyle=(0, (2, 1)), label="p99"),
        ]
    if missed:
        handles.append(Line2D([], [], color=INK, linestyle="none", marker="x", markersize=5, label="refused or failed"))
    if handles:
        _legend(canvas, handles)
    return canvas
