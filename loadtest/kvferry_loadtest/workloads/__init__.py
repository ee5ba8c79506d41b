"""Workloads: each turns a scenario into a plan, by its seed and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from kvferry_loadtest.plan import Plan
from kvferry_loadtest.scenario import Kind, Scenario
from kvferry_loadtest.workloads import agent, burst, chat, documents, neighbours, rag, trace
from kvferry_loadtest.workloads.base import PlanBuilder

_KIND_TO_PLANNER: dict[Kind, Callable[[PlanBuilder], None]] = {
    "rag": rag.plan,
    "chat": chat.plan,
    "agent": agent.plan,
    "documents": documents.plan,
    "burst": burst.plan,
    "neighbours": neighbours.plan,
    "trace": trace.plan,
}


def make_plan(scenario: Scenario) -> Plan:
    """The same plan for the same scenario. Raises ScenarioError or TraceError where a trace cannot be read."""
    builder = PlanBuilder(scenario)
    _KIND_TO_PLANNER[scenario.kind](builder)
    plan = builder.plan()
    plan.check()
    return plan
