"""Demand on a deployment: lengths of prompts and answers, users or a rate, and objectives."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ConfigError

MAX_USERS: Final = 10_000_000
MAX_RATE_PER_S: Final = 1e6
MAX_TPOT_S: Final = 5.0
MAX_TOKENS: Final = 16 << 20
MAX_SAMPLES: Final = 1_000_000
_Z99: Final = statistics.NormalDist().inv_cdf(0.99)
# A lognormal distribution has no larger quotient of its 99th percentile by its mean.
MAX_P99_BY_MEAN: Final = math.exp(_Z99 * _Z99 / 2)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: mean, 99th percentile, and the squared coefficient of variation."""

    mean: float
    p99: float
    cv2: float

    @property
    def deviation(self) -> float:
        return self.mean * math.sqrt(self.cv2)


def fixed(tokens: float) -> Lengths:
    return Lengths(tokens, tokens, 0.0)


def parse_lengths(text: str, option: str) -> Lengths:
    """Read `MEAN` or `MEAN:P99`, in tokens; the latter is assumed to be lognormal. Raises ConfigError."""
    mean_text, colon, p99_text = text.partition(":")
    mean = _tokens(mean_text, option, text)
    if not colon:
        return fixed(mean)
    p99 = _tokens(p99_text, option, text)
    if not mean <= p99 <= mean * MAX_P99_BY_MEAN:
        raise ConfigError(
            f"{option} {text[:40]!r}: the 99th percentile has to be 1 to {MAX_P99_BY_MEAN:.1f} times the mean"
        )
    # ln p99 = mu + z s and ln mean = mu + s^2 / 2.
    sigma = _Z99 - math.sqrt(_Z99 * _Z99 - 2 * math.log(p99 / mean))
    return Lengths(mean, p99, math.exp(sigma * sigma) - 1)


def of_samples(samples: Sequence[int]) -> Lengths:
    """Raises ValueError for no samples, or more than the limit."""
    if not 0 < len(samples) <= MAX_SAMPLES:
        raise ValueError(f"{len(samples)} requests; 1 to {MAX_SAMPLES} are expected")
    ordered = sorted(samples)
    mean = max(statistics.fmean(ordered), 1e-9)
    rank = max(0, math.ceil(0.99 * len(ordered)) - 1)
    return Lengths(mean, ordered[rank], statistics.pvariance(ordered, mean) / (mean * mean))


def _tokens(text: str, option: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"{option} {whole[:40]!r}: expected MEAN or MEAN:P99, each 1 to {MAX_TOKENS} tokens")
    return value


@dataclass(frozen=True, slots=True)
class Demand:
    """Load and objectives, in seconds and tokens."""

    # `users` is how many requests are under way at once, `rate_per_s` how many arrive; each follows from the other by
    # Little's law, at the objectives: a user waits `ttft_s`, takes `tpot_s` for each further token, then thinks.

    context_tokens: int  # the longest request, prompt and answer
    prompt: Lengths
    output: Lengths
    users: float
    rate_per_s: float
    ttft_s: float
    tpot_s: float
    think_s: float = 0.0
    prefix_share: float = 0.0  # of the prompt's tokens, common to all requests: computed and held once per engine
    restored_share: float = 0.0  # of the prompt's tokens, that come back from a lower tier, as sessions return
    ttft_is_default: bool = False

    def text(self) -> str:
        """Return the demand for people, on one line."""
        users = f"{self.users:,.0f}" if self.users >= 10 else f"{self.users:.3g}"
        why = " (no --ttft: the larger of 2 s and a second for each 1,000 tokens of the longest prompts)"
        return (
            f"{users} users, {self.rate_per_s:.3g} requests/s of {self.prompt.mean:,.0f} + {self.output.mean:,.0f} "
            f"tokens; TTFT {self.ttft_s:g} s{why if self.ttft_is_default else ''}, TPOT {self.tpot_s * 1e3:g} ms"
        )

    def computed_tokens(self, prompt_tokens: float) -> float:
        """Return how many tokens of a prompt prefill computes: at least one, for the logits of the next."""
        return max(1.0, prompt_tokens * (1 - self.prefix_share - self.restored_share))

    def restored_tokens(self, prompt_tokens: float) -> float:
        return prompt_tokens * self.restored_share

    @property
    def shared_tokens(self) -> int:
        return int(self.prompt.mean * self.prefix_share)

    @property
    def request_tokens(self) -> float:
        return self.prompt.mean + self.output.mean


def demand(
    *,
    context_tokens: int,
    prompt: Lengths | None,
    output: Lengths | None,
    users: float | None,
    rate_per_s: float | None,
    ttft_s: float,
    tpot_s: float,
    think_s: float = 0.0,
    prefix_share: float = 0.0,
    restored_share: float = 0.0,
    ttft_is_default: bool = False,
) -> Demand:
    """Complete and check a demand. Raises ConfigError naming the option that is wrong."""
    _within("--context", context_tokens, 2, MAX_TOKENS)
    _within("--ttft", ttft_s, 1e-3, 3600)
    if not 1e-4 <= tpot_s <= MAX_TPOT_S:
        raise ConfigError(f"--tpot {tpot_s:g}: expected 0.0001 to {MAX_TPOT_S:g} seconds, such as 0.05 for 50 ms")
    _within("--think", think_s, 0, 86400)
    _within("--prefix-share", prefix_share, 0, 0.999)
    _within("--restored-share", restored_share, 0, 0.999)
    if prefix_share + restored_share >= 1:
        raise ConfigError("--prefix-share and --restored-share: together they have to be below 1")
    if output is None:
        output = fixed(min(512, max(1, context_tokens // 8)))
    if prompt is None:
        prompt = fixed(max(1, context_tokens - output.mean))
    if prompt.mean + output.mean > context_tokens:
        raise ConfigError(
            f"--context {context_tokens}: shorter than the mean prompt and answer together, "
            f"{prompt.mean:.0f} + {output.mean:.0f} tokens"
        )
    # The 99th percentile of a sum of independent lengths, exact where one of them is fixed.
    spread = math.hypot(max(0.0, prompt.p99 - prompt.mean), max(0.0, output.p99 - output.mean))
    longest = prompt.mean + output.mean + spread
    if longest > context_tokens + 1e-6:
        raise ConfigError(
            f"--context {context_tokens}: shorter than the 99th percentile of prompt and answer together, "
            f"{longest:.0f} tokens; vLLM refuses longer requests"
        )
    if (users is None) == (rate_per_s is None):
        raise ConfigError("give either --users (requests at once) or --rate (requests per second)")
    stay_s = ttft_s + (output.mean - 1) * tpot_s
    if users is not None:
        _within("--users", users, 1, MAX_USERS)
        rate_per_s = users / (stay_s + think_s)
    else:
        assert rate_per_s is not None
        _within("--rate", rate_per_s, 1e-6, MAX_RATE_PER_S)
        users = rate_per_s * (stay_s + think_s)
    return Demand(
        context_tokens, prompt, output, users, rate_per_s, ttft_s, tpot_s, think_s, prefix_share, restored_share,
        ttft_is_default,
    )  # fmt: skip


def _within(option: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value:g}: expected {low:g} to {high:g}")
