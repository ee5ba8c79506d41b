"""Agents: chains of steps that use tools, and that sometimes branch into parallel children and join again.

What a tool returned goes into a user message: servers take a tool's message only after an answer that called the tool,
and whether the model does is not the plan's to say.
"""

from __future__ import annotations

from kvferry_loadtest.plan import AnswerOf, RequestId
from kvferry_loadtest.scenario import Agent
from kvferry_loadtest.workloads.base import Conversation, Part, PlanBuilder, Session, pause


def plan(builder: PlanBuilder) -> None:
    table = builder.scenario.agent
    assert table is not None  # as `scenario.load` saw to
    for session in builder.sessions():
        _work(builder, session, table)


def _work(builder: PlanBuilder, session: Session, table: Agent) -> None:
    rng = session.rng
    key = (session.tenant, session.session_id)
    chain = Conversation(builder, session, builder.segment(table.system_tokens, session.tenant, "system"), tools=True)
    num_steps = table.steps.draw(rng)
    chain.ask(builder.segment(table.task_tokens.draw(rng), *key, "task"), answer_tokens=table.answer_tokens.draw(rng))
    for step in range(1, num_steps):
        if rng.random() < table.branch_probability:
            children = [_child(builder, session, table, chain.fork(), step, child) for child in range(table.fan_out)]
            # A word between two answers, so that neither runs into the other.
            reports: list[Part] = []
            for child, last in enumerate(children):
                reports += [builder.segment(1, *key, step, child, "report"), AnswerOf(last)]
            chain.ask(*reports, answer_tokens=table.answer_tokens.draw(rng), after=tuple(children))
        else:
            chain.ask(
                builder.segment(table.tool_result_tokens.draw(rng), *key, step, "result"),
                answer_tokens=table.answer_tokens.draw(rng),
                pause_s=pause(rng, table.tool_time_s),
            )


def _child(
    builder: PlanBuilder, session: Session, table: Agent, chain: Conversation, step: int, child: int
) -> RequestId:
    """Its last request."""
    rng = session.rng
    key = (session.tenant, session.session_id, step, child)
    last = chain.ask(
        builder.segment(table.task_tokens.draw(rng), *key, "task"), answer_tokens=table.answer_tokens.draw(rng)
    )
    for child_step in range(1, table.branch_steps):
        last = chain.ask(
            builder.segment(table.tool_result_tokens.draw(rng), *key, child_step, "result"),
            answer_tokens=table.answer_tokens.draw(rng),
            pause_s=pause(rng, table.tool_time_s),
        )
    return last
