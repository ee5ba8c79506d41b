"""Which workers take a request, by what it costs in milliseconds. Pure: time is passed in, randomness is seeded.

There are two ways to serve a prompt:
- disaggregated: a prefill worker computes what it does not hold, the decode worker pulls what it does not hold;
- alone: the decode worker computes what it does not hold.

    disaggregated = prefill(P) + decode(D)          alone = compute(D) + streams(D)
    prefill(P)    = queue + load from slower tiers + compute x (1 + work_weight)
    decode(D)     = handoff + lacking pages x ferry rate + streams(D)
    compute(D)    = queue + load + compute x (1 + work_weight + interference_weight x (streams + 1))
    streams(D)    = this answer's steps, and what it adds to the steps of those running there, waiting, full memory

"Load" brings pages from the CPU tier and from a volume: the one that saves most, read by the keeper of the worker's own
node or, dearer, through another node's. Where computing its pages costs less, the worker is told to leave them.

What D lacks does not depend on P, so the cheapest pair is the cheapest P and the cheapest D, as long as they can
exchange pages: prices are P + D sums, not P x D. Workers that can exchange pages form a group, and each group is priced
apart.

Requests in flight count: their uncomputed tokens are queue, their streams are load, and the pages they will leave
behind are residency already, so that a burst of siblings waits for the first one's pages instead of computing them
again.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeVar

from kvferry.engine.base import EngineStats, RequestId
from kvferry.membership.base import MemberId
from kvferry.residency.index import Found, ResidencyIndex
from kvferry.router.placement import Candidate, Reason
from kvferry.router.rates import CostDefaults, RatePool, WorkerRates

# In-flight pages are noted at every 4th page and at the last one: a quarter of the work, and a sibling is credited with
# up to 3 pages less than it will find.
_STRIDE = 4

# What an engine computes in one step at most, about: vLLM's default for long prompts is 2,048 to 8,192.
_STEP_TOKENS = 2048

_NUM_RUNNERS_UP = 4

NO_VOLUMES: Mapping[str, VolumeView] = {}


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that may be given requests now, and what it last said of itself.

    `reported_s` is when `stats` was made, on the clock of `now_s`; requests begun later are added to it. Keep passing
    the same object until there is a new report: what follows from a report is worked out once for each object.
    """

    candidate: Candidate
    stats: EngineStats = field(default_factory=EngineStats)
    reported_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class VolumeView:
    """A volume that can be read now, as its keepers last said."""

    nodes: frozenset[str]  # whose keepers read it themselves; others' workers get its pages through one of those
    page_ms: float  # one page, at the rate last measured
    queue_ms: float  # of the reads before a new one


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """`keys` are the route keys of the prompt's full pages, in pages of `block_size` tokens."""

    request_id: RequestId
    keys: Sequence[int]
    num_tokens: int
    block_size: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Matched:
    """Prompt tokens a worker need not compute, by where they are. `expected` are of requests in flight."""

    gpu: int = 0
    cpu: int = 0
    volume: int = 0
    expected: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.cpu + self.volume + self.expected


