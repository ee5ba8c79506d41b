"""Types of a placement, and the round-robin choice."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.engine.base import EngineStats, RequestId
from kvferry.membership.base import Member, MemberId


class Reason(enum.StrEnum):
    """A label of the metric."""

    DISAGGREGATED = "disaggregated"
    SIBLING = "sibling"  # disaggregated, on a worker that a request in flight will leave pages on
    PREFIX_ON_DECODE = "prefix_on_decode"  # aggregated: the decode worker holds most of the prompt
    SHORT_TAIL = "short_tail"  # aggregated: computing the rest costs less than a KV transfer
    PREFILL_BUSY = "prefill_busy"  # aggregated: the queues of the prefill workers cost more
    NO_PREFILL_WORKER = "no_prefill_worker"
    UNEQUAL_PAGES = "unequal_pages"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable worker with its last report.

    Pass the same object until the next one: costs are cached for it.
    """

    member: Member
    stats: EngineStats = field(default_factory=EngineStats)
    reported_s: float = float("-inf")  # when `stats` arrived, on the clock of `now_s`
    member_id: MemberId = field(init=False)  # of `member`

    def __post_init__(self) -> None:
        object.__setattr__(self, "member_id", self.member.member_id)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """`keys` are the route keys of the prompt's full pages of `block_size` tokens."""

    request_id: RequestId
    keys: Sequence[int]
    num_tokens: int
    block_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode worker computes the prompt (aggregated)."""

    prefill: MemberId | None
    decode: MemberId
    reason: Reason


def can_exchange(one: Member, other: Member) -> bool:
    """Whether KV pages of one worker are valid on the other."""
    # vLLM does not check the block size itself, and unequal ones give garbage.
    return page_format(one) == page_format(other)


def page_format(member: Member) -> tuple[str, int, str]:
    return member.model, member.block_size, member.kv_cache_dtype


class RoundRobin:
    def __init__(self) -> None:
        self._turn = 0

    def place(self, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement | None:
        """None when there is no decode worker."""
        if not decode:
            return None
        turn, self._turn = self._turn, self._turn + 1
        chosen = decode[turn % len(decode)].member
        if not prefill:
            return Placement(None, chosen.member_id, Reason.NO_PREFILL_WORKER)
        partners = [candidate.member for candidate in prefill if can_exchange(candidate.member, chosen)]
        if not partners:
            return Placement(None, chosen.member_id, Reason.UNEQUAL_PAGES)
        return Placement(partners[turn % len(partners)].member_id, chosen.member_id, Reason.DISAGGREGATED)
