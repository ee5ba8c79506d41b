"""A tenant of steady chats beside one that sends long prompts, each of which it needs once.

The question is what the second costs the first: in waiting, and in pages that its prompts push out.
"""

from __future__ import annotations

from kvferry_loadtest.scenario import Neighbours
from kvferry_loadtest.workloads import chat, documents
from kvferry_loadtest.workloads.base import PlanBuilder


def plan(builder: PlanBuilder) -> None:
    scenario, table = builder.scenario, builder.scenario.neighbours
    assert table is not None  # as `scenario.load` saw to
    assert scenario.arrivals is not None
    steady, noisy = (tenant.name for tenant in scenario.tenants)
    num_sessions = scenario.warmup_sessions + (scenario.num_sessions or 0)
    starts_s = builder.times(scenario.arrivals, num_sessions, "arrivals")
    for index, start_s in enumerate(starts_s):
        warmup = index < scenario.warmup_sessions
        chat.converse(builder, builder.session(f"session-{index}", steady, start_s, warmup=warmup), table.steady)
    for index, at_s in enumerate(_noisy_times(builder, table, until_s=starts_s[-1])):
        documents.ask(builder, builder.session(f"noise-{index}", noisy, at_s), table.noisy)


def _noisy_times(builder: PlanBuilder, table: Neighbours, *, until_s: float) -> list[float]:
    left_s = until_s - table.noisy_start_s
    count = 1
    # The same generator makes the same times, so a longer list begins with the shorter one.
    while (times_s := builder.times(table.noisy_arrivals, count, "noisy arrivals"))[-1] <= left_s:
        count *= 2
    return [table.noisy_start_s + at_s for at_s in times_s if at_s <= left_s]
