"""The cost of a placement, in milliseconds. Pure.

    disaggregated = prefill(P) + decode(D)          aggregated = compute(D) + streams(D)
    prefill(P)    = queue + load from slower tiers + compute x (1 + work_weight)
    decode(D)     = kv_transfer_fixed_ms + (lacking pages + pages on their way to D) x transfer rate + streams(D)
    compute(D)    = queue + load + compute x (1 + work_weight + interference_weight x (streams + 1))
    streams(D)    = this answer's steps, its effect on the steps of other streams, waiting, full memory

A worker that has not loaded the request's adapter costs adapter_load_ms more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvferry.membership.base import MemberId
from kvferry.residency.index import Found, ResidencyIndex
from kvferry.router.placement import Candidate, PageFormat, PlacementRequest
from kvferry.router.prices.expected_pages import ExpectedPages, expected_depth
from kvferry.router.prices.ledger import Ledger
from kvferry.router.prices.rates import CostDefaults
from kvferry.router.prices.worker_costs import CostPool, WorkerCosts


@dataclass(frozen=True, slots=True)
class VolumeCosts:
    nodes: frozenset[str]  # whose keepers read it themselves; workers on other nodes get its pages through one of those
    page_ms: float  # one page, at the rate last measured
    queue_ms: float  # of the reads before a new one


NO_VOLUMES: Mapping[str, VolumeCosts] = {}


@dataclass(frozen=True, slots=True)
class Matched:
    gpu: int = 0
    cpu: int = 0
    volume: int = 0
    expected: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.cpu + self.volume + self.expected


@dataclass(frozen=True, slots=True)
class Price:
    """Cost of serving with these workers, in ms. `prefill` is None when aggregated."""

    prefill: MemberId | None
    decode: MemberId
    queue_ms: float  # of prompts before this one; on a prefill worker also until its memory has room
    load_ms: float  # of pages from slower tiers
    compute_ms: float  # of missing tokens
    others_ms: float  # what the compute costs other requests
    kv_transfer_ms: float
    streams_ms: float  # the answer's steps and what they cost other streams
    matched: Matched
    volume: str = ""  # where pages are loaded from; empty: none are

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.load_ms + self.compute_ms + self.others_ms + self.kv_transfer_ms + self.streams_ms


class VolumeLoad(NamedTuple):
    volume: str  # empty: none
    num_pages: int  # on that volume, from the prompt's start
    skipped_pages: int  # lie on volumes and cost more to load than to compute


NO_LOAD: Final = VolumeLoad("", 0, 0)


class SlowerPages:
    """Pages that slower tiers have, each counted without the tiers before it."""

    # Assigned one by one, as those of Quote.
    __slots__ = ("cpu", "depth", "expected", "load", "load_ms", "on_volume")

    depth: int  # pages from the prompt's start that need not be computed, with those on the GPU
    cpu: int
    expected: int  # of requests in flight
    on_volume: int
    load_ms: float
    load: VolumeLoad


def _no_slower_pages() -> SlowerPages:
    slower = SlowerPages()
    slower.depth = slower.cpu = slower.expected = slower.on_volume = 0
    slower.load_ms = 0.0
    slower.load = NO_LOAD
    return slower


_NO_SLOWER_PAGES: Final = _no_slower_pages()


class Quote:
    # Fields are assigned one by one: hundreds of quotes are made for each decision, and a constructor with arguments
    # takes four times as long.
    __slots__ = ("compute_ms", "gpu_pages", "load_ms", "missing_tokens", "queue_ms", "slower", "worker")

    worker: WorkerCosts
    queue_ms: float
    load_ms: float
    compute_ms: float
    missing_tokens: int
    gpu_pages: int  # of the prompt, held on the GPU
    slower: SlowerPages

    @property
    def member_id(self) -> MemberId:
        return self.worker.account.member_id


class PrefillQuote(Quote):
    __slots__ = ("cost_ms",)

    cost_ms: float


class DecodeQuote(Quote):
    """`cost_ms` is the cost when disaggregated."""

    __slots__ = ("aggregated_ms", "cost_ms", "kv_transfer_ms", "lacking_pages", "streams_ms")

    cost_ms: float
    aggregated_ms: float
    streams_ms: float
    kv_transfer_ms: float
    lacking_pages: int


def price_of(prefill: PrefillQuote | None, decode: DecodeQuote, block_size: int, work_weight: float) -> Price:
    computing: Quote
    if prefill is None:
        computing = decode
        others_ms = decode.aggregated_ms - decode.queue_ms - decode.load_ms - decode.compute_ms - decode.streams_ms
    else:
        computing = prefill
        others_ms = work_weight * prefill.compute_ms
    return Price(
        prefill=None if prefill is None else prefill.member_id,
        decode=decode.member_id,
        queue_ms=computing.queue_ms,
        load_ms=computing.load_ms,
        compute_ms=computing.compute_ms,
        others_ms=others_ms,
        kv_transfer_ms=0.0 if prefill is None else decode.kv_transfer_ms,
        streams_ms=decode.streams_ms,
        matched=Matched(
            gpu=computing.gpu_pages * block_size,
            cpu=computing.slower.cpu * block_size,
            volume=computing.slower.on_volume * block_size,
            expected=computing.slower.expected * block_size,
        ),
        volume=computing.slower.load.volume,
    )


class _Offer(NamedTuple):
    depth: int
    volume_id: str
    costs: VolumeCosts


class PrefixPages:
    __slots__ = ("_cost_defaults", "_offers", "cpu", "gpu", "is_on_slower_tier", "is_on_volume", "request")

    def __init__(
        self,
        request: PlacementRequest,
        found: Found,
        volumes: Mapping[str, VolumeCosts],
        cost_defaults: CostDefaults,
    ) -> None:
        self.request = request
        self.gpu = found.gpu
        self.cpu = found.cpu
        self._cost_defaults = cost_defaults
        self._offers = [
            _Offer(depth, volume_id, volumes[volume_id])
            for volume_id, depth in found.volumes.items()
            if volume_id in volumes
        ]
        self.is_on_volume = bool(self._offers)
        self.is_on_slower_tier = bool(found.cpu or self._offers)

    def beyond_gpu(self, worker: WorkerCosts, member_id: MemberId, held: int) -> SlowerPages | None:
        """Return pages of CPU tier and requests in flight, after `held` ones; None without any there or on volumes."""
        cpu = expected = 0
        depth = held
        if self.cpu and (reach := self.cpu.get(member_id, 0)) > depth:
            cpu, depth = reach - depth, reach
        computed = worker.expected_pages
        if computed and (reach := expected_depth(computed, self.request.keys, depth)) > depth:
            expected, depth = reach - depth, reach
        if depth == held and not self.is_on_volume:
            return None
        slower = SlowerPages()
        slower.depth, slower.cpu, slower.expected, slower.on_volume = depth, cpu, expected, 0
        slower.load_ms = cpu * self._cost_defaults.cpu_page_ms
        slower.load = NO_LOAD
        return slower

    # A volume is read by the keeper of the worker's own node or, at a higher cost, through another node's.
    def add_volume(self, slower: SlowerPages, worker: WorkerCosts, page_compute_ms: float) -> None:
        """Add pages of the best volume, where loading is cheaper than computing."""
        held, node, remote_page_ms = slower.depth, worker.node, self._cost_defaults.remote_page_ms
        best, best_depth, best_ms, most_saved_ms, most_pages = "", 0, 0.0, 0.0, held
        for depth, volume_id, costs in self._offers:
            num_pages = depth - held
            if num_pages <= 0:
                continue
            if depth > most_pages:
                most_pages = depth
            page_ms = costs.page_ms if node in costs.nodes else costs.page_ms + remote_page_ms
            load_ms = costs.queue_ms + num_pages * page_ms
            saved_ms = num_pages * page_compute_ms - load_ms
            if saved_ms > most_saved_ms:
                most_saved_ms, best, best_depth, best_ms = saved_ms, volume_id, depth, load_ms
        if best:
            slower.on_volume = best_depth - held
            slower.load_ms += best_ms
            slower.depth = best_depth
            slower.load = VolumeLoad(best, best_depth, 0)
        elif most_pages > held:
            slower.load = VolumeLoad("", 0, most_pages - held)


class Pricer:
    def __init__(
        self, index: ResidencyIndex, ledger: Ledger, expected_pages: ExpectedPages, cost_defaults: CostDefaults
    ) -> None:
        self._index = index
        self._ledger = ledger
        self._cost_defaults = cost_defaults
        self._groups: dict[PageFormat, int] = {}
        self._output_tokens = cost_defaults.output_tokens  # how long an answer is

        def in_prefill(name: str) -> float | None:
            return self.prefill.rates.fresh(name)

        def in_decode(name: str) -> float | None:
            return self.decode.rates.fresh(name)

        self.prefill = CostPool(ledger, expected_pages, cost_defaults, self._groups, in_decode)
        self.decode = CostPool(ledger, expected_pages, cost_defaults, self._groups, in_prefill)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def find(self, request: PlacementRequest, volumes: Mapping[str, VolumeCosts], now_s: float) -> PrefixPages:
        self.prefill.advance(now_s)
        self.decode.advance(now_s)
        for member_id in self._ledger.pop_changed():
            self.prefill.invalidate(member_id)
            self.decode.invalidate(member_id)
        return PrefixPages(request, self._index.find(request.keys), volumes, self._cost_defaults)

    def learn_answer_length(self, num_generated: int) -> None:
        length = self._output_tokens
        self._output_tokens += 0.02 * (min(num_generated, 8 * length) - length)

    def quote_prefill(self, pages: PrefixPages, candidates: Sequence[Candidate], now_s: float) -> list[PrefillQuote]:
        request, gpu, pool = pages.request, pages.gpu, self.prefill
        costs_of, is_slower, is_on_volume = pool.by_member.get, pages.is_on_slower_tier, pages.is_on_volume
        num_tokens, block_size, adapter = request.num_tokens, request.block_size, request.adapter
        fixed_ms = self._cost_defaults.prefill_fixed_ms
        compute_weight = 1.0 + self._cost_defaults.work_weight
        quotes: list[PrefillQuote] = []
        for candidate in candidates:
            member_id = candidate.member_id
            costs = costs_of(member_id)
            if costs is None or costs.candidate is not candidate:
                costs = pool.update(candidate, self._output_tokens)
            ms_per_token, account = costs.ms_per_token, costs.account
            queue_ms = costs.foreign_ms + num_tokens * costs.foreign_ms_per_token
            if account.prefills:
                queue_ms += account.queue_ms(ms_per_token, fixed_ms, now_s)
            on_gpu = held = gpu.get(member_id, 0)
            slower, load_ms = _NO_SLOWER_PAGES, 0.0
            if is_slower or costs.expected_pages:
                found = pages.beyond_gpu(costs, member_id, held)
                if found is not None:
                    slower = found
                    if is_on_volume:
                        pages.add_volume(slower, costs, block_size * ms_per_token * compute_weight)
                    held, load_ms = slower.depth, slower.load_ms
            # An engine computes the last token whatever it holds.
            missing_tokens = num_tokens - held * block_size or 1
            if costs.backlogs is not None and request.turn is not None:
                queue_ms = costs.fair_queue_ms(request.turn, fixed_ms + missing_tokens * ms_per_token, fixed_ms)
            if missing_tokens > costs.free_tokens:
                # Without room for its pages the prompt waits until kept ones have been pulled.
                queue_ms += (missing_tokens - costs.free_tokens) * costs.full_ms_per_token
            if adapter and adapter not in candidate.stats.loaded_adapters:
                queue_ms += self._cost_defaults.adapter_load_ms
            compute_ms = fixed_ms + missing_tokens * ms_per_token
            quote = PrefillQuote()
            quote.worker = costs
            quote.queue_ms = queue_ms
            quote.load_ms = load_ms
            quote.compute_ms = compute_ms
            quote.missing_tokens = missing_tokens
            quote.gpu_pages = on_gpu
            quote.slower = slower
            quote.cost_ms = queue_ms + load_ms + compute_ms * compute_weight
            quotes.append(quote)
        return quotes

    def quote_decode(self, pages: PrefixPages, candidates: Sequence[Candidate], now_s: float) -> list[DecodeQuote]:
        request, gpu, pool, cost_defaults = pages.request, pages.gpu, self.decode, self._cost_defaults
        costs_of, is_slower, is_on_volume = pool.by_member.get, pages.is_on_slower_tier, pages.is_on_volume
        num_tokens, block_size, adapter = request.num_tokens, request.block_size, request.adapter
        num_pages = -(-num_tokens // block_size)
        fixed_ms = cost_defaults.prefill_fixed_ms
        steps = min(float(request.max_tokens), self._output_tokens)
        wanted_pages = num_pages + int(steps) // block_size
        quotes: list[DecodeQuote] = []
        for candidate in candidates:
            member_id = candidate.member_id
            costs = costs_of(member_id)
            if costs is None or costs.candidate is not candidate:
                costs = pool.update(candidate, self._output_tokens)
            ms_per_token, account = costs.ms_per_token, costs.account
            on_gpu = held = gpu.get(member_id, 0)
            slower, load_ms = _NO_SLOWER_PAGES, 0.0
            if is_slower or costs.expected_pages:
                found = pages.beyond_gpu(costs, member_id, held)
                if found is not None:
                    slower = found
                    held, load_ms = slower.depth, slower.load_ms
            # A decode worker does not read volumes while a KV transfer brings the same pages. Pages that the transfer
            # of another request brings are there in time for this one's transfer, and too late for aggregated serving.
            arriving = costs.arriving_pages
            lacking_pages = num_pages - (expected_depth(arriving, request.keys, held) if arriving else held)
            kv_transfer_ms = costs.kv_transfer_fixed_ms + lacking_pages * costs.kv_transfer_page_ms + load_ms
            if is_on_volume:
                pages.add_volume(slower, costs, block_size * ms_per_token * costs.compute_weight)
                held, load_ms = slower.depth, slower.load_ms
            streams_ms = steps * costs.ms_per_step + costs.wait_ms
            tight_pages = wanted_pages * (costs.unreported_streams + 1) - costs.free_pages
            if tight_pages > 0:
                streams_ms += tight_pages * costs.full_ms_per_page
            if adapter and adapter not in candidate.stats.loaded_adapters:
                streams_ms += cost_defaults.adapter_load_ms
            queue_ms = costs.foreign_ms
            if account.prefills:
                queue_ms += account.queue_ms(ms_per_token, fixed_ms, now_s)
            missing_tokens = num_tokens - held * block_size or 1
            compute_ms = fixed_ms + missing_tokens * ms_per_token
            if costs.backlogs is not None and request.turn is not None:
                queue_ms = costs.fair_queue_ms(request.turn, compute_ms, fixed_ms)
            quote = DecodeQuote()
            quote.worker = costs
            quote.queue_ms = queue_ms
            quote.load_ms = load_ms
            quote.compute_ms = compute_ms
            quote.missing_tokens = missing_tokens
            quote.gpu_pages = on_gpu
            quote.slower = slower
            quote.lacking_pages = lacking_pages
            quote.kv_transfer_ms = kv_transfer_ms
            quote.streams_ms = streams_ms
            quote.cost_ms = kv_transfer_ms + streams_ms
            quote.aggregated_ms = queue_ms + load_ms + compute_ms * costs.compute_weight + streams_ms
            quotes.append(quote)
        return quotes

    def check(self) -> None:
        for pool in (self.prefill, self.decode):
            pool.check()
