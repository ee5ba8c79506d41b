"""One interface for the ways to choose placements: by price, or round robin."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import msgspec

from kvferry.engine.base import EngineDurations, RequestId
from kvferry.membership.base import MemberId
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Candidate, Placement, PlacementRequest, Reason, can_exchange
from kvferry.router.priced_placement import Decision, Placer
from kvferry.router.prices.pricing import Price, VolumeCosts
from kvferry.router.prices.rates import CostDefaults


class Measured(msgspec.Struct, frozen=True, gc=False):
    """One attempt on its decode worker. Times in ms.

    Where the engine measured its own time, `durations` say it; the gateway's times hold queues and other requests too.
    """

    first_token_ms: float
    load_ms: float  # of that, the expected time to load pages from slower tiers, when aggregated
    computed_tokens: int  # by the decode worker
    transferred_pages: int
    queue_tokens: int  # computed before the prompt, when aggregated
    step_ms: float | None  # mean time between its tokens
    num_streams: int  # on the worker meanwhile
    durations: EngineDurations | None = None  # None from older workers


class Policy(Protocol):
    """Every `began` must be followed by `ended`. A policy that learns nothing defines `place` alone."""

    def place(
        self,
        request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        now_s: float,
        *,
        volumes: Mapping[str, VolumeCosts],
        may_be_aggregated: bool,
        why_no_prefill: Reason = Reason.NO_PREFILL_WORKER,
    ) -> Placement | None:
        """`why_no_prefill` is the reason of a placement where `prefill` is empty."""
        ...

    def began(self, request: PlacementRequest, placement: Placement, now_s: float) -> None:
        return

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        return

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        return

    def ended(self, request_id: RequestId, now_s: float, num_generated: int | None) -> None:
        return

    def learn_prefill(
        self,
        worker: MemberId,
        computed_tokens: int,
        elapsed_ms: float,
        placement: Placement,
        durations: EngineDurations | None,
    ) -> None:
        """`elapsed_ms` from the gateway's submit to the end counts where `durations` are not known."""
        return

    def learn(self, worker: MemberId, measured: Measured) -> None:
        return

    def forget(self, worker: MemberId) -> None:
        return


