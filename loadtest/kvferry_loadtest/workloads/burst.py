"""Bursts: requests of one instant that begin alike and differ at the end.

The first of them has computed nothing yet when the others arrive. Whether a server computes the shared part once or as
often as there are siblings is what this is about.
"""

from __future__ import annotations

from kvferry_loadtest.workloads.base import PlanBuilder, messages


def plan(builder: PlanBuilder) -> None:
    table = builder.scenario.burst
    assert table is not None  # as `scenario.load` saw to
    for burst in builder.sessions():
        system = builder.segment(table.system_tokens, burst.tenant, "system")
        shared = builder.segment(table.shared_tokens, burst.tenant, burst.session_id, "shared")
        for sibling in range(table.siblings):
            tail = builder.segment(table.tail_tokens.draw(burst.rng), burst.tenant, burst.session_id, sibling)
            builder.add(
                burst,
                messages=messages(("system", (system,)), ("user", (shared, tail))),
                max_tokens=builder.scenario.tokens(table.answer_tokens),
            )
