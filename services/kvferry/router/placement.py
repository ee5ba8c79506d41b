"""Which workers take a request. Pure: a snapshot goes in, a decision with its reason comes out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.membership.base import MemberId


class Reason(enum.StrEnum):
    """Why a request was placed as it was; a label of the metric."""

    DISAGGREGATED = "disaggregated"
    SIBLING = "sibling"  # disaggregated, where the pages of a request in flight will be
    PREFIX_ON_DECODE = "prefix_on_decode"  # alone: most of the prompt is there
    SHORT_TAIL = "short_tail"  # alone: to compute it costs less than the handoff
    PREFILL_BUSY = "prefill_busy"  # alone: the prefill workers' queues cost more
    NO_PREFILL_WORKER = "no_prefill_worker"
    UNEQUAL_PAGES = "unequal_pages"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may be given requests now."""

    member_id: MemberId
    model: str
    block_size: int
    kv_cache_dtype: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """`prefill` is None when the decode worker computes the prompt itself."""

    prefill: MemberId | None
    decode: MemberId
    reason: Reason


def can_exchange(one: Candidate, other: Candidate) -> bool:
    """Whether pages of one mean the same on the other.

    vLLM does not check the block size itself, and unequal ones give garbage.
    """
    return (one.model, one.block_size, one.kv_cache_dtype) == (
        other.model,
        other.block_size,
        other.kv_cache_dtype,
    )


class RoundRobin:
    """Turns over prefill and decode workers independently. The only state is whose turn it is."""

    def __init__(self) -> None:
        self._turn = 0

    def place(self, prefill: Sequence[Candidate], decode: Sequence[Candidate]) -> Placement | None:
        """None when there is nobody to decode."""
        if not decode:
            return None
        turn, self._turn = self._turn, self._turn + 1
        chosen = decode[turn % len(decode)]
        if not prefill:
            return Placement(None, chosen.member_id, Reason.NO_PREFILL_WORKER)
        partners = [candidate for candidate in prefill if can_exchange(candidate, chosen)]
        if not partners:
            return Placement(None, chosen.member_id, Reason.UNEQUAL_PAGES)
        return Placement(partners[turn % len(partners)].member_id, chosen.member_id, Reason.DISAGGREGATED)
