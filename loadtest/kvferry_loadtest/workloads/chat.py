"""Multi-turn chats over a system prompt that a tenant's sessions share."""

from __future__ import annotations

from kvferry_loadtest.scenario import Chat
from kvferry_loadtest.workloads.base import Conversation, PlanBuilder, Session, pause


def plan(builder: PlanBuilder) -> None:
    table = builder.scenario.chat
    assert table is not None  # as `scenario.load` saw to
    for session in builder.sessions():
        converse(builder, session, table)


def converse(builder: PlanBuilder, session: Session, table: Chat) -> None:
    """One session."""
    rng = session.rng
    talk = Conversation(builder, session, builder.segment(table.system_tokens, session.tenant, "system"))
    for turn in range(table.turns.draw(rng)):
        talk.ask(
            builder.segment(table.user_tokens.draw(rng), session.tenant, session.session_id, turn),
            answer_tokens=table.answer_tokens.draw(rng),
            pause_s=pause(rng, table.think_time_s) if turn else 0.0,
        )
