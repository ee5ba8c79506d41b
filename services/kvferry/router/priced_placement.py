"""Chooses placements by price, and learns prices. Pure, with passed time and seeded randomness."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

import msgspec

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Candidate, Placement, PlacementRequest, Reason
from kvferry.router.prices.expected_pages import ExpectedPages
from kvferry.router.prices.ledger import Ledger
from kvferry.router.prices.pricing import (
    NO_VOLUMES,
    DecodeQuote,
    Matched,
    PrefillQuote,
    Price,
    Pricer,
    Quote,
    VolumeCosts,
    VolumeLoad,
    price_of,
)
from kvferry.router.prices.rates import CostDefaults

_NUM_RUNNERS_UP = 4

_cost_ms: Callable[[PrefillQuote | DecodeQuote], float] = attrgetter("cost_ms")
_aggregated_ms: Callable[[DecodeQuote], float] = attrgetter("aggregated_ms")
_group: Callable[[PrefillQuote | DecodeQuote], int] = attrgetter("worker.group")

_AnyQuote = TypeVar("_AnyQuote", bound=Quote)


class _Quotes(msgspec.Struct, frozen=True, gc=False):
    prefill: PrefillQuote | None
    decode: DecodeQuote
    cheapest_prefill: Sequence[PrefillQuote]
    cheapest_decode: Sequence[DecodeQuote]
    cheapest_aggregated: DecodeQuote
    block_size: int
    work_weight: float

    def price_of(self, prefill: PrefillQuote | None, decode: DecodeQuote) -> Price:
        return price_of(prefill, decode, self.block_size, self.work_weight)

    def runners_up(self) -> list[Price]:
        chosen = (self.prefill, self.decode)
        pairs = itertools.product(self.cheapest_prefill, self.cheapest_decode)
        prices = sorted((self.price_of(*pair) for pair in pairs if pair != chosen), key=lambda price: price.total_ms)
        prices = prices[:_NUM_RUNNERS_UP]
        aggregated = (None, self.cheapest_aggregated)
        return prices if aggregated == chosen else [*prices, self.price_of(*aggregated)]


class Decision(Placement, frozen=True, gc=False):
    missing_tokens: int  # to be computed, by `prefill` or, when aggregated, by `decode`
    queue_tokens: int  # to be computed before them there
    lacking_pages: int  # to transfer; 0 when aggregated
    expected_ttft_ms: float
    load: VolumeLoad  # of the worker that computes the prompt
    _quotes: _Quotes

    @property
    def price(self) -> Price:
        return self._quotes.price_of(self._quotes.prefill, self._quotes.decode)

    @property
    def matched(self) -> Matched:
        return self.price.matched

    @property
    def load_ms(self) -> float:
        """Return `price.load_ms`, which each request is measured with, without the rest of the price."""
        computing = self._quotes.decode if self._quotes.prefill is None else self._quotes.prefill
        return computing.load_ms

    def runners_up(self) -> list[Price]:
        """Up to four next cheapest pairs, and the cheapest aggregated, without the chosen."""
        return self._quotes.runners_up()


class Placer:
    """One per gateway. The caller:

        decision = placer.place(request, prefill, decode, now_s)
        placer.began(request, decision, now_s)              # sent to a worker
        placer.prefilled(request_id, now_s)                 # the prompt is computed (disaggregated)
        placer.first_token(request_id, now_s)               # from the decode worker
        placer.ended(request_id, now_s)                     # always; idempotent

    A request that is placed again is `ended` and `began` anew. Unknown requests are ignored.
    """

    def __init__(
        self, index: ResidencyIndex, cost_defaults: CostDefaults | None = None, seed: int | None = None
    ) -> None:
        self.cost_defaults = cost_defaults or CostDefaults()
        self._random = random.Random(seed)
        self._ledger = Ledger()
        self._expected_pages = ExpectedPages(self.cost_defaults.expected_grace_s)
        self._pricer = Pricer(index, self._ledger, self._expected_pages, self.cost_defaults)

    def __repr__(self) -> str:
        return f"<Placer {self._ledger!r} {self._expected_pages!r}>"

    @property
    def num_in_flight(self) -> int:
        return self._ledger.num_in_flight

    @property
    def is_idle(self) -> bool:
        return self._ledger.is_idle and self._expected_pages.is_idle

    def place(
        self,
        request: PlacementRequest,
        prefill: Sequence[Candidate],
        decode: Sequence[Candidate],
        now_s: float,
        *,
        volumes: Mapping[str, VolumeCosts] = NO_VOLUMES,
        may_be_aggregated: bool = True,
        why_no_prefill: Reason = Reason.NO_PREFILL_WORKER,
    ) -> Decision | None:
        """Return the cheapest placement, or by chance one near it; None without a decode worker. O(P + D).

        Without `may_be_aggregated`, only a lack of prefill workers makes a decode worker compute the prompt.
        """
        if not decode:
            return None
        self._expected_pages.expire(now_s)
        pages = self._pricer.find(request, volumes, now_s)
        decode_quotes = self._pricer.quote_decode(pages, decode, now_s)
        prefill_quotes = self._pricer.quote_prefill(pages, prefill, now_s)
        aggregated = min(decode_quotes, key=_aggregated_ms)
        by_prefill, by_decode = self._cheapest_group(prefill_quotes, decode_quotes)
        if by_prefill and (
            not may_be_aggregated or by_prefill[0].cost_ms + by_decode[0].cost_ms <= aggregated.aggregated_ms
        ):
            # The margin follows the cost at stake, not the answer's own steps: these cost the same anywhere.
            margin_ms = self._margin_ms(by_prefill[0].cost_ms + by_decode[0].kv_transfer_ms)
            chosen_prefill = self._choose_near(by_prefill, _cost_ms, margin_ms)
            chosen = self._choose_near(by_decode, _cost_ms, margin_ms)
            reason = Reason.SIBLING if chosen_prefill.slower.expected else Reason.DISAGGREGATED
        else:
            margin_ms = self._margin_ms(aggregated.aggregated_ms - aggregated.streams_ms)
            chosen_prefill = None
            chosen = self._choose_near(sorted(decode_quotes, key=_aggregated_ms), _aggregated_ms, margin_ms)
            reason = _why_aggregated(request, prefill_quotes, by_prefill, by_decode, chosen) or why_no_prefill
        quotes = _Quotes(
            chosen_prefill,
            chosen,
            # Not lists: the empty tuple is no work for the garbage collector, and this is kept for `explain`.
            tuple(by_prefill[:_NUM_RUNNERS_UP]),
            tuple(by_decode[:_NUM_RUNNERS_UP]),
            aggregated,
            request.block_size,
            self.cost_defaults.work_weight,
        )
        return _decide(quotes, reason)

    def began(self, request: PlacementRequest, decision: Decision, now_s: float) -> None:
        """Raises ValueError when the request is in flight already."""
        request_id, prefill, decode = request.request_id, decision.prefill, decision.decode
        self._ledger.begin(
            request_id,
            prefill,
            decode,
            decision.missing_tokens,
            now_s,
            num_tokens=request.num_tokens,
            lacking_pages=decision.lacking_pages,
        )
        self._expected_pages.begin(request_id, request.keys, prefill, decode, now_s)

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        self._ledger.prefilled(request_id, now_s)
        self._expected_pages.prefilled(request_id, now_s)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        self._ledger.first_token(request_id, now_s)
        self._expected_pages.first_token(request_id, now_s)

    def ended(self, request_id: RequestId, now_s: float, num_generated: int | None = None) -> None:
        """`num_generated` is given only if the request ended by itself."""
        self._expected_pages.end(request_id)
        if self._ledger.end(request_id, now_s) and num_generated:
            self._pricer.learn_answer_length(num_generated)

    def observed_prefill(
        self, worker: MemberId, computed_tokens: int, elapsed_ms: float, other_tokens: float = 0.0
    ) -> None:
        """`other_tokens` of other prompts were computed meanwhile. Jobs of a few tokens are ignored."""
        pool = self._pricer.decode if worker in self._pricer.decode.by_member else self._pricer.prefill
        pool.observed_prefill(worker, computed_tokens, elapsed_ms, other_tokens)

    def observed_kv_transfer(
        self, worker: MemberId, num_pages: int, elapsed_ms: float, other_pages: float = 0.0
    ) -> None:
        """`other_pages` of other requests were transferred meanwhile."""
        self._pricer.decode.observed_kv_transfer(worker, num_pages, elapsed_ms, other_pages)

    def observed_step(self, worker: MemberId, step_ms: float, num_streams: int) -> None:
        self._pricer.decode.observed_step(worker, step_ms, num_streams)

    def forget(self, worker: MemberId) -> None:
        """The worker is gone. Its requests must still be `ended`."""
        for part in (self._pricer.prefill, self._pricer.decode, self._ledger, self._expected_pages):
            part.forget(worker)

    def check(self) -> None:
        self._ledger.check()
        self._expected_pages.check()
        self._pricer.check()

    def _margin_ms(self, cost_ms: float) -> float:
        return self.cost_defaults.near_ms + self.cost_defaults.near_share * cost_ms

    def _cheapest_group(
        self, prefill: list[PrefillQuote], decode: list[DecodeQuote]
    ) -> tuple[list[PrefillQuote], list[DecodeQuote]]:
        if not prefill:
            return [], []
        if self._pricer.num_groups == 1:
            return sorted(prefill, key=_cost_ms), sorted(decode, key=_cost_ms)
        best: tuple[list[PrefillQuote], list[DecodeQuote]] = [], []
        best_ms = float("inf")
        for group in sorted({*map(_group, prefill)} & {*map(_group, decode)}):
            by_prefill = sorted((quote for quote in prefill if quote.worker.group == group), key=_cost_ms)
            by_decode = sorted((quote for quote in decode if quote.worker.group == group), key=_cost_ms)
            pair_ms = by_prefill[0].cost_ms + by_decode[0].cost_ms
            if not best[0] or pair_ms < best_ms:
                best, best_ms = (by_prefill, by_decode), pair_ms
        return best

    def _choose_near(
        self, quotes: Sequence[_AnyQuote], cost_of: Callable[[_AnyQuote], float], margin_ms: float
    ) -> _AnyQuote:
        # Several gateways see the same prices: if all chose the very cheapest, all would queue there.
        limit_ms = cost_of(quotes[0]) + margin_ms
        weights = []
        for cost_ms in map(cost_of, quotes):
            if cost_ms >= limit_ms:
                break
            weights.append(limit_ms - cost_ms)
        if len(weights) == 1:
            return quotes[0]
        drawn = self._random.random() * sum(weights)
        for quote, weight in zip(quotes, weights, strict=False):
            drawn -= weight
            if drawn < 0:
                return quote
        return quotes[len(weights) - 1]  # rounding


def _decide(quotes: _Quotes, reason: Reason) -> Decision:
    prefill, decode = quotes.prefill, quotes.decode
    computing: Quote = decode if prefill is None else prefill
    kv_transfer_ms = 0.0 if prefill is None else decode.kv_transfer_ms
    compute_ms = computing.queue_ms + computing.load_ms + computing.compute_ms
    return Decision(
        None if prefill is None else prefill.member_id,
        decode.member_id,
        reason,
        computing.missing_tokens,
        computing.worker.account.queued_tokens,
        0 if prefill is None else decode.lacking_pages,
        compute_ms + kv_transfer_ms + decode.worker.wait_ms + decode.worker.step_ms,
        computing.slower.load,
        quotes,
    )


def _why_aggregated(
    request: PlacementRequest,
    prefill: Sequence[PrefillQuote],
    by_prefill: Sequence[PrefillQuote],
    by_decode: Sequence[DecodeQuote],
    chosen: DecodeQuote,
) -> Reason | None:
    """None without prefill workers."""
    if not prefill:
        return None
    if not by_prefill:
        return Reason.UNEQUAL_PAGES
    if 2 * chosen.missing_tokens <= request.num_tokens:
        return Reason.PREFIX_ON_DECODE
    without_queue_ms = min(quote.cost_ms - quote.queue_ms for quote in by_prefill) + by_decode[0].cost_ms
    return Reason.PREFILL_BUSY if without_queue_ms < chosen.aggregated_ms else Reason.SHORT_TAIL
