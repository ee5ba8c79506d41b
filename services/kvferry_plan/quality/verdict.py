"""Statistics of one run by context length, and the verdict against a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from kvferry.engine.quality_report import Interval, Verdict, judge

_CONFIDENCE = 0.95
_NORMAL = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
# Student's t at 97.5 %, by degrees of freedom from 1; beyond the table the expansion below is right to 0.0001.
_STUDENT = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip


def interval_of_mean(values: Sequence[float]) -> Interval:
    """Student's; endless for one value. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    if not all(map(math.isfinite, values)):
        return Interval(math.inf, math.inf, math.inf)
    mean = fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def interval_of_share(num_hits: int, num_trials: int) -> Interval:
    """Wilson's. Raises ValueError without trials."""
    if num_trials < 1 or not 0 <= num_hits <= num_trials:
        raise ValueError(f"{num_hits} hits of {num_trials} trials")
    share, square = num_hits / num_trials, _NORMAL**2
    middle = (share + square / (2 * num_trials)) / (1 + square / num_trials)
    half = _NORMAL * math.sqrt(share * (1 - share) / num_trials + square / (4 * num_trials**2))
    half /= 1 + square / num_trials
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def _student(degrees: int) -> float:
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    # Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, slots=True)
class SampleScores:
    """One sample, over its scored positions. Divergences and losses are in nats."""

    num_tokens: int  # of context before the first scored position
    divergence: float  # mean KL divergence of the next token's distribution from the baseline's
    baseline_loss: float  # mean negative log-probability of the text's tokens
    loss: float
    num_agreeing: int  # positions at which both find the same token likeliest
    num_positions: int


@dataclass(frozen=True, slots=True)
class LengthResult:
    num_tokens: int
    num_samples: int
    num_positions: int
    divergence: Interval  # nats
    baseline_perplexity: float
    perplexity_ratio: Interval  # to the baseline's
    agreement: float  # share of positions
    verdict: Verdict


def by_length(scores: Sequence[SampleScores], budget: float) -> list[LengthResult]:
    """Intervals are over samples: positions of one depend on each other."""
    lengths = sorted({score.num_tokens for score in scores})
    return [_result([score for score in scores if score.num_tokens == length], budget) for length in lengths]


def _result(scores: Sequence[SampleScores], budget: float) -> LengthResult:
    divergence = interval_of_mean([score.divergence for score in scores])
    excess = interval_of_mean([score.loss - score.baseline_loss for score in scores])
    num_positions = sum(score.num_positions for score in scores)
    return LengthResult(
        num_tokens=scores[0].num_tokens,
        num_samples=len(scores),
        num_positions=num_positions,
        divergence=divergence,
        baseline_perplexity=_exp(sum(score.baseline_loss for score in scores) / len(scores)),
        perplexity_ratio=Interval(*map(_exp, excess)),
        agreement=sum(score.num_agreeing for score in scores) / num_positions,
        # The divergence is the excess loss that the baseline itself expects, with far less noise than that of a text.
        verdict=Verdict.FAIL if judge(excess, budget) is Verdict.FAIL else judge(divergence, budget),
    )


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Raises ValueError without verdicts."""
    if not verdicts:
        raise ValueError("no verdicts")
    return next(each for each in (Verdict.FAIL, Verdict.UNDECIDED, Verdict.PASS) if each in verdicts)


def exact_match(baseline: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Interval:
    """Return the share of answers that equal the baseline's."""
    equal = sum(list(one) == list(other) for one, other in zip(baseline, answers, strict=True))
    return interval_of_share(equal, len(answers))


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
