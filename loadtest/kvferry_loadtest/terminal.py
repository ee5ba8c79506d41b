"""Display of a run in a terminal: its progress while it lasts, and its figures after it."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvferry_loadtest import figures
from kvferry_loadtest.figures import FIGURES, MISSING, shown
from kvferry_loadtest.result import LATENCIES, Result

PLAIN_EVERY_S = 5.0


class Progress:
    """A context manager that shows how a run gets on: in place in a terminal, as a line every five seconds of the run
    elsewhere. It keeps no clock of its own: `update` says how far the run is, as often as one likes.
    """

    def __init__(self, console: Console, title: str, expected_s: float | None = None) -> None:
        """`expected_s` is how long the run will take by its plan; None when that is not known (closed loop)."""
        self._console = console
        self._title = title
        self._expected_s = expected_s
        self._shown_at_s: float | None = None
        self._latest: tuple[int, int, int, int, int, float, float | None] = (0, 0, 0, 0, 0, 0.0, None)
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __repr__(self) -> str:
        return f"<Progress {self.line()}>"

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leaves the last state behind as a plain line."""
        if self._live is not None:
            self._live.__exit__(kind, error, traceback)
        if self._shown_at_s != self._latest[5] or self._live is not None:
            self._print()

    def update(
        self, sent: int, in_flight: int, ok: int, missed: int, planned: int, elapsed_s: float, ttft_p50_ms: float | None
    ) -> None:
        """`missed` are refused, failed and timed out; `ttft_p50_ms` is that of the last seconds, None without any."""
        self._latest = (sent, in_flight, ok, missed, planned, elapsed_s, ttft_p50_ms)
        if self._live is not None:
            self._live.update(self._panel())
        # Either way: the clock begins anew when the warm-up is over.
        elif self._shown_at_s is None or abs(elapsed_s - self._shown_at_s) >= PLAIN_EVERY_S:
            self._print()

    def line(self) -> str:
        sent, in_flight, ok, missed, planned, elapsed_s, ttft_p50_ms = self._latest
        return (
            f"{self._title}: {self._time(elapsed_s)}, sent {sent:,} of {planned:,}, {in_flight:,} in flight, "
            f"{ok:,} ok, {missed:,} missed, TTFT p50 {shown(ttft_p50_ms, 'ms')}"
        )

    def _print(self) -> None:
        self._shown_at_s = self._latest[5]
        self._console.print(Text(self.line()), soft_wrap=True)

    def _time(self, elapsed_s: float) -> str:
        expected = "" if self._expected_s is None else f" of {_clock(self._expected_s)}"
        return f"{_clock(elapsed_s)}{expected}"

    def _panel(self) -> RenderableType:
        sent, in_flight, ok, missed, planned, elapsed_s, ttft_p50_ms = self._latest
        done, of = (elapsed_s, self._expected_s) if self._expected_s else (ok + missed, planned)
        share = done / of if of else 0.0
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._title, style="bold"), ProgressBar(1.0, min(share, 1.0), width=40), self._time(elapsed_s)
        )
        row = Text()
        for label, value, style in (
            ("sent", f"{sent:,} of {planned:,}", ""),
            ("in flight", f"{in_flight:,}", ""),
            ("ok", f"{ok:,}", "green" if ok else ""),
            ("missed", f"{missed:,}", "bold red" if missed else ""),
            ("TTFT p50", shown(ttft_p50_ms, "ms"), ""),
        ):
            row.append(f"{label} ", style="dim")
            row.append(f"{value}   ", style=style)
        return Group(head, row)


def _clock(seconds: float) -> str:
    """ "2:05", or "1:02:05" from an hour on."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def print_summary(console: Console, result: Result) -> None:
    """The figures of one run, its latencies, and what went wrong; a harness that cannot be trusted comes first."""
    if not result.harness.ok:
        warning = f"Do not trust these figures: the harness itself was at its limit: {result.harness.reason}"
        console.print(Text(warning, style="bold red"))
    console.print(Text.assemble((result.deployment, "bold"), f"  {result.scenario}, {_clock(result.duration_s)}"))
    console.print(_figures(result))
    console.print(_latencies(result))
    outcomes = {
        name: number
        for name in ("ok", "refused", "failed", "timed_out", "skipped")
        if (number := figures.count(result, name)) is not None
    }
    parts = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in outcomes.items() if number)
    console.print(Text(f"{result.overall.counts.planned:,} requests: {parts or 'none ended'}"))
    for text, number in sorted(result.errors.items(), key=lambda item: -item[1])[:5]:
        console.print(Text(f"  {number:,} × {text}", style="red"))
    if len(result.errors) > 5:
        console.print(Text(f"  and {len(result.errors) - 5} other errors", style="red"))


def _figures(result: Result) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    cells = []
    for figure in FIGURES:
        if figure.headline:
            table.add_column(figure.label, justify="right")
            text = shown(figure.of(result), figure.unit)
            if figure.key == "recompute_share" and (floor := figures.recompute_floor(result)) is not None:
                text += f"\nfloor {shown(floor, '%')}"
            cells.append(Text(text))
    table.add_row(*cells)
    return table


def _latencies(result: Result) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("Latency")
    columns = {"p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "max", "mean": "mean"}
    for label in (*columns.values(), "n"):
        table.add_column(label, justify="right")
    for kind, label in LATENCIES.items():
        found = result.overall.latencies.get(kind)
        if found is None:
            table.add_row(Text(label, style="dim"), *[MISSING] * (len(columns) + 1))
            continue
        cells = [shown(figures.latency(result, kind, statistic), "ms") for statistic in columns]
        table.add_row(Text(label), *cells, f"{found.count:,}")
    return table
