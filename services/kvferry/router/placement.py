"""Types of a placement."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.engine.base import EngineStats, RequestId, Turn
from kvferry.membership.base import Member, MemberId
from kvferry.pages.exchange import difference, sorted_fields
from kvferry.proof.certificates import EngineKind, kind_of


class Reason(enum.StrEnum):
    """A label of the metric."""

    DISAGGREGATED = "disaggregated"
    SIBLING = "sibling"  # disaggregated, on a worker that a request in flight will leave pages on
    PREFIX_ON_DECODE = "prefix_on_decode"  # aggregated: the decode worker holds most of the prompt
    SHORT_TAIL = "short_tail"  # aggregated: computing the rest costs less than a KV transfer
    PREFILL_BUSY = "prefill_busy"  # aggregated: the queues of the prefill workers cost more
    NO_PREFILL_WORKER = "no_prefill_worker"
    UNEQUAL_PAGES = "unequal_pages"
    UNPROVEN = "unproven"  # aggregated: no transfer from a prefill worker to these is proven


PageFormat = tuple[str, int, str, str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable worker with its last report.

    Pass the same object until the next one: costs are cached for it.
    """

    member: Member
    stats: EngineStats = field(default_factory=EngineStats)
    reported_s: float = float("-inf")  # when `stats` arrived, on the clock of `now_s`
    member_id: MemberId = field(init=False)  # of `member`
    engine_kind: EngineKind = field(init=False)  # likewise

    def __post_init__(self) -> None:
        object.__setattr__(self, "member_id", self.member.member_id)
        object.__setattr__(self, "engine_kind", kind_of(self.member))


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """`keys` are the route keys of the prompt's full pages of `block_size` tokens."""

    request_id: RequestId
    keys: Sequence[int]
    num_tokens: int
    block_size: int
    max_tokens: int
    turn: Turn | None = None  # None where tenants have no shares
    adapter: str = ""  # of EngineInfo.adapters; empty: the model itself


# One is kept for every request, to be explained: none is work for the garbage collector.
class Placement(msgspec.Struct, frozen=True, gc=False):
    """`prefill` is None when the decode worker computes the prompt (aggregated)."""

    prefill: MemberId | None
    decode: MemberId
    reason: Reason


def can_exchange(one: Member, other: Member) -> bool:
    """Whether KV pages of one worker are valid on the other."""
    # vLLM does not check the block size itself, and unequal ones give garbage.
    return page_format(one) == page_format(other)


def page_format(member: Member) -> PageFormat:
    return member.model, member.block_size, member.kv_cache_dtype, member.exchange_digest


def why_unequal(one: Member, other: Member) -> str:
    """Return what keeps two workers apart; empty if nothing does."""
    if can_exchange(one, other):
        return ""
    if not (one.exchange and other.exchange):
        return "one of them does not say what its pages' bytes mean"
    named = sorted_fields({"model": one.model, **dict(one.exchange)})
    return difference(named, sorted_fields({"model": other.model, **dict(other.exchange)}))


def unpaired(prefill: Sequence[Member], decode: Sequence[Member]) -> Iterator[tuple[Member, Member]]:
    """Yield each worker that exchanges pages with none of the other role, and one of those."""
    if not (prefill and decode):
        return
    for workers, others in ((prefill, decode), (decode, prefill)):
        formats = {page_format(other) for other in others}
        for worker in workers:
            if page_format(worker) not in formats:
                yield worker, others[0]
