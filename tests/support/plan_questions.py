"""Questions for the planner, of small demands on known models."""

from __future__ import annotations

from typing import Any

from kvferry_plan import model_catalogue
from kvferry_plan.planner import models, workload
from kvferry_plan.planner.gpu_catalogue import shipped
from kvferry_plan.planner.models import PlannedModel
from kvferry_plan.planner.question import Question

DEMAND = {"prompt", "output", "users", "rate_per_s", "ttft_s", "tpot_s", "think_s", "prefix_share", "restored_share"}


def planned_model(name: str = "llama-3.1-8b", weights: str | None = None) -> PlannedModel:
    entry = model_catalogue.find(name)
    assert entry is not None
    return models.planned(entry.geometry(), weights, None, None)


def question(
    model: str = "llama-3.1-8b", *, gpus: tuple[str, ...] = ("h100",), context: int = 8192, weights: str | None = None,
    **options: Any,
) -> Question:  # fmt: skip
    """A question with one user, TTFT 2 s and TPOT 50 ms where `options` do not say otherwise."""
    given = {name: options.pop(name) for name in DEMAND & set(options)}
    for name in ("prompt", "output"):
        if isinstance(given.get(name), str):
            given[name] = workload.parse_lengths(given[name], f"--{name}")
    if "rate_per_s" not in given:
        given.setdefault("users", 1.0)
    defaults: dict[str, Any] = {
        "prompt": None, "output": None, "users": None, "rate_per_s": None, "ttft_s": 2.0, "tpot_s": 0.05,
    }  # fmt: skip
    demand = workload.demand(context_tokens=context, **(defaults | given))
    known = shipped()
    return Question(planned_model(model, weights), demand, {name: known[name] for name in gpus}, **options)
