"""More load never needs fewer GPUs, a looser objective never more, and longer requests never leave more room."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry_plan.planner import plan
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.plan import NoPlan
from kvferry_plan.planner.sizing import Candidate, size
from support.plan_questions import question

MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3")
SHAPES = (("200", "2000"), ("3000:6000", "500"), ("7000", "100"))
CASES = [(model, mode, *shape) for model in MODELS for mode in ("aggregated", "disaggregated") for shape in SHAPES]


def needed(model: str, mode: str, prompt: str, output: str, **options: Any) -> int | None:
    asked = question(model, gpus=("h200",), mode=mode, prompt=prompt, output=output, **options)
    try:
        return min(each.num_gpus for each in plan._all(asked)[0])
    except (NoPlan, ValueError):
        return None


def check_falls(found: list[int | None]) -> None:
    # None, where nothing meets the demand, counts as more than any number.
    counts = [float("inf") if each is None else each for each in found]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("model", "mode", "prompt", "output"), CASES)
def test_more_users_never_need_fewer_gpus(model: str, mode: str, prompt: str, output: str) -> None:
    users = (3000.0, 500.0, 200.0, 100.0, 30.0, 10.0, 3.0, 1.0)
    found = [needed(model, mode, prompt, output, users=each, tensor_parallel_size=8) for each in users]
    assert any(found)
    check_falls(found)


@pytest.mark.parametrize(("model", "mode", "prompt", "output"), CASES)
@pytest.mark.parametrize("objective", ["ttft_s", "tpot_s"])
def test_a_looser_objective_never_needs_more_gpus(
    model: str, mode: str, prompt: str, output: str, objective: str
) -> None:
    goals = {"ttft_s": (0.3, 0.5, 1.0, 2.0, 5.0, 20.0), "tpot_s": (0.02, 0.03, 0.05, 0.08, 0.2, 0.5)}[objective]
    # A rate, not users: with a looser objective fewer requests per second would come from as many users.
    found = [
        needed(model, mode, prompt, output, rate_per_s=20.0, tensor_parallel_size=8, **{objective: each})
        for each in goals
    ]
    assert any(found)
    check_falls(found)


@pytest.mark.parametrize("model", MODELS)
def test_longer_requests_never_leave_room_for_more(model: str) -> None:
    most = []
    for tokens in (256, 600, 1024, 2000, 4096, 8000, 16384, 32000):
        asked = question(
            model, gpus=("h200",), context=32768, prompt=str(tokens), output="256", tpot_s=1.0, ttft_s=60.0
        )
        found = size(asked, "h200", Layout(8), disaggregated=True)
        assert isinstance(found, Candidate)
        most.append(found.max_batch_of_pages)
    assert most == sorted(most, reverse=True)
