"""Demands: lengths, users and rates, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry_plan.planner.workload import MAX_P99_BY_MEAN, MAX_SAMPLES, demand, fixed, of_samples, parse_lengths


def make(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "context_tokens": 8192, "prompt": fixed(1000), "output": fixed(101), "users": 12, "rate_per_s": None,
        "ttft_s": 1.0, "tpot_s": 0.05,
    }  # fmt: skip
    return demand(**(given | changes))


def test_users_and_rate_follow_from_each_other() -> None:
    # A request stays 1 s and 100 more tokens of 50 ms.
    assert make().rate_per_s == pytest.approx(2.0)
    assert make(users=None, rate_per_s=2.0).users == pytest.approx(12.0)
    assert make(think_s=6.0).rate_per_s == pytest.approx(1.0)


def test_a_lognormal_has_the_given_percentile() -> None:
    lengths = parse_lengths("1000:4000", "--prompt")
    sigma2 = math.log(lengths.cv2 + 1)
    mu = math.log(1000) - sigma2 / 2
    assert math.exp(mu + 2.3263478740408408 * math.sqrt(sigma2)) == pytest.approx(4000)


def test_samples_have_mean_percentile_and_variation() -> None:
    lengths = of_samples([100] * 99 + [300])
    assert lengths.mean == 102
    assert lengths.p99 == 100
    assert lengths.cv2 == pytest.approx((99 * 2**2 + 198**2) / 100 / 102**2)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "100:50", "100:", "1e9", "1000:20000"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt"):
        parse_lengths(text, "--prompt")


def test_the_longest_tail() -> None:
    parse_lengths(f"1000:{1000 * MAX_P99_BY_MEAN * 0.999}", "--prompt")
    with pytest.raises(ConfigError, match=r"1 to 15\.0 times"):
        parse_lengths(f"1000:{1000 * MAX_P99_BY_MEAN * 1.001}", "--prompt")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"context_tokens": 1}, "--context 1"),
        ({"context_tokens": 1000}, "shorter than the mean prompt and answer"),
        ({"users": 0}, "--users 0"),
        ({"users": 1e8}, "--users 1e\\+08"),
        ({"users": None}, "either --users"),
        ({"rate_per_s": 1.0}, "either --users"),
        ({"users": None, "rate_per_s": 1e7}, "--rate"),
        ({"ttft_s": 0}, "--ttft 0"),
        ({"tpot_s": 100}, "--tpot 100"),
        ({"prefix_share": 1}, "--prefix-share 1"),
        ({"prefix_share": 0.5, "restored_share": 0.5}, "together"),
        ({"think_s": -1}, "--think -1"),
    ],
)
def test_bad_demands_are_refused_by_option(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(**changes)


def test_samples_have_a_limit() -> None:
    with pytest.raises(ValueError, match="expected"):
        of_samples([])
    with pytest.raises(ValueError, match="expected"):
        of_samples([1] * (MAX_SAMPLES + 1))
