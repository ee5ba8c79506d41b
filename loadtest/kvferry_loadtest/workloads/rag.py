"""Chats about retrieved documents, some of which everybody asks about.

A session's document is one that nobody has seen with probability `cold_fraction`; otherwise it is one of
`num_documents`, and the one of rank r is chosen in proportion to r ** -zipf_s: Zipf's law, which requests for web pages
were found to follow (Breslau et al., INFOCOM 1999). What a cache can save hangs on both; a figure means nothing without
them.
"""

from __future__ import annotations

from itertools import accumulate

from kvferry_loadtest.plan import Segment
from kvferry_loadtest.scenario import Rag
from kvferry_loadtest.workloads.base import Conversation, PlanBuilder, Session, pause


def plan(builder: PlanBuilder) -> None:
    scenario, table = builder.scenario, builder.scenario.rag
    assert table is not None  # as `scenario.load` saw to
    # Nobody would ask for them where every session has its own.
    offset_s = _prime(builder, table) if table.prime_documents and table.cold_fraction < 1 else 0.0
    popularity = list(accumulate((rank + 1) ** -table.zipf_s for rank in range(table.num_documents)))
    ranks = range(table.num_documents)
    for session in builder.sessions(offset_s if scenario.loop == "open" else 0.0):
        rng = session.rng
        cold = rng.random() < table.cold_fraction
        rank = rng.choices(ranks, cum_weights=popularity)[0]
        name = f"{session.session_id}/document" if cold else f"document-{rank}"
        talk, document = _begin(builder, session, table, name)
        for turn in range(table.turns):
            talk.ask(
                None if turn else document,
                builder.segment(table.user_tokens, session.tenant, session.session_id, turn),
                answer_tokens=table.answer_tokens,
                pause_s=pause(rng, table.think_time_s) if turn else 0.0,
            )


def _prime(builder: PlanBuilder, table: Rag) -> float:
    """Sends every tenant's warm documents, the most popular last. Returns when sessions may begin, in seconds."""
    interval_s = 1 / table.prime_rate_per_s
    tenants = [tenant.name for tenant in builder.scenario.tenants] or [""]
    todo = [(tenant, rank) for rank in reversed(range(table.num_documents)) for tenant in tenants]
    for index, (tenant, rank) in enumerate(todo):
        arrival_s = index * interval_s if builder.scenario.loop == "open" else None
        session = builder.session("/".join(filter(None, ("prime", tenant, str(rank)))), tenant, arrival_s, warmup=True)
        talk, document = _begin(builder, session, table, f"document-{rank}")
        talk.ask(document, answer_tokens=1)
    return len(todo) * interval_s


def _begin(builder: PlanBuilder, session: Session, table: Rag, document: str) -> tuple[Conversation, Segment | None]:
    system = builder.segment(table.system_tokens, session.tenant, "system")
    return Conversation(builder, session, system), builder.segment(table.document_tokens, session.tenant, document)
