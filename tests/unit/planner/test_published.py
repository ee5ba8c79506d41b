"""Every published figure is what the comparison says of it, by formula and by the planner's own functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

import msgspec
import pytest

from kvferry.pages.geometry.model import ModelGeometry
from kvferry_plan import model_catalogue
from kvferry_plan.planner import published
from kvferry_plan.planner.published import Figure, Judgement, faults, judge, kind_of
from kvferry_plan.planner.published_functions import functions

FIGURES = published.load().figures


def geometry_of(name: str) -> ModelGeometry:
    entry = model_catalogue.find(name)
    assert entry is not None, name
    return entry.geometry()


@pytest.fixture(scope="module")
def known() -> Mapping[str, Callable[..., float | bool]]:
    return functions(geometry_of)


def figure(name: str) -> Figure:
    (found,) = (each for each in FIGURES if each.id == name)
    return found


@pytest.fixture(scope="module")
def judged(known: Mapping[str, Callable[..., float | bool]]) -> dict[str, list[Judgement]]:
    """Judgements by kind. Fails for all figures that cannot be judged."""
    by_kind: dict[str, list[Judgement]] = {}
    errors = []
    for each in FIGURES:
        try:
            judgement = judge(each, known)
        except Exception as error:
            errors.append(f"{each.id}: {error!r}")
        else:
            by_kind.setdefault(kind_of(judgement), []).append(judgement)
    assert not errors, "\n".join(errors)
    return by_kind


@pytest.mark.parametrize("kind", ["agrees", "convention", "error", "not checked"])
def test_figures_of_each_kind_are_what_the_comparison_says(judged: dict[str, list[Judgement]], kind: str) -> None:
    wrong = [fault for each in judged[kind] for fault in faults(each)]
    assert not wrong, "\n".join(wrong)


def test_how_many_there_are_of_each_kind(judged: dict[str, list[Judgement]]) -> None:
    kinds = {kind: len(judgements) for kind, judgements in judged.items()}
    assert kinds == {"agrees": 116, "convention": 29, "error": 53, "not checked": 160}
    assert len(FIGURES) == 358


def test_nothing_to_check_says_so(judged: dict[str, list[Judgement]]) -> None:
    """An entry without a check and without a statement of its function may not claim anything."""
    unchecked = [each.figure for each in judged["not checked"]]
    assert {each.agrees for each in unchecked} == {None}
    assert all(each.check is None for each in unchecked)


def test_figures_are_recomputed_by_functions_and_not_by_formulas_alone() -> None:
    checked = [each for each in FIGURES if each.agrees is not None]
    assert len(checked) == 198
    by_function = [each for each in checked if each.via is not None]
    assert len(by_function) >= 160
    # Formulas without a function relate numbers of one source to each other.
    assert all(each.formula for each in checked if each.via is None)


def test_bytes_of_tokens_come_from_the_geometry() -> None:
    of_kv = [each for each in FIGURES if each.via is not None and each.via.function == "kv_bytes"]
    assert len(of_kv) > 30
    assert {each.via.arguments["model"] for each in of_kv if each.via} == {
        "llama-3.1-8b",
        "llama-3.1-70b",
        "llama-3.1-405b",
        "deepseek-v3",
    }


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("001.token.70b", {"value": 0.328}, "agrees is True, the comparison says False"),
        ("001.token.70b", {"formula": "2*80*8*128*1/1e6"}, "the formula gives 0.16384"),
        ("001.token.70b", {"expected": 0.33}, "expected 0.33"),
        ("003.ctx.405b.128k", {"value": 63.0}, "agrees is False, the comparison says True"),
        ("003.ctx.405b.128k", {"agrees": True}, "agrees is True, the comparison says False"),
        ("002.conc.fp8", {"expected": 68.0}, "expected 68"),
        ("003.q8_0", {"agrees": None}, "agrees is None, the comparison says False"),
        ("001.vllm.swap", {"agrees": True}, "agrees is True, the comparison says False"),
        ("000.mla.70pct", {"value": 0.8}, "agrees is True, the comparison says False"),
        ("000.restore.nvme.serial", {"value": [2.4, 3.0]}, "agrees is True, the comparison says False"),
    ],
)
def test_a_spoilt_entry_is_noticed(
    name: str, change: dict[str, Any], says: str, known: Mapping[str, Callable[..., float | bool]]
) -> None:
    spoilt = msgspec.structs.replace(figure(name), **change)
    assert any(says in fault for fault in faults(judge(spoilt, known)))


def test_a_function_of_another_model_is_noticed(known: Mapping[str, Callable[..., float | bool]]) -> None:
    entry = figure("003.ctx.8b.128k")
    assert entry.via is not None
    arguments = {**entry.via.arguments, "model": "llama-3.1-70b"}
    spoilt = msgspec.structs.replace(entry, via=msgspec.structs.replace(entry.via, arguments=arguments))
    assert faults(judge(spoilt, known)) != []


def test_disagreements_differ_by_the_stated_amount(known: Mapping[str, Callable[..., float | bool]]) -> None:
    ratios = {name: judge(figure(name), known).ratio for name in ("003.ctx.405b.4k", "002.conc.fp8", "002.kv.fp4")}
    assert ratios["003.ctx.405b.4k"] == 1.96875 / 3
    assert ratios["002.conc.fp8"] == pytest.approx(1 / 3.7, rel=1e-2)
    assert ratios["002.kv.fp4"] == 0.5


def content(**changes: Any) -> bytes:
    whole = json.loads(resources.files("kvferry_plan.planner").joinpath("published-figures.json").read_bytes())
    return json.dumps(whole | changes).encode()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources": {}}, "no source"),
        ({"conventions": {}}, "no convention"),
        ({"figures": [{"id": "x"}]}, "missing required field"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_a_bad_file_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        published.parse(content(**changes))


def test_two_figures_of_one_name_are_refused() -> None:
    whole = json.loads(content())
    with pytest.raises(ValueError, match="two figures are called"):
        published.parse(content(figures=[*whole["figures"], whole["figures"][0]]))


def test_more_figures_than_the_limit_are_refused() -> None:
    first = json.loads(content())["figures"][0]
    many = [first | {"id": str(i)} for i in range(published.MAX_FIGURES + 1)]
    with pytest.raises(ValueError, match="limit"):
        published.parse(content(figures=many))
    published.parse(content(figures=many[:-1]))


def test_an_unknown_function_and_a_check_that_does_not_fit_are_refused() -> None:
    entry = figure("001.token.8b")
    with pytest.raises(ValueError, match="no function"):
        judge(entry, {})
    unfit = msgspec.structs.replace(entry, via=None, value="about")
    with pytest.raises(ValueError, match="does not fit"):
        judge(unfit, {})
