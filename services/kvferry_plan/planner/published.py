"""Published figures of KV caches and their sizing, compared with arithmetic."""

# `published-figures.json` holds each figure with its source, its inputs, a formula, and the expected outcome of the
# comparison. `judge` makes the comparison anew from the formula, and from the planner's own functions where an entry
# names one (`via`): neither reads `agrees` or `expected`.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from kvferry_plan.planner.arithmetic import evaluate

Check = Literal["nearest", "floor", "eq", "in", "lt", "le", "gt", "ge"]
_FILE: Final = "published-figures.json"
_SIGNIFICANT_DIGITS: Final = 6
MAX_FIGURES: Final = 10_000


class Via(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function of `published_functions` that gives the figure, and what its value is divided by."""

    function: str
    arguments: dict[str, Any]
    divisor: float = 1.0


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published figure. `value` is as printed; `expected` is the arithmetic's value, to 6 significant digits."""

    id: str
    source: str
    section: str
    group: int
    quantity: str
    value: str | float | bool | list[float]
    unit: str
    agrees: bool | None
    inputs: str = ""
    formula: str = ""
    expected: float | None = None
    check: Check | None = None
    digits: int | None = None
    conventions: list[str] = []
    via: Via | None = None
    note: str = ""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    date: str


class Collection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything in the file."""

    sources: dict[str, Source]
    conventions: dict[str, str]
    figures: list[Figure]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A comparison: the arithmetic's value, by formula and by function, and whether the figure agrees."""

    figure: Figure
    by_formula: float | None
    by_function: float | bool | None
    agrees: bool | None  # None where nothing can be checked
    ratio: float | None  # the arithmetic's value by the nearest published one, where both are numbers

    @property
    def ours(self) -> float | bool | None:
        return self.by_function if self.by_function is not None else self.by_formula


def parse(content: bytes) -> Collection:
    """Raises ValueError that names what is wrong with the file."""
    try:
        collection = msgspec.json.decode(content, type=Collection)
    except msgspec.DecodeError as error:
        raise ValueError(f"{_FILE}: {error}") from None
    if len(collection.figures) > MAX_FIGURES:
        raise ValueError(f"{_FILE}: {len(collection.figures)} figures; {MAX_FIGURES} is the limit")
    seen: set[str] = set()
    for figure in collection.figures:
        if figure.id in seen:
            raise ValueError(f"{_FILE}: two figures are called {figure.id}")
        seen.add(figure.id)
        if figure.source not in collection.sources:
            raise ValueError(f"{_FILE}: {figure.id}: no source {figure.source!r}")
        if unknown := set(figure.conventions) - set(collection.conventions):
            raise ValueError(f"{_FILE}: {figure.id}: no convention {', '.join(sorted(unknown))}")
    return collection


@functools.cache
def load() -> Collection:
    """Return the figures that the package ships."""
    return parse(resources.files("kvferry_plan.planner").joinpath(_FILE).read_bytes())


def judge(figure: Figure, functions: Mapping[str, Callable[..., float | bool]]) -> Judgement:
    """Compare one figure. Raises ValueError for a formula that is not arithmetic, or an unknown function."""
    by_formula = evaluate(figure.formula) if figure.formula else None
    by_function: float | bool | None = None
    if figure.via is not None:
        function = functions.get(figure.via.function)
        if function is None:
            raise ValueError(f"{figure.id}: no function {figure.via.function!r}")
        by_function = function(**figure.via.arguments)
        if not isinstance(by_function, bool):
            by_function = by_function / figure.via.divisor
    if isinstance(by_function, bool):
        # A statement that holds or does not; a formula beside it is only what it is about.
        return Judgement(figure, by_formula, by_function, by_function, None)
    ours = by_function if by_function is not None else by_formula
    if ours is None or figure.check is None:
        return Judgement(figure, by_formula, by_function, None, None)
    bounds = _numbers(figure)
    return Judgement(figure, by_formula, by_function, _compare(figure, ours, bounds), _ratio(ours, bounds))


def faults(judgement: Judgement) -> list[str]:
    """Return in what the comparison differs from what the file says of it; empty: in nothing."""
    figure, found = judgement.figure, []
    if judgement.agrees is not figure.agrees:
        found.append(f"{figure.id}: agrees is {figure.agrees}, the comparison says {judgement.agrees}")
    numbers = {"formula": judgement.by_formula, "function": judgement.by_function}
    for name, number in numbers.items():
        if number is None or isinstance(number, bool):
            continue
        if figure.expected is None or _rounded(number) != _rounded(figure.expected):
            found.append(f"{figure.id}: expected {figure.expected}, the {name} gives {_rounded(number)}")
    return found


def as_json(judgement: Judgement) -> dict[str, Any]:
    figure = judgement.figure
    return {
        "id": figure.id,
        "source": figure.source,
        "quantity": figure.quantity,
        "published": figure.value,
        "unit": figure.unit,
        "kind": kind_of(judgement),
        "conventions": figure.conventions,
        "ours": judgement.ours,
        "ratio": judgement.ratio,
        "formula": figure.formula,
        "note": figure.note,
    }


def kind_of(judgement: Judgement) -> str:
    """Return `error`, `convention` (it agrees under one that has to be named), `agrees` or `not checked`."""
    if judgement.agrees is None:
        return "not checked"
    if not judgement.agrees:
        return "error"
    return "convention" if judgement.figure.conventions else "agrees"


def _numbers(figure: Figure) -> list[float]:
    values = figure.value if isinstance(figure.value, list) else [figure.value]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != len(values) or (figure.check == "in") != (len(numbers) == 2):
        raise ValueError(f"{figure.id}: check {figure.check!r} does not fit the value {figure.value!r}")
    return numbers


def _compare(figure: Figure, ours: float, bounds: list[float]) -> bool:
    published = bounds[0]
    match figure.check:
        case "nearest" | "floor":
            rounding = ROUND_HALF_UP if figure.check == "nearest" else ROUND_FLOOR
            place = Decimal(1).scaleb(-(figure.digits or 0))
            # Twelve digits drop what binary fractions add (0.5625 is exact, 112.94967 is not).
            rounded = Decimal(f"{ours:.12g}").quantize(place, rounding=rounding)
            return rounded == Decimal(repr(published))
        case "eq":
            return math.isclose(ours, published, rel_tol=1e-12)
        case "in":
            return bounds[0] <= ours <= bounds[1]
        case "lt":
            return ours < published
        case "le":
            return ours <= published
        case "gt":
            return ours > published
        case "ge":
            return ours >= published
        case _:
            raise ValueError(f"{figure.id}: no check {figure.check!r}")


def _ratio(ours: float, bounds: list[float]) -> float | None:
    nearest = min(bounds, key=lambda bound: abs(bound - ours))
    if len(bounds) == 2 and bounds[0] <= ours <= bounds[1]:
        return 1.0
    return None if nearest == 0 else ours / nearest


def _rounded(value: float) -> float:
    return float(f"{value:.{_SIGNIFICANT_DIGITS}g}")
