"""Workers as a router sees them."""

from __future__ import annotations

from typing import Any

from kvferry.engine.base import EngineStats
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.router.placement import Candidate


def candidate(
    name: str,
    stats: EngineStats | None = None,
    reported_s: float = float("-inf"),
    *,
    kind: MemberKind = MemberKind.PREFILL,
    **values: Any,
) -> Candidate:
    """Return a worker of pages of 16 tokens; `values` are further ones of its member."""
    known = {"address": "127.0.0.1:1", "model": "m", "version": "0", "block_size": 16, "kv_cache_dtype": "auto"}
    member = Member(kind=kind, member_id=MemberId(name), **{**known, **values})
    return Candidate(member, stats or EngineStats(), reported_s)
