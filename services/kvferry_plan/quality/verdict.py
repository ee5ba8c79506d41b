"""Statistics of one run by context length, and the verdict against a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.quality_report import Interval, Verdict, judge
from kvferry_plan.quality.statistics import interval_of_mean, interval_of_share


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
