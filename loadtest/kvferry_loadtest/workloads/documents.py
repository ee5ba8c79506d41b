"""Single requests about a document that nobody sent before."""

from __future__ import annotations

from kvferry_loadtest.scenario import Documents
from kvferry_loadtest.workloads.base import Conversation, PlanBuilder, Session


def plan(builder: PlanBuilder) -> None:
    table = builder.scenario.documents
    assert table is not None  # as `scenario.load` saw to
    for session in builder.sessions():
        ask(builder, session, table)


def ask(builder: PlanBuilder, session: Session, table: Documents) -> None:
    """One session of one request."""
    Conversation(builder, session, builder.segment(table.system_tokens, session.tenant, "system")).ask(
        builder.segment(table.document_tokens.draw(session.rng), session.tenant, session.session_id, "document"),
        answer_tokens=table.answer_tokens.draw(session.rng),
    )
