"""Confidence intervals of a few repeats: what can be said about a mean, and about how two means compare."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence

import msgspec

CONFIDENCE = 0.95


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of `n` repeats; `half_width` is that of its 95 % confidence interval, None with a single repeat."""

    mean: float
    half_width: float | None
    n: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times a mean is another one, and whether the two differ.

    `value` is None when the other one is 0. `low` and `high` bound the 95 % confidence interval; both are None where it
    has no bounds. `significant` is None when either side has a single repeat: nothing can be said then.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    significant: bool | None = None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Student's interval, t(0.975, n - 1) * s / sqrt(n). None without a value."""
    if not values:
        return None
    half_width = None
    if len(values) > 1:
        half_width = student_t(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), half_width=half_width, n=len(values))


def ratio(values: Sequence[float], base: Sequence[float]) -> Ratio | None:
    """Ratio of the mean of `values` to that of `base`: independent samples of figures that are never negative, possibly
    of unequal variance. None where a side has no value.

    The two differ by Welch's t-test (B. L. Welch, The generalization of 'Student's' problem when several different
    population variances are involved, Biometrika 34, 1947). The interval is Fieller's, all r for which mean - r * base
    passes for 0, with the same degrees of freedom (E. C. Fieller, Some problems in interval estimation, Journal of the
    Royal Statistical Society B 16, 1954): it leaves out 1 just when the two differ, and it has no bounds when `base`
    itself passes for 0.
    """
    if not values or not base:
        return None
    mean, base_mean = statistics.fmean(values), statistics.fmean(base)
    value = mean / base_mean if base_mean else None
    if len(values) < 2 or len(base) < 2:
        return Ratio(value=value)
    squares = [statistics.variance(side) / len(side) for side in (values, base)]  # of the standard errors
    if (variance := sum(squares)) == 0:
        return Ratio(value=value, low=value, high=value, significant=mean != base_mean)
    terms = zip(squares, (values, base), strict=True)
    freedom = variance**2 / sum(square**2 / (len(side) - 1) for square, side in terms)
    t_squared = student_t(freedom) ** 2
    significant = (mean - base_mean) ** 2 > t_squared * variance
    # r^2 * leading - 2 r * mean * base_mean + rest <= 0
    leading, rest = base_mean**2 - t_squared * squares[1], mean**2 - t_squared * squares[0]
    if leading <= 0:
        return Ratio(value=value, significant=significant)
    root = math.sqrt(max(0.0, (mean * base_mean) ** 2 - leading * rest))
    low, high = ((mean * base_mean + sign * root) / leading for sign in (-1, 1))
    return Ratio(value=value, low=max(0.0, low), high=high, significant=significant)


@functools.cache
def student_t(freedom: float) -> float:
    """The t that Student's distribution stays within on both sides with 95 %, to 9 digits. `freedom` is at least 1,
    not necessarily whole.

    P(|T| > t) is the regularised incomplete beta function I_x(freedom / 2, 1/2) at x = freedom / (freedom + t^2)
    (NIST Digital Library of Mathematical Functions, 8.17); it falls with t, so halving finds it.
    """
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom")
    low, high = 0.0, 13.0  # t(1) is 12.7
    for _ in range(48):
        middle = (low + high) / 2
        if _incomplete_beta(freedom / (freedom + middle**2), freedom / 2, 0.5) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for 0 < x <= 1 by its continued fraction, DLMF 8.17.22, in the half where that converges fast."""
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # x^a (1-x)^b / B(a, b)
    value = 1.0  # of the fraction, from its far end
    for term in range(80, 0, -1):
        m = term // 2
        if term % 2:
            factor = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            factor = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + factor / value
    return front / (a * value)