class PricedPolicy:
    # Each pool of workers has prices of its own. Pools differ in their engines and, where there are several models, by
    # orders of magnitude: a new worker would be priced by the rates of other models' workers.

    def __init__(
        self, index: ResidencyIndex, cost_defaults: CostDefaults | None = None, seed: int | None = None
    ) -> None:
        self._make = functools.partial(Placer, index, cost_defaults, seed)
        self.placer = self._make()  # of the default pool
        self._by_pool: dict[str, Placer] = {}
        self._by_worker: dict[MemberId, Placer] = {}  # of other pools, as the next one
        self._by_request: dict[RequestId, Placer] = {}

    def place(
        self,
        request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        now_s: float,
        *,
        volumes: Mapping[str, VolumeCosts],
        may_be_aggregated: bool,
        why_no_prefill: Reason = Reason.NO_PREFILL_WORKER,
    ) -> Placement | None:
        pool = decode[0].member.pool if decode else ""
        placer = self.placer if not pool else self._by_pool.get(pool)
        if placer is None:
            placer = self._by_pool[pool] = self._make()
        decision = placer.place(
            *(request, prefill, decode, now_s),
            volumes=volumes,
            may_be_aggregated=may_be_aggregated,
            why_no_prefill=why_no_prefill,
        )
        if pool and decision is not None:
            for worker in filter(None, (decision.prefill, decision.decode)):
                self._by_worker[worker] = placer
        return decision

    def began(self, request: PlacementRequest, placement: Placement, now_s: float) -> None:
        assert isinstance(placement, Decision)
        placer = self._of(placement.decode)
        placer.began(request, placement, now_s)
        if placer is not self.placer:
            self._by_request[request.request_id] = placer

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        self._by_request.get(request_id, self.placer).prefilled(request_id, now_s)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self._by_request.get(request_id, self.placer).first_token(request_id, now_s)

    def ended(self, request_id: RequestId, now_s: float, num_generated: int | None) -> None:
        self._by_request.pop(request_id, self.placer).ended(request_id, now_s, num_generated)

    def forget(self, worker: MemberId) -> None:
        self.placer.forget(worker)
        self._by_worker.pop(worker, None)
        in_use = {id(placer) for placer in self._by_worker.values()}
        for pool, placer in list(self._by_pool.items()):
            placer.forget(worker)
            if id(placer) not in in_use and not placer.num_in_flight:
                del self._by_pool[pool]

    def _of(self, worker: MemberId) -> Placer:
        return self._by_worker.get(worker, self.placer)

    def learn_prefill(
        self,
        worker: MemberId,
        computed_tokens: int,
        elapsed_ms: float,
        placement: Placement,
        durations: EngineDurations | None,
    ) -> None:
        queue_tokens, load_ms = (
            (placement.queue_tokens, placement.price.load_ms) if isinstance(placement, Decision) else (0, 0.0)
        )
        self._learn_prefill(worker, computed_tokens, durations, elapsed_ms - load_ms, queue_tokens)

    def learn(self, worker: MemberId, measured: Measured) -> None:
        durations, num_pages = measured.durations, measured.transferred_pages
        if num_pages:
            if durations is None or durations.kv_transfer_ms is None:
                self._of(worker).observed_kv_transfer(worker, num_pages, measured.first_token_ms)
            elif (other_pages := _beside(num_pages, durations.kv_transfer_share)) is not None:
                self._of(worker).observed_kv_transfer(worker, num_pages, durations.kv_transfer_ms, other_pages)
        elif measured.computed_tokens:
            elapsed_ms = measured.first_token_ms - measured.load_ms
            self._learn_prefill(worker, measured.computed_tokens, durations, elapsed_ms, measured.queue_tokens)
        if measured.step_ms is not None:
            self._of(worker).observed_step(worker, measured.step_ms, measured.num_streams)

    def _learn_prefill(
        self,
        worker: MemberId,
        computed_tokens: int,
        durations: EngineDurations | None,
        elapsed_ms: float,
        queue_tokens: int,
    ) -> None:
        if durations is None or durations.prefill_ms is None:
            self._of(worker).observed_prefill(worker, computed_tokens, elapsed_ms, queue_tokens)
        elif (other_tokens := _beside(computed_tokens, durations.prefill_share)) is not None:
            self._of(worker).observed_prefill(worker, computed_tokens, durations.prefill_ms, other_tokens)


def _beside(amount: int, share: float | None) -> float | None:
    """Return what was done for other requests in the time of which this one had `share`, if known."""
    return amount / share - amount if share is not None else None


class RoundRobinPolicy(Policy):
    """Disaggregated wherever possible: a baseline. It learns nothing."""

    def __init__(self) -> None:
        self._turn = 0

    def place(
        self,
        request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        now_s: float,
        *,
        volumes: Mapping[str, VolumeCosts],
        may_be_aggregated: bool,
        why_no_prefill: Reason = Reason.NO_PREFILL_WORKER,
    ) -> Placement | None:
        if not decode:
            return None
        turn, self._turn = self._turn, self._turn + 1
        chosen = decode[turn % len(decode)].member
        if not prefill:
            return Placement(None, chosen.member_id, why_no_prefill)
        partners = [candidate.member for candidate in prefill if can_exchange(candidate.member, chosen)]
        if not partners:
            return Placement(None, chosen.member_id, Reason.UNEQUAL_PAGES)
        return Placement(partners[turn % len(partners)].member_id, chosen.member_id, Reason.DISAGGREGATED)


def explain(placement: Placement) -> dict[str, Any]:
    values: dict[str, Any] = {
        "reason": placement.reason.value,
        "prefill": placement.prefill,
        "decode": placement.decode,
    }
    if isinstance(placement, Decision):
        values |= {
            "expected_ttft_ms": round(placement.expected_ttft_ms, 3),
            "missing_tokens": placement.missing_tokens,
            "skipped_pages": placement.load.skipped_pages,
            "price": _price(placement.price),
            "runners_up": [_price(price) for price in placement.runners_up()],
        }
    return values


def _price(price: Price) -> dict[str, Any]:
    values = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(price).items()}
    values["ferry_ms"] = values.pop("kv_transfer_ms")  # the name in the output of `kvferry explain --json`
    return {**values, "total_ms": round(price.total_ms, 3)}
