"""Evaluates the arithmetic of published figures: numbers, `+ - * / // % **`, signs and brackets, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Final

MAX_FORMULA_CHARS: Final = 200
MAX_EXPONENT: Final = 64
MAX_MAGNITUDE: Final = 1e30

_BINARY: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Final[dict[type[ast.unaryop], Callable[[float], float]]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(formula: str) -> float:
    """Return the value of `formula`. Raises ValueError for what is not arithmetic, or exceeds the limits."""
    if len(formula) > MAX_FORMULA_CHARS:
        raise ValueError(f"a formula of {len(formula)} characters; {MAX_FORMULA_CHARS} is the limit")
    try:
        tree = ast.parse(formula, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{formula!r} is not arithmetic") from None
    try:
        value = _value(tree.body, formula)
    except (ZeroDivisionError, OverflowError):
        raise ValueError(f"{formula!r} has no value") from None
    return value


def _value(node: ast.expr, formula: str) -> float:
    value: float
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand, formula))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, formula), _value(node.right, formula)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise ValueError(f"{formula!r}: an exponent over {MAX_EXPONENT}")
        value = _BINARY[type(node.op)](left, right)
    else:
        raise ValueError(f"{formula!r}: only numbers, + - * / // % ** and brackets are allowed")
    if isinstance(value, complex) or not math.isfinite(value) or abs(value) > MAX_MAGNITUDE:
        raise ValueError(f"{formula!r}: a value over {MAX_MAGNITUDE:g}, or none")
    return value
