"""The figures by which deployments are compared, as data: reports, comparisons and summaries all read this list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from kvferry_loadtest.result import Distribution, Result

MISSING = "–"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a result. `of` gives None where the result does not have it."""

    key: str
    label: str
    unit: str  # "ms", "/s", "%", "×" or empty for a count; shares are 0..1 and are shown as %
    better: Literal["lower", "higher"]
    of: Callable[[Result], float | None]
    headline: bool = True


def known(result: Result, name: str) -> bool:
    """Whether the figure with the dotted `name` is one that `result` really has."""
    return name not in result.missing


def latency(result: Result, kind: str, statistic: str) -> float | None:
    """In ms; `kind` of `result.LATENCIES`, `statistic` a field of Distribution."""
    found: Distribution | None = result.overall.latencies.get(kind)
    if found is None or not known(result, f"overall.latencies.{kind}.{statistic}"):
        return None
    return float(getattr(found, statistic))


def _latency(kind: str, statistic: str) -> Callable[[Result], float | None]:
    return lambda result: latency(result, kind, statistic)


def _overall(name: str) -> Callable[[Result], float | None]:
    return lambda result: float(getattr(result.overall, name)) if known(result, f"overall.{name}") else None


def count(result: Result, outcome: str) -> int | None:
    """Requests that ended so; `outcome` is a field of Counts."""
    return int(getattr(result.overall.counts, outcome)) if known(result, f"overall.counts.{outcome}") else None


def failed(result: Result) -> float | None:
    """Share 0..1 of the planned requests that failed or timed out."""
    return _share(result, ("failed", "timed_out"))


def refused(result: Result) -> float | None:
    """Share 0..1 of the planned requests that the server refused."""
    return _share(result, ("refused",))


def _share(result: Result, outcomes: Sequence[str]) -> float | None:
    counts = [count(result, outcome) for outcome in outcomes]
    known_counts = [number for number in counts if number is not None]
    if not known_counts or not result.overall.counts.planned:
        return None
    return sum(known_counts) / result.overall.counts.planned


def recompute_share(result: Result) -> float | None:
    """Share 0..1 of the prompt tokens whose prefill was computed, by the server's own counters."""
    return result.server.recompute_share


def recompute_floor(result: Result) -> float | None:
    """The least share 0..1 that any cache can reach with this plan."""
    return None if result.floor is None else result.floor.recompute_share


def recompute_over_floor(result: Result) -> float | None:
    """1 is perfect. None where either is not known, or the floor is 0."""
    share, floor = recompute_share(result), recompute_floor(result)
    return share / floor if share is not None and floor else None


FIGURES = (
    Figure(key="ttft_p50", label="TTFT p50", unit="ms", better="lower", of=_latency("ttft", "p50")),
    Figure(key="ttft_p99", label="TTFT p99", unit="ms", better="lower", of=_latency("ttft", "p99")),
    Figure(
        key="ttft_sent_p50",
        label="TTFT p50, from sending",
        unit="ms",
        better="lower",
        of=_latency("ttft_sent", "p50"),
        headline=False,
    ),
    Figure(
        key="ttft_sent_p99",
        label="TTFT p99, from sending",
        unit="ms",
        better="lower",
        of=_latency("ttft_sent", "p99"),
        headline=False,
    ),
    Figure(key="tpot_p50", label="TPOT p50", unit="ms", better="lower", of=_latency("tpot", "p50")),
    Figure(key="e2e_p50", label="End to end p50", unit="ms", better="lower", of=_latency("e2e", "p50"), headline=False),
    Figure(key="e2e_p99", label="End to end p99", unit="ms", better="lower", of=_latency("e2e", "p99"), headline=False),
    Figure(
        key="output_tokens_per_s",
        label="Output tokens",
        unit="/s",
        better="higher",
        of=_overall("output_tokens_per_s"),
    ),
    Figure(key="requests_per_s", label="Requests", unit="/s", better="higher", of=_overall("requests_per_s")),
    Figure(key="goodput_share", label="Goodput", unit="%", better="higher", of=_overall("goodput_share")),
    Figure(
        key="goodput_requests_per_s",
        label="Goodput rate",
        unit="/s",
        better="higher",
        of=_overall("goodput_requests_per_s"),
        headline=False,
    ),
    Figure(key="recompute_share", label="Recomputed", unit="%", better="lower", of=recompute_share),
    Figure(key="recompute_over_floor", label="Times the floor", unit="×", better="lower", of=recompute_over_floor),
    Figure(key="refused", label="Refused", unit="%", better="lower", of=refused),
    Figure(key="failed", label="Failed", unit="%", better="lower", of=failed),
)


def by_deployment(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Repeats side by side; deployments in the order in which they first appear."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.deployment, []).append(result)
    return groups


def values(results: Sequence[Result], figure: Figure) -> list[float]:
    """The figure in each repeat that has it."""
    return [value for value in map(figure.of, results) if value is not None]


def shown(value: float | None, unit: str) -> str:
    """As people read it: three significant digits, units that fit the size ("1.24 s" for 1240 ms), "–" for None."""
    if value is None:
        return MISSING
    if unit == "ms" and abs(value) >= 1000:
        return f"{_digits(value / 1e3)} s"
    if unit == "%":
        return f"{value * 100:.1f} %"
    if unit == "×":
        return f"{_digits(value)}×"
    if unit == "":
        return f"{value:,.0f}" if value == round(value) else _digits(value)
    return f"{_digits(value)}{unit}" if unit.startswith("/") else f"{_digits(value)} {unit}"


def shown_interval(mean: float, half_width: float | None, unit: str) -> str:
    """Mean ± half width in one unit, the width to two significant digits and the mean to as many decimals."""
    if half_width is None:
        return shown(mean, unit)
    scale, suffix = 1.0, {"ms": " ms", "%": " %", "×": "×", "": ""}.get(unit, unit)
    if unit == "ms" and abs(mean) >= 1000:
        scale, suffix = 1e-3, " s"
    elif unit == "%":
        scale = 100.0
    mean, half_width = mean * scale, half_width * scale
    decimals = _decimals(half_width) if half_width > 0 else _decimals(mean, digits=3)
    return f"{mean:,.{decimals}f} ± {half_width:,.{decimals}f}{suffix}"


def _digits(value: float) -> str:
    return f"{value:,.{_decimals(value, digits=3)}f}"


def _decimals(value: float, digits: int = 2) -> int:
    if value == 0:
        return 0
    size = abs(value)
    decimals = 0
    while size < 10 ** (digits - 1) and decimals < 3:
        size *= 10
        decimals += 1
    return decimals