@dataclass(frozen=True, slots=True)
class Price:
    """What serving with these workers costs, in ms; `total_ms` is the sum of the others. `prefill` None means alone."""

    prefill: MemberId | None
    decode: MemberId
    queue_ms: float  # of prompts before this one
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


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why. `prefill` is None when the decode worker computes the prompt itself.

    `missing_tokens` are to be computed by `prefill`, or by `decode` when alone; `queue_tokens` are before them there.
    """

    prefill: MemberId | None
    decode: MemberId
    reason: Reason
    missing_tokens: int
    queue_tokens: int
    lacking_pages: int  # to ferry; 0 when alone
    expected_ttft_ms: float
    # Of the worker that computes the prompt. It is to load from `volume`, where `volume_pages` from the prompt's start
    # lie; `skipped_pages` lie on volumes and cost more to load than to compute.
    volume: str
    volume_pages: int
    skipped_pages: int
    _rows: _Rows = field(repr=False, compare=False)

    @property
    def price(self) -> Price:
        """Of the chosen."""
        return self._rows.price_of(self._rows.prefill, self._rows.decode)

    @property
    def matched(self) -> Matched:
        """Of the worker that computes the prompt."""
        return self.price.matched

    def runners_up(self) -> list[Price]:
        """The cheapest others, at most four, then the cheapest alone if it is not among them; the chosen left out."""
        return self._rows.runners_up()


# What a worker does about volumes: the one it loads from, pages that lie there from the prompt's start, pages that it
# does not load.
_Load = tuple[str, int, int]
_NO_LOAD: Final[_Load] = ("", 0, 0)

# A priced prefill worker: (cost, order, worker, queue_ms, load_ms, compute_ms, missing tokens, pages held on the GPU,
# on the CPU, on volumes, expected, load). A priced decode worker: the same of computing alone, where cost is that of a
# transfer, then (alone, streams_ms, kv_transfer_ms, lacking pages). Tuples, since hundreds are made for each decision.
_PrefillRow = tuple[float, int, "_Worker", float, float, float, int, int, int, int, int, _Load]
_DecodeRow = tuple[float, int, "_Worker", float, float, float, int, int, int, int, int, _Load, float, float, float, int]
_COST: Final = 0
_LOAD: Final = 11
_ALONE: Final = 12
_STREAMS: Final = 13
_KV_TRANSFER: Final = 14
_LACKING: Final = 15
_Row = TypeVar("_Row", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a decision was made from, cut to the few that are worth showing; prices are built only when looked at."""

    prefill: _PrefillRow | None
    decode: _DecodeRow
    cheapest_prefill: Sequence[_PrefillRow]
    cheapest_decode: Sequence[_DecodeRow]
    cheapest_alone: _DecodeRow
    block_size: int
    work_weight: float

    def price_of(self, prefill: _PrefillRow | None, decode: _DecodeRow) -> Price:
        alone, streams_ms, kv_transfer_ms = decode[_ALONE], decode[_STREAMS], decode[_KV_TRANSFER]
        computing = decode if prefill is None else prefill
        queue_ms, load_ms, compute_ms = computing[3:6]
        matched = Matched(*(pages * self.block_size for pages in computing[7:11]))
        if prefill is None:
            others_ms, kv_transfer_ms = alone - queue_ms - load_ms - compute_ms - streams_ms, 0.0
        else:
            others_ms = self.work_weight * compute_ms
        return Price(
            None if prefill is None else prefill[2].member_id,
            decode[2].member_id,
            queue_ms,
            load_ms,
            compute_ms,
            others_ms,
            kv_transfer_ms,
            streams_ms,
            matched,
            computing[_LOAD][0],
        )

    def runners_up(self) -> list[Price]:
        pairs: list[tuple[_PrefillRow | None, _DecodeRow]] = [
            (prefill, decode) for prefill in self.cheapest_prefill for decode in self.cheapest_decode
        ]
        alone = (None, self.cheapest_alone)
        chosen = (self.prefill, self.decode)
        prices = sorted((self.price_of(*pair) for pair in pairs if pair != chosen), key=lambda price: price.total_ms)[
            :_NUM_RUNNERS_UP
        ]
        return prices if alone == chosen else [*prices, self.price_of(*alone)]


