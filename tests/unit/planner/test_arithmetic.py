"""Formulas of published figures are arithmetic and nothing else."""

from __future__ import annotations

import pytest

from kvferry_plan.planner.arithmetic import MAX_EXPONENT, MAX_FORMULA_CHARS, evaluate


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("2*80*8*128*2", 327_680),
        ("-(-226//73.6)", 4),
        ("64%3", 1),
        ("2**30", 1 << 30),
        ("(1 - 34/64)*100", 46.875),
        ("50e3*32768/1e9", 1.6384),
    ],
)
def test_arithmetic_has_its_value(formula: str, value: float) -> None:
    assert evaluate(formula) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os')",
        "sum(range(7))",
        "a",
        "1 if 1 else 2",
        "[1]",
        "'1'*9",
        "True",
        "1j",
        "1 < 2",
        "",
        "1;2",
        "(1).real",
        "~1",
    ],
)
def test_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|not arithmetic"):
        evaluate(formula)


@pytest.mark.parametrize("formula", ["1/0", "1%0", "1e308*10", "(-1)**0.5", "1e29*1e29"])
def test_values_that_are_none_are_refused(formula: str) -> None:
    with pytest.raises(ValueError, match=r"has no value|over"):
        evaluate(formula)


def test_the_limits() -> None:
    assert evaluate(f"1**{MAX_EXPONENT}") == 1
    with pytest.raises(ValueError, match="exponent"):
        evaluate(f"1**{MAX_EXPONENT + 1}")
    longest = "1" + "+1" * ((MAX_FORMULA_CHARS - 1) // 2)
    assert evaluate(longest) == (len(longest) + 1) / 2
    with pytest.raises(ValueError, match="limit"):
        evaluate("1" * (MAX_FORMULA_CHARS + 1))
    with pytest.raises(ValueError, match="not arithmetic"):
        evaluate("(" * 100 + "1")