class _Worker:
    """The accounts of one worker, in one role, and what they come to.

    What a price needs of the worker alone is worked out once per report or change, in `sum_up`, and is good as long as
    `view` is the one passed to `place`. Whoever changes an account or a rate sets `view` to None.
    """

    __slots__ = (
        "arriving",
        "coming",
        "compute_weight",
        "expected",
        "foreign_prompts",
        "full_ms_per_page",
        "group",
        "head_since_s",
        "kv_transfer_page_ms",
        "member_id",
        "ms_per_step",
        "ms_per_token",
        "node",
        "prefills",
        "queued_tokens",
        "rates",
        "room_pages",
        "step_ms",
        "streams",
        "unheard",
        "view",
        "wait_ms",
    )

    def __init__(self, member_id: MemberId, rates: WorkerRates) -> None:
        self.member_id = member_id
        self.rates = rates
        self.group = 0
        self.node = ""
        # Prompts being computed here, first come first: request -> tokens. `queued_tokens` is their sum.
        self.prefills: dict[RequestId, int] = {}
        self.queued_tokens = 0
        self.head_since_s = 0.0
        self.coming: set[RequestId] = set()  # whose prompt is being computed elsewhere
        self.streams: dict[RequestId, float] = {}  # request -> when it was sent here, oldest first
        # Route key -> requests whose pages will be here: `expected` once the prompts before a new one are computed,
        # `arriving` by ferries, when another worker has computed them.
        self.expected: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self.view: WorkerView | None = None
        self.ms_per_token = 0.0
        self.foreign_prompts = 0.0  # other gateways' prompts before a new one
        self.kv_transfer_page_ms = 0.0
        self.step_ms = 0.0  # with one more stream
        self.ms_per_step = 0.0  # what a step of one more stream costs it and the others
        self.wait_ms = 0.0  # until it gets a place among the streams
        self.compute_weight = 0.0  # what a ms of compute here costs it and the others
        self.unheard = 0  # streams that the report does not count
        self.room_pages = 0.0  # before memory gets tight
        self.full_ms_per_page = 0.0

    def __repr__(self) -> str:
        return (
            f"<{self.member_id}: {len(self.prefills)} prefills of {self.queued_tokens} tokens, "
            f"{len(self.coming)} coming, {len(self.streams)} streams>"
        )

    @property
    def idle(self) -> bool:
        return not (self.prefills or self.coming or self.streams or self.expected or self.arriving)

    def sum_up(self, view: WorkerView, cost_defaults: CostDefaults, output_tokens: float) -> None:
        self.view = view
        stats, rates = view.stats, self.rates
        self.ms_per_token = rates.prefill_ms_per_token.value
        self.kv_transfer_page_ms = rates.kv_transfer_page_ms.value
        # The one that runs is half done.
        self.foreign_prompts = max(0.0, stats.num_running + stats.num_waiting - len(self.prefills) - 0.5)
        self.unheard = len(self.coming) + _num_since(self.streams, view.reported_s)
        streams = stats.num_running + stats.num_waiting + self.unheard
        scale = rates.step_scale.value
        self.step_ms = scale * (cost_defaults.step_ms + cost_defaults.step_ms_per_stream * (streams + 1))
        self.ms_per_step = self.step_ms + scale * cost_defaults.step_ms_per_stream * streams
        # Each one before it waits for a stream to end; the ends of those running are spread over an answer's time.
        self.wait_ms = stats.num_waiting * output_tokens * self.step_ms / max(1, stats.num_running)
        self.compute_weight = 1.0 + cost_defaults.work_weight + cost_defaults.interference_weight * (streams + 1)
        if stats.num_pages:
            self.room_pages = cost_defaults.pages_full_share * stats.num_pages - stats.num_pages_used
            self.full_ms_per_page = cost_defaults.pages_full_ms / (
                (1.0 - cost_defaults.pages_full_share) * stats.num_pages
            )
        else:
            self.room_pages, self.full_ms_per_page = float("inf"), 0.0


# Pages expected: the counts they are in, and their keys.
_Note = tuple[dict[int, int], list[int]]


@dataclass(slots=True)
class _Flight:
    """A request between `began` and `ended`; what is None was settled already."""

    request_id: RequestId
    prefill: _Worker | None
    computing: _Worker | None
    decode: _Worker
    notes: list[_Note]


class Placer:
    """Prices every placement, keeps the accounts of requests in flight, and learns the workers' rates.

    One per gateway. The caller:

        decision = placer.place(request, prefill, decode, now_s)
        placer.began(request, decision, now_s)              # sent to a worker
        placer.prefilled(request_id, now_s)                 # the prompt is computed (disaggregated)
        placer.first_token(request_id, now_s)               # from the decode worker
        placer.ended(request_id, now_s)                     # however it ended; always; may be repeated

    and `observed_*` with what it measured. A request that is placed again after a failure is `ended` and `began` anew.
    `forget` a worker that is gone.
    """

    def __init__(
        self, index: ResidencyIndex, cost_defaults: CostDefaults | None = None, seed: int | None = None
    ) -> None:
        self._index = index
        self.cost_defaults = cost_defaults or CostDefaults()
        self._random = random.Random(seed)
        self._prefill_rates = RatePool(self.cost_defaults)
        self._decode_rates = RatePool(self.cost_defaults)
        self._prefill: dict[MemberId, _Worker] = {}
        self._decode: dict[MemberId, _Worker] = {}
        self._groups: dict[tuple[str, int, str], int] = {}
        self._flights: dict[RequestId, _Flight] = {}
        # Computed pages that the index may not know yet: (until, pages), soonest first.
        self._fading: deque[tuple[float, _Note]] = deque()
        self._output_tokens = self.cost_defaults.output_tokens

    def __repr__(self) -> str:
        return (
            f"<Placer {len(self._flights)} in flight on {len(self._prefill)} prefill and {len(self._decode)} decode "
            f"workers, {len(self._fading)} fading>"
        )

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def place(
        self,
        request: PlacementRequest,
        prefill: Sequence[WorkerView],
        decode: Sequence[WorkerView],
        now_s: float,
        *,
        volumes: Mapping[str, VolumeView] = NO_VOLUMES,
        may_be_aggregated: bool = True,
    ) -> Decision | None:
        """The cheapest placement, or one near it by chance. None when there is nobody to decode.

        Not `may_be_aggregated`: a decode worker computes the prompt only where no prefill worker can.

        `prefill` and `decode` are those that may be given requests now, `volumes` those that may be read, by id; what
        the index knows of others does not count. Changes no account. O(P + D), with a probe of the index for each.
        """
        if not decode:
            return None
        self._fade(now_s)
        found = self._index.find(request.keys)
        offers = [
            _Offer(depth, volume_id, volumes[volume_id])
            for volume_id, depth in found.volumes.items()
            if volume_id in volumes
        ]
        decode_rows = self._price_decode(request, decode, found, offers, now_s)
        prefill_rows = self._price_prefill(request, prefill, found, offers, now_s)
        alone = min(decode_rows, key=itemgetter(_ALONE))
        p_rows, d_rows = self._cheapest_pair(prefill_rows, decode_rows)
        prefill_row: _PrefillRow | None = None
        computing: _PrefillRow | _DecodeRow
        # How near is near depends on what is at stake: not on the answer's own steps, which cost the same anywhere.
        if p_rows and (not may_be_aggregated or p_rows[0][_COST] + d_rows[0][_COST] <= alone[_ALONE]):
            margin = self.cost_defaults.near_ms + self.cost_defaults.near_share * (
                p_rows[0][_COST] + d_rows[0][_KV_TRANSFER]
            )
            prefill_row = computing = self._among_near(p_rows, _COST, margin)
            decode_row = self._among_near(d_rows, _COST, margin)
            reason = Reason.SIBLING if prefill_row[10] else Reason.DISAGGREGATED
            lacking, kv_transfer_ms = decode_row[_LACKING], decode_row[_KV_TRANSFER]
        else:
            margin = self.cost_defaults.near_ms + self.cost_defaults.near_share * (alone[_ALONE] - alone[_STREAMS])
            by_cost = sorted(decode_rows, key=itemgetter(_ALONE))
            decode_row = computing = self._among_near(by_cost, _ALONE, margin)
            reason = self._why_alone(request, prefill_rows, p_rows, d_rows, decode_row)
            lacking, kv_transfer_ms = 0, 0.0
        rows = _Rows(
            prefill_row,
            decode_row,
            p_rows[:_NUM_RUNNERS_UP],
            d_rows[:_NUM_RUNNERS_UP],
            alone,
            request.block_size,
            self.cost_defaults.work_weight,
        )
        on = decode_row[2]
        return Decision(
            None if prefill_row is None else prefill_row[2].member_id,
            on.member_id,
            reason,
            computing[6],
            computing[2].queued_tokens,
            lacking,
            computing[3] + computing[4] + computing[5] + kv_transfer_ms + on.wait_ms + on.step_ms,
            *computing[_LOAD],
            rows,
        )

    def began(self, request: PlacementRequest, decision: Decision, now_s: float) -> None:
        """The request is on its way. Raises ValueError when it is in flight already."""
        request_id = request.request_id
        if request_id in self._flights:
            raise ValueError(f"request {request_id} is in flight already")
        self._fade(now_s)
        decode = self._worker(self._decode, self._decode_rates, decision.decode)
        prefill = None
        if decision.prefill is not None:
            prefill = self._worker(self._prefill, self._prefill_rates, decision.prefill)
        computing = decode if prefill is None else prefill
        if not computing.prefills:
            computing.head_since_s = now_s
        computing.prefills[request_id] = decision.missing_tokens
        computing.queued_tokens += decision.missing_tokens
        if prefill is None:
            decode.streams[request_id] = now_s
        else:
            decode.coming.add(request_id)
        computing.view = decode.view = None
        notes = [_note(computing.expected, request.keys)]
        if prefill is not None:
            notes.append(_note(decode.arriving, request.keys))
        self._flights[request_id] = _Flight(request_id, prefill, computing, decode, notes)

    def prefilled(self, request_id: RequestId, now_s: float) -> None:
        """The prompt is computed. Unknown requests are ignored."""
        flight = self._flights.get(request_id)
        if flight is not None:
            self._computed(flight, now_s)

    def first_token(self, request_id: RequestId, now_s: float) -> None:
        """The decode worker has the prompt's pages. Unknown requests are ignored."""
        flight = self._flights.get(request_id)
        if flight is not None:
            self._computed(flight, now_s)
            for note in flight.notes:
                # What a ferry brought is like what was computed here.
                _unnote(note)
                self._fade_later(_count(flight.decode.expected, note[1]), now_s)
            flight.notes.clear()

    def ended(self, request_id: RequestId, now_s: float, num_generated: int | None = None) -> None:
        """Close its accounts. `num_generated` when it ended by itself: it teaches how long answers are.

        Pages it was expected to leave, and did not get to, are expected no more. Unknown requests are ignored.
        """
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        self._drop_prefill(flight, now_s)
        for note in flight.notes:
            _unnote(note)
        flight.decode.coming.discard(request_id)
        flight.decode.streams.pop(request_id, None)
        flight.decode.view = None
        if num_generated:
            self._output_tokens += 0.02 * (min(num_generated, 8 * self._output_tokens) - self._output_tokens)

    def observed_prefill(
        self, worker: MemberId, computed_tokens: int, elapsed_ms: float, queued_ahead_tokens: int = 0
    ) -> None:
        """A prompt took `elapsed_ms` from sending to its end: these tokens, and those that were before it.

        Of a prefill worker, or of a decode worker that computed alone. Jobs of a few tokens are passed over.
        """
        is_decode = worker in self._decode
        rates = (self._decode_rates if is_decode else self._prefill_rates).of(worker)
        if rates.observed_prefill(self.cost_defaults, computed_tokens, elapsed_ms, queued_ahead_tokens):
            self._learned(worker, is_decode)

    def observed_kv_transfer(self, worker: MemberId, num_pages: int, elapsed_ms: float) -> None:
        """The decode worker had `num_pages` pages this long after it was asked."""
        if self._decode_rates.of(worker).observed_kv_transfer(self.cost_defaults, num_pages, elapsed_ms):
            self._learned(worker, is_decode=True)

    def observed_step(self, worker: MemberId, step_ms: float, num_streams: int) -> None:
        """A decode step of `num_streams` streams."""
        if self._decode_rates.of(worker).observed_step(self.cost_defaults, step_ms, num_streams):
            self._learned(worker, is_decode=True)

    def forget(self, worker: MemberId) -> None:
        """The worker is gone for good. Its requests in flight still want their `ended`."""
        for workers, pool in ((self._prefill, self._prefill_rates), (self._decode, self._decode_rates)):
            workers.pop(worker, None)
            pool.forget(worker)

    def expire(self, now_s: float) -> None:
        """Stop believing in pages that were computed long ago and never told of. `place` does so too."""
        self._fade(now_s)

    def check(self) -> None:
        """The laws of the accounts. Raises AssertionError naming the broken one. O(everything)."""
        prefills: dict[int, set[RequestId]] = {}
        streams: dict[int, set[RequestId]] = {}
        notes: dict[int, int] = {}
        workers: dict[int, _Worker] = {
            id(worker): worker for role in (self._prefill, self._decode) for worker in role.values()
        }
        for flight in self._flights.values():
            if flight.computing is not None:
                prefills.setdefault(id(flight.computing), set()).add(flight.request_id)
            streams.setdefault(id(flight.decode), set()).add(flight.request_id)
        for counts, noted in [note for flight in self._flights.values() for note in flight.notes] + [
            note for _until, note in self._fading
        ]:
            notes[id(counts)] = notes.get(id(counts), 0) + len(noted)
        for name, worker in workers.items():
            assert worker.prefills.keys() == prefills.get(name, set()), f"{worker} computes for requests not in flight"
            assert worker.queued_tokens == sum(worker.prefills.values()), f"{worker} has {worker.prefills}"
            ours = worker.streams.keys() | worker.coming
            assert ours == streams.get(name, set()), f"{worker} has streams that are not in flight"
            assert len(ours) == len(worker.streams) + len(worker.coming), f"{worker} has streams that are yet to come"
            for counts in (worker.expected, worker.arriving):
                assert sum(counts.values()) == notes.get(id(counts), 0), f"{worker} expects pages that nobody brings"

    @property
    def idle(self) -> bool:
        """Whether every account is at zero."""
        workers = (*self._prefill.values(), *self._decode.values())
        return not self._flights and not self._fading and all(worker.idle for worker in workers)

    # --- prices

    def _price_prefill(
        self, request: PlacementRequest, views: Sequence[WorkerView], found: Found, offers: list[_Offer], now_s: float
    ) -> list[_PrefillRow]:
        cost_defaults, worker_of, gpu, cpu = self.cost_defaults, self._prefill.get, found.gpu, found.cpu
        beyond = bool(cpu or offers)
        num_tokens, block_size, keys = request.num_tokens, request.block_size, request.keys
        cpu_page_ms, fixed_ms = cost_defaults.cpu_page_ms, cost_defaults.prefill_fixed_ms
        charged = 1.0 + cost_defaults.work_weight
        rows: list[_PrefillRow] = []
        for order, view in enumerate(views):
            member_id = view.candidate.member_id
            worker = worker_of(member_id)
            if worker is None or worker.view is not view:
                worker = self._know(self._prefill, self._prefill_rates, view)
            ms_per_token = worker.ms_per_token
            # Prompts that are not ours are taken to be as long as this one.
            queue_ms = worker.foreign_prompts * num_tokens * ms_per_token
            if worker.prefills:
                queue_ms += _queue_ms(worker, ms_per_token, fixed_ms, now_s)
            on_gpu = held = gpu.get(member_id, 0)
            on_cpu = on_volume = expected = 0
            load_ms = 0.0
            load = _NO_LOAD
            if beyond or worker.expected:
                if (reach := cpu.get(member_id, 0)) > held:
                    on_cpu, held = reach - held, reach
                    load_ms = on_cpu * cpu_page_ms
                if worker.expected and (reach := _reach(worker.expected, keys, held)) > held:
                    expected, held = reach - held, reach
                if offers:
                    page_compute_ms = block_size * ms_per_token * charged
                    load, volume_ms = _best_load(
                        offers, held, worker.node, page_compute_ms, cost_defaults.remote_page_ms
                    )
                    if load[1]:
                        on_volume, held = load[1] - held, load[1]
                        load_ms += volume_ms
            # An engine computes the last token whatever it holds.
            missing = num_tokens - held * block_size or 1
            compute_ms = fixed_ms + missing * ms_per_token
            cost = queue_ms + load_ms + compute_ms * charged
            rows.append(
                (cost, order, worker, queue_ms, load_ms, compute_ms, missing, on_gpu, on_cpu, on_volume, expected, load)
            )
        return rows

    def _price_decode(
        self, request: PlacementRequest, views: Sequence[WorkerView], found: Found, offers: list[_Offer], now_s: float
    ) -> list[_DecodeRow]:
        cost_defaults, worker_of, gpu, cpu = self.cost_defaults, self._decode.get, found.gpu, found.cpu
        beyond = bool(cpu)
        num_tokens, block_size, keys = request.num_tokens, request.block_size, request.keys
        num_pages = -(-num_tokens // block_size)
        cpu_page_ms, fixed_ms = cost_defaults.cpu_page_ms, cost_defaults.prefill_fixed_ms
        handoff_ms = cost_defaults.handoff_ms
        steps = min(float(request.max_tokens), self._output_tokens)
        wanted_pages = num_pages + int(steps) // block_size
        rows: list[_DecodeRow] = []
        for order, view in enumerate(views):
            member_id = view.candidate.member_id
            worker = worker_of(member_id)
            if worker is None or worker.view is not view:
                worker = self._know(self._decode, self._decode_rates, view)
            on_gpu = held = gpu.get(member_id, 0)
            on_cpu = on_volume = expected = 0
            load_ms = 0.0
            if beyond or worker.expected:
                if (reach := cpu.get(member_id, 0)) > held:
                    on_cpu, held = reach - held, reach
                    load_ms = on_cpu * cpu_page_ms
                if worker.expected and (reach := _reach(worker.expected, keys, held)) > held:
                    expected, held = reach - held, reach
            # A decode worker does not read volumes while a ferry brings the same pages. What a sibling's ferry brings
            # is there in time for this one's, and too late for computing alone.
            lacking = num_pages - (_reach(worker.arriving, keys, held) if worker.arriving else held)
            kv_transfer_ms = handoff_ms + lacking * worker.kv_transfer_page_ms + load_ms
            load = _NO_LOAD
            if offers:
                page_compute_ms = block_size * worker.ms_per_token * worker.compute_weight
                load, volume_ms = _best_load(offers, held, worker.node, page_compute_ms, cost_defaults.remote_page_ms)
                if load[1]:
                    on_volume, held = load[1] - held, load[1]
                    load_ms += volume_ms
            streams_ms = steps * worker.ms_per_step + worker.wait_ms
            tight_pages = wanted_pages * (worker.unheard + 1) - worker.room_pages
            if tight_pages > 0:
                streams_ms += tight_pages * worker.full_ms_per_page
            queue_ms = _queue_ms(worker, worker.ms_per_token, fixed_ms, now_s) if worker.prefills else 0.0
            missing = num_tokens - held * block_size or 1
            compute_ms = fixed_ms + missing * worker.ms_per_token
            alone = queue_ms + load_ms + compute_ms * worker.compute_weight + streams_ms
            rows.append(
                (
                    kv_transfer_ms + streams_ms,
                    order,
                    worker,
                    queue_ms,
                    load_ms,
                    compute_ms,
                    missing,
                    on_gpu,
                    on_cpu,
                    on_volume,
                    expected,
                    load,
                    alone,
                    streams_ms,
                    kv_transfer_ms,
                    lacking,
                )
            )
        return rows

    def _cheapest_pair(
        self, prefill_rows: list[_PrefillRow], decode_rows: list[_DecodeRow]
    ) -> tuple[list[_PrefillRow], list[_DecodeRow]]:
        """Of the group with the cheapest pair, both kinds of workers, cheapest first. Empty when none can exchange."""
        if not prefill_rows:
            return [], []
        if len(self._groups) == 1:
            return sorted(prefill_rows), sorted(decode_rows)
        best: tuple[list[_PrefillRow], list[_DecodeRow]] = [], []
        for group in sorted({row[2].group for row in prefill_rows} & {row[2].group for row in decode_rows}):
            p_rows = sorted(row for row in prefill_rows if row[2].group == group)
            d_rows = sorted(row for row in decode_rows if row[2].group == group)
            if not best[0] or p_rows[0][_COST] + d_rows[0][_COST] < best[0][0][_COST] + best[1][0][_COST]:
                best = p_rows, d_rows
        return best

    def _among_near(self, rows: Sequence[_Row], cost: int, margin: float) -> _Row:
        """One of the cheapest by chance: never one `margin` above the cheapest, and the less often the nearer to that.

        Several gateways see the same prices; would all take the very cheapest, all would queue there.
        """
        limit = rows[0][cost] + margin
        weights = list(itertools.takewhile(_above_zero, (limit - row[cost] for row in rows)))
        return rows[0] if len(weights) == 1 else self._random.choices(rows[: len(weights)], weights)[0]

    def _why_alone(
        self,
        request: PlacementRequest,
        prefill_rows: Sequence[_PrefillRow],
        p_rows: Sequence[_PrefillRow],
        d_rows: Sequence[_DecodeRow],
        alone: _DecodeRow,
    ) -> Reason:
        if not prefill_rows:
            return Reason.NO_PREFILL_WORKER
        if not p_rows:
            return Reason.UNEQUAL_PAGES
        if 2 * alone[6] <= request.num_tokens:
            return Reason.PREFIX_ON_DECODE
        idle_ms = min(row[_COST] - row[3] for row in p_rows) + d_rows[0][_COST]
        return Reason.PREFILL_BUSY if idle_ms < alone[_ALONE] else Reason.SHORT_TAIL

    # --- accounts

    def _know(self, workers: dict[MemberId, _Worker], pool: RatePool, view: WorkerView) -> _Worker:
        candidate = view.candidate
        worker = self._worker(workers, pool, candidate.member_id)
        # What `placement.can_exchange` compares.
        facts = (candidate.model, candidate.block_size, candidate.kv_cache_dtype)
        worker.group = self._groups.setdefault(facts, len(self._groups))
        worker.node = candidate.node
        worker.sum_up(view, self.cost_defaults, self._output_tokens)
        return worker

    def _learned(self, member_id: MemberId, is_decode: bool) -> None:
        """A rate of a worker changed, and with it perhaps what is believed of those without."""
        workers, pool = (self._decode, self._decode_rates) if is_decode else (self._prefill, self._prefill_rates)
        if pool.changed():
            for worker in workers.values():
                worker.view = None
        elif member_id in workers:
            workers[member_id].view = None

    def _worker(self, workers: dict[MemberId, _Worker], pool: RatePool, member_id: MemberId) -> _Worker:
        worker = workers.get(member_id)
        if worker is None:
            worker = workers[member_id] = _Worker(member_id, pool.of(member_id))
        return worker

    def _computed(self, flight: _Flight, now_s: float) -> None:
        """The prompt is computed: its pages are where it was, and its decode worker is asked next."""
        self._drop_prefill(flight, now_s)
        if flight.prefill is not None and flight.notes and flight.notes[0][0] is flight.prefill.expected:
            self._fade_later(flight.notes.pop(0), now_s)
        if flight.request_id in flight.decode.coming:
            flight.decode.coming.remove(flight.request_id)
            flight.decode.streams[flight.request_id] = now_s
            flight.decode.view = None

    def _drop_prefill(self, flight: _Flight, now_s: float) -> None:
        worker, flight.computing = flight.computing, None
        if worker is not None:
            if next(iter(worker.prefills)) == flight.request_id:
                worker.head_since_s = now_s
            worker.queued_tokens -= worker.prefills.pop(flight.request_id)
            worker.view = None

    def _fade_later(self, note: _Note, now_s: float) -> None:
        """The pages are there; the index will hear of it within the grace."""
        self._fading.append((now_s + self.cost_defaults.expected_grace_s, note))

    def _fade(self, now_s: float) -> None:
        fading = self._fading
        while fading and fading[0][0] <= now_s:
            _unnote(fading.popleft()[1])


class _Offer(NamedTuple):
    """A volume that holds this many pages from the prompt's start."""

    depth: int
    volume_id: str
    view: VolumeView


def _best_load(
    offers: list[_Offer], held: int, node: str, page_compute_ms: float, remote_page_ms: float
) -> tuple[_Load, float]:
    """What a worker that holds `held` pages best loads, and how long that takes, in ms.

    Computing a page costs `page_compute_ms`, in what it is charged with: where no load costs less, none is made.
    """
    most_saved_ms, best, best_ms, most_pages = 0.0, "", 0.0, held
    depth = 0
    for offer in offers:
        num_pages = offer.depth - held
        if num_pages <= 0:
            continue
        most_pages = max(most_pages, offer.depth)
        view = offer.view
        page_ms = view.page_ms if node in view.nodes else view.page_ms + remote_page_ms
        load_ms = view.queue_ms + num_pages * page_ms
        saved_ms = num_pages * page_compute_ms - load_ms
        if saved_ms > most_saved_ms:
            most_saved_ms, best, best_ms, depth = saved_ms, offer.volume_id, load_ms, offer.depth
    return (best, depth, 0 if best else most_pages - held), best_ms


def _queue_ms(worker: _Worker, ms_per_token: float, fixed_ms: float, now_s: float) -> float:
    """How long the prompts before a new one will take.

    Of the first we know when it began. Once it takes longer than it should, it is taken to need as long again as it is
    late: a worker that hangs grows dear by itself.
    """
    head_tokens = next(iter(worker.prefills.values()))
    head_ms = fixed_ms + head_tokens * ms_per_token
    rest_tokens = worker.queued_tokens - head_tokens
    # An engine computes as many prompts in one step as fit: a burst of short ones is one step, not one each.
    rest_ms = rest_tokens * ms_per_token + min(len(worker.prefills) - 1, rest_tokens / _STEP_TOKENS) * fixed_ms
    return abs(head_ms - (now_s - worker.head_since_s) * 1000.0) + rest_ms


def _num_since(streams: dict[RequestId, float], since_s: float) -> int:
    """Streams sent after a moment. O(their number)."""
    return sum(1 for _ in itertools.takewhile(lambda sent_s: sent_s > since_s, reversed(streams.values())))


def _note(expected: dict[int, int], keys: Sequence[int]) -> _Note:
    """Expect the pages of a prompt. Returns what to give to `_unnote`, once."""
    noted = list(keys[_STRIDE - 1 :: _STRIDE])
    if len(keys) % _STRIDE:
        noted.append(keys[-1])
    return _count(expected, noted)


def _count(expected: dict[int, int], noted: list[int]) -> _Note:
    for key in noted:
        expected[key] = expected.get(key, 0) + 1
    return expected, noted


def _unnote(note: _Note) -> None:
    expected, noted = note
    for key in noted:
        left = expected[key] - 1
        if left:
            expected[key] = left
        else:
            del expected[key]


def _reach(expected: dict[int, int], keys: Sequence[int], held: int) -> int:
    """How far the prompt will be held once requests in flight are done; `held` when they add nothing.

    Every request notes all of its prompt, so what is expected are prefixes, and halving is exact at the noted pages.
    """
    if not keys:
        return held
    if keys[-1] in expected:
        return len(keys)
    low, high = held // _STRIDE, len(keys) // _STRIDE
    if low >= high or keys[low * _STRIDE + _STRIDE - 1] not in expected:
        return held
    low += 1
    while low < high:
        middle = (low + high + 1) >> 1
        if keys[middle * _STRIDE - 1] in expected:
            low = middle
        else:
            high = middle - 1
    return low * _STRIDE


def _above_zero(value: float) -> bool:
    return value > 0
